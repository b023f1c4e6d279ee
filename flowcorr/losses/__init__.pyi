from .flow_dppo import flow_dppo
from .flow_grpo import flow_grpo
from .grpo_guard import grpo_guard, normalized_log_ratio
from .importance_cap import importance_cap
from .reinforce import reinforce
from .table import LOSS_KEYS, LOSSES, Limit, Loss, LossSettings, loss_of, resolve_loss
from .terms import RatioLevel, clip_by_term, pool_log_ratio

__all__ = [
    "LOSSES",
    "LOSS_KEYS",
    "Limit",
    "Loss",
    "LossSettings",
    "RatioLevel",
    "clip_by_term",
    "flow_dppo",
    "flow_grpo",
    "grpo_guard",
    "importance_cap",
    "loss_of",
    "normalized_log_ratio",
    "pool_log_ratio",
    "reinforce",
    "resolve_loss",
]
