"""Checks that a run fits the GPU of this machine, before anything is loaded."""

from __future__ import annotations

import logging
import os
import shlex
import warnings
from collections.abc import Sequence

import torch

from flowcorr.config import redact_override
from flowcorr.config.schema import Config
from flowcorr.devices import named_device
from flowcorr.errors import ConfigError
from flowcorr.health.finding import Finding, as_overrides
from flowcorr.instruments.plan.answers import MEMORY_TOLERANCE, SHARED, gigabytes
from flowcorr.instruments.plan.devices import find_gpu
from flowcorr.instruments.plan.estimate import make_plan
from flowcorr.instruments.plan.report import report_of
from flowcorr.models import EMBEDDED
from flowcorr.rollout.vllm_omni.environment import engine_gpus
from flowcorr.rollout.vllm_omni.options import num_gpus

logger = logging.getLogger(__name__)

_SPEED = "bandwidth=1000,bf16=100"  # any values: only the memory is used


def check_this_gpu(recipe: str, overrides: Sequence[str], config: Config) -> None:
    """Check that a run fits the GPU that it will use; with several ranks, only the main rank checks.

    Args:
        recipe: the recipe, as on the command line.
        overrides: its overrides.
        config: the configuration of both.

    Raises:
        ConfigError: the run cannot fit; the message says what would fit.

    Warns:
        UserWarning: the run fits, but without the margin for fragmentation.
    """
    if config.model.path in EMBEDDED or os.environ.get("RANK", "0") != "0":
        return
    device = named_device("trainer.device", config.trainer.device)
    if device.type != "cuda":
        return
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    memory = torch.cuda.get_device_properties(device).total_memory
    own = device.index or 0
    gpus = engine_gpus(
        own,
        int(os.environ.get("LOCAL_WORLD_SIZE", ranks)),
        num_gpus(config.rollout.engine),
        visible=torch.cuda.device_count(),
    )
    check_fit(recipe, overrides, config, memory=memory, ranks=ranks, shared=own in gpus)


def check_fit(
    recipe: str, overrides: Sequence[str], config: Config, *, memory: float, ranks: int, shared: bool
) -> None:
    """Check that a run fits into `memory` bytes, with the rollout engine on the same GPU if `shared`.

    Raises:
        ConfigError: see `check_this_gpu`.
    """
    try:
        made = make_plan(config, gpu=find_gpu(f"memory={memory / 1e9},{_SPEED}"), ranks=ranks)
    except (
        Exception
    ) as error:  # of any library or family: without a prediction, the run itself tells whether it fits
        logger.warning("the memory that the run needs could not be predicted: %s", error)
        return
    peak, crowded = max(made.memory.engine, made.memory.trainer), False
    if shared and made.memory.shared is not None:
        peak, crowded = made.memory.shared, True
    if made.fits(peak):
        return
    told = [
        _in_words(finding)
        for finding in report_of(made).findings
        if finding.level in ("serious", "warning") and (crowded or finding.cause != SHARED)
    ]
    shown = ["flowcorr", "plan", recipe, *map(redact_override, overrides)]
    shown += ["--ranks", str(ranks)] if ranks > 1 else []
    advice = f"{'. '.join(told)}. `{shlex.join(shown)}` shows the phases"
    if peak * (1 - MEMORY_TOLERANCE) > memory:
        raise ConfigError(
            f"the run needs {gigabytes(peak)} of GPU memory, and there are {gigabytes(memory)}. {advice}"
        )
    message = f"the run needs {gigabytes(peak)} of {gigabytes(memory)} of GPU memory, which leaves little for"
    warnings.warn(f"{message} fragmentation. {advice}", UserWarning, stacklevel=2)


def _in_words(finding: Finding) -> str:
    """A finding of a plan with its remedy, and the overrides that carry it out."""
    overrides = as_overrides(finding.keys)
    return ": ".join(filter(None, (finding.sentence, finding.remedy, overrides and f"`{overrides}`")))
