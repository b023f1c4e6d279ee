"""SDE windows: the few steps of a trajectory that are stochastic and trained on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from flowcorr.errors import BatchError, ConfigError, unknown_choice
from flowcorr.records import HIGHEST_NOISE_LEVEL, LOWEST_NOISE_LEVEL
from flowcorr.sde.noise import stable_seed
from flowcorr.sde.transition import TRANSITIONS, SdeType, check_noise_level

WINDOW_PER = ("group", "sample")
LAYOUTS = ("consecutive", "scattered")


def check_window(size: int, window_range: tuple[int, int], num_inference_steps: int) -> None:
    """Raise `ConfigError` unless a window of `size` steps fits into the half-open `window_range`."""
    _check_range(window_range, num_inference_steps, "sampling.sde_window_range")
    start, end = window_range
    if not 1 <= size <= end - start:
        raise ConfigError(
            f"sampling.sde_window_size={size} does not fit into sampling.sde_window_range=[{start}, {end}]; "
            f"choose 1 to {end - start}, or widen the range "
            f"(up to sampling.num_inference_steps={num_inference_steps})"
        )


def check_schedule(
    kind: SdeType,
    sigmas: Sequence[float],
    window_range: tuple[int, int],
    noise_level: float,
    *,
    noise_range: tuple[int, int] | None = None,
) -> None:
    """Check once, on the host, that every step which can be stochastic has a density.

    Args:
        kind: a key of `TRANSITIONS`.
        sigmas: the schedule's `num_inference_steps + 1` noise levels, the last one after the last step.
        window_range: half-open range of steps that windows lie in.
        noise_level: `eta`.
        noise_range: half-open range of steps that are stochastic outside the window too, or None.

    Raises:
        ConfigError: `kind` is unknown, `noise_level` is outside its range, a range is outside the
            schedule, or it holds a step that `kind` cannot take.
        BatchError: the noise levels do not descend within [0, 1].
    """
    if kind not in TRANSITIONS:
        raise ConfigError(unknown_choice("sampling.sde_type", kind, TRANSITIONS))
    check_noise_level(kind, noise_level)
    for index, (sigma, sigma_next) in enumerate(itertools.pairwise(sigmas)):
        if not 0.0 <= sigma_next < sigma <= HIGHEST_NOISE_LEVEL:
            raise BatchError(
                f"the schedule goes from sigma={sigma} to {sigma_next} at step {index}; "
                "noise levels must lie within [0, 1] and descend"
            )
    _check_steps(kind, sigmas, window_range, "sampling.sde_window_range")
    if noise_range is not None:
        _check_steps(kind, sigmas, noise_range, "sampling.sde_noise_range")


def _check_steps(kind: SdeType, sigmas: Sequence[float], steps: tuple[int, int], key: str) -> None:
    """`check_schedule` for the half-open range `steps`, which is that of `key`."""
    _check_range(steps, len(sigmas) - 1, key)
    start, end = steps
    for index in range(start, end):
        sigma, sigma_next = float(sigmas[index]), float(sigmas[index + 1])
        if sigma_next >= 1.0 or sigma <= LOWEST_NOISE_LEVEL:
            raise ConfigError(
                f"{key}=[{start}, {end}] holds step {index} from sigma={sigma:g} to {sigma_next:g}, which has no "
                f"density above 1 or below {LOWEST_NOISE_LEVEL:g}; leave it out of the range"
            )
        if kind == "cps" and sigma_next <= LOWEST_NOISE_LEVEL:
            shorter = f"end the range at {index}, or " if index > start else ""
            raise ConfigError(
                f"{key}=[{start}, {end}] holds step {index}, which ends at sigma={sigma_next:g}, "
                f"where sampling.sde_type=cps adds no noise; {shorter}choose sde or dance_sde"
            )


def draw_windows(
    groups: Sequence[int],
    members: Sequence[int],
    *,
    seed: int,
    training_step: int,
    size: int,
    window_range: tuple[int, int],
    num_inference_steps: int,
    per: Literal["group", "sample"] = "group",
    layout: Literal["consecutive", "scattered"] = "consecutive",
) -> Tensor:
    """The steps of each sample's SDE window, uniform over all windows of its layout within the range.

    Each draw depends on the seed, the training step and the sample (or its group) alone, so that batches may
    be cut in any way. Source: consecutive windows as in MixGRPO, arXiv:2507.21802, and Flow-GRPO-Fast; scattered
    ones as in DanceGRPO, arXiv:2505.07818, which trains on a random subset of the steps.

    Args:
        groups: prompt group of each of the `B` samples.
        members: place of each sample within its group.
        seed: the run's seed.
        training_step: the step that the rollout belongs to.
        size: `T`, steps in the window.
        window_range: half-open range of steps that windows lie in.
        num_inference_steps: steps in the schedule.
        per: whether the samples of a group share a window.
        layout: whether a window's steps follow each other, or are any of the range.

    Returns:
        `[B, T]` int64, the steps' places in the schedule, ascending; on the CPU.

    Raises:
        ConfigError: the window does not fit into the range, or the range into the schedule.
    """
    check_window(size, window_range, num_inference_steps)
    if per not in WINDOW_PER:
        raise ConfigError(unknown_choice("sampling.window_per", per, WINDOW_PER))
    if layout not in LAYOUTS:
        raise ConfigError(unknown_choice("sampling.sde_window_layout", layout, LAYOUTS))
    if len(groups) != len(members):
        raise BatchError(
            f"{len(groups)} groups and {len(members)} members were given; each sample needs one group and one member"
        )
    draw = _consecutive if layout == "consecutive" else _scattered
    windows = [
        draw((int(seed), int(training_step), int(group), owner, "window"), size, range(*window_range))
        for group, owner in zip(groups, _owners(members, per), strict=True)
    ]
    return torch.tensor(windows, dtype=torch.int64).reshape(-1, size)


def _consecutive(key: tuple[int | str, ...], size: int, steps: range) -> list[int]:
    start = stable_seed(*key) % (len(steps) - size + 1)
    return list(steps[start : start + size])


def _scattered(key: tuple[int | str, ...], size: int, steps: range) -> list[int]:
    """Draw `size` steps without replacement: every step gets a random number, and the smallest ones win."""
    return sorted(sorted(steps, key=lambda step: stable_seed(*key, step))[:size])


def _owners(members: Sequence[int], per: str) -> list[int | str]:
    return ["group"] * len(members) if per == "group" else [int(member) for member in members]


def _check_range(steps: tuple[int, int], num_inference_steps: int, key: str) -> None:
    start, end = steps
    if not 0 <= start < end <= num_inference_steps:
        raise ConfigError(
            f"{key}=[{start}, {end}] does not lie within the schedule of "
            f"sampling.num_inference_steps={num_inference_steps}; "
            f"choose 0 <= start < end <= {num_inference_steps}"
        )
