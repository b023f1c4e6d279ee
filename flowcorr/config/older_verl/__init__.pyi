from .functions import (
    compute_offpolicy_metrics,
    compute_rollout_importance_weights,
    compute_rollout_rejection_mask,
    older_metrics,
)
from .keys import FLAT_KEYS, from_older, translate_algorithm, translate_section

__all__ = [
    "FLAT_KEYS",
    "compute_offpolicy_metrics",
    "compute_rollout_importance_weights",
    "compute_rollout_rejection_mask",
    "from_older",
    "older_metrics",
    "translate_algorithm",
    "translate_section",
]
