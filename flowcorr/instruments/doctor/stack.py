"""The training stack, set up as another trainer's captured samples say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowcorr.config.schema import LoraConfig
from flowcorr.dumps.replay import ReplaySamples
from flowcorr.errors import ConfigError
from flowcorr.lora import ADAPTER, adapter_state, add_adapter
from flowcorr.models import DTYPES, Conditioning, Guidance, ModelFamily, Schedule
from flowcorr.models.adapter_files import plain_name
from flowcorr.records import Prompt
from flowcorr.references import Reference

# Relative error of a velocity: of two float32 stacks, of one whose weights and activations are rounded.
VELOCITY_ERROR = {"float32": 2e-6, "float16": 2.5e-3, "bfloat16": 2e-2}
_BATCH = 8  # samples of a forward pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What velocities depend on besides latents; one value of each, or one a sample.

    Attributes:
        prompts: one a sample.
        guidance_scale: of all.
        negative_prompts: one a sample.
        adapter: whether it is on.
        max_sequence_length: of the long text encoder.
        timesteps: `[N]` of the schedule, as the transformer is fed.
        sigmas: `[N + 1]` of the schedule, as steps are taken.
    """

    prompts: tuple[str, ...]
    guidance_scale: float
    negative_prompts: tuple[str, ...]
    adapter: bool
    max_sequence_length: int | None
    timesteps: tuple[float, ...]
    sigmas: tuple[float, ...]


class Stack:
    """A model that replays samples of one training step.

    Args:
        family: the loaded pipeline; it gets the adapter of the first samples that have one.
        samples: the captured samples.

    Attributes:
        latent_shape: `L`, as the family has it.
        own: the model's own schedule of as many steps.
        captured: the inputs as they were captured, with the model's own schedule where it was not.
        velocity_error: relative error of a velocity that the precision of both stacks explains.

    Raises:
        ConfigError: the samples do not fit the model.
    """

    def __init__(self, family: ModelFamily, samples: ReplaySamples) -> None:
        self.family, self.samples = family, samples
        images = samples.images
        assert isinstance(images, Tensor)
        height, width = images.shape[-3:-1]
        num_frames = images.shape[1] if images.dim() == 5 else None
        self.latent_shape = family.sample_shape(height, width, num_frames)
        family.reference_size = (height, width)
        with self._prompt(samples.prompts[0], 0) as prompt:
            family.check_references([prompt])
        self.tensor("initial_noise")  # refuses samples of another model
        sigmas, timesteps = (samples.tensors().get(name) for name in ("sigmas", "timesteps"))
        count = len(sigmas) - 1 if sigmas is not None else 0 if timesteps is None else len(timesteps)
        self.own: Schedule | None = family.schedule(count, self.latent_shape) if count else None
        own = Schedule(sigmas=(), timesteps=()) if self.own is None else self.own
        negative = samples.negative_prompt or ""
        self.captured = Inputs(
            prompts=tuple(samples.prompts),
            guidance_scale=1.0 if samples.guidance_scale is None else samples.guidance_scale,
            negative_prompts=(negative,) * len(samples.prompts)
            if isinstance(negative, str)
            else tuple(negative),
            adapter=bool(samples.adapter),
            max_sequence_length=samples.max_sequence_length,
            timesteps=own.timesteps if timesteps is None else tuple(timesteps.tolist()),
            sigmas=own.sigmas if sigmas is None else tuple(sigmas.tolist()),
        )
        of_engine = VELOCITY_ERROR[samples.dtype or "bfloat16"]
        of_stack = VELOCITY_ERROR[str(family.dtype).removeprefix("torch.")]
        self.velocity_error = max(of_engine, of_stack)
        if samples.adapter:
            load_adapter(family, samples)
        self._encoded: dict[tuple[str, str, int, float, int | None], Conditioning] = {}

    @property
    def device(self) -> torch.device:
        return next(self.family.transformer.parameters()).device

    def tensor(self, name: str) -> Tensor | None:
        """Captured latents in the family's layout, float32 on its device; None where there are none.

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
        scale: dict[str, Any] = {self.family.guidance_key: inputs.guidance_scale}
        guidance = Guidance(**scale)
        computed = self.family.guidance_in_dtype(guidance, DTYPES[self.samples.dtype or "float32"])
        asked = [
            (inputs.prompts[row], inputs.negative_prompts[row], self._source(row, inputs.prompts[row]))
            for row in rows
        ]
        known = {
            one: self._conditioning(*one, guidance, inputs.max_sequence_length)
            for one in dict.fromkeys(asked)
        }
        found = []
        with self._adapter(on=inputs.adapter):
            for start in range(0, len(rows), _BATCH):
                part = slice(start, start + _BATCH)
                conditioning = {
                    name: torch.cat([known[one][name] for one in asked[part]]) for name in known[asked[0]]
                }
                times = torch.tensor([inputs.timesteps[index] for index in indices[part]], device=self.device)
                found.append(
                    self.family.velocity(
                        self.family.transformer, latents[part], times, conditioning, computed
                    )
                )
        return torch.cat(found)

    def _source(self, row: int, text: str) -> int:
        """The sample whose reference images belong to a text: one that was captured with it, else `row` itself."""
        captured = self.samples.prompts
        return captured.index(text) if text != captured[row] and text in captured else row

    @contextmanager
    def _prompt(self, text: str, source: int) -> Iterator[Prompt]:
        """A text with the captured reference images of a sample, which are files meanwhile."""
        with TemporaryDirectory() as folder:
            images = []
            for place, pixels in enumerate(
                () if self.samples.references is None else self.samples.references[source]
            ):
                path = Path(folder) / f"{place}.png"
                Image.fromarray(np.asarray(pixels)).save(path)
                images.append(Reference.of(path))
            yield Prompt(text=text, images=tuple(images))

    def _conditioning(
        self, text: str, negative: str, source: int, guidance: Guidance, length: int | None
    ) -> Conditioning:
        key = (text, negative, source, getattr(guidance, self.family.guidance_key), length)
        if key not in self._encoded:
            before, self.family.text_tokens = self.family.text_tokens, self.family.count_text_tokens(length)
            try:
                with self._prompt(text, source) as prompt:
                    self._encoded[key] = self.family.encode(
                        [replace(prompt, negative_prompt=negative)], guidance
                    )
            finally:
                self.family.text_tokens = before
        return self._encoded[key]

    @contextmanager
    def _adapter(self, *, on: bool) -> Iterator[None]:
        transformer = self.family.transformer
        if not getattr(transformer, "peft_config", {}) or (on and self.samples.adapter):
            yield
            return
        transformer.disable_adapters()
        try:
            yield
        finally:
            transformer.enable_adapters()

    @property
    def adapter_is_zero(self) -> bool:
        """Whether the adapter changes nothing: each layer has a factor that is 0, as all have before training."""
        ups = [value for name, value in self.samples.adapter.items() if "lora_B" in name]
        return not any(bool(value.any()) for value in ups)


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
    """All different prompts that were captured, those of the training steps nearest to `step` first."""
    nearest = sorted(steps, key=lambda number: abs(number - step))
    return list(dict.fromkeys(prompt for number in nearest for prompt in steps[number].prompts))
