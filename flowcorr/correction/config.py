"""The section `algorithm.rollout_correction`: how the drift is measured and corrected."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self, cast, get_args

from flowcorr.correction.bounds import (
    AUTO,
    IS_LEVELS,
    SECTION,
    Band,
    Criterion,
    Threshold,
    canonical_threshold,
    check_scale,
    parse_criteria,
    parse_modes,
    parse_veto,
    parse_weights,
)
from flowcorr.correction.preset_methods import PresetMethods
from flowcorr.correction.presets import find_preset
from flowcorr.errors import ConfigError, unknown_choice

ScaleName = Literal["mean", "sqrt", "sum"]
LossType = Literal["ppo_clip", "reinforce"]
Scope = Literal["step", "trajectory"]
Denominator = Literal["kept", "all"]
Level = Literal["token", "sequence", "geometric"]
BypassMode = bool | Literal["auto"]
CorrectionMode = Literal["decoupled", "bypass", "auto", "off"]
Groups = Literal["none", "recentre", "drop_small"]


@dataclass(frozen=True, kw_only=True)
class RolloutCorrectionConfig(PresetMethods):
    """Settings that measure and correct the drift from the rollout policy.

    Build it from keys, by a preset's class method (`RolloutCorrectionConfig.seq_is(threshold=3.0)`), by
    `RolloutCorrectionConfig.from_preset("seq_is", rollout_is_threshold=3.0)`, or from a recipe's mapping.

    Attributes:
        preset: name of a preset that fills the keys below; `flowcorr presets` lists them. Two configs are equal if
            their other values are.
        bypass_mode: take the rollout's log-probs as the old ones, and correct inside the loss. `auto` starts in bypass
            mode (with stale weights in decoupled mode), and recomputes while noise exceeds `actor.clip_ratio`.
        auto_enter: with `auto`, switch to decoupled mode when noise exceeds this multiple of `actor.clip_ratio`.
        auto_leave: with `auto`, switch back to bypass mode when noise is below this multiple of `actor.clip_ratio`.
        loss_type: the loss in bypass mode; `reinforce` weights its terms, `ppo_clip` holds the ratio itself.
        rollout_is: level of the importance weights; None computes none.
        rollout_is_threshold: a number caps the weights (TIS), a pair zeroes weights outside it (IcePop), `inf`
            changes none.
        rollout_is_apply: False computes weights and their metrics, and applies none.
        rollout_is_batch_normalize: divide the weights by their mean over the global batch.
        rollout_rs: rejection mode, or several chained by commas, all of which must hold; None rejects none.
        rollout_rs_threshold: a threshold for all modes, or one for each, in order: a band of ratios or a
            number `u` for `[1/u, u]` for k1 modes, an upper bound for the others; `auto` measures it, in decoupled mode
            on each batch and in bypass mode at each step of the schedule on earlier training steps.
        rollout_token_veto_threshold: a step with a ratio below it rejects its sample.
        bypass_scope: whether the loss in bypass mode sees single steps or whole trajectories.
        log_ratio_scale: factor on the mean-pooled log-ratios of weights, bands and veto: `mean` (1),
            `sqrt` (`sqrt(D)`), `sum` (`D`) or a number.
        rollout_rs_denominator: divide the loss by the number of kept terms, or of all finite terms.
        rejection_groups: after rejection, `recentre` shifts the advantages of each group to mean 0 over its kept terms;
            `drop_small` also rejects groups with fewer than two samples left. Needs decoupled mode.
        score_centering: subtract from each term's gradient its mean under the rollout policy, which is 0 only if the
            two policies are equal. Needs the rollout's step means; works with weights of `token` level. Clipped and
            rejected terms are not centred.
        log_legacy_names: log the `mismatch/*` names of the older dialect as well.

    Raises:
        ConfigError: a value is unknown or out of bounds, or two keys contradict each other.
    """

    preset: str | None = field(default=None, compare=False)
    bypass_mode: BypassMode = False
    auto_enter: float = 1.0
    auto_leave: float = 0.5
    loss_type: LossType = "ppo_clip"
    rollout_is: Level | None = None
    rollout_is_threshold: float | Band | None = 2.0
    rollout_is_apply: bool = True
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None
    rollout_rs_threshold: float | Band | str | None = None
    rollout_token_veto_threshold: float | None = None
    bypass_scope: Scope = "step"
    log_ratio_scale: ScaleName | float = "mean"
    rollout_rs_denominator: Denominator = "kept"
    rejection_groups: Groups = "none"
    score_centering: bool = False
    log_legacy_names: bool = False

    def __post_init__(self) -> None:
        _check_types(self)
        _normalize(self)
        if self.preset is not None:
            _check_preset(self)
        _check_combinations(self)
        for message in _without_effect(self):
            warnings.warn(message, UserWarning, stacklevel=3)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> Self:
        """The preset `name` with some keys changed; `RolloutCorrectionConfig.preset` is the same.

        Raises:
            ConfigError: the name is unknown, or an override contradicts the preset.
        """
        return cls(**{**find_preset(name).keys, **overrides, "preset": name})

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Build a config from a recipe's section; a `preset` fills the keys that the section leaves out.

        Raises:
            ConfigError: a key is unknown, or a value is bad, or contradicts the preset.
        """
        names = [field.name for field in fields(cls)]
        for key in mapping:
            if key not in names:
                raise ConfigError(unknown_choice(f"{SECTION}: key", key, names))
        values = dict(mapping)
        preset = values.pop("preset", None)
        return cls(**values) if preset is None else cls.from_preset(preset, **values)

    @property
    def mode(self) -> CorrectionMode:
        """The mode that `bypass_mode` names."""
        if self.bypass_mode == AUTO:
            return "auto"
        return "bypass" if self.bypass_mode else "decoupled"

    def in_mode(self, mode: Literal["decoupled", "bypass"]) -> Self:
        """A copy of a correction with `bypass_mode: auto`, fixed to one of the two modes."""
        idle = {"auto_enter", "auto_leave"} | ({"bypass_scope"} if mode == "decoupled" else set())
        values = {**_as_dict(self), "preset": None, "bypass_mode": mode == "bypass"}
        return type(self)(**{key: value for key, value in values.items() if key not in idle})

    @property
    def label(self) -> str:
        """Its name in messages: `measured only` if it corrects nothing, else the preset, else the mode."""
        if self.mode == "decoupled" and not (self.applies_weights or self.rejects):
            return "measured only"
        if self.preset is None:
            return self.mode
        return f"{self.preset}, auto" if self.mode == "auto" else self.preset

    @property
    def criteria(self) -> tuple[Criterion, ...]:
        """The rejection criteria, parsed."""
        return parse_criteria(self.rollout_rs, self.rollout_rs_threshold)

    @property
    def applies_weights(self) -> bool:
        """Whether importance weights multiply the loss; in bypass ppo_clip the ratio itself does."""
        in_ratio = self.mode != "decoupled" and self.loss_type == "ppo_clip"
        return self.rollout_is is not None and self.rollout_is_apply and not in_ratio

    @property
    def rejects(self) -> bool:
        """Whether terms or samples can be rejected."""
        return self.rollout_rs is not None or self.rollout_token_veto_threshold is not None

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of `compute_rollout_correction_and_rejection_mask` that it sets."""
        keys = (
            "rollout_is",
            "rollout_is_threshold",
            "rollout_is_batch_normalize",
            "rollout_rs",
            "rollout_rs_threshold",
            "rollout_token_veto_threshold",
            "log_ratio_scale",
        )
        return {key: getattr(self, key) for key in keys} | {"rollout_is_apply": self.applies_weights}

    @property
    def needs_means(self) -> bool:
        """Whether the rollout must return its step means, for an exact KL."""
        return any(criterion.mode.needs == "step_kl" for criterion in self.criteria)

    @property
    def needs_batch(self) -> bool:
        """Whether a rejection mode measures its bounds, or the noise that it compares with."""
        return any(criterion.needs_batch for criterion in self.criteria)


class _Off(RolloutCorrectionConfig):
    """No correction: nothing is computed, and nothing is logged."""

    @property
    def mode(self) -> CorrectionMode:
        return "off"

    @property
    def label(self) -> str:
        return "not measured"


DEFINING_KEYS = ("bypass_mode", "loss_type", "rollout_is", "rollout_rs")
_FLAGS = ("rollout_is_apply", "rollout_is_batch_normalize", "score_centering", "log_legacy_names")
_CHOICES: dict[str, tuple[str, ...]] = {
    "loss_type": get_args(LossType),
    "bypass_scope": get_args(Scope),
    "rollout_rs_denominator": get_args(Denominator),
    "rejection_groups": get_args(Groups),
}


def _check_types(config: RolloutCorrectionConfig) -> None:
    if not isinstance(config.bypass_mode, bool) and config.bypass_mode != AUTO:
        raise ConfigError(f"{SECTION}.bypass_mode={config.bypass_mode!r} must be true, false or auto")
    for key in _FLAGS:
        value = getattr(config, key)
        if not isinstance(value, bool):
            raise ConfigError(f"{SECTION}.{key}={value!r} must be true or false")
    for key, choices in _CHOICES.items():
        value = getattr(config, key)
        if value not in choices:
            raise ConfigError(unknown_choice(f"{SECTION}.{key}", value, choices))
    if config.rollout_is is not None and config.rollout_is not in IS_LEVELS:
        raise ConfigError(unknown_choice(f"{SECTION}.rollout_is", config.rollout_is, (*IS_LEVELS, "null")))
    check_scale(config.log_ratio_scale)
    for key in ("auto_enter", "auto_leave"):
        value = getattr(config, key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"{SECTION}.{key}={value!r} must be a positive number of clip ranges")
    if config.auto_leave >= config.auto_enter:
        raise ConfigError(
            f"{SECTION}.auto_leave={config.auto_leave:g} must be below auto_enter={config.auto_enter:g}, or the mode "
            "would switch back and forth; half of auto_enter is usual"
        )


def _normalize(config: RolloutCorrectionConfig) -> None:
    def assign(key: str, value: object) -> None:
        object.__setattr__(config, key, value)

    if config.rollout_is is not None or config.rollout_is_threshold is not None:
        assign(
            "rollout_is_threshold", parse_weights(config.rollout_is or "token", config.rollout_is_threshold)
        )
    modes = parse_modes(config.rollout_rs)
    if modes:
        parse_criteria(config.rollout_rs, config.rollout_rs_threshold)
    threshold = cast(Threshold | None, config.rollout_rs_threshold)
    assign("rollout_rs_threshold", canonical_threshold(threshold))
    assign("rollout_rs", ",".join(modes) or None)
    # Again, as a saved configuration is read: a band that was text is two bare numbers by now.
    parse_criteria(config.rollout_rs, config.rollout_rs_threshold)
    assign("rollout_token_veto_threshold", parse_veto(config.rollout_token_veto_threshold))


def _check_combinations(config: RolloutCorrectionConfig) -> None:
    """Refuse keys that the mode cannot obey; under `auto` they must work in both modes."""
    if config.mode != "bypass" and config.loss_type == "reinforce":
        raise ConfigError(
            f"{SECTION}.loss_type='reinforce' needs bypass_mode: true; "
            f"decoupled mode uses actor.loss_mode, so leave loss_type out"
        )
    _check_centering(config)
    if config.mode == "decoupled":
        return
    if config.rollout_is_batch_normalize:
        raise ConfigError(
            f"{SECTION}.rollout_is_batch_normalize=True needs the whole batch, which bypass mode never sees "
            f"at once; set it to false, or bypass_mode to false"
        )
    if config.rejection_groups != "none":
        raise ConfigError(
            f"{SECTION}.rejection_groups={config.rejection_groups!r} needs the whole batch, which bypass mode never "
            f"sees at once; set it to none, or bypass_mode to false"
        )
    if config.bypass_scope == "step" and config.applies_weights and config.rollout_is != "token":
        raise ConfigError(
            f"{SECTION}.bypass_scope='step' gives the loss single steps, but rollout_is="
            f"{config.rollout_is!r} weighs whole trajectories; set bypass_scope: trajectory, or rollout_is: token"
        )


def _check_centering(config: RolloutCorrectionConfig) -> None:
    """Refuse to centre weighted terms of which the mean has no closed form."""
    weighs = config.rollout_is is not None and config.rollout_is_apply
    if not (config.score_centering and weighs) or (
        config.mode == "bypass" and config.loss_type == "ppo_clip"
    ):
        return
    if config.rollout_is != "token":
        raise ConfigError(
            f"{SECTION}.score_centering=true: the mean of a score that rollout_is={config.rollout_is!r} weighs by its "
            "whole trajectory has no closed form; set rollout_is: token or null, or score_centering: false"
        )
    if isinstance(config.rollout_is_threshold, tuple):
        raise ConfigError(
            f"{SECTION}.score_centering=true: rollout_is_threshold={list(config.rollout_is_threshold)} leaves terms "
            "without a weight, and nothing of them can be centred; give a number, which caps weights, or set "
            "score_centering: false"
        )


def _check_preset(config: RolloutCorrectionConfig) -> None:
    name = config.preset
    preset = type(config)(**find_preset(name).keys)
    keys = DEFINING_KEYS if preset.bypass_scope == "step" else (*DEFINING_KEYS, "bypass_scope")
    for key in keys:
        value, expected = getattr(config, key), getattr(preset, key)
        if value != expected and value != AUTO:  # `auto` uses the preset's keys in both modes
            raise ConfigError(
                f"{SECTION}.{key}={value!r} contradicts preset={name!r}, which has {expected!r}; leave one of the two "
                f"out: {key}, or the preset by {SECTION}.preset=null (in code: "
                f"RolloutCorrectionConfig.from_preset({name!r}))"
            )
    if config.mode == "auto" and preset.loss_type == "reinforce":
        raise ConfigError(
            f"{SECTION}.bypass_mode='auto': preset {name!r} is for bypass mode only; choose one with ppo_clip, "
            f"or bypass_mode: true"
        )


def _without_effect(config: RolloutCorrectionConfig) -> list[str]:
    reasons: dict[str, str] = {}
    if config.rollout_is is None:
        for key in ("rollout_is_threshold", "rollout_is_apply", "rollout_is_batch_normalize"):
            reasons[key] = "rollout_is is null"
    if config.rollout_rs is None:
        reasons["rollout_rs_threshold"] = "rollout_rs is null"
    if config.mode == "decoupled":
        reasons["bypass_scope"] = "bypass_mode is false"
    if config.mode != "auto":
        reasons["auto_enter"] = reasons["auto_leave"] = "bypass_mode is not auto"
    if config.rollout_rs is None and config.rollout_token_veto_threshold is None:
        reasons["rejection_groups"] = "no mode or veto rejects anything"
        if config.rollout_is is None:
            reasons["log_ratio_scale"] = "there are no weights, bands or veto to scale"
    defaults = {field.name: field.default for field in fields(config)}
    return [
        f"{SECTION}.{key}={value!r} has no effect: {reason}"
        for key, reason in reasons.items()
        if (value := getattr(config, key)) != defaults[key] and value is not None
    ]


def _as_dict(config: RolloutCorrectionConfig) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in fields(config)}


# Instances have their own attribute of this name.
RolloutCorrectionConfig.preset = RolloutCorrectionConfig.from_preset  # type: ignore[assignment]

OFF = _Off()
"""No correction; a recipe writes `rollout_correction: null`."""
MEASURED = RolloutCorrectionConfig()
"""The gap is measured, and not corrected, as by the preset `disabled`: the section of a recipe that writes none."""
