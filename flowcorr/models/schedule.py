"""The sigma table of a run, and the one that most pipelines make: equal steps, which the scheduler shifts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowcorr.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The sigma table of one run, of `N` steps.

    Attributes:
        sigmas: `N + 1` noise levels, from the pipeline's own scheduler, ending in 0.
        timesteps: `N` values as they are handed to `ModelFamily.velocity`.
    """

    sigmas: tuple[float, ...]
    timesteps: tuple[float, ...]

    def begin_at(self, steps: Sequence[int]) -> Schedule:
        """Merge steps into longer ones: each begins at one of `steps`, ascending, and ends at the next one's start."""
        return Schedule(
            sigmas=(*(self.sigmas[step] for step in steps), self.sigmas[-1]),
            timesteps=tuple(self.timesteps[step] for step in steps),
        )


def own_schedule(scheduler: Any, num_inference_steps: int, *, shift: float | None = None) -> Schedule:
    """The table of a scheduler that makes its noise levels itself.

    Args:
        scheduler: the pipeline's; it is not changed.
        num_inference_steps: of the schedule.
        shift: of a scheduler that shifts dynamically.
    """
    scheduler = type(scheduler).from_config(scheduler.config)
    scheduler.set_timesteps(num_inference_steps, **({} if shift is None else {"mu": shift}))
    timesteps = scheduler.timesteps.float()
    return Schedule(sigmas=tuple(scheduler.sigmas.tolist()), timesteps=tuple(timesteps.tolist()))


def linear_schedule(
    scheduler: Any, num_inference_steps: int, num_tokens: int, *, shift: float | None = None
) -> Schedule:
    """Sigmas in equal steps from 1 to `1 / num_inference_steps`, which the scheduler then shifts.

    Args:
        scheduler: the pipeline's; it is not changed.
        num_inference_steps: of the schedule.
        num_tokens: image tokens of one sample. Where the scheduler shifts dynamically, its shift grows with them.
        shift: takes the place of that shift.

    Raises:
        ConfigError: the scheduler does not take sigmas and a shift, as the pipeline hands them over, or no single
            step; or see `dynamic_shift`.
    """
    scheduler = type(scheduler).from_config(scheduler.config)
    config = scheduler.config
    accepted = inspect.signature(scheduler.set_timesteps).parameters
    if not {"sigmas", "mu"} <= accepted.keys() or config.get("use_flow_sigmas"):
        raise ConfigError(
            f"the model's scheduler {type(scheduler).__name__} does not take the sigmas of its pipeline; replace it by "
            "FlowMatchEulerDiscreteScheduler in model_index.json and scheduler/scheduler_config.json"
        )
    if num_inference_steps == 1 and config.get("shift_terminal"):  # its only noise level would be 0 / 0
        raise ConfigError(
            f"sampling.num_inference_steps=1 is too few for the model's scheduler, whose last step begins at "
            f"shift_terminal={config.shift_terminal}; use at least 2"
        )
    if shift is None:
        shift = dynamic_shift(config, num_tokens)
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / num_inference_steps, num_inference_steps), mu=shift)
    return Schedule(sigmas=tuple(scheduler.sigmas.tolist()), timesteps=tuple(scheduler.timesteps.tolist()))


def dynamic_shift(config: Mapping[str, Any], num_tokens: int) -> float | None:
    """Shift of a scheduler for a number of image tokens; None if the scheduler's shift does not depend on it.

    Args:
        config: the scheduler's.
        num_tokens: see `linear_schedule`.

    Raises:
        ConfigError: the configuration lacks a number that the shift is computed from.
    """
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    if not config.get("use_dynamic_shifting"):
        return None
    keys = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    for key in keys:
        if not isinstance(config.get(key), int | float):
            raise ConfigError(
                f"the model's scheduler has {key}={config.get(key)!r} in scheduler/scheduler_config.json, and needs a "
                "number there, since use_dynamic_shifting is true; set it, or use_dynamic_shifting to false"
            )
    shift: float = calculate_shift(num_tokens, *(config[key] for key in keys))
    return shift
