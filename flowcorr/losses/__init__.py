"""Policy losses: pure functions from the tensors of a few steps to a sum with its counts."""

from flowcorr.losses.flow_dppo import flow_dppo
from flowcorr.losses.flow_grpo import flow_grpo
from flowcorr.losses.grpo_guard import grpo_guard
from flowcorr.losses.importance_cap import importance_cap
from flowcorr.losses.reinforce import reinforce
from flowcorr.losses.table import LOSS_KEYS, LOSSES, Limit, Loss, LossSettings, loss_of, resolve_loss
from flowcorr.losses.terms import RatioLevel, clip_by_term, pool_log_ratio

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
    "pool_log_ratio",
    "reinforce",
    "resolve_loss",
]
