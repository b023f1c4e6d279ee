"""Compares a family's adapter with its pipeline's own call, part by part."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowcorr.config.schema import SamplingConfig
from flowcorr.errors import ConfigError, one_sentence
from flowcorr.models.adapter_inputs import decoder_difference, input_differences, relative
from flowcorr.models.base import Conditioning, Guidance, ModelFamily
from flowcorr.models.in_engine import as_in_engine, explained
from flowcorr.models.negatives import sides
from flowcorr.models.pipeline_call import (
    PipelineCall,
    Row,
    Rows,
    Step,
    call_pipeline,
    decoder_inputs,
    recorded,
)
from flowcorr.records import Prompt

PROMPTS = (Prompt(text="a cat"), Prompt(text="two dogs that sleep on a red sofa"))
GUIDANCE = Guidance(guidance_scale=4.0, true_cfg_scale=4.0, negative_prompt="a blurry photo")
# Largest relative differences of two computations: of one velocity or decoder input, of inputs of the transformer.
LIMITS = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
SIGMAS = 1e-4  # both sides compute them in float32 at least
TIMESTEPS = {
    torch.float32: 1e-4,
    torch.float16: 8e-4,
    torch.bfloat16: 6e-3,
}  # pipelines round them to their dtype
INPUTS = {torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 0.02}
# Of a limit: a smaller difference of velocities is rounding, and says that a difference of inputs does not matter.
NO_EFFECT = 0.02
LEVELS = {torch.float32: 0.2, torch.float16: 2.0, torch.bfloat16: 8.0}  # of 255, of decoded pixels


class CannotCompare(ConfigError):
    """The pipeline's own call fails, so that there is nothing to compare an adapter with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A part of an adapter that differs from its pipeline.

    Attributes:
        part: schedule, timesteps, prompt, pooled_prompt, mask, positions, latents, velocity, negative_prompt, guidance,
            decode or pixels.
        sentence: what differs, and in which method it is computed.
        value: the relative difference, or that of pixels in levels of 255.
        limit: the largest that passes.
    """

    part: str
    sentence: str
    value: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCheck:
    """The comparison of an adapter with its pipeline's own call.

    Attributes:
        differences: parts that differ; without any, the adapter is right.
        velocity_gap: largest relative difference of velocities.
        pixel_gap: root mean square difference of decoded pixels, in levels of 255.
        guided: whether guidance was compared, too.
    """

    differences: Sequence[Difference]
    velocity_gap: float
    pixel_gap: float
    guided: bool


def compare_with_pipeline(
    family: ModelFamily,
    prompts: Sequence[Prompt] = PROMPTS,
    guidance: Guidance = GUIDANCE,
    *,
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
    num_inference_steps: int = 4,
) -> AdapterCheck:
    """Compare a family with its pipeline's own call: schedule, velocities with and without guidance, and decoding.

    The pipeline draws each prompt alone, the family all in one batch. The transformer computes in two steps a prompt,
    with guidance in one more. `predict`, `guide` and `decode` see what they would see in an engine, if the family has
    one.

    Args:
        family: as `load_family` returns it, with its text encoders and without an adapter.
        prompts: best of different lengths.
        guidance: compared where the family has guidance of two forward passes.
        height, width, num_frames: see `ModelFamily.sample_shape`.
        num_inference_steps: of the schedule.

    Raises:
        CannotCompare: the pipeline's own call fails, or takes no references beside a family that reads them.
        ConfigError: a method of the family returns another shape, or reads what an engine does not have.
    """
    return _Comparison(family, prompts, guidance, (height, width, num_frames), num_inference_steps).result()


def compare_as_sampled(
    family: ModelFamily, prompts: Sequence[Prompt], sampling: SamplingConfig
) -> AdapterCheck:
    """`compare_with_pipeline` at the size, the steps and the guidance of a run.

    An empty negative prompt is replaced by one that a family can forget.
    """
    given = Guidance.of(sampling)
    return compare_with_pipeline(
        family,
        prompts,
        replace(given, negative_prompt=given.negative_prompt or GUIDANCE.negative_prompt),
        height=sampling.height,
        width=sampling.width,
        num_frames=sampling.num_frames,
        num_inference_steps=sampling.num_inference_steps,
    )


class _Comparison:
    """The parts of `compare_with_pipeline`."""

    def __init__(
        self,
        family: ModelFamily,
        prompts: Sequence[Prompt],
        guidance: Guidance,
        size: tuple[int | None, int | None, int | None],
        num_steps: int,
    ) -> None:
        self.family, self.prompts = family, prompts
        accepted = inspect.signature(family.pipeline.__call__).parameters
        if any(prompt.images for prompt in prompts) and "image" not in accepted:
            raise CannotCompare(
                f"{type(family.pipeline).__name__} takes no reference images, which {family.place()} reads"
            )
        if "negative_prompt" not in accepted:
            guidance = replace(guidance, negative_prompt="")
            prompts = [replace(prompt, negative_prompt=None) for prompt in prompts]
        self.guidance = guidance
        self.size = dict(zip(("height", "width", "num_frames"), size, strict=True))
        self.num_steps = num_steps
        self.shape = family.sample_shape(*size)
        self.schedule = family.schedule(num_steps, self.shape)
        weights = list(family.transformer.parameters())
        self.device = weights[0].device
        # The coarsest one: families keep some weights in float32, and the bytes of quantized ones are no dtype.
        dtypes = [weight.dtype for weight in weights if weight.dtype in LIMITS]
        self.dtype = max(dtypes, key=LIMITS.__getitem__, default=family.dtype)
        self.limit = LIMITS[self.dtype]
        with explained(family):
            self.computing = family if family.vllm_omni is None else as_in_engine(family)
        self.gap = 0.0

    def result(self) -> AdapterCheck:
        family, scale = self.family, getattr(self.guidance, self.family.guidance_key)
        conditioning = family.checked_embed(self.prompts, self.guidance)
        guided = any(name.startswith("negative_") for name in conditioning)
        _, own = sides(conditioning)
        plain = self._unguided() if guided else self.guidance
        places = sorted({0, self.num_steps // 2})
        calls = [self._call(prompt, plain, places, decodes=True) for prompt in self.prompts]
        differences = self._schedule(calls[0])
        differences += self._velocities(calls, places, own, plain)
        decoded, pixel_gap = self._decoding(calls)
        if guided and not differences:
            calls = [self._call(prompt, self.guidance, places[:1], decodes=False) for prompt in self.prompts]
            differences += self._guided(calls, conditioning, scale)
        return AdapterCheck(
            differences=(*differences, *decoded),
            velocity_gap=self.gap,
            pixel_gap=pixel_gap,
            guided=guided,
        )

    def _unguided(self) -> Guidance:
        off: dict[str, Any] = {self.family.guidance_key: 1.0}
        return replace(self.guidance, **off)

    def _call(
        self, prompt: Prompt, guidance: Guidance, places: Sequence[int], *, decodes: bool
    ) -> PipelineCall:
        asked = {
            **{name: value for name, value in self.size.items() if value is not None},
            "num_inference_steps": self.num_steps,
            "generator": torch.Generator(self.device).manual_seed(0),
            **self.family.call_arguments(prompt, guidance.of_prompt(prompt)),
        }
        try:
            call = call_pipeline(self.family.pipeline, asked, places, decodes=decodes)
        except Exception as error:  # a pipeline of any class, called with what the family says
            raise CannotCompare(
                f"{type(self.family.pipeline).__name__} cannot be called with the arguments of "
                f"{self.family.place()}.call_arguments: {type(error).__name__}: {one_sentence(error)}"
            ) from error
        for place in places:
            if place not in call.steps:
                raise CannotCompare(
                    f"{type(self.family.pipeline).__name__} does not call its scheduler's step"
                )
            self._latents(call.steps[place].latents)
        return call

    def _latents(self, latents: Tensor) -> Tensor:
        """The pipeline's latents `[1, ...]` in the family's layout, float32."""
        if latents.numel() != torch.Size(self.shape).numel():
            raise CannotCompare(
                f"{self.family.place()}.latent_shape is {self.shape}, and the latents of the pipeline's own call are "
                f"{tuple(latents.shape[1:])}: they have to be the same numbers in the same order"
            )
        return latents.reshape(1, *self.shape).float()

    # Schedule and velocities -----------------------------------------------------------------------------

    def _schedule(self, call: PipelineCall) -> list[Difference]:
        ours, theirs = np.array(self.schedule.sigmas), np.array(call.sigmas)
        if len(ours) != len(theirs):
            sentence = f"schedule has {len(ours)} sigmas, and the pipeline's call {len(theirs)}"
            return [Difference(part="schedule", sentence=sentence, value=1.0, limit=0.0)]
        place = int(np.abs(ours - theirs).argmax())
        gap = float(abs(ours - theirs)[place])
        if gap <= SIGMAS:
            return []
        sentence = (
            f"schedule: sigma {place + 1} of {len(ours)} is {ours[place]:.4g}, and {theirs[place]:.4g} in the "
            "pipeline's call"
        )
        return [Difference(part="schedule", sentence=sentence, value=gap, limit=SIGMAS)]

    def _timestep(self, sigma: float) -> float:
        """The family's timestep of a noise level."""
        sigmas, timesteps = (
            self.schedule.sigmas[:-1],
            self.family.in_dtype(self.schedule, self.dtype).timesteps,
        )
        return float(np.interp(sigma, sigmas[::-1], timesteps[::-1]))

    @torch.no_grad()
    def _predicted(
        self, latents: Tensor, sigma: float, conditioning: Conditioning, guidance: Guidance
    ) -> tuple[Tensor, Rows]:
        """The family's velocities at the pipeline's latents, and the rows of its forward passes."""
        rows: Rows = []
        timesteps = latents.new_full((len(latents),), self._timestep(sigma))
        transformer = recorded(self.family.transformer, rows)
        with explained(self.family):
            velocity = self.computing.velocity(transformer, latents, timesteps, conditioning, guidance)
        return velocity.float(), rows

    def _velocities(
        self,
        calls: Sequence[PipelineCall],
        places: Sequence[int],
        conditioning: Conditioning,
        guidance: Guidance,
    ) -> list[Difference]:
        """Differences of velocities that are computed in one forward pass, named by the first input that differs."""
        for place in places:
            steps = [call.steps[place] for call in calls]
            latents = torch.cat([self._latents(step.latents) for step in steps])
            velocities, rows = self._predicted(latents, calls[0].sigmas[place], conditioning, guidance)
            for number, step in enumerate(steps):
                gap = self._gap(velocities[number], self._latents(step.velocity)[0])
                closest = min(step.rows, key=partial(_distance, rows[number]))
                named = self._inputs(rows[number], closest)
                acts = gap > NO_EFFECT * self.limit or any(part.part == "timesteps" for part in named)
                if gap > self.limit or (named and acts):
                    return named or [self._unnamed(velocities[number], step, gap)]
        return []

    def _gap(self, ours: Tensor, theirs: Tensor) -> float:
        gap = relative(ours, theirs)
        self.gap = max(self.gap, gap)
        return gap

    def _unnamed(self, ours: Tensor, step: Step, gap: float) -> Difference:
        """The difference of velocities of equal inputs."""
        theirs = self._latents(step.velocity)[0]
        if len(step.rows) > 1:
            sentence = (
                f"guide: without guidance, the pipeline makes {len(step.rows)} forward passes a step, the adapter 1; "
                "call_arguments says how the pipeline counts guidance, and embed returns the negative prompt's tensors"
            )
            return Difference(part="guidance", sentence=sentence, value=gap, limit=self.limit)
        factor = _factor(ours, theirs)
        fits = relative(ours, factor * theirs) <= self.limit and abs(factor) > self.limit
        told = (
            f"is {factor:.3g} times the pipeline's"
            if fits
            else f"differs from the pipeline's by {100 * gap:.2g} %"
        )
        sentence = f"predict: the transformer's inputs are the pipeline's, and the velocity {told}"
        return Difference(part="velocity", sentence=sentence, value=gap, limit=self.limit)

    def _inputs(self, ours: Row, theirs: Row) -> list[Difference]:
        """Differences of the transformer's inputs; an input that explains others comes before them."""
        limits = INPUTS[self.dtype], TIMESTEPS[self.dtype]
        return [
            Difference(
                part=part,
                sentence=f"{_METHODS.get(part, 'embed')}: {sentence}",
                value=gap,
                limit=limits[part == "timesteps"],
            )
            for part, (sentence, gap) in input_differences(ours, theirs, *limits).items()
        ]

    # Guidance --------------------------------------------------------------------------------------------

    def _guided(
        self, calls: Sequence[PipelineCall], conditioning: Conditioning, scale: float
    ) -> list[Difference]:
        """Differences of guidance, for velocities that agree without it."""
        steps = [call.steps[0] for call in calls]
        latents = torch.cat([self._latents(step.latents) for step in steps])
        sigma, limit = calls[0].sigmas[0], self.limit * scale
        velocities, rows = self._predicted(latents, sigma, conditioning, self.guidance)
        for number, step in enumerate(steps):
            theirs = self._latents(step.velocity)[0]
            gap = self._gap(velocities[number], theirs)
            if gap <= NO_EFFECT * limit:
                continue
            if len(step.rows) < 2:
                sentence = (
                    f"guide: the adapter makes two forward passes at {self.family.guidance_key}={scale:g}, and the "
                    "pipeline's call one; call_arguments says how the pipeline counts guidance"
                )
                return [Difference(part="guidance", sentence=sentence, value=gap, limit=limit)]
            negative, positive = rows[number], rows[len(calls) + number]
            ordered = sorted(step.rows, key=partial(_distance, positive))
            differences = self._negative(negative, ordered[0], ordered[-1])
            if not differences and gap > limit:
                differences = [self._rule(latents, number, sigma, conditioning, theirs, gap)]
            if differences:
                return differences
        return []

    def _negative(self, ours: Row, positive: Row, negative: Row) -> list[Difference]:
        """The difference of the negative prompt's rows.

        Args:
            ours: the adapter's row of the negative prompt.
            positive, negative: the pipeline's rows.
        """
        gap = relative(ours.output, negative.output)
        named = self._inputs(ours, negative)
        if gap <= (NO_EFFECT if named else 1.0) * self.limit:
            return []
        told = "; ".join(difference.sentence for difference in named)
        if relative(ours.output, positive.output) <= NO_EFFECT * self.limit:
            told = "its tensors are the prompt's"
        sentence = f"embed: the negative prompt's tensors are not those of the pipeline's call ({told})"
        return [Difference(part="negative_prompt", sentence=sentence, value=gap, limit=self.limit)]

    def _rule(
        self,
        latents: Tensor,
        number: int,
        sigma: float,
        conditioning: Conditioning,
        theirs: Tensor,
        gap: float,
    ) -> Difference:
        """The difference of the rule by which both sides are mixed."""
        family, key = self.family, self.family.guidance_key
        scale = getattr(self.guidance, key)
        negative, positive = (
            self._predicted(latents, sigma, side, self._unguided())[0][number] for side in sides(conditioning)
        )
        factor = _factor(theirs - negative, positive - negative)
        fits = relative(negative + factor * (positive - negative), theirs) <= self.limit * scale
        told = (
            f"fits {key}={factor:.3g}"
            if fits
            else "fits no scale: its rule is another than classifier-free guidance"
        )
        sentence = (
            f"guide: at {key}={scale:g} both sides of guidance are the pipeline's, and mixed otherwise; in "
            f"{family.place()}'s convention, the pipeline's velocity {told}"
        )
        return Difference(part="guidance", sentence=sentence, value=gap, limit=self.limit * scale)

    # Decoding --------------------------------------------------------------------------------------------

    def _decoding(self, calls: Sequence[PipelineCall]) -> tuple[list[Difference], float]:
        """Differences of decoded images, and the largest one of their pixels."""
        largest = 0.0
        for call in calls:
            assert call.final is not None
            assert call.decoded is not None
            assert call.pixels is not None
            with decoder_inputs(self.family.pipeline.vae) as inputs, explained(self.family), torch.no_grad():
                pixels = self.computing.decode(self._latents(call.final))
            shown = ((pixels.float().clamp(-1, 1) + 1) / 2).movedim(1, -1).cpu()
            if shown.shape != call.pixels.shape:
                sentence = (
                    f"decode: pixels are {tuple(shown.shape)}, and {tuple(call.pixels.shape)} in the pipeline"
                )
                return [Difference(part="decode", sentence=sentence, value=1.0, limit=0.0)], 255.0
            gap = 255 * float((shown - call.pixels).square().mean().sqrt())
            largest = max(largest, gap)
            fed = inputs[-1].float() if inputs else None
            told = None if fed is None else decoder_difference(fed, call.decoded.float(), self.limit)
            if told is not None:
                sentence, value = told
                return [Difference(part="decode", sentence=sentence, value=value, limit=self.limit)], largest
            if gap > LEVELS[self.dtype]:
                sentence = "decode: the VAE gets the pipeline's latents, and the pixels are others"
                if relative(shown.flip(-1), call.pixels) <= self.limit:
                    sentence = "decode: red and blue are exchanged"
                return [
                    Difference(part="pixels", sentence=sentence, value=gap, limit=LEVELS[self.dtype])
                ], largest
        return [], largest


_METHODS: Mapping[str, str] = {
    "timesteps": "predict or schedule",
    "guidance": "predict",
    "latents": "predict",
    "positions": "predict",
}
"""Methods of a family that compute the parts that are not `embed`'s."""


def _distance(row: Row, other: Row) -> float:
    return relative(other.output, row.output)


def _factor(ours: Tensor, theirs: Tensor) -> float:
    """The factor of `theirs` that fits `ours` best."""
    return float((ours * theirs).sum() / theirs.square().sum().clamp(min=1e-30))
