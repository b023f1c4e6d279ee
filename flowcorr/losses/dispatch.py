"""From `actor.loss_mode` to a loss: the built-in ones by name, a user's own by import path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from flowcorr.errors import ConfigError, unknown_choice
from flowcorr.imports import import_target
from flowcorr.losses.flow_dppo import flow_dppo
from flowcorr.losses.flow_grpo import flow_grpo
from flowcorr.losses.grpo_guard import grpo_guard
from flowcorr.losses.importance_cap import importance_cap
from flowcorr.losses.reinforce import reinforce
from flowcorr.losses.terms import RatioLevel, clip_by_term
from flowcorr.records import BatchStep, LossOutput, PolicyStep


class LossSettings(Protocol):
    """What losses read of the `actor` section."""

    @property
    def clip_ratio(self) -> float | Sequence[float]:
        """Half-width of the range that a ratio is clipped to, a number or one for each step of the schedule."""

    @property
    def adv_clip_max(self) -> float:
        """Largest magnitude of an advantage."""

    @property
    def ratio_level(self) -> RatioLevel:
        """What a ratio is taken over."""

    @property
    def kl_threshold(self) -> float:
        """Radius of flow_dppo's trust region, nats per latent element."""

    @property
    def importance_cap(self) -> float:
        """Largest ratio of the loss `importance_cap`."""


Loss = Callable[[PolicyStep, BatchStep, LossSettings], LossOutput]


def _flow_grpo(policy: PolicyStep, batch: BatchStep, settings: LossSettings) -> LossOutput:
    return flow_grpo(
        policy.log_prob,
        batch.old_log_prob,
        batch.advantage,
        clip_ratio=clip_by_term(settings.clip_ratio, batch.step_index),
        adv_clip_max=settings.adv_clip_max,
        weight=batch.weight,
        keep=batch.keep,
        clip_center=batch.clip_center,
        ratio_level=settings.ratio_level,
    )


def _grpo_guard(policy: PolicyStep, batch: BatchStep, settings: LossSettings) -> LossOutput:
    return grpo_guard(
        policy.log_prob,
        batch.old_log_prob,
        batch.advantage,
        mean=policy.mean,
        old_mean=batch.old_mean,
        std=policy.std,
        step=policy.step,
        clip_ratio=clip_by_term(settings.clip_ratio, batch.step_index),
        adv_clip_max=settings.adv_clip_max,
        weight=batch.weight,
        keep=batch.keep,
        clip_center=batch.clip_center,
        ratio_level=settings.ratio_level,
    )


def _flow_dppo(policy: PolicyStep, batch: BatchStep, settings: LossSettings) -> LossOutput:
    return flow_dppo(
        policy.log_prob,
        batch.old_log_prob,
        batch.advantage,
        mean=policy.mean,
        old_mean=batch.old_mean,
        std=policy.std,
        kl_threshold=settings.kl_threshold,
        adv_clip_max=settings.adv_clip_max,
        weight=batch.weight,
        keep=batch.keep,
        ratio_level=settings.ratio_level,
    )


def _importance_cap(policy: PolicyStep, batch: BatchStep, settings: LossSettings) -> LossOutput:
    return importance_cap(
        policy.log_prob,
        batch.old_log_prob,
        batch.advantage,
        cap=settings.importance_cap,
        adv_clip_max=settings.adv_clip_max,
        weight=batch.weight,
        keep=batch.keep,
        ratio_level=settings.ratio_level,
    )


def _reinforce(policy: PolicyStep, batch: BatchStep, settings: LossSettings) -> LossOutput:
    return reinforce(
        policy.log_prob,
        batch.advantage,
        adv_clip_max=settings.adv_clip_max,
        weight=batch.weight,
        keep=batch.keep,
        old_log_prob=batch.old_log_prob,
    )


LOSSES: dict[str, Loss] = {
    "flow_grpo": _flow_grpo,
    "grpo_guard": _grpo_guard,
    "flow_dppo": _flow_dppo,
    "importance_cap": _importance_cap,
    "reinforce": _reinforce,
}
NEED_MEANS = frozenset({"grpo_guard", "flow_dppo"})
UNCLIPPED = frozenset({"flow_dppo", "importance_cap", "reinforce"})  # read no `clip_ratio`


def resolve_loss(name: str) -> Loss:
    """The loss called `name`, or the function at `package.module:name`.

    A user's function takes `(policy_step, batch_step, actor_config)` and returns a `LossOutput`, as those of
    `LOSSES` do; with an attribute `needs_means = True` it is given `batch_step.old_mean`. The clip range of each
    term is `clip_by_term(actor_config.clip_ratio, batch_step.step_index)`, and `batch_step.clip_center` its centre.

    Raises:
        ConfigError: the name is unknown, or nothing callable can be imported from the path.
    """
    if name in LOSSES:
        return LOSSES[name]
    if ":" not in name:
        message = unknown_choice("actor.loss_mode", name, LOSSES)
        raise ConfigError(f"{message}; a loss of your own is given as 'package.module:name'")
    loss = import_target("actor.loss_mode", name, "a function")
    if not callable(loss):
        raise ConfigError(
            f"actor.loss_mode={name!r} is of type {type(loss).__name__}; name a function that takes "
            "(policy_step, batch_step, actor_config) and returns a LossOutput"
        )
    return loss


def needs_means(name: str) -> bool:
    """Whether the loss called `name` reads the step means of the old policy.

    Raises:
        ConfigError: as `resolve_loss`.
    """
    return name in NEED_MEANS or bool(getattr(resolve_loss(name), "needs_means", False))
