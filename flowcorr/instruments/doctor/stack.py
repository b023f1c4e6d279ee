"""The training stack, set up as another trainer's captured samples say."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowcorr import sde
from flowcorr.config.schema import LoraConfig
from flowcorr.dumps.replay import COUNT, ReplaySamples
from flowcorr.errors import ConfigError
from flowcorr.instruments.doctor.mistakes import FLIPS
from flowcorr.instruments.doctor.shifts import schedule_at
from flowcorr.lora import ADAPTER, adapter_state, add_adapter
from flowcorr.models import DTYPES, Conditioning, Guidance, ModelFamily, Schedule
from flowcorr.models.adapter_files import plain_name
from flowcorr.models.negatives import with_negative
from flowcorr.records import Prompt
from flowcorr.references import Reference
from flowcorr.rollout.precision import accounted_gap, clean_gap
from flowcorr.sde.transition import over_elements

_BATCH = 8  # samples of a forward pass
_MAX_FRAMES = 1024  # of a video whose number is looked for
OTHER_REFERENCES: Mapping[str, Callable[[Tensor], Tensor]] = {
    **{words: partial(torch.flip, dims=(axis,)) for words, axis in FLIPS.items()},
    **{
        f"of the sample {place} before": partial(torch.roll, shifts=place, dims=0)
        for place in range(1, COUNT)
    },
}
"""Changes of the reference images `[B, R, H, W, 3]` that an engine may make, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Inputs of steps other than latents; one value of each, or one a sample.

    Attributes:
        prompts: one a sample.
        pooled_prompts: one a sample, of pooled embeddings; None where they are those of `prompts`.
        initial_scale: factor of the initial noise.
        guidance_scale: of all.
        negative_prompts: one a sample.
        unguided: places in the schedule of steps without guidance.
        guidance_rescale: share of the guided velocity that is rescaled to the std under the prompt alone.
        negative_zeros: whether the negative prompt's embeddings are zeros.
        swapped: whether prompt and negative prompt are exchanged.
        adapter: times that the adapter is applied: 1, or 0 without one.
        unadapted: the end of the names of layers without the adapter; empty where all have it.
        references: a change of the reference images, a key of `OTHER_REFERENCES`; empty for none.
        max_sequence_length: of the long text encoder.
        embeddings_cut: whether the embeddings of all text encoders together are cut to that length.
        timesteps: `[N]` of the schedule, as the transformer is fed.
        sigmas: `[N + 1]` of the schedule, as steps are taken.
        noise_level, sde_type: of the window's steps.
        sigma_max: see `flowcorr.sde.transition`.
        noise_outside: whether one step of each leg outside the window may have noise as those of the window have.
        shift: places in the schedule that the window's steps lie after the captured ones.
    """

    prompts: tuple[str, ...]
    pooled_prompts: tuple[str, ...] | None = None
    initial_scale: float = 1.0
    guidance_scale: float
    negative_prompts: tuple[str, ...]
    unguided: tuple[int, ...] = ()
    guidance_rescale: float = 0.0
    negative_zeros: bool = False
    swapped: bool = False
    adapter: float
    unadapted: str = ""
    references: str = ""
    max_sequence_length: int | None
    embeddings_cut: bool = False
    timesteps: tuple[float, ...]
    sigmas: tuple[float, ...]
    noise_level: float | None
    sde_type: sde.SdeType
    sigma_max: float | None = None
    noise_outside: bool = False
    shift: int = 0

    @property
    def of_velocity(self) -> Inputs:
        """The same for all inputs that give the same velocities."""
        return replace(
            self,
            initial_scale=1.0,
            sigmas=(),
            noise_level=None,
            sde_type="sde",
            sigma_max=None,
            noise_outside=False,
        )


class Stack:
    """A model that replays samples of one training step.

    Args:
        family: the loaded pipeline; it gets the adapter of the first samples that have one.
        samples: the captured samples.

    Attributes:
        latent_shape: `L`, as the family has it.
        places: of the steps' noise levels in the model's own schedule, see `ReplaySamples.sigma_indices`.
        own: the same steps of the model's own schedule.
        captured: the inputs as they were captured, with the model's own schedule where it was not.

    Raises:
        ConfigError: the samples do not fit the model.
    """

    def __init__(self, family: ModelFamily, samples: ReplaySamples) -> None:
        self.family, self.samples = family, samples
        images = samples.images
        assert isinstance(images, Tensor)
        height, width = images.shape[-3:-1]
        num_frames = _num_frames(family, samples) if images.dim() == 5 else None
        self.latent_shape = family.sample_shape(height, width, num_frames)
        family.reference_size = (height, width)
        with self._prompt(samples.prompts[0], 0) as prompt:
            family.check_references([prompt])
        self.tensor("initial_noise")  # refuses samples of another model
        sigmas, timesteps = (samples.tensors().get(name) for name in ("sigmas", "timesteps"))
        count = len(sigmas) - 1 if sigmas is not None else 0 if timesteps is None else len(timesteps)
        places = samples.tensors().get("sigma_indices")
        self.places: tuple[int, ...] = tuple(range(count + 1) if places is None else places.tolist())
        self.own: Schedule | None = schedule_at(family, self.places, self.latent_shape) if count else None
        own = Schedule(sigmas=(), timesteps=()) if self.own is None else self.own
        negative = samples.negative_prompt or ""
        self.captured = Inputs(
            prompts=tuple(samples.prompts),
            guidance_scale=1.0 if samples.guidance_scale is None else samples.guidance_scale,
            negative_prompts=(negative,) * len(samples.prompts)
            if isinstance(negative, str)
            else tuple(negative),
            adapter=float(bool(samples.adapter)),
            max_sequence_length=samples.max_sequence_length,
            timesteps=own.timesteps if timesteps is None else tuple(timesteps.tolist()),
            sigmas=own.sigmas if sigmas is None else tuple(sigmas.tolist()),
            noise_level=samples.noise_level,
            sde_type=cast(sde.SdeType, samples.sde_type),
        )
        if samples.adapter:
            load_adapter(family, samples)
        self._encoded: dict[tuple[Any, ...], Conditioning] = {}

    @property
    def device(self) -> torch.device:
        return next(self.family.transformer.parameters()).device

    @property
    def dtype(self) -> str:
        """In which the engine computed; the coarsest that `ReplaySamples` knows where it was not captured."""
        return self.samples.dtype or "bfloat16"

    def gaps_in(self, dtype: str) -> tuple[float, float]:
        """The largest velocity gap of clean runs, and the largest that is accounted for.

        Args:
            dtype: in which the engine computed.
        """
        names = {dtype, str(self.family.dtype).removeprefix("torch.")}
        scale = self.family.amplification(self._guidance(self.captured.guidance_scale))
        return clean_gap(names, scale, apart=False), accounted_gap(names, scale, apart=False)

    def tensor(self, name: str) -> Tensor | None:
        """Captured latents in the family's layout, float32 on its device; None if none were captured.

        Raises:
            ConfigError: they are not those of this model's images.
        """
        value = self.samples.tensors().get(name)
        if value is None:
            return None
        lead = value.shape[: 2 if name in ("latents", "next_latents") else 1]
        size = torch.Size(self.latent_shape).numel()
        if value[(0,) * len(lead)].numel() != size:
            shape = " x ".join(map(str, self.samples.tensors()["images"].shape[1:-1]))
            raise ConfigError(
                f"the captured {name} have {value[(0,) * len(lead)].numel()} elements a sample, and this model's "
                f"latents have {size} for the captured images of {shape}: they are of another model, or of another "
                "size or number of frames"
            )
        return value.reshape(*lead, *self.latent_shape).float().to(self.device)

    @cached_property
    def steps(self) -> list[int]:
        """Places of the window's steps in the schedule; a step of `cps` to 0 has no noise, and is an Euler step."""
        indices, sigmas = self.samples.tensors().get("step_indices"), self.captured.sigmas
        steps = list(range(len(self.captured.timesteps))) if indices is None else indices.tolist()
        noiseless = self.samples.sde_type == "cps" and sigmas and sigmas[steps[-1] + 1] == 0
        return steps[:-1] if noiseless else steps

    @torch.no_grad()
    def velocity(
        self, latents: Tensor, indices: Sequence[int], rows: Sequence[int], inputs: Inputs
    ) -> Tensor:
        """Velocities `[b, *L]` at `latents` `[b, *L]`, of samples `rows` at steps `indices` of the schedule."""
        asked_guidance = self._guidance(inputs.guidance_scale)
        guidance = self.family.guidance_in_dtype(asked_guidance, DTYPES[self.samples.dtype or "float32"])
        asked = [
            (inputs.prompts[row], inputs.negative_prompts[row], self._source(row, inputs.prompts[row]))
            for row in rows
        ]
        pooled = asked
        if inputs.pooled_prompts:
            pooled = [(inputs.pooled_prompts[row], inputs.negative_prompts[row], row) for row in rows]
        known = {one: self._conditioning(*one, inputs) for one in dict.fromkeys((*asked, *pooled))}
        velocities = []
        with self._adapter(inputs):
            for start in range(0, len(rows), _BATCH):
                part = slice(start, start + _BATCH)
                conditioning = {
                    name: torch.cat(
                        [known[one][name] for one in (pooled if name.startswith("pooled") else asked)[part]]
                    )
                    for name in known[asked[0]]
                }
                has_guidance = torch.tensor(
                    [index not in inputs.unguided for index in indices[part]], device=self.device
                )
                times = torch.tensor([inputs.timesteps[index] for index in indices[part]], device=self.device)
                velocities.append(
                    self._guided(latents[part], times, conditioning, guidance, inputs, has_guidance)
                )
        return torch.cat(velocities)

    def _guided(
        self,
        latents: Tensor,
        timesteps: Tensor,
        conditioning: Conditioning,
        guidance: Guidance,
        inputs: Inputs,
        has_guidance: Tensor,
    ) -> Tensor:
        """`ModelFamily.velocity` at any scale of guidance; `has_guidance` `[b]` turns it off for some samples."""
        family, given = self.family, (latents, timesteps, conditioning)
        if not any(name.startswith("negative_") for name in conditioning):
            return family.predict(family.transformer, *given, guidance)
        negative, positive = family.predict(family.transformer, *with_negative(*given), guidance).chunk(2)
        if inputs.swapped:
            negative, positive = positive, negative
        velocity = family.guide(negative, positive, inputs.guidance_scale)
        if inputs.guidance_rescale:
            ratio = positive.flatten(1).std(1) / velocity.flatten(1).std(1)
            velocity = velocity * over_elements(1 + inputs.guidance_rescale * (ratio - 1), velocity)
        return torch.where(over_elements(has_guidance, velocity), velocity, positive)

    def _guidance(self, scale: float) -> Guidance:
        changed: dict[str, Any] = {self.family.guidance_key: scale}
        return Guidance(**changed)

    def _source(self, row: int, text: str) -> int:
        """The sample with the reference images of a text: the one captured with that text, else `row` itself."""
        captured = self.samples.prompts
        return captured.index(text) if text != captured[row] and text in captured else row

    @contextmanager
    def _prompt(self, text: str, source: int, change: str = "") -> Iterator[Prompt]:
        """A text with the reference images of a sample, one of `OTHER_REFERENCES` of them; they are files meanwhile."""
        references = self.samples.tensors().get("references")
        if references is not None and change:
            references = OTHER_REFERENCES[change](references)
        with TemporaryDirectory() as folder:
            images = []
            for place, pixels in enumerate(() if references is None else references[source]):
                path = Path(folder) / f"{place}.png"
                Image.fromarray(np.asarray(pixels)).save(path)
                images.append(Reference.of(path))
            yield Prompt(text=text, images=tuple(images))

    def _conditioning(self, text: str, negative: str, source: int, inputs: Inputs) -> Conditioning:
        # Embeddings depend on whether there is guidance, and not on its scale.
        guided = inputs.guidance_scale != 1 and not self.family.distills_guidance
        length = inputs.max_sequence_length
        cut = inputs.embeddings_cut
        key = (text, negative, source, guided, inputs.negative_zeros, inputs.references, length, cut)
        if key not in self._encoded:
            tokens = self.family.count_text_tokens(length)
            before, self.family.text_tokens = self.family.text_tokens, tokens
            try:
                with self._prompt(text, source, inputs.references) as prompt:
                    encoded = self.family.encode(
                        [replace(prompt, negative_prompt=negative)],
                        self._guidance(2.0 if guided else inputs.guidance_scale),
                    )
            finally:
                self.family.text_tokens = before
            self._encoded[key] = {
                name: torch.zeros_like(value)
                if inputs.negative_zeros and name.startswith("negative_") and not name.endswith("mask")
                else value[:, :tokens]
                if cut and name.removeprefix("negative_").startswith("prompt_embeds")
                else value
                for name, value in encoded.items()
            }
        return self._encoded[key]

    @contextmanager
    def _adapter(self, inputs: Inputs) -> Iterator[None]:
        """The captured adapter, as these inputs apply it; without one, the base alone."""
        transformer = self.family.transformer
        if not getattr(transformer, "peft_config", {}):
            yield
            return
        layers = {
            name: module
            for name, module in transformer.named_modules()
            if ADAPTER in getattr(module, "scaling", ())
        }
        before = [module.scaling[ADAPTER] for module in layers.values()]
        if not inputs.adapter:
            transformer.disable_adapters()
        for name, module in layers.items():
            bound = not (inputs.unadapted and name.endswith(inputs.unadapted))
            alpha = self.samples.adapter_alpha or 0.0
            module.scaling[ADAPTER] = bound * inputs.adapter * alpha / module.r[ADAPTER]
        try:
            yield
        finally:
            for module, scale in zip(layers.values(), before, strict=True):
                module.scaling[ADAPTER] = scale
            transformer.enable_adapters()

    @property
    def adapter_targets(self) -> list[str]:
        """The ends of the names of the layers that the adapter is of, without the block's."""
        layers = [name.removesuffix(".lora_A.weight") for name in self.samples.adapter if "lora_A" in name]
        return sorted({re.split(r"\.[0-9]+\.", f".{layer}", maxsplit=1)[-1] for layer in layers})

    @property
    def adapter_is_zero(self) -> bool:
        """Whether the adapter changes nothing: each layer has a factor that is 0, as all have before training."""
        ups = [value for name, value in self.samples.adapter.items() if "lora_B" in name]
        return not any(bool(value.any()) for value in ups)


def _num_frames(family: ModelFamily, samples: ReplaySamples) -> int:
    """Number of frames that the latents decode to; the number in the images if no number fits the latents."""
    images, noise = samples.tensors()["images"], samples.tensors()["initial_noise"]
    own, (height, width) = int(images.shape[1]), images.shape[2:4]
    for count in (own, *range(1, _MAX_FRAMES)):
        try:
            shape = family.sample_shape(height, width, count)
        except ConfigError:  # no number of frames of this model
            continue
        if torch.Size(shape).numel() == noise[0].numel():
            return count
    return own


def load_adapter(family: ModelFamily, samples: ReplaySamples) -> None:
    """Put the captured adapter on the model.

    Raises:
        ConfigError: its tensors are not those of one LoRA on this model.
    """
    import peft

    state: dict[str, Any] = {plain_name(name): value for name, value in samples.adapter.items()}
    downs = {name: value for name, value in state.items() if name.endswith(".lora_A.weight")}
    ranks = {value.shape[0] for value in downs.values()}
    if len(ranks) != 1 or 2 * len(downs) != len(state):
        raise ConfigError(
            f"the captured adapter has {len(state)} tensors, {len(downs)} of them lora_A.weight, of ranks "
            f"{sorted(ranks)}; capture peft.get_peft_model_state_dict of a plain LoRA of one rank"
        )
    (rank,) = ranks
    targets = tuple(name.removesuffix(".lora_A.weight") for name in downs)
    assert samples.adapter_alpha is not None, "`ReplaySamples` has checked it"
    if ADAPTER not in getattr(family.transformer, "peft_config", {}):
        lora = LoraConfig(rank=rank, alpha=samples.adapter_alpha, targets=targets)
        add_adapter(family.transformer, family, lora, seed=0)
    expected = adapter_state(family.transformer)
    odd = sorted(name for name in expected.keys() ^ state.keys())
    odd += [name for name in expected.keys() & state.keys() if expected[name].shape != state[name].shape]
    if odd:
        raise ConfigError(f"the captured adapter does not fit the model: {odd[0]} differs in name or shape")
    peft.set_peft_model_state_dict(family.transformer, state, adapter_name=ADAPTER)


def prompt_pool(steps: Mapping[int, ReplaySamples], step: int) -> list[str]:
    """All different captured prompts, sorted by the distance of their training step from `step`."""
    nearest = sorted(steps, key=lambda number: abs(number - step))
    return list(dict.fromkeys(prompt for number in nearest for prompt in steps[number].prompts))
