"""The step rule of a pipeline's scheduler, which has to be Euler's: rollouts and evaluations take Euler steps."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import torch

from flowcorr.errors import ConfigError
from flowcorr.records import HIGHEST_NOISE_LEVEL

_STEPS = 6  # of a walk: solvers of higher order begin, and end, with a step of Euler's
_TOLERANCE = 1e-4  # of latents of unit size; Euler's step in another order of operations is within 1e-6
_EULER = "FlowMatchEulerDiscreteScheduler"


def check_step_rule(scheduler: Any, path: str) -> None:
    """Check that the scheduler steps from sigma to sigma as Euler's method does, by walking a few of its own steps.

    Args:
        scheduler: the pipeline's; it is not changed.
        path: of the model, for messages.

    Raises:
        ConfigError: it steps otherwise, or its noise levels are not those of a flow.
    """
    name, config = type(scheduler).__name__, scheduler.config
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            difference = _difference_from_euler(scheduler)
    except Exception as error:  # whatever another class raises that cannot be asked so
        difference = f"it cannot be asked: {' '.join(str(error).split())}"
    if not difference:
        return
    if config.get("stochastic_sampling"):
        remedy = "set stochastic_sampling to false in scheduler/scheduler_config.json"
    elif config.get("invert_sigmas"):
        remedy = "set invert_sigmas to false in scheduler/scheduler_config.json"
    else:
        shift = config.get("flow_shift") or config.get("shift") or 1.0
        remedy = f"replace it by {_EULER} with shift {shift}, in model_index.json and scheduler/scheduler_config.json"
    raise ConfigError(
        f"model.path={path!r}: its scheduler {name} does not take Euler's steps of a flow, which flowcorr trains and "
        f"evaluates with: {difference}. If images by Euler's steps are what you want, {remedy}"
    )


def _difference_from_euler(scheduler: Any) -> str:
    """The difference of the scheduler's steps from Euler's, in words; empty if they agree."""
    scheduler = type(scheduler).from_config(scheduler.config)
    scheduler.set_timesteps(_STEPS, **({"mu": 1.0} if scheduler.config.get("use_dynamic_shifting") else {}))
    sigmas = scheduler.sigmas.tolist()
    if len(scheduler.timesteps) != _STEPS or len(sigmas) != _STEPS + 1:
        return f"{_STEPS} steps take {len(scheduler.timesteps)} velocities"
    if not all(0 <= after < before <= HIGHEST_NOISE_LEVEL for before, after in itertools.pairwise(sigmas)):
        return f"its noise levels go from {sigmas[0]:g} to {sigmas[-1]:g}, and do not descend from 1 to 0"
    draw = torch.Generator().manual_seed(0)
    latents = torch.randn(1, 4, 2, 2, generator=draw)
    with torch.random.fork_rng(devices=[]):  # a stochastic step draws from the global generator
        for step, timestep in enumerate(scheduler.timesteps):
            velocity = torch.randn(latents.shape, generator=draw)
            euler = latents - (sigmas[step] - sigmas[step + 1]) * velocity
            latents = scheduler.step(velocity, timestep, latents, return_dict=False)[0]
            gap = float((latents - euler).abs().max())
            if not gap <= _TOLERANCE:
                return f"step {step + 1} of {_STEPS} arrives {gap:.2g} away"
    return ""
