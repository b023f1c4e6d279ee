"""Verl's older rollout correction: three generations of keys, functions of the first, and its names of metrics.

The keys stand under `algorithm` itself as well as under `algorithm.rollout_correction`. Each translation is announced
by a `FutureWarning`, which Python shows to users by default, with the keys to write instead. They are read without
torch.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flowcorr import correction
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.correction.bounds import (
    IS_LEVELS,
    RS_ALIASES,
    SECTION,
    Band,
    parse_band,
    parse_modes,
    parse_weights,
    scale_factor,
)
from flowcorr.errors import ConfigError, unknown_choice

if TYPE_CHECKING:
    from torch import Tensor

    from flowcorr.metrics import Metrics

_IS_MODES = ("truncate", "mask")
_OLD_VETO = "1e-4"
_FIRST_DIALECT = (
    "rollout_is_level",
    "rollout_is_mode",
    "rollout_is_threshold_lower",
    "rollout_is_veto_threshold",
)
_LATER_DIALECTS = (
    "rollout_rs_threshold_lower",
    "bypass_old_logprob_for_rollout",
    "use_pure_rollout_correction",
    "use_policy_gradient",
)
# Keys that the dialects share with today's, but that once stood directly under `algorithm`.
_SHARED = (
    "rollout_is",
    "rollout_is_threshold",
    "rollout_is_batch_normalize",
    "rollout_rs",
    "rollout_rs_threshold",
    "rollout_token_veto_threshold",
    "bypass_mode",
)
FLAT_KEYS = (*_SHARED, *_FIRST_DIALECT, *_LATER_DIALECTS)
"""The keys of correction that dialects had under `algorithm` itself."""
_OF_DRIFT = (
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
# The first dialect masked by its weights.
_OF_MASK = {
    "rollout_rs_masked_fraction": "rollout_is_masked_fraction",
    "rollout_rs_seq_masked_fraction": "rollout_is_seq_masked_fraction",
}


def translate_algorithm(algorithm: Mapping[str, Any]) -> dict[str, Any]:
    """The section `algorithm` with older correction keys, wherever they stand, as `rollout_correction`.

    Raises:
        ConfigError: a key stands in both places, or has a value that its dialect does not know.
    """
    result = dict(algorithm)
    moved = {key: result.pop(key) for key in FLAT_KEYS if key in result}
    section = result.get("rollout_correction")
    if section is None and not moved:
        return result
    section = {} if section is None else dict(section)
    for key in moved:
        if key in section:
            raise ConfigError(f"algorithm.{key} and {SECTION}.{key} are both set; keep the second")
    if moved or _is_older(section):
        result["rollout_correction"] = _announced({**moved, **section}, moved=tuple(moved))
    else:
        _warn_of_scope(section)
    return result


def from_older(mapping: Mapping[str, Any]) -> RolloutCorrectionConfig:
    """The correction of a section `rollout_correction` with keys of an older dialect, or of today's.

    Raises:
        ConfigError: a key is unknown, or has a value that its dialect does not know.
    """
    return RolloutCorrectionConfig.from_mapping(translate_section(mapping))


def translate_section(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Older keys of `rollout_correction` as today's, with a warning; today's are left as they are."""
    if _is_older(mapping):
        return _announced(mapping)
    _warn_of_scope(mapping)
    return dict(mapping)


def _is_older(section: Mapping[str, Any]) -> bool:
    """Whether a section holds keys or values of an older dialect."""
    return any(key in section for key in (*_FIRST_DIALECT, *_LATER_DIALECTS)) or isinstance(
        section.get("rollout_is"), bool
    )


def _announced(mapping: Mapping[str, Any], moved: Sequence[str] = ()) -> dict[str, Any]:
    """The keys translated, with warnings that name the older ones, and today's that stood under `algorithm`."""
    is_first = _is_first_dialect(mapping, was_flat=bool(moved))
    translated = _from_later_dialects(_from_first_dialect(dict(mapping)) if is_first else dict(mapping))
    redefined = ("rollout_is", "rollout_is_threshold") if is_first else ()
    kept = [
        key
        for key, value in translated.items()
        if key in mapping and mapping[key] == value and key not in redefined
    ]
    older = [key for key in mapping if key not in kept]
    misplaced = [f"algorithm.{key}" for key in moved if key in kept]
    written = ", ".join(f"{key}: {_yaml(value)}" for key, value in translated.items() if key not in kept)
    if older:
        today = f"{{{written}}}" if written else "nothing"
        message = f"{SECTION}: {_listed(older, 'is', 'are')} of an older dialect; write {today} instead"
        if is_first and _lacks_veto(mapping):
            message += (
                f". verl 0.6.0 also rejected samples with a ratio below {_OLD_VETO}: add "
                f"rollout_token_veto_threshold: {_OLD_VETO} for that"
            )
        warnings.warn(message, FutureWarning, stacklevel=4)
    if misplaced:
        message = f"{_listed(misplaced, 'belongs', 'belong')} under {SECTION}"
        warnings.warn(message, FutureWarning, stacklevel=4)
    return translated


def _lacks_veto(old: Mapping[str, Any]) -> bool:
    """Whether a section of the first dialect applies weights and names no veto, so that its default would act."""
    applied = old.get("rollout_is") and old.get("rollout_is_threshold") is not None
    return bool(applied) and not {"rollout_is_veto_threshold", "rollout_token_veto_threshold"} & set(old)


def _warn_of_scope(section: Mapping[str, Any]) -> None:
    """Warn that verl's reinforce rejects whole samples, and bypass mode here single steps by default."""
    if section.get("loss_type") != "reinforce" or {"bypass_scope", "preset"} & set(section):
        return
    criteria = [mode for mode in parse_modes(section.get("rollout_rs")) if mode.startswith("seq_")]
    if section.get("rollout_token_veto_threshold") is not None:
        criteria.append("the veto")
    if criteria:
        warnings.warn(
            f"{SECTION}: with loss_type: reinforce, {', '.join(criteria)} rejects single steps here and whole samples "
            "in verl; write bypass_scope: trajectory for verl's meaning, or bypass_scope: step for this one",
            UserWarning,
            stacklevel=4,
        )


def _listed(keys: Sequence[str], singular: str, plural: str) -> str:
    return f"{', '.join(keys)} {singular if len(keys) == 1 else plural}"


def _is_first_dialect(old: Mapping[str, Any], *, was_flat: bool) -> bool:
    has_level_key = any(key in old for key in _FIRST_DIALECT) or isinstance(old.get("rollout_is"), bool)
    names_level = isinstance(old.get("rollout_is"), str)
    return has_level_key or (was_flat and not names_level and "rollout_is_threshold" in old)


def _from_first_dialect(old: dict[str, Any]) -> dict[str, Any]:
    """Read the dialect in which a threshold turned the weights on and a boolean, false by default, applied them."""
    level = old.pop("rollout_is_level", None) or "token"
    mode = old.pop("rollout_is_mode", None) or "truncate"
    upper = old.pop("rollout_is_threshold", None)
    lower = old.pop("rollout_is_threshold_lower", None)
    veto = old.pop("rollout_is_veto_threshold", None)
    if isinstance(old.get("rollout_is"), str):
        level, apply = old.pop("rollout_is"), True
    else:
        apply = bool(_flag(old, "rollout_is"))
    if level not in IS_LEVELS:
        raise ConfigError(unknown_choice(f"{SECTION}.rollout_is_level", level, IS_LEVELS))
    if mode not in _IS_MODES:
        raise ConfigError(unknown_choice(f"{SECTION}.rollout_is_mode", mode, _IS_MODES))
    if upper is None:
        return {"rollout_is": None, **old}
    new: dict[str, Any] = {"rollout_is": level, "rollout_is_threshold": upper}
    if mode == "mask":
        new["rollout_is_threshold"] = math.inf
        new["rollout_rs"] = RS_ALIASES[level]
        new["rollout_rs_threshold"] = _band("rollout_is_threshold", upper, lower)
    if not apply:
        new["rollout_is_apply"] = False
    if veto is not None:
        new["rollout_token_veto_threshold"] = veto
    for key in new:
        if key in old:
            raise ConfigError(
                f"{SECTION}.{key}={old[key]!r} contradicts the older rollout_is_* keys; drop these"
            )
    return {**new, **old}


def _from_later_dialects(old: dict[str, Any]) -> dict[str, Any]:
    """Keys of the first `RolloutCorrectionConfig`: a lower threshold of its own, flags for the mode and loss."""
    lower = old.pop("rollout_rs_threshold_lower", None)
    if old.get("rollout_rs") is not None and lower is not None:
        old["rollout_rs"] = ",".join(parse_modes(old["rollout_rs"]))
        old["rollout_rs_threshold"] = _band("rollout_rs_threshold", old.get("rollout_rs_threshold"), lower)
    bypass = _flag(old, "bypass_old_logprob_for_rollout")
    gradient_flags = [_flag(old, key) for key in ("use_pure_rollout_correction", "use_policy_gradient")]
    if bypass is not None:
        _refuse_other(old, "bypass_mode", bypass, f"bypass_old_logprob_for_rollout={bypass}")
        old["bypass_mode"] = bypass
    if any(gradient_flags):
        if not old.get("bypass_mode"):
            raise ConfigError(
                f"{SECTION}.use_pure_rollout_correction=True needs bypass_old_logprob_for_rollout: true; "
                f"today's keys for both are bypass_mode: true and loss_type: reinforce"
            )
        _refuse_other(old, "loss_type", "reinforce", "use_pure_rollout_correction or use_policy_gradient")
        old["loss_type"] = "reinforce"
    if old.get("loss_type") == "reinforce" and _is_of_samples(old):
        old.setdefault("bypass_scope", "trajectory")
    return old


def _flag(old: dict[str, Any], key: str) -> bool | None:
    """Take out an older key that is true or false; a text such as `off` would count as true."""
    value = old.pop(key, None)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{SECTION}.{key}={value!r} must be true or false")
    return value


def _refuse_other(old: Mapping[str, Any], key: str, value: object, older: str) -> None:
    """Refuse a key of today that says otherwise than an older one."""
    if old.get(key, value) != value:
        raise ConfigError(f"{SECTION}.{key}={old[key]!r} contradicts the older {older}; drop the older key")


def _is_of_samples(section: Mapping[str, Any]) -> bool:
    by_weight = section.get("rollout_is") in ("sequence", "geometric")
    by_veto = section.get("rollout_token_veto_threshold") is not None
    modes = parse_modes(section.get("rollout_rs"))
    return by_weight or by_veto or any(mode.startswith("seq_") for mode in modes)


def _band(key: str, upper: Any, lower: Any) -> tuple[float, float]:
    """The band of an upper threshold and one named `<key>_lower`, by default its reciprocal."""
    highest = parse_band(upper, key)
    if isinstance(highest, tuple):
        raise ConfigError(f"{SECTION}.{key}={upper!r} is a band already; drop the lower threshold")
    if lower is None:
        return 1.0 / highest, highest
    try:
        lowest = math.nan if isinstance(lower, bool) else float(lower)
    except (TypeError, ValueError):
        lowest = math.nan
    if not 0 <= lowest < highest:
        raise ConfigError(
            f"{SECTION}.{key}_lower={lower!r} must be a number from 0 to below {key}={highest:g}, "
            "or null for its reciprocal"
        )
    # A lower threshold of 0 meant none; bands are of positive ratios.
    return max(lowest, sys.float_info.min), highest


def _yaml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"{value[0]!r}_{value[1]!r}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return ".inf" if value == math.inf else str(value)


def older_metrics(
    metrics: Metrics,
    target_log_prob: Tensor,
    rollout_log_prob: Tensor,
    mask: Tensor | None,
    config: RolloutCorrectionConfig,
    num_elements: int | None = None,
) -> Metrics:
    """The metrics of a correction under the names of verl's first dialect, `mismatch/*`, as far as it had them.

    In that dialect's mode `mask`, fractions of weights count against the band of the rejection.

    Args:
        metrics: of the correction, `rollout_corr/*`.
        target_log_prob, rollout_log_prob, mask: `[B, T]`, as the correction got them.
        config: the correction.
        num_elements: `D`, which some log-ratio scales need.
    """
    from flowcorr.correction import describe
    from flowcorr.correction.ratios import log_ratios
    from flowcorr.correction.weights import raw_weights
    from flowcorr.metrics import Metrics

    band = _mask_band(config)

    def older(name: str) -> str | None:
        name = name.removeprefix("rollout_corr/")
        if band is not None and name.endswith(("_fraction_high", "_fraction_low")):
            return None
        if name in _OF_DRIFT:
            return f"mismatch/mismatch_{name}"
        is_of_weights = name.startswith("rollout_is_") and name != "rollout_is_batch_norm_factor"
        return f"mismatch/{_OF_MASK.get(name, name)}" if is_of_weights or name in _OF_MASK else None

    renamed = metrics.renamed(older)
    if band is None:
        return renamed
    assert config.rollout_is is not None
    scale = scale_factor(config.log_ratio_scale, num_elements)
    ratios = log_ratios(target_log_prob, rollout_log_prob, mask, scale=scale)
    shares = describe.outside_band(ratios, raw_weights(config.rollout_is, ratios), band)
    return renamed.merge(Metrics(shares).prefixed("mismatch/"))


def _mask_band(config: RolloutCorrectionConfig) -> Band | None:
    """The band of ratios outside of which a correction masks weights that have no cap; else None."""
    cap = parse_weights(config.rollout_is, config.rollout_is_threshold)
    bands = [mode for mode in config.criteria if mode.mode.bounds.is_band and not mode.auto]
    if config.rollout_is is None or cap != math.inf or not bands:
        return None
    return math.exp(-bands[0].upper), math.exp(-bands[0].lower)


def compute_rollout_importance_weights(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is_level: str = "token",
    rollout_is_mode: str = "truncate",
    rollout_is_threshold: float | None = None,
    rollout_is_threshold_lower: float | None = None,
    rollout_is_veto_threshold: float | None = None,
) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    """Weights, mask and metrics under the names of the first dialect; None, the mask and {} without a threshold.

    The mask has the dtype of `response_mask`; metrics are the `mismatch/*` ones.
    """
    if rollout_is_threshold is None:
        return None, response_mask, {}
    keys = _from_first_dialect(
        {
            "rollout_is": True,
            "rollout_is_level": rollout_is_level,
            "rollout_is_mode": rollout_is_mode,
            "rollout_is_threshold": rollout_is_threshold,
            "rollout_is_threshold_lower": rollout_is_threshold_lower,
            "rollout_is_veto_threshold": rollout_is_veto_threshold,
        }
    )
    config = RolloutCorrectionConfig(**keys)
    log_probs = (old_log_prob, rollout_log_prob, response_mask)
    corrected = correction.compute_rollout_correction_and_rejection_mask(*log_probs, **config.options)
    metrics = older_metrics(corrected.metrics, *log_probs, config).compute()
    return corrected.weights, corrected.keep.to(response_mask.dtype), metrics


def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> dict[str, float]:
    """The drift's diagnostics without a prefix, as verl names them.

    Without the rollout's log-probs, only the perplexity of the old policy, as in verl.
    """
    metrics = correction.compute_rollout_correction_and_rejection_mask(
        old_log_prob, old_log_prob if rollout_log_prob is None else rollout_log_prob, response_mask
    ).metrics
    named = {name.removeprefix("rollout_corr/"): value for name, value in metrics.compute().items()}
    if rollout_log_prob is None:
        return {name: value for name, value in named.items() if name.startswith("training_")}
    return named


def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_rs: str = "token_k1",
    rollout_rs_threshold: str | float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The mask after rejection by log-ratios `[B, T]`, and its metrics without a prefix.

    Bands of k1 are bands of ratios, as everywhere in flowcorr; verl takes them of the reciprocal.
    """
    corrected = correction.compute_rollout_correction_and_rejection_mask(
        log_ratio,
        log_ratio.new_zeros(log_ratio.shape),
        response_mask,
        rollout_rs=rollout_rs,
        rollout_rs_threshold=rollout_rs_threshold,
    )
    metrics = corrected.metrics.compute()
    chosen = {name: value for name, value in metrics.items() if name.startswith("rollout_corr/rollout_rs_")}
    mask = corrected.keep.to(response_mask.dtype)
    return mask, {name.removeprefix("rollout_corr/"): value for name, value in chosen.items()}
