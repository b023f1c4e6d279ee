"""From a dump with captured samples to a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from flowcorr import dumps
from flowcorr.config.schema import Config, ModelConfig
from flowcorr.dumps.replay import ReplaySamples, load_replay, replay_files
from flowcorr.errors import ConfigError
from flowcorr.instruments.doctor.replayed.conventions import examine_advantages, examine_convention
from flowcorr.instruments.doctor.replayed.images import examine_images, examine_reward
from flowcorr.instruments.doctor.replayed.inputs import examine_inputs
from flowcorr.instruments.doctor.replayed.legs import Legs, rounding_notes
from flowcorr.instruments.doctor.replayed.schedules import examine_noise, examine_schedule
from flowcorr.instruments.doctor.replayed.stack import Stack, prompt_pool
from flowcorr.instruments.doctor.replayed.verdicts import ReplayReport, Verdict, worst
from flowcorr.models import ModelFamily, load_family

_STEPS = 3  # training steps that are replayed


def examine_dump(folder: Path, model: str | Config, *, device: torch.device | str = "cpu") -> ReplayReport:
    """Replay the captured samples of a dump with the training stack.

    Args:
        folder: what `flowcorr.dump` wrote, with `replay`.
        model: a diffusers pipeline, replayed in float32, or a recipe, which also brings its reward.
        device: where the model is put.

    Raises:
        ConfigError: the folder holds no captured samples, or the model is of no family that flowcorr has.
    """
    files = replay_files(folder)
    if not files:
        raise ConfigError(
            f"{folder} holds no captured samples (replay_000000.safetensors); give flowcorr.dump replay="
            "flowcorr.ReplaySamples(...) of the sampling loop, as examples/dump_log_probs.py shows"
        )
    captured = {step: load_replay(path) for step, path in files.items()}
    config = model if isinstance(model, Config) else None
    of_model = ModelConfig(path=str(model)) if config is None else config.model
    family = load_family(of_model, device)
    chosen, terms = _spread(list(captured)), dumps.files(folder)
    verdicts: list[Verdict] = []
    for step in chosen:
        earlier = {number: samples for number, samples in captured.items() if number < step}
        verdicts += _examine_step(
            family, captured[step], step, earlier, prompt_pool(captured), config, terms.get(step)
        )
    verdicts.append(examine_advantages(terms))
    last = captured[chosen[-1]]
    return ReplayReport(
        folder=str(folder),
        model=of_model.path,
        steps=chosen,
        verdicts=worst(verdicts),
        notes=[*last.missing(), *rounding_notes(last)],
    )


def _examine_step(
    family: ModelFamily,
    samples: ReplaySamples,
    step: int,
    earlier: Mapping[int, ReplaySamples],
    pool: Sequence[str],
    config: Config | None,
    terms: Path | None,
) -> list[Verdict]:
    stack = Stack(family, samples)
    legs = Legs(stack)
    convention = examine_convention(legs, step, terms)
    inputs = examine_inputs(stack, legs, pool, step)
    if convention is not None:
        inputs = [verdict for verdict in inputs if verdict.part != "log_probs" or verdict.status != "PASS"]
        inputs.append(convention)
    return [
        examine_schedule(stack, step),
        examine_noise(stack, legs, step, earlier),
        *inputs,
        examine_images(stack, step, earlier),
        examine_reward(samples, config, step),
    ]


def _spread(steps: Sequence[int]) -> list[int]:
    """At most `_STEPS` training steps, from the first to the last."""
    if len(steps) <= _STEPS:
        return list(steps)
    return [steps[round(place * (len(steps) - 1) / (_STEPS - 1))] for place in range(_STEPS)]
