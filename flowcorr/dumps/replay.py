"""A few samples of a training step, with all inputs of a replay: `replay_000123.safetensors` in the step's folder.

Make `ReplaySamples` in the sampling loop, where prompts, images and latents are at hand and the adapter still is the
one that sampled: it copies what it is given. Hand it to `flowcorr.dump` at the end of the step. `flowcorr doctor`
replays the samples with the training stack, and names the part that differs. `COSTS` says what it cannot tell without
an optional field.

A file holds the tensors of `ReplaySamples` under their names, those of the adapter as `adapter.NAME`, and its other
fields as JSON in its metadata. Later versions may add fields, and keep these. A file may be a stranger's: `load_replay`
checks all of it, and runs nothing that it names.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowcorr.dumps import checks
from flowcorr.dumps.checks import Array
from flowcorr.dumps.files import damaged, opened, write
from flowcorr.errors import BatchError, ConfigError
from flowcorr.records import HIGHEST_NOISE_LEVEL, tensors_of

COUNT = 4
"""Samples of a step that are kept."""
COSTS = {
    "negative_prompt": "taken to be empty",
    "guidance_scale": "the steps cannot be replayed",
    "sigmas": "the schedule is not compared with the model's own, and log-probs are not judged",
    "timesteps": "taken from the model's own schedule",
    "noise_level": "log-probs are not judged, nor the adapter",
    "latents": "nothing between the noise and the final latents is judged",
    "log_probs": "their convention is not judged, and prompts, guidance and adapter only outside the window",
    "final_latents": "the images are not judged, nor the steps after the window",
    "rewards": "the reward is not judged",
    "adapter": "the samples are replayed without one",
    "dtype": "faults below the rounding of bfloat16 are not told from it",
}
"""Optional fields, and what a replay without them does."""
DTYPES = ("float32", "bfloat16", "float16")
SDE_TYPES = ("sde", "cps", "dance_sde")

_FILE, _NAME = "replay_{:06d}.safetensors", re.compile(r"replay_([0-9]{1,12})\.safetensors")
_ADAPTER = "adapter."
_BY_SAMPLE = (
    *("initial_noise", "images", "latents", "next_latents", "log_probs", "final_latents", "rewards"),
    "references",
)
_PIXELS = ("images", "references")
_PLACES = ("step_indices", "sigma_indices")
_NUMBERS = ("guidance_scale", "noise_level", "adapter_alpha", "max_sequence_length")
_FINITE = ("initial_noise", "latents", "next_latents", "log_probs", "final_latents")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplaySamples:
    """The first `COUNT` samples that it is given, copied to the CPU.

    Attributes:
        prompts: of each sample.
        initial_noise: `[B, *L]`, as the pipeline has its latents.
        images: `[B, H, W, 3]`, videos `[B, F, H, W, 3]`, or either with channels before `H`; uint8, or floats from
            0 to 1.
        negative_prompt: of all samples, or texts, one a sample.
        guidance_scale: as it was used; 1 is off.
        sigmas: `[N + 1]`, noise levels of the schedule as the engine used it, down to 0.
        timesteps: `[N]`, as the transformer was fed.
        noise_level: `eta` of the SDE steps.
        sde_type: their transition, see `flowcorr.sde.TRANSITIONS`.
        latents, next_latents: `[B, T, *L]` before and after each SDE step of the window.
        log_probs: `[B, T]` of these steps, as the engine gave them.
        step_indices: `[T]`, their places among the steps of `sigmas`; None if all of these are SDE steps.
        sigma_indices: `[N + 1]`, places of `sigmas` in the model's schedule, from 0 to its number of steps, where some
            steps cover several of its; None if the engine took each of them.
        final_latents: `[B, *L]`, which were decoded.
        rewards: `[B]`.
        references: `[B, R, H, W, 3]`, or `[B, H, W, 3]` of one each: the reference images that an editing model got.
        adapter: the tensors of the LoRA that sampled, as `peft.get_peft_model_state_dict` names them.
        adapter_alpha: its `lora_alpha`; needed with `adapter`.
        max_sequence_length: tokens of the long text encoder; None is the model family's default.
        dtype: in which the transformer computed: `float32`, `bfloat16` or `float16`. Leave it out where weights are
            rounded to fewer bits, as to fp8 or int4.
    """

    prompts: Sequence[str]
    initial_noise: Array
    images: Array
    negative_prompt: str | Sequence[str] | None = None
    guidance_scale: float | None = None
    sigmas: Array | None = None
    timesteps: Array | None = None
    noise_level: float | None = None
    sde_type: str = "sde"
    latents: Array | None = None
    next_latents: Array | None = None
    log_probs: Array | None = None
    step_indices: Array | None = None
    sigma_indices: Array | None = None
    final_latents: Array | None = None
    rewards: Array | None = None
    references: Array | None = None
    adapter: Mapping[str, Tensor] = field(default_factory=dict)
    adapter_alpha: float | None = None
    max_sequence_length: int | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        count = min(COUNT, len(self.prompts))
        if not count or isinstance(self.prompts, str):
            raise BatchError(f"flowcorr.ReplaySamples: prompts={self.prompts!r} must be texts, one a sample")
        changed: dict[str, Any] = {"prompts": tuple(self.prompts[:count])}
        if isinstance(self.negative_prompt, list | tuple):
            self._check_length("negative_prompt", self.negative_prompt)
            changed["negative_prompt"] = tuple(self.negative_prompt[:count])
        for name in _NUMBERS:
            if hasattr(value := getattr(self, name), "item"):  # of numpy or torch
                changed[name] = value.item()
        for name in (*_BY_SAMPLE, "sigmas", "timesteps", *_PLACES):
            value = getattr(self, name)
            if value is not None:
                if getattr(value, "ndim", int(isinstance(value, Sequence))) == 0:
                    raise BatchError(
                        f"flowcorr.ReplaySamples: {name} is one number; give one a sample or step"
                    )
                if name in _BY_SAMPLE:
                    self._check_length(name, value)
                changed[name] = _copied(name, value[:count] if name in _BY_SAMPLE else value)
        changed |= {name: _as_pixels(name, changed[name]) for name in _PIXELS if name in changed}
        if "references" in changed and changed["references"].dim() == 4:
            changed["references"] = changed["references"].unsqueeze(1)
        changed["adapter"] = {name: value.detach().cpu().clone() for name, value in self.adapter.items()}
        for name, value in changed.items():
            object.__setattr__(self, name, value)
        if problem := _problem(self):
            raise BatchError(f"flowcorr.ReplaySamples: {problem}")

    def _check_length(self, name: str, value: Any) -> None:
        if len(value) != len(self.prompts):
            raise BatchError(
                f"flowcorr.ReplaySamples: {name} is of {len(value)} samples, and prompts of "
                f"{len(self.prompts)}; give all fields of the same samples, in one order"
            )

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, without the adapter's."""
        return tensors_of(self)

    def missing(self) -> list[str]:
        """A line for each field of `COSTS` that is not there."""
        absent = [
            name for name in COSTS if getattr(self, name) is None or (name == "adapter" and not self.adapter)
        ]
        return [f"not captured: {name}; {COSTS[name]}" for name in absent]


def save_replay(folder: Path, step: int, samples: ReplaySamples) -> Path:
    """Write the samples of a step, completely or not at all.

    Raises:
        BackendError: the folder cannot be written to.
    """
    adapter = {f"{_ADAPTER}{name}": value for name, value in samples.adapter.items()}
    plain = {entry.name: getattr(samples, entry.name) for entry in fields(samples)}
    told = {
        name: json.dumps(value)
        for name, value in plain.items()
        if value is not None and name != "adapter" and not isinstance(value, Tensor)
    }
    tensors = samples.tensors() | adapter
    return write(folder / _FILE.format(step), tensors, {"step": str(step), **told}, "dump without `replay`")


def discard_replay(folder: Path, step: int) -> None:
    """Delete the samples of a step, if an earlier run left some and the step is written again."""
    (folder / _FILE.format(step)).unlink(missing_ok=True)


def load_replay(path: Path) -> ReplaySamples:
    """Read the samples of a step.

    Raises:
        ConfigError: the file is damaged, or has another format. The message names the field, its value and what is
            allowed.
    """
    with opened(path) as (file, metadata):
        known = {entry.name for entry in fields(ReplaySamples)}
        values: dict[str, Any] = {}
        for name in sorted(known & metadata.keys()):
            values[name] = checks.json_value(metadata[name])
            if problem := _problem_of_plain(name, values[name]):
                raise damaged(path, problem)
        for name, there in (("prompts", values), ("initial_noise", file.keys()), ("images", file.keys())):
            if name not in there:
                raise damaged(path, f"{name} is missing")
        adapter = {}
        for name in sorted(file.keys()):
            dtype = file.get_slice(name).get_dtype()
            if dtype not in checks.REAL_DTYPES and (name, dtype) not in _OTHER_DTYPES:
                raise damaged(path, f"{checks.shown(name)} has dtype {dtype}, which it must not have")
            if name.startswith(_ADAPTER):
                adapter[name.removeprefix(_ADAPTER)] = file.get_tensor(name)
            elif name in known and name not in _PLAIN:
                values[name] = file.get_tensor(name)
    try:
        return ReplaySamples(**values, adapter=adapter)
    except BatchError as error:
        raise damaged(path, str(error)) from error


def replay_files(folder: Path) -> dict[int, Path]:
    """The files with samples of a folder, by training step in ascending order.

    Raises:
        ConfigError: the folder cannot be read.
    """
    try:
        matches = [_NAME.fullmatch(name) for name in (os.listdir(folder) if folder.is_dir() else [])]
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror or error}") from error
    return dict(sorted((int(match[1]), folder / match[0]) for match in matches if match))


_OTHER_DTYPES = {*((name, "U8") for name in _PIXELS), *((name, "I64") for name in _PLACES)}
_IS_NUMBER = ("a number", lambda value: type(value) in (int, float) and math.isfinite(value))


def _are_texts(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(text, str) for text in value)


_PLAIN: dict[str, tuple[str, Any]] = {
    "prompts": ("texts, one a sample", _are_texts),
    "negative_prompt": (
        "a text, or texts, one a sample",
        lambda value: isinstance(value, str) or _are_texts(value),
    ),
    "guidance_scale": _IS_NUMBER,
    "noise_level": ("a number above 0", lambda value: _IS_NUMBER[1](value) and value > 0),
    "adapter_alpha": ("a number above 0", lambda value: _IS_NUMBER[1](value) and value > 0),
    "sde_type": (" or ".join(SDE_TYPES), lambda value: value in SDE_TYPES),
    "dtype": (" or ".join(DTYPES), lambda value: value in DTYPES),
    "max_sequence_length": (
        "a whole number from 1 to 65536",
        lambda value: type(value) is int and 0 < value <= 65536,
    ),
}


def _problem_of_plain(name: str, value: object) -> str:
    if name not in _PLAIN:
        return f"{name} is no text of its metadata"
    allowed, is_allowed = _PLAIN[name]
    return "" if is_allowed(value) else f"{name}={checks.shown(str(value))} must be {allowed}"


def _problem(samples: ReplaySamples) -> str:
    """The first problem of the given samples, in words; empty if there is none."""
    for name in _PLAIN:
        value = getattr(samples, name)
        if value is not None and (problem := _problem_of_plain(name, value)):
            return problem
    if bool(samples.adapter) != (samples.adapter_alpha is not None):
        return "adapter and adapter_alpha (its lora_alpha) belong together; give both"
    if (samples.latents is None) != (samples.next_latents is None):
        return "latents and next_latents belong together; give both"
    tensors = samples.tensors()
    return (
        _problem_of_schedule(tensors)
        or _problem_of_shapes(tensors, len(samples.prompts))
        or _problem_of_values(tensors)
    )


def _problem_of_values(tensors: Mapping[str, Tensor]) -> str:
    """The first latent or log-prob that is not finite, in words; a failed reward may be NaN."""
    for name in _FINITE:
        if name in tensors and (lost := (~tensors[name].isfinite().flatten(1).all(1)).nonzero()).numel():
            return (
                f"{name} of sample {int(lost[0])} is not finite, so nothing can be replayed; give samples without NaN "
                "and infinity, and see why this one has them: the weights have diverged, or numbers overflow in "
                "float16"
            )
    return ""


def _problem_of_shapes(tensors: Mapping[str, Tensor], count: int) -> str:
    shape = tensors["initial_noise"].shape[1:]
    window = _window(tensors)
    expected = {
        "initial_noise": shape,
        "images": tensors["images"].shape[1:],
        "latents": (window, *shape),
        "next_latents": (window, *shape),
        "final_latents": shape,
        "log_probs": (window,),
        "rewards": (),
        "references": tensors["references"].shape[1:] if "references" in tensors else (),
    }
    for name, rest in expected.items():
        if name in tensors and list(tensors[name].shape) != [count, *rest]:
            return f"{name} has shape {list(tensors[name].shape)}; it must be {[count, *rest]}"
    return ""


def _problem_of_schedule(tensors: Mapping[str, Tensor]) -> str:
    sigmas, timesteps, indices = (tensors.get(name) for name in ("sigmas", "timesteps", "step_indices"))
    if sigmas is not None and (sigmas.dim() != 1 or len(sigmas) < 2 or not bool((sigmas.diff() < 0).all())):
        return f"sigmas={checks.shown(str(sigmas.tolist()))} must descend from the first noise level to the image's"
    for name in ("sigmas", "timesteps"):
        if name in tensors and not bool(tensors[name].isfinite().all()):
            return f"{name}={checks.shown(str(tensors[name].tolist()))} must be finite"
    if sigmas is not None and not (sigmas[-1] >= 0 and sigmas[0] <= HIGHEST_NOISE_LEVEL):
        return f"sigmas={checks.shown(str(sigmas.tolist()))} must lie from 0 to 1; divide timesteps by 1000"
    if sigmas is not None and timesteps is not None and timesteps.shape != sigmas[1:].shape:
        allowed = f"with {len(sigmas)} sigmas it must be {list(sigmas[1:].shape)}"
        return f"timesteps has shape {list(timesteps.shape)}; {allowed}"
    num_steps, window = _num_steps(tensors), _window(tensors)
    places = tensors.get("sigma_indices")
    if places is not None and (problem := _problem_of_places(places, num_steps)):
        return problem
    if indices is None:
        if window is None or num_steps is None or window == num_steps:
            return ""
        return f"the window has {window} of {num_steps} steps, so step_indices is needed"
    ascending = indices.dim() == 1 and len(indices) > 0 and bool((indices.diff() > 0).all())
    if not ascending or window not in (None, len(indices)):
        return f"step_indices={indices.tolist()} must ascend, one for each of the window's {window} steps"
    if not 0 <= int(indices[0]) <= int(indices[-1]) < (num_steps or checks.MAX_SCHEDULE):
        return f"step_indices={indices.tolist()} must lie in a schedule of {num_steps} steps"
    return ""


def _problem_of_places(places: Tensor, num_steps: int | None) -> str:
    if num_steps is None:
        return "sigma_indices needs sigmas or timesteps; give the steps that the engine took"
    ascend = places.shape == (num_steps + 1,) and bool((places.diff() > 0).all()) and int(places[0]) == 0
    if ascend and int(places[-1]) <= checks.MAX_SCHEDULE:
        return ""
    return (
        f"sigma_indices={checks.shown(str(places.tolist()))} must ascend from 0 to the number of the schedule's steps, "
        f"at most {checks.MAX_SCHEDULE}, one place for each of {num_steps + 1} sigmas"
    )


def _window(tensors: Mapping[str, Tensor]) -> int | None:
    """SDE steps of the window, `T`; None if unknown."""
    known = [tensors[name] for name in ("latents", "log_probs") if name in tensors]
    return known[0].shape[1] if known and known[0].dim() > 1 and known[0].shape[1] else None


def _num_steps(tensors: Mapping[str, Tensor]) -> int | None:
    """Steps of the schedule; None if unknown."""
    if "sigmas" in tensors:
        return len(tensors["sigmas"]) - 1
    return len(tensors["timesteps"]) if "timesteps" in tensors else None


def _copied(name: str, values: Array) -> Tensor:
    """Numbers of one's own, on the CPU; latents as float32, which holds all that half precision does."""
    tensor = checks.as_tensor(f"flowcorr.ReplaySamples: {name}", values).clone()
    if name in _PIXELS:
        return tensor
    if name in _PLACES:
        if bool((tensor != tensor.long()).any()):
            raise BatchError(f"flowcorr.ReplaySamples: {name}={tensor.tolist()} must be whole numbers")
        return tensor.long()
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _as_pixels(name: str, images: Tensor) -> Tensor:
    """`records.Images`."""
    if images.dim() in (4, 5) and images.shape[-3] == 3 and images.shape[-1] != 3:
        images = images.movedim(-3, -1)
    if images.dim() not in (4, 5) or images.shape[-1] != 3:
        raise BatchError(
            f"flowcorr.ReplaySamples: {name} has shape {list(images.shape)}; it must be [B, H, W, 3] or [B, 3, H, W], "
            "and of videos [B, F, H, W, 3] or [B, F, 3, H, W]; of references, R stands in the place of F"
        )
    if images.dtype == torch.uint8:
        return images
    if not images.is_floating_point() or not bool(((images >= 0) & (images <= 1)).all()):
        raise BatchError(f"flowcorr.ReplaySamples: {name} must be uint8, or floats from 0 to 1")
    return (images.float() * 255).round().to(torch.uint8)
