"""Checks that a run fits the GPU of this machine, before anything is loaded."""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence

import torch

from flowcorr.config import redact_override
from flowcorr.config.schema import Config
from flowcorr.devices import named_device
from flowcorr.errors import ConfigError
from flowcorr.instruments.finding import as_overrides
from flowcorr.instruments.plan.answers import MEMORY_TOLERANCE, SHARED, gigabytes
from flowcorr.models import EMBEDDED
from flowcorr.rollout.vllm_omni.environment import engine_gpus
from flowcorr.rollout.vllm_omni.options import num_gpus

logger = logging.getLogger(__name__)

_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
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
    check_fit(recipe, overrides, memory=memory, ranks=ranks, shared=own in gpus)


def check_fit(recipe: str, overrides: Sequence[str], *, memory: float, ranks: int, shared: bool) -> None:
    """Check that a run fits into `memory` bytes, with the rollout engine on the same GPU if `shared`.

    `flowcorr plan` runs in a process of its own, so that no cache of a library keeps a tensor without values for the
    training that follows.

    Raises:
        ConfigError: see `check_this_gpu`.
    """
    gpu = f"memory={memory / 1e9},{_SPEED}"
    command = [sys.executable, "-m", "flowcorr", "plan", recipe, *overrides, "--json", "--gpu", gpu]
    environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHER}
    outcome = subprocess.run(
        [*command, "--ranks", str(ranks)],
        env={**environment, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    if not outcome.stdout:  # an exit code may also say that the run does not fit
        lines = outcome.stderr.strip().splitlines()
        logger.warning(
            "the memory that the run needs could not be predicted: %s", lines[-1] if lines else "no answer"
        )
        return
    plan = json.loads(outcome.stdout)
    facts = plan["facts"]
    crowded = shared and facts["shared_fits"] is not None
    if facts["shared_fits" if crowded else "fits"]:
        return
    needed = facts["memory"]
    peak = needed["shared"] if crowded else max(needed["engine"], *needed["phases"].values())
    told = [
        _in_words(found)
        for found in plan["findings"]
        if found["level"] in ("serious", "warning") and (crowded or found["cause"] != SHARED)
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


def _in_words(finding: Mapping[str, str]) -> str:
    """A finding of a plan with its remedy, and the overrides that carry it out."""
    overrides = as_overrides(finding["keys"])
    return ": ".join(filter(None, (finding["sentence"], finding["remedy"], overrides and f"`{overrides}`")))
