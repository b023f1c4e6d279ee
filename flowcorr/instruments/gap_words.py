"""A run's gap and its correction in words, as training shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.correction.bounds import idle_modes

_GAP = "rollout_corr/logprob_abs_diff_mean"
_OUTSIDE = "rollout_corr/clip_noise_fraction"
_UNMEASURED = "rollout_corr/rollout_rs_unmeasured_fraction"
_IDLE_WEIGHTS = 1e-4  # weights nearer to 1 than this print as 1

Values = Mapping[str, float]


def treatment(correction: RolloutCorrectionConfig) -> str:
    """The correction, as a run's first line names it."""
    return f"rollout gap {correction.label}"


def action(correction: RolloutCorrectionConfig, values: Values) -> str:
    """The effect of a correction in a step: `rejected 3.1 %`, `weights 0.98 to 1.02`, `idle` where it cannot act.

    Bands that earlier training steps measure say `measuring` until there are enough of them.

    Args:
        correction: the run's.
        values: the metrics of the training step.
    """
    if correction.mode == "off":
        return ""
    parts = []
    if correction.rejects:
        bands_idle = len(idle_modes(correction.criteria, values)) == len(correction.criteria)
        idle = bands_idle and correction.rollout_token_veto_threshold is None
        rejected = _applied(values, "rollout_rs_masked_fraction")
        if values.get(_UNMEASURED) == 1 and not rejected:
            parts.append("rejection measuring")
        elif rejected is not None:
            parts.append("rejection idle" if idle and not rejected else f"rejected {percent(rejected)}")
    low, high = _applied(values, "rollout_is_min"), _applied(values, "rollout_is_max")
    if correction.applies_weights and low is not None and high is not None:
        idle = max(1 - low, high - 1) < _IDLE_WEIGHTS
        parts.append("weights idle" if idle else f"weights {low:.3g} to {high:.3g}")
    return "  ".join(parts)


def measurement(correction: RolloutCorrectionConfig, steps: Sequence[Values], audit: str) -> str:
    """The measurements of a run in a sentence, with the next command.

    Args:
        correction: the run's.
        steps: the metrics of its training steps.
        audit: the command that audits the run's configuration.

    Returns:
        An empty text where no training step was done.
    """
    if not steps:
        return ""
    gap, outside = _mean(steps, _GAP), _mean(steps, _OUTSIDE)
    if correction.mode == "off" or gap is None:
        return (
            "gap not measured: algorithm.rollout_correction.preset=disabled measures it and corrects nothing"
        )
    if gap == 0:
        return f"gap 0: engine and trainer give equal log-probs; {audit}"
    found = f"gap {gap:.2g}"
    if outside is not None:
        found += f"; {percent(outside)} of ratios outside the clip range before any update{_consequence(correction)}"
    return f"{found}: {audit}"


def percent(share: float) -> str:
    """A share in percent, with two digits."""
    return f"{100 * share:.2g} %"


def _consequence(correction: RolloutCorrectionConfig) -> str:
    if correction.mode == "decoupled":
        return ", but old log-probs were recomputed, so PPO clipped none of that"
    if correction.mode == "auto":
        return ", which PPO clipped where a step was in bypass mode"
    return ", which PPO clipped as if the policy had learned it" if correction.loss_type == "ppo_clip" else ""


def _applied(values: Values, name: str) -> float | None:
    """A metric of the correction that acted: inside the loss in bypass mode, else on the whole batch."""
    return values.get(f"actor/rollout_corr/{name}", values.get(f"rollout_corr/{name}"))


def _mean(steps: Sequence[Values], name: str) -> float | None:
    found = [values[name] for values in steps if name in values]
    return sum(found) / len(found) if found else None
