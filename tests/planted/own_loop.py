"""Plant faults in a loop of one's own, in the style of flow_grpo and of scripts with accelerate, and say what is named.

    python -m tests.planted.own_loop --ends              # all, as the table of results.md
    python -m tests.planted.own_loop --dtype bfloat16    # all sizes, in the precision of most training
    python -m tests.planted.own_loop guidance_rescaled   # one of them

The loop captures its samples with `flowcorr.ReplaySamples` and dumps its steps with `flowcorr.dump`, beside the
log-probs of a trainer without a fault. `DRAWN` were written down before the doctor was made to name any of them;
`NUMBERS` are the settings that a loop can have wrong, `OTHERS` bugs of other projects.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flowcorr
from flowcorr.instruments.doctor import examine_dump
from tests.instruments.doctor.plain_loop import LEVEL, Loop
from tests.planted import plants
from tests.shallow import SHALLOW

Plants = dict[str, Callable[[Loop, Any], Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of a loop.

    Attributes:
        name: its name.
        stands_for: the mistake in words.
        fields: of `ReplaySamples`, in which the fault lies.
        plant: a size -> the places of the loop that it changes, see `Loop`.
        sizes: sizes that are tried, from the largest on.
        window: of the loop.
        options: of the loop.
    """

    name: str
    stands_for: str
    fields: Sequence[str]
    plant: Callable[[float], Plants]
    sizes: Sequence[float] = (0.0,)
    window: str = "whole"
    options: Mapping[str, Any] = field(default_factory=dict)


def _always(**places: Callable[[Loop, Any], Any]) -> Callable[[float], Plants]:
    return lambda size: dict(places)


def _of_step(change: Callable[[float], dict[str, Any]]) -> Callable[[float], Plants]:
    return lambda size: {"step": lambda loop, values: values | change(size)}


def _next_timesteps(loop: Loop, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    sigmas, timesteps = tables
    return sigmas, torch.cat([timesteps[1:], timesteps[-1:] / 2])


def _with_template(loop: Loop, prompts: Sequence[str]) -> list[str]:
    return [f"a photo of {prompt}" for prompt in prompts]


def _pooled_of_another(loop: Loop, text: Any) -> Any:
    embeds, pooled = text["prompt"]
    return {**text, "prompt": (embeds, pooled.roll(1, 0))}


def _by_channel(loop: Loop, pooled: Tensor) -> Tensor:
    return 4 * pooled  # the sum over channels of means over places


def _without_step(loop: Loop, std: Tensor) -> Tensor:
    sigmas = loop.pipeline.scheduler.sigmas
    return std / (sigmas[loop.index] - sigmas[loop.index + 1]).sqrt()


def _before_last_step(loop: Loop, latents: Tensor) -> Tensor:
    return loop.kept if hasattr(loop, "kept") else latents


def _keep_one_before(loop: Loop, latents: Tensor) -> Tensor:
    if loop.index == loop.num_steps - 2:
        loop.kept = latents  # type: ignore[attr-defined]
    return latents


def _older_adapter(size: float) -> Plants:
    """The captured adapter is one update ahead of the one that sampled."""

    def moved(loop: Loop, adapter: Mapping[str, Tensor]) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(4)
        return {
            name: value + size * 0.3 * torch.randn(value.shape, generator=draw) if "lora_B" in name else value
            for name, value in adapter.items()
        }

    return {"adapter": moved}


def _not_on_values(loop: Loop, pipeline: Any) -> Any:
    for name, parameter in pipeline.transformer.named_parameters():
        if "to_v.lora_B" in name:
            loop.kept_adapter[name] = parameter.data.clone()  # type: ignore[attr-defined]
            parameter.data.zero_()
    return pipeline


def _restored(loop: Loop, adapter: Mapping[str, Tensor]) -> dict[str, Tensor]:
    whole = {name.replace(".default", ""): value for name, value in loop.kept_adapter.items()}  # type: ignore[attr-defined]
    return {**adapter, **{name: whole.get(name, value) for name, value in adapter.items()}}


def _partial_adapter(size: float) -> Plants:
    def plant(loop: Loop, pipeline: Any) -> Any:
        loop.kept_adapter = {}  # type: ignore[attr-defined]
        return _not_on_values(loop, pipeline)

    return {"pipeline": plant, "adapter": _restored}


def _rescaled(size: float) -> Plants:
    def rescale(loop: Loop, velocity: Tensor) -> Tensor:
        ratio = loop.plain.flatten(1).std(1) / velocity.flatten(1).std(1)
        return velocity * (1 - size + size * ratio)[:, None, None, None]

    return {"velocity": rescale}


def _scaled_adapter(scale: Callable[[float], float]) -> Callable[[float], Plants]:
    def of(size: float) -> Plants:
        def plant(loop: Loop, pipeline: Any) -> Any:
            pipeline.transformer.set_adapters("default", weights=scale(size))
            return pipeline

        return {"pipeline": plant}

    return of


def _shifted(size: float) -> Plants:
    """The sampler's own scheduler has another shift than the captured one."""

    def plant(loop: Loop, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        scheduler = loop.pipeline.scheduler
        other = type(scheduler).from_config(scheduler.config, shift=scheduler.config.shift * (1 + size))
        other.set_timesteps(loop.num_steps)
        return other.sigmas, other.timesteps

    return {"schedule": plant}


def _shift_captured(size: float) -> Plants:
    """The sampler's scheduler has another shift than the model's own, and it is captured."""

    def plant(loop: Loop, captured: dict[str, Any]) -> dict[str, Any]:
        sigmas, timesteps = _shifted(size)["schedule"](loop, (None, None))
        return {**captured, "sigmas": sigmas, "timesteps": timesteps}

    return _shifted(size) | {"captured": plant}


def _jpeg(size: float) -> Plants:
    """Images that were stored as JPEG of quality 100 - size."""

    def plant(loop: Loop, images: Tensor) -> Tensor:
        stored = plants.jpeg((images * 255).round().to(torch.uint8).permute(0, 2, 3, 1), round(100 - size))
        return stored.permute(0, 3, 1, 2).float() / 255

    return {"images": plant}


def _noise_outside(places: Sequence[int]) -> Callable[[Loop, Tensor], Tensor]:
    def plant(loop: Loop, latents: Tensor) -> Tensor:
        if loop.index not in places:
            return latents
        mean, std = loop.step(*loop.latest)
        return mean + std * loop.normal(*mean.shape)

    return plant


def _timesteps_of_fewer_steps(loop: Loop, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    loop.pipeline.scheduler.set_timesteps(loop.num_steps - 1)
    fewer = loop.pipeline.scheduler.timesteps
    loop.pipeline.scheduler.set_timesteps(loop.num_steps)
    return tables[0], torch.cat([fewer, fewer[-1:]])


_QUARTERS = (1.0, 0.25, 0.06, 0.016)

DRAWN: Sequence[Fault] = (
    Fault(
        name="timesteps_of_next_step",
        stands_for="the transformer is fed the timestep of the next step",
        fields=("timesteps",),
        plant=_always(schedule=_next_timesteps),
    ),
    Fault(
        name="timesteps_whole",
        stands_for="the transformer is fed whole timesteps",
        fields=("timesteps",),
        plant=_always(schedule=lambda loop, tables: (tables[0], tables[1].trunc())),
    ),
    Fault(
        name="prompt_template",
        stands_for="the sampler writes its own words around the prompt",
        fields=("prompts",),
        plant=_always(prompts=_with_template),
    ),
    Fault(
        name="pooled_of_another",
        stands_for="the pooled embeddings of other samples",
        fields=("prompts",),
        plant=_always(text=_pooled_of_another),
    ),
    Fault(
        name="step_noise_large",
        stands_for="step noise is too large by this share, and scored as it is",
        fields=("next_latents",),
        plant=lambda size: {"noise": lambda loop, noise: (1 + size) * noise},
        sizes=(0.8, 0.2, 0.05, 0.0125),
    ),
    Fault(
        name="step_noise_of_batch",
        stands_for="one draw of step noise for all samples of a batch",
        fields=("next_latents",),
        plant=_always(noise=lambda loop, noise: noise[:1].expand_as(noise)),
    ),
    Fault(
        name="initial_noise_scaled",
        stands_for="the sampler scales the initial noise, too large by this share",
        fields=("initial_noise",),
        plant=lambda size: {"initial": lambda loop, noise: (1 + size) * noise},
        sizes=(0.8, 0.2, 0.05, 0.0125),
        window="middle",
    ),
    Fault(
        name="latents_clamped",
        stands_for="latents are clamped to 2.5 / size after a step, and scored so",
        fields=("next_latents",),
        plant=lambda size: {"next": lambda loop, latents: latents.clamp(-2.5 / size, 2.5 / size)},
        sizes=(4.0, 1.0, 0.5),
    ),
    Fault(
        name="latents_rounded",
        stands_for="latents are rounded to bfloat16 between the steps, after they were scored",
        fields=("latents",),
        plant=_always(kept=lambda loop, latents: latents.bfloat16().float()),
        window="middle",
    ),
    Fault(
        name="log_probs_of_next_step",
        stands_for="log-probs are those of the next step of the window",
        fields=("log_probs",),
        plant=_always(log_probs=lambda loop, values: values.roll(-1, 1)),
    ),
    Fault(
        name="log_probs_by_channel",
        stands_for="log-probs are summed over channels, and averaged over places",
        fields=("log_probs",),
        plant=_always(pooled=_by_channel),
    ),
    Fault(
        name="std_without_step",
        stands_for="the std of the score lacks the root of the step",
        fields=("log_probs",),
        plant=_always(scored_std=_without_step),
    ),
    Fault(
        name="decoded_one_early",
        stands_for="the latents before the last step are decoded",
        fields=("final_latents",),
        plant=_always(kept=_keep_one_before, final=_before_last_step),
    ),
    Fault(
        name="images_brighter",
        stands_for="images are brighter by so many grey levels",
        fields=("images",),
        plant=lambda size: {"images": lambda loop, images: (images + size / 255).clamp(0, 1)},
        sizes=(16.0, 4.0, 1.0),
    ),
    Fault(
        name="images_jpeg",
        stands_for="images went through JPEG of quality 100 - size",
        fields=("images",),
        plant=_jpeg,
        sizes=(60.0, 15.0, 5.0),
    ),
    Fault(
        name="adapter_behind",
        stands_for="the adapter that sampled is one update behind the captured one, moved by this share",
        fields=("adapter",),
        plant=_older_adapter,
        sizes=_QUARTERS,
    ),
    Fault(
        name="adapter_partial",
        stands_for="the adapter misses the projections of the values",
        fields=("adapter",),
        plant=_partial_adapter,
    ),
    Fault(
        name="guidance_rescaled",
        stands_for="guidance_rescale",
        fields=("guidance_scale",),
        plant=_rescaled,
        sizes=_QUARTERS,
    ),
    Fault(
        name="guidance_late",
        stands_for="the first step has no guidance",
        fields=("guidance_scale",),
        plant=_always(scale=lambda loop, scale: 1.0 if loop.index == 0 else scale),
    ),
    Fault(
        name="transformer_rounds",
        stands_for="the transformer computes in bfloat16 where float32 is captured",
        fields=("dtype",),
        plant=_always(captured=lambda loop, captured: {**captured, "dtype": "float32"}),
        options={"dtype": "bfloat16"},
    ),
)
"""Twenty faults."""

NUMBERS: Sequence[Fault] = (
    Fault(
        name="indices_from_one",
        stands_for="steps of the window are counted from 1",
        fields=("step_indices",),
        plant=_always(captured=lambda loop, captured: {**captured, "step_indices": [2, 4]}),
        window="middle",
    ),
    Fault(
        name="length_of_prompts",
        stands_for="prompts are padded to 77 tokens where 16 are captured",
        fields=("max_sequence_length",),
        plant=_always(captured=lambda loop, captured: {**captured, "max_sequence_length": 77}),
    ),
    Fault(
        name="noise_level",
        stands_for="the noise level is too large by this share",
        fields=("noise_level",),
        plant=_of_step(lambda size: {"level": LEVEL * (1 + size)}),
        sizes=(0.5 / 7, 0.016, 0.004, 0.001),
    ),
    Fault(
        name="sde_type_dance",
        stands_for="dance_sde where sde is captured",
        fields=("sde_type",),
        plant=_of_step(lambda size: {"kind": "dance_sde"}),
    ),
    Fault(
        name="sde_type_cps",
        stands_for="cps where sde is captured",
        fields=("sde_type",),
        plant=_of_step(lambda size: {"kind": "cps"}),
        window="middle",
    ),
    Fault(
        name="sigma_max",
        stands_for="the first step takes 1 - size for the noise level 1, not the next one",
        fields=("sigmas",),
        plant=_of_step(lambda size: {"sigma_max": 1 - size}),
        sizes=(0.02, 0.005),
    ),
    Fault(
        name="adapter_twice",
        stands_for="the adapter is applied twice",
        fields=("adapter_alpha",),
        plant=_scaled_adapter(lambda size: 2.0),
    ),
    Fault(
        name="adapter_scale",
        stands_for="the adapter acts too strongly by this share",
        fields=("adapter_alpha",),
        plant=_scaled_adapter(lambda size: 1 + size),
        sizes=(0.4, 0.1, 0.025, 0.006),
    ),
    Fault(
        name="shift_of_sampler",
        stands_for="the sampler's schedule has a shift too large by this share, and the other is captured",
        fields=("sigmas", "timesteps"),
        plant=_shifted,
        sizes=(0.4, 0.1, 0.025, 0.006),
    ),
    Fault(
        name="shift_captured",
        stands_for="the sampler's schedule has a shift too large by this share, and is captured",
        fields=("sigmas", "timesteps"),
        plant=_shift_captured,
        sizes=(0.4, 0.1, 0.025, 0.006),
    ),
    Fault(
        name="guidance_scale",
        stands_for="guidance is too strong by this share",
        fields=("guidance_scale",),
        plant=lambda size: {"scale": lambda loop, scale: scale * (1 + size)},
        sizes=(0.4, 0.1, 0.025, 0.006),
    ),
    Fault(
        name="guidance_swapped",
        stands_for="the halves of guidance are exchanged",
        fields=("guidance_scale",),
        plant=_always(text=lambda loop, text: {"prompt": text["negative"], "negative": text["prompt"]}),
    ),
    Fault(
        name="negative_of_another",
        stands_for="the negative prompt is another prompt of the run",
        fields=("negative_prompt",),
        plant=_always(negative=lambda loop, text: "owl"),
        options={"negative": "mud"},
    ),
    Fault(
        name="negative_empty",
        stands_for="the negative prompt is empty",
        fields=("negative_prompt",),
        plant=_always(negative=lambda loop, text: ""),
        options={"negative": "mud"},
    ),
    Fault(
        name="negative_zeros",
        stands_for="the negative prompt's embeddings are zeros",
        fields=("negative_prompt",),
        plant=_always(
            text=lambda loop, text: {**text, "negative": tuple(map(torch.zeros_like, text["negative"]))}
        ),
    ),
    Fault(
        name="vae_scaling_missing",
        stands_for="latents are decoded without the VAE's scaling factor",
        fields=("final_latents",),
        plant=_always(vae=lambda loop, numbers: (1.0, numbers[1])),
    ),
    Fault(
        name="vae_shift_missing",
        stands_for="latents are decoded without the VAE's shift",
        fields=("final_latents",),
        plant=_always(vae=lambda loop, numbers: (numbers[0], 0.0)),
    ),
    Fault(
        name="vae_scaling_twice",
        stands_for="the VAE's scaling and shift are applied twice",
        fields=("final_latents",),
        plant=_always(vae=lambda loop, numbers: (numbers[0] ** 2, numbers[1] / numbers[0] + numbers[1])),
    ),
    Fault(
        name="vae_scaling",
        stands_for="the VAE's scaling factor is too large by this share",
        fields=("final_latents",),
        plant=lambda size: {"vae": lambda loop, numbers: (numbers[0] * (1 + size), numbers[1])},
        sizes=(0.8, 0.2, 0.05),
    ),
)
"""Settings that a loop can have wrong."""

OTHERS: Sequence[Fault] = (
    Fault(
        name="noise_outside",
        stands_for="a step before the window and one after it have noise, as its own",
        fields=("initial_noise", "final_latents"),
        plant=_always(outside=_noise_outside((0, 4))),
        window="middle",
        options={"num_steps": 6},
    ),
    Fault(
        name="timesteps_of_fewer_steps",
        stands_for="the timesteps are those of a schedule of one step less than the sigmas",
        fields=("timesteps",),
        plant=_always(schedule=_timesteps_of_fewer_steps),
        window="middle",
    ),
)
"""Bugs that others made and mended, see `flowcorr/instruments/README.md`."""
EVERY = (*DRAWN, *NUMBERS, *OTHERS)


def dump_fault(
    fault: Fault | None, size: float, folder: Path, *, seed: int = 0, dtype: str = "float32"
) -> None:
    """Dump a step of the loop with a fault, or of a clean one, with a transformer in `dtype`."""
    options = {"dtype": dtype} | ({} if fault is None else {"window": fault.window, **fault.options})
    captured = Loop(seed=seed, plant=None if fault is None else fault.plant(size), **options).sample()
    rewards = captured["rewards"]
    flowcorr.dump(
        folder,
        0,
        rollout_log_probs=captured["log_probs"],
        old_log_probs=Loop(**options).rescore(captured),
        advantages=(rewards - rewards.mean()) / (rewards.std() + 1e-4),
        num_elements=captured["initial_noise"][0].numel(),
        sigmas=captured["sigmas"][captured["step_indices"]],
        step_indices=captured["step_indices"],
        clip_ratio=1e-4,
        replay=flowcorr.ReplaySamples(**captured),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What the doctor said about a fault of one size.

    Attributes:
        size: of the fault.
        causes: that it names, in words; where it names none, the checks that warn.
        is_named: whether it names one.
    """

    size: float
    causes: str
    is_named: bool


def tried(fault: Fault, sizes: Sequence[float], *, seed: int = 0, dtype: str = "float32") -> Iterator[Result]:
    """Examine sizes of a fault, in a dtype."""
    for size in sizes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            dump_fault(fault, size, folder, seed=seed, dtype=dtype)
            doctor = examine_dump(folder, SHALLOW)
        causes = dict.fromkeys(doctor.causes())
        warned = dict.fromkeys(f"cannot tell ({check})" for check in doctor.causes("warning"))
        yield Result(
            size=size,
            causes=", ".join(f"`{cause}`" for cause in causes) or ", ".join(warned) or "nothing",
            is_named=bool(causes),
        )


def row(fault: Fault, results: Sequence[Result]) -> str:
    """The row of a fault in the table of results.md."""
    named = [result for result in results if result.is_named]
    sizes = [result.size for result in named]
    unnamed = [result.size for result in results if not result.is_named]
    doctor = named[0].causes if named else results[0].causes
    cells = (
        ", ".join(f"`{name}`" for name in fault.fields),
        f"`{fault.name}`: {fault.stands_for}",
        doctor,
        f"{min(sizes):.3g}" if named and fault.sizes != (0.0,) else "yes" if named else "-",
        f"{max(unnamed):.3g}" if unnamed and fault.sizes != (0.0,) else "",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="FAULT")
    parser.add_argument("--ends", action="store_true", help="the largest and the smallest size alone")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    drawn = {"seed": arguments.seed, "dtype": arguments.dtype}
    print("| field | fault | doctor | smallest named | not named |")
    print("|---|---|---|---|---|")
    for chosen in EVERY:
        if not arguments.names or chosen.name in arguments.names:
            sizes = dict.fromkeys((chosen.sizes[0], chosen.sizes[-1])) if arguments.ends else chosen.sizes
            print(row(chosen, list(tried(chosen, list(sizes), **drawn))), flush=True)
