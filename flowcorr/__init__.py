"""flowcorr: FlowGRPO training for flow-matching models, with rollout correction measured before it is trusted.

Importing this package is cheap: names and subpackages are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_SUBPACKAGES = (
    "advantages",
    "algorithm",
    "config",
    "correction",
    "dumps",
    "errors",
    "losses",
    "metrics",
    "sde",
    "trainer",
)
_NAMES = {
    "Config": "flowcorr.config",
    "RolloutCorrectionConfig": "flowcorr.correction",
    "ReplaySamples": "flowcorr.dumps",
    "Watch": "flowcorr.diagnostics.watch",
    "apply_bypass_mode_to_diffusion_batch": "flowcorr.algorithm",
    "apply_rollout_correction_to_diffusion_batch": "flowcorr.algorithm",
    "compute_rollout_correction_and_rejection_mask": "flowcorr.correction",
    "diffusion_loss": "flowcorr.algorithm",
    "dump": "flowcorr.dumps",
    "group_advantages": "flowcorr.advantages",
    "load": "flowcorr.config",
    "train": "flowcorr.trainer",
    "watch": "flowcorr.diagnostics.watch",
}

__all__ = ["__version__", *_SUBPACKAGES, *_NAMES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return import_module(f"flowcorr.{name}")
    if name in _NAMES:
        return getattr(import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'flowcorr' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
