"""Faults of the real vllm-omni engine, one row each: in its loop, images, inputs, transformer, worker and client."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from PIL import Image
from torch import Tensor

from flowcorr.records import Prompt
from flowcorr.rollout import sampler
from tests.planted import mistakes, plants
from tests.planted.fault import Fault, sized, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where faults are planted: the trainer's side, and the worker's in the same process."""

    engine: Any
    module: Any
    pipeline: Any
    worker: Any
    prompts: Sequence[Prompt] = ()
    empty_negative: Mapping[str, Tensor] = field(default_factory=dict)


Plant = Callable[[Place, contextlib.ExitStack], None]


def _swap(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    undo.enter_context(mock.patch.object(owner, name, value))


# Ways to plant -----------------------------------------------------------------------------------------------


def loop(*edits: tuple[str, str]) -> Plant:
    """The engine's sampling loop with other lines."""

    def plant(place: Place, undo: contextlib.ExitStack) -> None:
        source = inspect.getsource(sampler.sample_sde_window)
        for old, new in edits:
            assert old in source, old
            source = source.replace(old, new)
        names = dict(vars(sampler))
        exec(compile(source, "<planted>", "exec"), names)
        _swap(undo, place.module, "sample_sde_window", names["sample_sde_window"])

    return plant


def images(change: Callable[[Tensor], Tensor]) -> Plant:
    """Other images `[B, H, W, 3]`."""

    def changed(decode: Callable[..., Any], family: Any, final: Tensor) -> tuple[Tensor, Tensor]:
        found, finite = decode(family, final)
        return change(found), finite

    return decoding(changed)


def decoding(change: Callable[..., tuple[Tensor, Tensor]]) -> Plant:
    """Another decoder: `change(decode, family, final)`."""

    def plant(place: Place, undo: contextlib.ExitStack) -> None:
        decode = place.module.decode
        _swap(undo, place.module, "decode", lambda family, final: change(decode, family, final))

    return plant


def velocity(change: Callable[..., Tensor]) -> Plant:
    """Another velocity: `change(velocity, transformer, latents, timesteps, conditioning, guidance)`."""

    def plant(place: Place, undo: contextlib.ExitStack) -> None:
        true = place.pipeline.family.velocity
        _swap(undo, place.pipeline.family, "velocity", lambda *arguments: change(true, *arguments))

    return plant


def timesteps(change: Callable[[Tensor], Tensor]) -> Plant:
    """The transformer gets other timesteps than the engine returns."""
    return velocity(lambda true, net, latents, fed, *rest: true(net, latents, change(fed), *rest))


def at_step(chosen: Callable[[Tensor], bool], change: Callable[..., Tensor]) -> Plant:
    """`velocity` where the timestep, up to 1000, is `chosen`."""

    def changed(true: Any, net: Any, latents: Tensor, fed: Tensor, *rest: Any) -> Tensor:
        if chosen(fed[0]):
            return change(true, net, latents, fed, *rest)
        found: Tensor = true(net, latents, fed, *rest)
        return found

    return velocity(changed)


def guidance(change: Callable[[Any], Any]) -> Plant:
    """Another guidance."""
    return velocity(
        lambda true, net, latents, fed, rows, guided: true(net, latents, fed, rows, change(guided))
    )


def scale_of(factor: float) -> Plant:
    return guidance(lambda guided: replace(guided, guidance_scale=1 + (guided.guidance_scale - 1) * factor))


def conditioning(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Plant:
    """Other embeddings of the prompts, not those that are returned."""

    def plant(place: Place, undo: contextlib.ExitStack) -> None:
        rows = place.pipeline._rows
        _swap(undo, place.pipeline, "_rows", lambda given: change(rows(given)))

    return plant


def embeddings(change: Callable[[Tensor], Tensor], *names: str) -> Plant:
    chosen = names or ("prompt_embeds", "pooled_prompt_embeds")
    return conditioning(
        lambda rows: {name: change(value) if name in chosen else value for name, value in rows.items()}
    )


def references(change: Callable[[Tensor], Tensor]) -> Plant:
    """Other latents of the reference images."""
    return embeddings(change, "references")


def negatives(change: Callable[[Tensor, Tensor], Tensor]) -> Plant:
    """Other negative prompts: `change(negative, positive)`, by name."""
    return conditioning(
        lambda rows: {
            name: change(value, rows[name.removeprefix("negative_")])
            if name.startswith("negative_")
            else value
            for name, value in rows.items()
        }
    )


def empty_negative(place: Place, undo: contextlib.ExitStack) -> None:
    """An empty negative prompt; the bench encodes it beforehand, as its text encoders leave."""
    empty = place.empty_negative

    def change(rows: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: empty[name][:1, : value.shape[1]].expand_as(value).to(value) if name in empty else value
            for name, value in rows.items()
        }

    conditioning(change)(place, undo)


def reversed_references(place: Place, undo: contextlib.ExitStack) -> None:
    """Red and blue of the reference images are exchanged before they are encoded."""
    family = place.engine.family
    other = copy.copy(family)
    other.fitted_references = lambda prompt: [
        Image.merge("RGB", image.split()[::-1]) for image in family.fitted_references(prompt)
    ]
    own, wrong = (each.encode_references(place.prompts)["references"] for each in (family, other))

    def change(rows: Tensor) -> Tensor:
        nearest = [int((own.to(row) - row).flatten(1).norm(dim=1).argmin()) for row in rows]
        return wrong[nearest].to(rows)

    references(change)(place, undo)


def in_some_images(
    chosen: Callable[[Any], bool], change: Callable[..., Tensor], other: bool = False
) -> Plant:
    """`velocity` in the images alone whose job is `chosen`; with `other`, under the last prompt of the batch."""

    def plant(place: Place, undo: contextlib.ExitStack) -> None:
        sample = place.pipeline._sample

        def altered(plan: Any, jobs: Sequence[Any], rows: dict[str, Tensor]) -> list[Any]:
            outputs: dict[int, Any] = {}
            for is_chosen in (False, True):
                at = [number for number, job in enumerate(jobs) if chosen(job) == is_chosen]
                if not at:
                    continue
                own = {
                    name: value[-1:].expand(len(at), *value.shape[1:]) if is_chosen and other else value[at]
                    for name, value in rows.items()
                }
                with contextlib.ExitStack() as meanwhile:
                    if is_chosen:
                        velocity(change)(place, meanwhile)
                    outputs |= zip(at, sample(plan, [jobs[number] for number in at], own), strict=True)
            return [outputs[number] for number in range(len(jobs))]

        _swap(undo, place.pipeline, "_sample", altered)

    return plant


def first_repeated(place: Place, undo: contextlib.ExitStack) -> None:
    """The answer to the first request again in the place of the last."""
    generate = place.engine.client.generate

    def answers(requests: Sequence[Any], **options: Any) -> list[Any]:
        found = generate(requests, **options)
        return [*found[:-1], found[0]]

    _swap(undo, place.engine.client, "generate", answers)


def parameters(change: Callable[[str, Tensor], Tensor | None]) -> Plant:
    """Other parameters of the engine's transformer; None leaves one as it is."""

    def plant(place: Place, undo: contextlib.ExitStack) -> None:
        for name, parameter in place.pipeline.transformer.named_parameters():
            value = change(name, parameter.data)
            if value is not None:
                kept = parameter.data.clone()
                parameter.data.copy_(value)
                undo.callback(parameter.data.copy_, kept)

    return plant


def matrices(size: float) -> Plant:
    draw = torch.Generator().manual_seed(5)

    def change(name: str, value: Tensor) -> Tensor | None:
        return (
            value + size * value.float().std() * torch.randn(value.shape, generator=draw)
            if value.dim() == 2
            else None
        )

    return parameters(change)


def layers(change: Callable[[str, Any], dict[str, Any]]) -> Plant:
    """The layers with adapters compute otherwise: `change(name, layer)` gives attributes that replace their own."""

    def plant(place: Place, undo: contextlib.ExitStack) -> None:
        for name, layer in place.worker.lora_manager._lora_modules.items():
            for attribute, value in change(name, layer).items():
                _swap(undo, layer, attribute, value)

    return plant


def adapter_scaled(factor: float, chosen: Callable[[str], bool] = lambda name: True) -> Plant:
    """What the adapter adds, times `factor`, in the layers that are `chosen`; the buffers stay."""

    def change(name: str, layer: Any) -> dict[str, Any]:
        if not chosen(name):
            return {}
        true = layer.apply

        def apply(x: Tensor, bias: Tensor | None = None) -> Tensor:
            base = layer.base_layer.quant_method.apply(layer.base_layer, x, bias)
            found: Tensor = base + factor * (true(x, bias) - base)
            return found

        return {"apply": apply}

    return layers(change)


def syncs(change: Callable[[list[Any]], Any]) -> Plant:
    """The worker loads other tensors than it is sent: `change` gets all that were sent so far."""

    def plant(place: Place, undo: contextlib.ExitStack) -> None:
        load, sent = place.worker.flowcorr_adapter, list[Any]()

        def loads(adapter_id: int, path: Any, tensors: Any, config: Any) -> Any:
            sent.append(tensors)
            return load(adapter_id, path, change(sent), config)

        _swap(undo, place.worker, "flowcorr_adapter", loads)

    return plant


def merged(change: Callable[[str, Tensor], Tensor]) -> Callable[[list[Any]], Any]:
    return lambda sent: {name: change(name, tensor) for name, tensor in sent[-1].items()}


def stale_requests(place: Place, undo: contextlib.ExitStack) -> None:
    """Requests name the adapter of the first sync that they saw; it is loaded again."""
    request = place.engine._lora_request()
    _swap(undo, place.engine, "_lora_request", lambda: request)


def silent_trainer(after: int) -> Plant:
    """The trainer's calls of `sync` stop reaching the engine."""

    def plant(place: Place, undo: contextlib.ExitStack) -> None:
        sync, count = place.engine.sync, [0]

        def called(weights: Any) -> None:
            count[0] += 1
            if count[0] <= after:
                sync(weights)

        _swap(undo, place.engine, "sync", called)

    return plant


# Changes -----------------------------------------------------------------------------------------------------

ARRIVED = "arrived = sde.sample(step, noise(index, members))"
EULER = "following = latents - over_elements(sigma - sigma_next, latents) * drift"
MOVED = "        latents = following\n"
STARTED = "    latents = initial\n"
LEVELS = "sigma, sigma_next = table[index].expand(len(latents)), table[index + 1].expand(len(latents))"


def noise(expression: str) -> Plant:
    """Other step noise: `expression` of `z`, the true one."""
    return loop((ARRIVED, f"z = noise(index, members); arrived = sde.sample(step, {expression})"))


def returned(name: str, expression: str) -> Plant:
    """Another returned column of the window: `expression` of `x`, the true one."""
    source = {"latents": "before", "next_latents": "after", "stds": "stds", "timesteps": "fed[windows]"}[name]
    return loop((f"{name}={source},", f"{name}=(lambda x: {expression})({source}),"))


def scores(expression: str) -> Plant:
    """Other log-probs: `expression` of `p`, the true ones."""
    return loop(("return window, log_probs, latents", f"p = log_probs; return window, {expression}, latents"))


def final(expression: str) -> Plant:
    """Other final latents, which are decoded, too: `expression` of `x`."""
    return loop(("return window, log_probs, latents", f"x = latents; return window, log_probs, {expression}"))


def levels(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A change of grey levels, as float."""
    return lambda rows: change(rows.float()).round().clamp(0, 255).to(torch.uint8)


def head(name: str, value: Tensor) -> Tensor | None:
    if not name.endswith("blocks.0.attn.to_out.0.weight") and not name.endswith(
        "blocks.0.attn.to_out.0.base_layer.weight"
    ):
        return None
    changed = value.clone()
    changed[:, : value.shape[1] // 4] = 0
    return changed


def ending(*endings: str) -> Callable[[str], bool]:
    return lambda name: name.removesuffix(".weight").removesuffix(".base_layer").endswith(endings)


def int8(name: str, value: Tensor) -> Tensor | None:
    if value.dim() != 2:
        return None
    step = value.abs().amax(1, keepdim=True).clamp(min=1e-9) / 127
    return (value / step).round() * step


def off_by(size: float) -> Callable[[Tensor], Tensor]:
    """Rows off by this share of their spread, all of a batch alike."""

    def change(rows: Tensor) -> Tensor:
        draw = torch.randn(rows[:1].shape, generator=torch.Generator().manual_seed(2))
        return rows + size * rows.float().std().to(rows) * draw.to(rows)

    return change


def reads(prefix: str) -> Callable[[Iterable[str]], bool]:
    """Whether the name of a conditioning of the run begins so; without it there is nothing to change."""
    return lambda names: any(name.startswith(prefix) for name in names)


FAULTS: Sequence[Fault] = (
    # noise
    sized(
        "noise_large", "step noise is too large by this share", lambda size: noise(f"{1 + size} * z"), 0.01
    ),
    whole("noise_bfloat16", "step noise is rounded to bfloat16", noise("z.bfloat16().float()")),
    whole("noise_of_another", "step noise of another sample", noise("z.roll(1, 0)")),
    whole("noise_reversed", "step noise of the other sign", noise("-z")),
    sized("noise_shifted", "step noise is off its mean", lambda size: noise(f"z + {size}"), 0.02),
    sized(
        "noise_clipped",
        "step noise is clipped to 3 / size",
        lambda size: noise(f"z.clamp(-3 / {size}, 3 / {size})"),
        1.0,
    ),
    whole(
        "noise_uniform",
        "step noise is uniform, of unit variance",
        noise("12 ** 0.5 * (torch.special.ndtr(z) - 0.5)"),
    ),
    whole("noise_shared", "one step noise for all samples", noise("z[:1].expand_as(z)")),
    sized(
        "initial_large",
        "initial noise is too large by this share",
        lambda size: loop((STARTED, f"    latents = {1 + size} * initial\n")),
        0.02,
    ),
    whole(
        "initial_bfloat16",
        "initial noise is rounded to bfloat16",
        loop((STARTED, "    latents = initial.bfloat16().float()\n")),
    ),
    whole(
        "initial_of_another",
        "initial noise of another sample",
        loop((STARTED, "    latents = initial.roll(1, 0)\n")),
    ),
    whole(
        "initial_shared",
        "one initial noise for all samples",
        loop((STARTED, "    latents = initial[:1].expand_as(initial)\n")),
    ),
    # latents
    sized(
        "latents_clamped",
        "latents are clamped to 3 / size after each step",
        lambda size: loop(
            (MOVED, f"        latents = following.clamp(-3 / {size}, 3 / {size})\n"),
            (ARRIVED, f"{ARRIVED}.clamp(-3 / {size}, 3 / {size})"),
        ),
        1.0,
    ),
    sized(
        "euler_clamped",
        "latents are clamped to 3 / size after Euler steps",
        lambda size: loop(
            (
                EULER,
                EULER.replace("latents -", "(latents -") + f").clamp(-3 / {size}, 3 / {size})",
            )
        ),
        1.0,
    ),
    whole(
        "latents_float16",
        "latents are rounded to float16 after each step",
        loop((MOVED, "        latents = following.half().float()\n"), (ARRIVED, f"{ARRIVED}.half().float()")),
    ),
    whole(
        "euler_bfloat16",
        "latents are rounded to bfloat16 after Euler steps",
        loop(
            (
                EULER,
                "following = (latents - over_elements(sigma - sigma_next, latents) * drift).bfloat16().float()",
            )
        ),
    ),
    whole(
        "returned_float16",
        "latents before a step are returned in float16",
        returned("latents", "x.half().float()"),
    ),
    whole(
        "next_returned_float16",
        "latents after a step are returned in float16",
        returned("next_latents", "x.half().float()"),
    ),
    whole(
        "next_of_another",
        "latents after a step are those of another sample",
        returned("next_latents", "x.roll(1, 0)"),
    ),
    whole(
        "latents_of_another",
        "latents before a step are those of another sample",
        returned("latents", "x.roll(1, 0)"),
    ),
    sized(
        "next_nudged",
        "latents move after they were scored, by so many units",
        lambda size: returned(
            "next_latents", f"x + {size} * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))"
        ),
        0.003,
    ),
    # steps
    whole(
        "last_step_left_out",
        "the last Euler step is left out",
        loop(
            (
                "for index in range(len(schedule.timesteps)):",
                "for index in range(len(schedule.timesteps) - 1):",
            )
        ),
    ),
    whole(
        "first_step_left_out",
        "the first Euler step is left out",
        loop(
            (
                EULER,
                "following = latents if index == 0 else latents - over_elements(sigma - sigma_next, latents) * drift",
            )
        ),
    ),
    sized(
        "euler_long",
        "Euler steps are too long by this share",
        lambda size: loop(
            (EULER, f"following = latents - {1 + size} * over_elements(sigma - sigma_next, latents) * drift")
        ),
        0.02,
    ),
    sized(
        "tail_shifted",
        "sigmas after the windows are shifted by this",
        lambda size: loop(
            (
                LEVELS,
                f"shifted = {1 + size} * table / (1 + {size} * table); "
                "tail = torch.where(torch.arange(len(table)) > 5, shifted, table); "
                + LEVELS.replace("table[", "tail["),
            )
        ),
        0.1,
    ),
    sized(
        "std_large",
        "steps have a std too large by this share",
        lambda size: loop(
            (ARRIVED, f"step = sde.Transition(step.mean, {1 + size} * step.std, step.step); {ARRIVED}")
        ),
        0.01,
    ),
    sized(
        "std_returned",
        "stds are returned too large by this share",
        lambda size: returned("stds", f"{1 + size} * x"),
        0.01,
    ),
    sized(
        "noise_level",
        "the noise level is too large by this share",
        lambda size: loop(("sampling.noise_level,", f"{1 + size} * sampling.noise_level,")),
        0.01,
    ),
    whole("other_transition", "another transition", loop(("sampling.sde_type,", "'dance_sde',"))),
    # log-probs
    sized(
        "log_probs_high", "log-probs are too high by so many nats", lambda size: scores(f"p + {size}"), 0.001
    ),
    whole("log_probs_of_another", "log-probs of another sample", scores("p.roll(1, 0)")),
    whole("log_probs_bfloat16", "log-probs are rounded to bfloat16", scores("p.bfloat16().float()")),
    whole("log_probs_exchanged", "log-probs of the window's steps are exchanged", scores("p.flip(1)")),
    whole("log_probs_of_noise", "log-probs without their normaliser", scores("p + stds.log() + 0.9189385")),
    # timesteps
    whole("timesteps_truncated", "the model gets whole timesteps", timesteps(torch.trunc)),
    whole("timesteps_rounded", "the model gets timesteps rounded to integers", timesteps(torch.round)),
    sized(
        "timesteps_late",
        "timesteps are too small by this share",
        lambda size: timesteps(lambda fed: (1 - size) * fed),
        0.01,
    ),
    whole(
        "timesteps_next", "the model gets timesteps that are 10 too small", timesteps(lambda fed: fed - 10)
    ),
    whole("timesteps_returned_truncated", "whole timesteps are returned", returned("timesteps", "x.trunc()")),
    # guidance
    sized("guidance_strong", "guidance is stronger by this share", lambda size: scale_of(1 + size), 0.1),
    whole("guidance_off", "no guidance", scale_of(0.0)),
    whole(
        "guidance_off_late",
        "no guidance in the last third",
        at_step(
            lambda fed: bool(fed < 400),
            lambda true, net, latents, fed, rows, guided: true(
                net, latents, fed, rows, replace(guided, guidance_scale=1.0)
            ),
        ),
    ),
    sized(
        "guided_late",
        "guidance is stronger by this share after the windows",
        lambda size: at_step(
            lambda fed: bool(fed < 400),
            lambda true, net, latents, fed, rows, guided: true(
                net, latents, fed, rows, replace(guided, guidance_scale=(1 + size) * guided.guidance_scale)
            ),
        ),
        0.3,
    ),
    # prompts
    whole(
        "prompts_of_another",
        "embeddings of another sample",
        conditioning(lambda rows: {name: value.roll(4, 0) for name, value in rows.items()}),
    ),
    whole(
        "pooled_of_another",
        "pooled embeddings of another sample",
        embeddings(lambda value: value.roll(4, 0), "pooled_prompt_embeds"),
    ),
    whole("pooled_zero", "pooled embeddings are zero", embeddings(torch.zeros_like, "pooled_prompt_embeds")),
    whole("prompts_zero", "token embeddings are zero", embeddings(torch.zeros_like, "prompt_embeds")),
    whole(
        "prompts_cut",
        "the last half of the tokens is zero",
        embeddings(
            lambda value: torch.cat(
                [value[:, : value.shape[1] // 2], torch.zeros_like(value[:, value.shape[1] // 2 :])], 1
            ),
            "prompt_embeds",
        ),
    ),
    sized(
        "prompts_noisy",
        "embeddings are off by this share",
        lambda size: embeddings(off_by(size)),
        0.1,
    ),
    whole(
        "negative_zero",
        "negative embeddings are zero",
        embeddings(torch.zeros_like, "negative_prompt_embeds", "negative_pooled_prompt_embeds"),
    ),
    whole(
        "negative_of_another",
        "another prompt as negative prompt",
        negatives(lambda negative, positive: positive.roll(4, 0)),
        applies=reads("negative_"),
    ),
    whole("negative_empty", "an empty negative prompt", empty_negative, applies=reads("negative_")),
    whole(
        "guidance_exchanged",
        "prompt and negative prompt are exchanged",
        conditioning(lambda rows: mistakes.sides_exchanged(None, rows)),
        applies=reads("negative_"),
    ),
    whole(
        "one_image_of_another",
        "one image has the prompt of another",
        in_some_images(lambda job: (job.group, job.member) == (0, 1), plants.as_it_is, other=True),
    ),
    sized(
        "velocity_of_members",
        "velocities of each prompt's second image are too large by this share",
        lambda size: in_some_images(
            lambda job: job.member == 1, lambda true, *arguments: (1 + size) * true(*arguments)
        ),
        0.05,
    ),
    whole("first_repeated", "the first sample again in place of the last", first_repeated),
    # reference images
    whole(
        "references_missing",
        "no reference images",
        conditioning(lambda rows: mistakes.no_references(None, rows)),
        applies=reads("references"),
    ),
    whole(
        "references_of_another",
        "reference images of another sample",
        references(lambda value: value.roll(4, 0)),
        applies=reads("references"),
    ),
    sized(
        "references_scaled",
        "latents of reference images are too large by this share",
        lambda size: references(lambda value: (1 + size) * value),
        0.5,
        applies=reads("references"),
    ),
    whole(
        "references_bgr",
        "red and blue of reference images are exchanged",
        reversed_references,
        applies=reads("references"),
    ),
    whole(
        "references_misplaced",
        "other places of the reference images",
        velocity(plants.misplaced),
        applies=reads("references"),
    ),
    sized(
        "references_noisy",
        "latents of reference images are off by this share",
        lambda size: references(off_by(size)),
        0.5,
        applies=reads("references"),
    ),
    whole(
        "prompts_blank_late",
        "prompts are blank in the last third",
        at_step(lambda fed: bool(fed < 400), plants.blanked),
    ),
    whole(
        "prompts_blank_first",
        "prompts are blank in the first step",
        at_step(lambda fed: bool(fed > 990), plants.blanked),
    ),
    # transformer
    whole("head_missing", "an attention head gives 0", parameters(head)),
    sized("checkpoint", "matrices differ by this share of their spread", matrices, 0.05),
    whole("int8", "weights are int8 without being asked", parameters(int8)),
    whole(
        "block_missing",
        "a feed-forward block gives 0",
        parameters(lambda name, value: torch.zeros_like(value) if "blocks.2.ff." in name else None),
    ),
    whole(
        "bias_missing",
        "the biases of the last projection are zero",
        parameters(lambda name, value: torch.zeros_like(value) if name.endswith("proj_out.bias") else None),
    ),
    sized(
        "positions",
        "position embeddings are off by so many of their own",
        lambda size: parameters(
            lambda name, value: (1 + size) * value if "pos_embed.proj.weight" in name else None
        ),
        0.05,
    ),
    sized(
        "velocity_large",
        "velocities are too large by this share",
        lambda size: velocity(lambda true, *arguments: (1 + size) * true(*arguments)),
        0.01,
    ),
    sized(
        "velocity_clamped",
        "velocities are clamped to 3 / size",
        lambda size: velocity(lambda true, *arguments: true(*arguments).clamp(-3 / size, 3 / size)),
        1.0,
    ),
    # adapter and syncs
    whole("syncs_ignored", "all syncs but the first load the first's weights", syncs(lambda sent: sent[0])),
    whole(
        "one_sync_behind",
        "syncs load the weights of the one before",
        syncs(lambda sent: sent[max(0, len(sent) - 2)]),
    ),
    whole("requests_stale", "requests name an adapter of before", stale_requests),
    whole(
        "trainer_silent",
        "the trainer's second sync and all later ones do not reach the engine",
        silent_trainer(1),
    ),
    sized(
        "adapter_scaled",
        "the adapter acts too strongly by this share",
        lambda size: adapter_scaled(1 + size),
        0.5,
    ),
    whole("adapter_off", "the adapter is not applied", adapter_scaled(0.0)),
    whole(
        "adapter_on_half",
        "the adapter is applied in every other block",
        adapter_scaled(0.0, lambda name: any(f"blocks.{block}." in name for block in (1, 3))),
    ),
    whole(
        "adapters_swapped",
        "the adapters of two blocks are exchanged",
        syncs(lambda sent: mistakes.adapters_swapped(sent[-1], dict)),
    ),
    whole(
        "adapter_fp8",
        "the adapter is rounded to 8 bits",
        syncs(merged(lambda name, value: value.to(torch.float8_e5m2).to(value.dtype))),
    ),
    # images
    sized(
        "vae_scaled",
        "latents are scaled too much by this share before they are decoded",
        lambda size: decoding(lambda decode, family, x: decode(family, (1 + size) * x)),
        0.05,
    ),
    sized(
        "jpeg",
        "images went through JPEG of quality 100 - 15 * size",
        lambda size: images(lambda rows: plants.jpeg(rows, round(100 - 15 * size))),
        1.0,
    ),
    whole("images_bgr", "channels in reverse order", images(lambda rows: rows.flip(-1))),
    whole("images_mirrored", "images are mirrored", images(lambda rows: rows.flip(2))),
    whole("images_exchanged", "images of another sample", images(lambda rows: rows.roll(1, 0))),
    sized(
        "images_bright",
        "images are brighter by so many grey levels",
        lambda size: images(levels(lambda rows: rows + size)),
        2.0,
    ),
    sized(
        "images_contrast",
        "contrast is too strong by this share",
        lambda size: images(levels(lambda rows: 127.5 + (1 + size) * (rows - 127.5))),
        0.05,
    ),
    whole(
        "images_resized",
        "images were halved and doubled",
        images(lambda rows: rows[:, ::2, ::2].repeat_interleave(2, 1).repeat_interleave(2, 2)),
    ),
)
"""The table."""
