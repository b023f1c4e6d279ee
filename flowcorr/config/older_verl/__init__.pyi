from .functions import (
    compute_offpolicy_metrics,
    compute_rollout_importance_weights,
    compute_rollout_rejection_mask,
    older_metrics,
)
from .keys import from_older, translate_algorithm, translate_section

__all__ = [
    "compute_offpolicy_metrics",
    "compute_rollout_importance_weights",
    "compute_rollout_rejection_mask",
    "from_older",
    "older_metrics",
    "translate_algorithm",
    "translate_section",
]
