"""A run's gap and its correction in words, as training shows them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import fmean

from flowcorr.config.schema import Config
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.correction.bounds import idle_modes
from flowcorr.health.setting import num_terms
from flowcorr.instruments.gap_size import estimated_kl

_EXACT, _SIZE = "rollout_corr/exact_kl", "rollout/num_elements"
_OF_STEP = re.compile(r"rollout_corr/step_[0-9]+/k3_kl")
_OUTSIDE = "rollout_corr/clip_noise_fraction"
_UNMEASURED = "rollout_corr/rollout_rs_unmeasured_fraction"
_IDLE_WEIGHTS = 1e-4  # weights nearer to 1 than this print as 1

Values = Mapping[str, float]


def treatment(correction: RolloutCorrectionConfig) -> str:
    """The correction, as a run's first line names it."""
    return f"rollout gap {correction.label}"


def joint_nats(config: Config, values: Values) -> float | None:
    """The KL of a whole SDE window in nats, summed over all latent elements; None if a step did not measure it.

    It is the exact KL where the engine returns step means, else `estimated_kl` of the mean and the mean square of
    `delta`, of which `k3_kl` is half, at each step of the schedule; these count alike, as samples share them out.
    """
    size, exact = values.get(_SIZE), values.get(_EXACT)
    moments = _moments(values)
    if size is None or (exact is None and (not moments or config.sampling.cps_unscaled)):
        return None
    if exact is None:
        count = max(num_terms(config) // len(moments), 1)
        exact = fmean(estimated_kl(mean, square, count, int(size)) for mean, square in moments)
    return config.sampling.sde_window_size * size * exact


def _moments(values: Values) -> list[tuple[float, float]]:
    """Mean and mean square of `delta` at each step of the schedule, or of all terms if steps were not logged."""
    names = [name.removesuffix("k3_kl") for name in values if _OF_STEP.fullmatch(name)]
    return [
        (-values[f"{name}kl"], 2 * values[f"{name}k3_kl"])
        for name in names or ["rollout_corr/"]
        if f"{name}kl" in values and f"{name}k3_kl" in values
    ]


def mean_gap(config: Config, steps: Sequence[Values]) -> float | None:
    """Mean of `joint_nats` over the training steps that measured it; None if none did."""
    sizes = [size for values in steps if (size := joint_nats(config, values)) is not None]
    return sum(sizes) / len(sizes) if sizes else None


def gap(nats: float) -> str:
    """The gap, as every screen names it."""
    return f"gap {two_digits(nats)} joint nats"


def action(correction: RolloutCorrectionConfig, values: Values) -> str:
    """The effect of a correction in a step: `rejected 3.1 %`, `weights 0.98 to 1.02`, or `idle` if it cannot act.

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


def measurement(config: Config, steps: Sequence[Values]) -> str:
    """The measurements of a run in a sentence; empty before the first training step.

    Args:
        config: the run's.
        steps: the metrics of its training steps.
    """
    if not steps:
        return ""
    correction, mean = config.algorithm.rollout_correction, mean_gap(config, steps)
    if correction.mode == "off":
        return (
            "gap not measured: algorithm.rollout_correction.preset=disabled measures it and corrects nothing"
        )
    if mean is None:
        why = ": sampling.cps_unscaled=true takes their scale off log-probs"
        return f"gap not measured in joint nats{why if config.sampling.cps_unscaled else ''}"
    if mean == 0:
        return "gap 0: engine and trainer give equal log-probs"
    text, shares = gap(mean), [values[_OUTSIDE] for values in steps if _OUTSIDE in values]
    if shares:
        outside = percent(sum(shares) / len(shares))
        text += f"; {outside} of ratios outside the clip range before any update{_consequence(correction)}"
    return text


def percent(share: float) -> str:
    """A share in percent, see `two_digits`."""
    return f"{two_digits(100 * share)} %"


def two_digits(value: float) -> str:
    """A number with two digits, and with all before the point: a gap of a large latent has hundreds of nats."""
    return f"{value:.0f}" if abs(value) >= 10 else f"{value:.2g}"


def _consequence(correction: RolloutCorrectionConfig) -> str:
    if correction.mode == "decoupled":
        return ", but old log-probs were recomputed, so PPO clipped none of that"
    if correction.mode == "auto":
        return ", which PPO clipped where a step was in bypass mode"
    return ", which PPO clipped as if the policy had learned it" if correction.loss_type == "ppo_clip" else ""


def _applied(values: Values, name: str) -> float | None:
    """A metric of the correction that acted: inside the loss in bypass mode, else on the whole batch."""
    return values.get(f"actor/rollout_corr/{name}", values.get(f"rollout_corr/{name}"))
