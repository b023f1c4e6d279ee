"""The metrics of a correction under the names of verl's first dialect, `mismatch/*`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from flowcorr.correction.bounds import Band, Criterion
from flowcorr.correction.weights import band_of
from flowcorr.metrics import Stat

_DRIFT = (
    "kl",
    "k3_kl",
    "training_ppl",
    "training_log_ppl",
    "rollout_ppl",
    "rollout_log_ppl",
    "log_ppl_diff",
    "log_ppl_abs_diff",
    "log_ppl_diff_max",
    "log_ppl_diff_min",
    "ppl_ratio",
)
# That dialect masked by its weights.
_RENAMED = {
    "rollout_rs_masked_fraction": "rollout_is_masked_fraction",
    "rollout_rs_seq_masked_fraction": "rollout_is_seq_masked_fraction",
}


def under_legacy_names(stats: Mapping[str, Stat]) -> dict[str, Stat]:
    """The stats that the dialect had."""
    names = {name: f"mismatch_{name}" for name in _DRIFT}
    names |= {name: name for name in stats if name.startswith("rollout_is_")} | _RENAMED
    return {f"mismatch/{names[name]}": stat for name, stat in stats.items() if name in names}


def legacy_band(cap: float | Band, criteria: Sequence[Criterion]) -> Band:
    """The band that the dialect's fractions count against: in its mode `mask`, that of the rejection."""
    bands = [criterion for criterion in criteria if criterion.mode.bounds == "ratio" and not criterion.auto]
    if cap == math.inf and bands:
        return math.exp(-bands[0].upper), math.exp(-bands[0].lower)
    return band_of(cap)
