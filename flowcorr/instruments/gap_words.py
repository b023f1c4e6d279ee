"""A run's gap and its correction in words, as training shows them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from flowcorr.config.schema import Config, SamplingConfig
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.correction.bounds import idle_modes

_EXACT, _K3, _SIZE = "rollout_corr/exact_kl", "rollout_corr/k3_kl", "rollout/num_elements"
_OUTSIDE = "rollout_corr/clip_noise_fraction"
_UNMEASURED = "rollout_corr/rollout_rs_unmeasured_fraction"
_IDLE_WEIGHTS = 1e-4  # weights nearer to 1 than this print as 1

Values = Mapping[str, float]


def treatment(correction: RolloutCorrectionConfig) -> str:
    """The correction, as a run's first line names it."""
    return f"rollout gap {correction.label}"


def joint_nats(sampling: SamplingConfig, values: Values) -> float | None:
    """The KL of a whole SDE window in nats, summed over all latent elements; None where a step did not measure it.

    It is the exact KL where the engine returns step means. Else it follows from the mean square of `delta`: with `m`
    the KL of a step a latent element, `delta` is normal with mean `-m` and variance `2 m / D`, so
    `2 k3_kl = m^2 + 2 m / D`.
    """
    size, exact, k3 = values.get(_SIZE), values.get(_EXACT), values.get(_K3)
    if size is None or (exact is None and (k3 is None or sampling.cps_unscaled)):
        return None
    if exact is None:
        assert k3 is not None, "checked above"
        square = 2 * size * size * k3
        exact = square / (1 + math.sqrt(1 + square)) / size  # sqrt(1 + square) - 1 cancels
    return sampling.sde_window_size * size * exact


def gap(nats: float) -> str:
    """The gap, as every screen names it."""
    return f"gap {two_digits(nats)} joint nats"


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


def measurement(config: Config, steps: Sequence[Values]) -> str:
    """The measurements of a run in a sentence; empty where no training step was done.

    Args:
        config: the run's.
        steps: the metrics of its training steps.
    """
    if not steps:
        return ""
    correction = config.algorithm.rollout_correction
    sizes = [size for values in steps if (size := joint_nats(config.sampling, values)) is not None]
    if correction.mode == "off":
        return (
            "gap not measured: algorithm.rollout_correction.preset=disabled measures it and corrects nothing"
        )
    if not sizes:
        why = ": sampling.cps_unscaled=true takes their scale off log-probs"
        return f"gap not measured in joint nats{why if config.sampling.cps_unscaled else ''}"
    mean = sum(sizes) / len(sizes)
    if mean == 0:
        return "gap 0: engine and trainer give equal log-probs"
    found, shares = gap(mean), [values[_OUTSIDE] for values in steps if _OUTSIDE in values]
    if shares:
        outside = percent(sum(shares) / len(shares))
        found += f"; {outside} of ratios outside the clip range before any update{_consequence(correction)}"
    return found


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
