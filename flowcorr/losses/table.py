"""`LOSSES`: one row for each loss, with every fact that other modules need to know about it.

Rows call the losses through their package, which imports them when they are first called: the configuration reads this
table, and a typo in it need not wait for torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from flowcorr import losses
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.errors import ConfigError, unknown_choice
from flowcorr.imports import import_target

if TYPE_CHECKING:
    from torch import Tensor

    from flowcorr.losses.terms import RatioLevel
    from flowcorr.records import LossOutput, Terms


class LossSettings(Protocol):
    """The keys of `actor` that losses read, see `ActorConfig`."""

    @property
    def loss_mode(self) -> str: ...
    @property
    def loss_options(self) -> Mapping[str, Any]: ...
    @property
    def clip_ratio(self) -> float | Sequence[float]: ...
    @property
    def adv_clip_max(self) -> float: ...
    @property
    def ratio_level(self) -> RatioLevel: ...
    @property
    def kl_threshold(self) -> float: ...
    @property
    def importance_cap(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Largest distance of a ratio from 1 that a loss allows, as one key of `actor` sets it.

    Attributes:
        key: its name: a distance from 1 on both sides, one number or one for each step of the schedule.
        is_cap: whether it is the largest ratio instead, which leaves the other side open.
    """

    key: str
    is_cap: bool = False

    def distance(self, settings: LossSettings) -> float | Sequence[float] | None:
        """The distance from 1, for all steps or by step index; None for a cap that leaves no room above 1."""
        value = getattr(settings, self.key)
        if not self.is_cap:
            return value
        return value - 1 if value > 1 else None

    def value(self, distance: float) -> float:
        """The value of the key that gives this distance."""
        return 1 + distance if self.is_cap else distance


CLIP = Limit(key="clip_ratio")


def plain_log_ratio(delta: Tensor, kl: Tensor | None, std: Tensor | None) -> Tensor:
    """`log_prob - old_log_prob` as it is."""
    return delta


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A policy loss.

    Attributes:
        objective: `(terms, actor_config, **loss_options)` -> `LossOutput`.
        log_ratio: `(delta, kl, std)` -> the log-ratios of single steps as the loss exponentiates them, from
            `log_prob - old_log_prob`, `sde.step_kl` of both policies (may be None unless `needs_kl`) and stds.
        limit: how far the loss lets a ratio be from 1; None if it bounds no ratio.
        needs_kl: whether it reads the exact KL from the old policy, `terms.old_kl`, and with it step means.
        needs_step: whether it reads the steps' sizes, `terms.step`.
        adds_kl: whether it adds that KL, with its gradient, to log-ratios, so that log-probs must be log-densities and
            the gradient is centred at the old policy: see `flowcorr.algorithm.centering`.
        scaled_by_advantage: whether each term is a multiple of its advantage, and an advantage of 0 has no gradient.
        from_correction: whether it is chosen by `rollout_correction.loss_type`, which supplies its weights.
        reads: the `LOSS_KEYS` that it reads; None if unknown.
    """

    objective: Callable[..., LossOutput]
    log_ratio: Callable[..., Tensor] = plain_log_ratio
    limit: Limit | None = None
    needs_kl: bool = False
    needs_step: bool = False
    adds_kl: bool = False
    scaled_by_advantage: bool = False
    from_correction: bool = False
    reads: tuple[str, ...] | None = None

    def ratio_limit(self, settings: LossSettings) -> float | Sequence[float] | None:
        """Largest distance of a ratio from 1, for all steps or by step index; None if the loss bounds no ratio."""
        return None if self.limit is None else self.limit.distance(settings)


def _shared(terms: Terms, settings: LossSettings) -> dict[str, Any]:
    """The arguments that all losses take."""
    return {
        "log_prob": terms.log_prob,
        "old_log_prob": terms.old_log_prob,
        "advantage": terms.advantage,
        "adv_clip_max": settings.adv_clip_max,
        "weight": terms.weight,
        "keep": terms.keep,
    }


def _flow_grpo(terms: Terms, settings: LossSettings) -> LossOutput:
    return losses.flow_grpo(
        **_shared(terms, settings),
        clip_ratio=losses.clip_by_term(settings.clip_ratio, terms.step_index),
        ratio_level=settings.ratio_level,
    )


def _grpo_guard(terms: Terms, settings: LossSettings) -> LossOutput:
    return losses.grpo_guard(
        **_shared(terms, settings),
        kl=terms.old_kl,
        std=terms.std,
        step=terms.step,
        clip_ratio=losses.clip_by_term(settings.clip_ratio, terms.step_index),
        ratio_level=settings.ratio_level,
    )


def _normalized_log_ratio(delta: Tensor, kl: Tensor, std: Tensor) -> Tensor:
    return losses.normalized_log_ratio(delta, kl, std)


def _flow_dppo(terms: Terms, settings: LossSettings) -> LossOutput:
    return losses.flow_dppo(
        **_shared(terms, settings),
        kl=terms.old_kl,
        kl_threshold=settings.kl_threshold,
        ratio_level=settings.ratio_level,
    )


def _importance_cap(terms: Terms, settings: LossSettings) -> LossOutput:
    return losses.importance_cap(
        **_shared(terms, settings), cap=settings.importance_cap, ratio_level=settings.ratio_level
    )


def _reinforce(terms: Terms, settings: LossSettings) -> LossOutput:
    return losses.reinforce(**_shared(terms, settings))


LOSSES: dict[str, Loss] = {
    "flow_grpo": Loss(
        objective=_flow_grpo, limit=CLIP, scaled_by_advantage=True, reads=("clip_ratio", "ratio_level")
    ),
    "grpo_guard": Loss(
        objective=_grpo_guard,
        log_ratio=_normalized_log_ratio,
        limit=CLIP,
        needs_kl=True,
        needs_step=True,
        adds_kl=True,
        scaled_by_advantage=True,
        reads=("clip_ratio", "ratio_level"),
    ),
    "flow_dppo": Loss(
        objective=_flow_dppo,
        needs_kl=True,
        scaled_by_advantage=True,
        reads=("kl_threshold", "ratio_level"),
    ),
    "importance_cap": Loss(
        objective=_importance_cap,
        limit=Limit(key="importance_cap", is_cap=True),
        scaled_by_advantage=True,
        reads=("importance_cap", "ratio_level"),
    ),
    "reinforce": Loss(objective=_reinforce, scaled_by_advantage=True, from_correction=True, reads=()),
}


CALL = "(terms, actor_config, **loss_options)"
"""How the function of a loss is called, for messages."""

LOSS_KEYS = frozenset(key for loss in LOSSES.values() for key in loss.reads or ())
"""The keys of `actor` that only some losses read."""


def resolve_loss(settings: LossSettings) -> Loss:
    """Find the loss of `actor.loss_mode`: a row of `LOSSES`, or an object at `package.module:name`.

    That object is a `Loss`, or a function `(terms, actor_config, **loss_options) -> LossOutput`. A function is taken
    to clip the plain ratio to `clip_by_term(actor_config.clip_ratio, terms.step_index)`.

    Raises:
        ConfigError: the name is unknown, nothing of the kind can be imported, or `actor.loss_options` do not fit.
    """
    name, options = settings.loss_mode, settings.loss_options
    if name in LOSSES:
        loss = LOSSES[name]
    elif ":" in name:
        loss = _imported(name)
    else:
        message = unknown_choice("actor.loss_mode", name, LOSSES)
        raise ConfigError(f"{message}; a loss of your own is given as 'package.module:name'")
    _check_call(name, loss.objective, options)
    return replace(loss, objective=partial(loss.objective, **options)) if options else loss


def loss_of(settings: LossSettings, correction: RolloutCorrectionConfig) -> Loss:
    """The loss of an update: the correction's `loss_type` if it names a loss, else `actor.loss_mode`.

    Raises:
        ConfigError: as `resolve_loss`.
    """
    if correction.loss_type in LOSSES:
        return LOSSES[correction.loss_type]
    return resolve_loss(settings)


def _imported(path: str) -> Loss:
    loss = import_target("actor.loss_mode", path, "a function or a Loss")
    if isinstance(loss, Loss):
        return loss
    if not callable(loss):
        raise ConfigError(
            f"actor.loss_mode={path!r} is of type {type(loss).__name__}; name a flowcorr.losses.Loss, or a function "
            f"that takes {CALL} and returns a LossOutput"
        )
    return Loss(objective=loss, limit=CLIP)


def _check_call(name: str, objective: Callable[..., LossOutput], options: Mapping[str, Any]) -> None:
    signature = inspect.signature(objective)
    try:
        signature.bind("terms", "actor_config", **options)
    except TypeError as error:
        raise ConfigError(
            f"actor.loss_options={dict(options)} do not fit actor.loss_mode={name!r}: {error}; it takes {signature}, "
            f"and a loss is called with {CALL}"
        ) from error
