"""From the measured gap to a recommendation: the rules of `flowcorr audit`, each constant with its reason.

The reasons are measurements on the flow whose gradient is known (`examples/ground_truth`, T = 2, 512 samples). "Behind"
is a shift wholly against the direction in which the policy learns, as that of stale weights is. With x = T D r^2, which
is twice the joint nats of the window, exact weights keep `exp(-x)` of their samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from flowcorr.correction.bounds import AUTO
from flowcorr.correction.modes import OUTLIER_Z
from flowcorr.health.finding import Finding, Level
from flowcorr.health.setting import clip_text, limit_at
from flowcorr.instruments.audit.explained import REMEDY, VERDICT
from flowcorr.instruments.audit.facts import MAX_OUTLIERS, NEGLIGIBLE_NATS, Facts
from flowcorr.instruments.gap_table import CLIP_HEADROOM, CLIP_QUANTILE
from flowcorr.instruments.gap_words import two_digits
from flowcorr.rollout.precision import LARGEST_DISTANCE

Kind = Literal["none", "leave", "correct", "repair"]
LEVELS: Mapping[Kind, Level] = {
    "none": "healthy",
    "leave": "warning",
    "correct": "warning",
    "repair": "serious",
}

# Random shifts, uncorrected, D = 16384: bias 2 % at r = .01 and 5 % at .03 (a sample is worth .88), 18 % at .1 (.44).
SMALL_R = 0.03
# int4 rollouts of the embedded model, r = .055 to .06: with recomputed old log-probs, 28 seeds learned what float32
# rollouts teach (held-out exact match differs by -.002 +- .010, examples/mismatch_study); bypass mode lost .185 there.
HARMLESS_R = 0.07
# Behind, sequence TIS at scale `sum`: a sample is worth 1.29 at x = .3 (uncorrected .24), .64 at .7 (.15), and .07
# at 1.5 (.10), where its cap takes back what its weights gain. exp(-.7) = .5.
MIN_ESS = 0.5
IS_CAP = 2.0  # the cap those numbers were measured with
# That quantile (`CLIP_QUANTILE`) of one noise, measured at four steps on 100 terms each, differs by a factor of 1.25
# (1.5 in one of 20).
CLIP_SPREAD = 1.5
# By the level of the loss's ratio: what learns within the clip range has to lie within the band.
_BAND_MODES = {"step": "token_k1", "trajectory_mean": "seq_mean_k1", "trajectory_sum": "seq_sum_k1"}
_LEAST_WIDTH = 1e-9  # of a band, so that it has two ends
_RECOMPUTE = (
    "In your trainer: score each batch with the trainer's weights before its first update, and take these log-probs as "
    "the old ones"
)
WORDS = {
    (False, "decoupled"): f"{_RECOMPUTE}; the loss clips the current policy against them.",
    (
        True,
        "decoupled",
    ): f"{_RECOMPUTE}; multiply each sample's loss by min(2, exp(D * sum over its steps of old - "
    "rollout)), without a gradient.",
    (
        False,
        "bypass",
    ): "In your trainer: take the engine's log-probs as the old ones; the clip range has room for the gap.",
}
"""By whether weights correct the gap, and the mode: the advice for a trainer that takes no recipe."""
_ASSUMED_NEWEST = Finding(
    level="note",
    cause="ages",
    sentence="the dump does not tell whether these weights were the newest (policy_versions, version)",
    remedy="if they were not, recompute old log-probs (decoupled)",
)
NO_ADVICE = Finding(
    level="note",
    cause="num_elements",
    sentence="no advice: the dump does not tell num_elements, without which a gap has no size",
)
BASIS = "Limits and biases are those measured on a flow whose gradient is known: examples/ground_truth."


def advise(facts: Facts, *, of_recipe: bool = True) -> list[Finding]:
    """Advice on a gap with keys and reasons, and, as an alternative, a wider clip range for bypass mode.

    Args:
        facts: what was measured.
        of_recipe: whether a recipe of flowcorr can take keys; another trainer's owner gets the same in words.
    """
    kind, mode = kind_of(facts), mode_of(facts)
    bypass = mode == "bypass"
    keys = _keys(facts, kind, bypass)
    done = _in_force(facts, keys) if of_recipe else kind != "correct" and _has_mode(facts, keys)
    verdict = _verdict(facts, kind, bypass)
    numbers = {
        "r": facts.r,
        "joint nats": facts.joint_nats,
        "ESS of exact weights": facts.exact_ess,
        "clip needed": facts.clip_needed,
    }
    reasons = {"size": _about_gap(facts, kind)}
    if not facts.unexplained:
        reasons |= {
            "mode": _about_mode(facts, kind, bypass),
            "weights": _about_weights(facts, kind),
            "rejection": _about_rejection(facts, bypass),
        }
    told = [Finding(level="note", cause=name, sentence=text) for name, text in reasons.items()]
    if facts.unexplained:
        fault = Finding(level=LEVELS[kind], cause="gap", sentence=VERDICT, numbers=numbers, remedy=REMEDY)
        return [fault, *told]
    findings = [
        Finding(
            level=LEVELS[kind],
            cause="gap",
            sentence=f"{verdict}; change nothing: the run does this already"
            if done and kind != "repair"
            else verdict,
            numbers=numbers,
            remedy="" if of_recipe or done else WORDS[kind == "correct", mode],
            keys=_yaml(keys) if of_recipe and not done else "",
        )
    ]
    wider = _alternative(facts, bypass)
    if wider and of_recipe:
        sentence = "or bypass, with a clip range above the noise"
        findings.append(Finding(level="note", cause="wider_clip", sentence=sentence, keys=wider))
    if facts.if_newest and not facts.negligible:
        findings.insert(0, _broken_if_newest(facts))
    elif bypass and facts.older_weights is None and not of_recipe:
        told.append(_ASSUMED_NEWEST)
    return findings + told


def _broken_if_newest(facts: Facts) -> Finding:
    return Finding(
        level="warning",
        cause="ages",
        sentence="older weights sampled, which the dump does not tell, or a part of engine or trainer is wrong",
        reason=str(facts.beyond),
        remedy=REMEDY,
    )


def kind_of(facts: Facts) -> Kind:
    """`none` needed, `leave` it uncorrected, `correct` it, or `repair` its source first."""
    if facts.negligible:
        return "none"
    if facts.unexplained:
        return "repair"
    if facts.systematic and facts.exact_ess >= MIN_ESS:
        return "correct" if facts.setting.densities else "leave"
    return "repair" if facts.systematic or facts.r > LARGEST_DISTANCE else "leave"


def mode_of(facts: Facts) -> Literal["bypass", "decoupled"]:
    """Whether old log-probs are to be recomputed."""
    return "bypass" if facts.has_headroom and kind_of(facts) != "correct" else "decoupled"


def round_up(value: float) -> float:
    """Round up to two digits."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit * (1 - 1e-12)) * unit:.2g}")


def _verdict(facts: Facts, kind: Kind, bypass: bool) -> str:
    mode = "bypass, without a recompute pass" if bypass else "decoupled, old log-probs recomputed"
    match kind:
        case "none":
            return f"no correction needed; {mode}"
        case "correct":
            return f"correct it with weights of the steps' density ratio; {mode}"
        case "repair":
            source = "lower the staleness" if facts.systematic else "close it at its source"
            return f"the gap is too large to correct: {source}; until then {mode}"
    if bypass:
        return f"there is a gap, within the clip range; leave it uncorrected; {mode}"
    text = f"there is a gap; leave it uncorrected; {mode}"
    return (
        text if facts.clip_limit is None else f"{text}, which keeps it out of the ratio; bypass would clip it"
    )


def _about_gap(facts: Facts, kind: Kind) -> str:
    gap = (
        f"The step means differ by r = {facts.r:.2g} stds. Over {facts.num_steps} step{'s'[: facts.num_steps != 1]} "
        f"with D = {facts.num_elements} that is {two_digits(facts.joint_nats)} joint nats: importance weights would "
        f"leave {100 * facts.exact_ess:.3g} % effective samples."
    )
    match kind:
        case "none":
            return f"{gap} Below {NEGLIGIBLE_NATS:g} joint nats, even the worst shift costs less than 3 % of bias."
        case "leave":
            small = f"up to r = {SMALL_R:g} it biases the gradient by about 5 %"
            large = (
                "by about 10 % at r = .06, where runs with recomputed old log-probs learned as much as without a gap, "
                "and runs in bypass mode lost, since PPO clipped it"
            )
            parts = [small, *[large] * (facts.r > SMALL_R)]
            parts += ["larger ones were not tried"] * (facts.r > HARMLESS_R)
            return f"{gap} Rounding shifts at random: {'; '.join(parts)}.{_about_quantization(facts)}"
        case "correct":
            return f"{gap} Most of it is staleness, a shift along the direction of learning, and biases the gradient."
    if facts.systematic:
        keys = "rollout.max_staleness or rollout.staleness, whichever is set"
        return f"{gap} It is mostly staleness: lower {keys}, or actor.lr."
    if facts.beyond is not None:
        return f"{gap} {facts.beyond}"
    return (
        f"{gap} Beyond r = {LARGEST_DISTANCE:g}, a gap is that of int4 in the last steps or of a fault, which flowcorr "
        "doctor tells apart, and weights cannot remove its bias."
        f"{_about_quantization(facts)}"
    )


def _about_quantization(facts: Facts) -> str:
    if facts.setting.quantization == "none":
        return ""
    return (
        f" model.quantization={facts.setting.quantization} rounds the trainer's weights and not the engine's, the "
        "likely source; rollout.name=in_process samples with the same weights, and so does "
        "rollout.engine.weight_sync=merged. flowcorr doctor says whether another part is wrong."
    )


def _about_mode(facts: Facts, kind: Kind, bypass: bool) -> str:
    needed = (
        f"{CLIP_HEADROOM:g} times the {CLIP_QUANTILE:g} quantile of |ratio - 1| is {facts.clip_needed:.2g}"
    )
    cost = "a forward pass of each term"
    if facts.recompute_share is not None:
        cost = f"{facts.recompute_share:.0%} of a step's time"
    if facts.older_weights:
        return (
            "The weights that sample are older than those that learn: in bypass mode PPO holds the update back to "
            f"them. Recomputing costs {cost} and starts every ratio at 1."
        )
    if facts.clip_limit is None:
        bound = (
            f"The loss {facts.setting.actor.loss_mode} bounds no ratio"
            if facts.limit is None
            else "No clip range is known"
        )
        held = f"{bound}, so only the gap itself decides:"
    elif facts.has_headroom:
        held = f"{needed}, within the range of {clip_text(facts.clip_limit)}:"
    else:
        held = f"{needed}, above the range of {clip_text(facts.clip_limit)}: bypass would clip noise."
        return f"{held} Recomputing costs {cost} and starts every ratio at 1."
    if bypass:
        return f"{held} bypass loses nothing and saves {cost}."
    if kind == "correct":
        return f"{held} but correcting the gap needs recomputed log-probs, which cost {cost}."
    return f"{held} it is not negligible. Decoupled mode keeps it out of the ratio; recomputing costs {cost}."


def _about_weights(facts: Facts, kind: Kind) -> str:
    if kind == "correct":
        return (
            f"sequence TIS at scale sum, capped at {IS_CAP:g}; scales mean and sqrt correct next to nothing. "
            f"It holds while exact weights keep {MIN_ESS:.0%} of the samples. It takes the bias away, at the price of "
            "noise: in a short training (examples/mismatch_study) runs without weights learned faster, so compare both."
        )
    if kind == "none":
        return "none; they would be 1."
    if not facts.setting.densities and facts.systematic:
        return (
            "none; with sampling.cps_unscaled differences of log-probs are no log-ratios of densities. Set it "
            "to false to correct this gap."
        )
    if facts.exact_ess < MIN_ESS:
        return "none; at scales mean and sqrt they correct nothing, at scale sum too few samples count."
    return "none; the shift is random, so they would add more variance than they remove bias."


def _about_rejection(facts: Facts, bypass: bool) -> str:
    share = f"{facts.outliers:.2%} of terms lie beyond {OUTLIER_Z:g} robust standard deviations"
    if facts.negligible:
        return "none; there is nothing to reject."
    if facts.outliers > MAX_OUTLIERS:
        return f"none; {share}, too many for outliers. Find the cause first: flowcorr doctor."
    if not facts.outliers:
        band = _band(facts.outlier_band)
        return f"none; there are no outliers. A token_k1 band that this noise stays inside is {band}."
    how = f"{_BAND_MODES[facts.setting.actor.ratio_level]} with auto, a band around the noise,"
    if facts.setting.actor.ratio_level == "step":
        how = f"token_k1 with auto, a band around the noise (here {_band(facts.outlier_band)})"
    if not bypass:
        how = "step_z, which follows the noise,"
    return f"{share}; {how} removes them. To find their cause, run flowcorr doctor."


def _keys(facts: Facts, kind: Kind, bypass: bool) -> dict[str, str]:
    """Keys of `algorithm.rollout_correction`."""
    if kind == "correct":
        keys = {
            "bypass_mode": "false",
            "rollout_is": "sequence",
            "rollout_is_threshold": f"{IS_CAP}",
            "log_ratio_scale": "sum",
        }
    else:
        # Under a quantized trainer, bypass mode stays a question that each run answers by its own noise.
        measured = facts.setting.quantization != "none" and facts.clip_limit is not None
        keys = {"bypass_mode": ("auto" if measured else "true") if bypass else "false"}
        if bypass and facts.setting.actor.ratio_level != "step":
            keys["bypass_scope"] = "trajectory"
    if not facts.has_outliers:
        return keys
    if bypass:
        return keys | {
            "rollout_rs": _BAND_MODES[facts.setting.actor.ratio_level],
            "rollout_rs_threshold": AUTO,
        }
    return keys | {"rollout_rs": "step_z", "rollout_rs_threshold": f"{OUTLIER_Z}"}


def _in_force(facts: Facts, keys: Mapping[str, str]) -> bool:
    """Whether the run's correction is the one that these keys set, and does nothing else."""
    correction = facts.setting.correction
    if not _has_mode(facts, keys):
        return False
    acts = correction.applies_weights, correction.rejects
    if acts != ("rollout_is" in keys, "rollout_rs" in keys) or correction.loss_type != "ppo_clip":
        return False
    return all(str(getattr(correction, key)) == value for key, value in keys.items() if key != "bypass_mode")


def _has_mode(facts: Facts, keys: Mapping[str, str]) -> bool:
    """Whether the run is in the mode that these keys set; without a correction, old log-probs are recomputed."""
    modes = {"true": ("bypass",), "false": ("decoupled", "off"), AUTO: ("auto",)}
    return facts.setting.correction.mode in modes[keys["bypass_mode"]]


def _alternative(facts: Facts, bypass: bool) -> str:
    if bypass or facts.has_headroom or facts.older_weights or facts.clip_limit is None:
        return ""
    if facts.clip_needed >= 1:  # such a range holds ratios down to 0, which have hardly a gradient
        return ""
    return f"actor:\n  {_clip_line(facts)}\n" + _yaml(_keys(facts, "leave", bypass=True))


def _clip_line(facts: Facts) -> str:
    """The key that widens the clip range beyond the noise: one number, or one by step index if noise differs."""
    assert facts.limit is not None
    assert facts.clip_limit is not None
    widest = round_up(facts.clip_needed)
    key = facts.limit.key
    if facts.limit.is_cap or facts.clip_needed <= CLIP_SPREAD * min(facts.clip_by_step.values()):
        return f"{key}: {_number(facts.limit.value(widest))}"
    # What is wider than its noise stays, and so does a step that was not sampled: its noise is not known.
    by_step = [
        max(round_up(facts.clip_by_step.get(index, 0.0)), limit_at(facts.clip_limit, index))
        for index in range(facts.setting.window_end)
    ]
    unknown = [index for index in range(facts.setting.window_end) if index not in facts.clip_by_step]
    remark = f"; not measured: {', '.join(map(str, unknown))}" if unknown else ""
    return f"{key}: [{', '.join(map(_number, by_step))}]  # by step index{remark}"


def _yaml(keys: dict[str, str]) -> str:
    lines = [f"    {key}: {value}\n" for key, value in keys.items()]
    return "algorithm:\n  rollout_correction:\n" + "".join(lines)


def _band(width: float) -> str:
    """The band of ratios up to a distance from 1, which is printed with two digits."""
    width = max(round_up(width), _LEAST_WIDTH)
    if width >= 1:  # no ratio is below 0
        return f"[{1 / (1 + width):.2g}, {1 + width:.2g}]"
    digits = 1 - math.floor(math.log10(width))
    return f"[{1 - width:.{digits}f}, {1 + width:.{digits}f}]"


def _number(value: float) -> str:
    """A number as text that YAML 1.1 reads as a float: with a point."""
    mantissa, exponent, power = f"{value:.6g}".partition("e")
    return (mantissa if "." in mantissa else f"{mantissa}.0") + exponent + power
