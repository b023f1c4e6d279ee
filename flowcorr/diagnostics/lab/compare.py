"""The effect of each preset on a run's own steps. Their dumped log-probs are replayed, without a model.

A policy gradient is a sum over terms of coefficients, `d loss / d log_prob`, times what the model makes of each
log-prob; a correction changes nothing but the coefficients. Where a preset's are those of no correction, up to a
factor, so is its gradient; how far two gradients lie apart where they are not, the model decides.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Sequence, Sized
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from flowcorr.algorithm import MeasuredBands
from flowcorr.config import Config
from flowcorr.correction import OFF, PRESETS, RolloutCorrectionConfig
from flowcorr.correction.bounds import SCALES
from flowcorr.correction.config import ScaleName
from flowcorr.correction.presets import NAMES
from flowcorr.diagnostics.dumped import read_dumped
from flowcorr.diagnostics.lab.replay import LoggedSteps, Replayed, chunks, obstacle, replay
from flowcorr.errors import ConfigError, unknown_choice
from flowcorr.metrics import Metrics
from flowcorr.trainer.run_config import LOSS, MODES, how_to_allow

THIS_RUN = "this run"
# Within both, a preset acts as no correction does: optimizers that normalise a gradient do not see its length.
SAME_COSINE, SAME_TERMS = 0.999, 0.01
FACTOR_LEVELS = (0.01, 0.25, 0.5, 0.75, 0.99)
MAX_FACTORS = 2**20
_MAX_NAMES = 4

Scale = ScaleName | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The effect of a preset on the steps; "uncorrected" is the run's loss without weights and rejection.

    Attributes:
        mean_weight, weight_std, max_weight, ess: of the weights that multiply the loss; None where none do.
        rejected_terms, rejected_samples: shares; a sample counts if one of its terms is rejected.
        clipped: share of kept terms whose ratio lies outside the loss's range; None where it has none.
        loss: the policy loss, over all terms as `actor/loss` is; a KL to the reference is no part of it.
        cosine: of its coefficients with uncorrected ones, the mean over steps; 0 for a step of which nothing is left,
            and None where all uncorrected ones are 0.
        least_cosine: the smallest over steps.
        relative_norm: of its coefficients to uncorrected ones, over all steps.
        factors: by what it multiplies the coefficient of a term, at the quantiles `FACTOR_LEVELS` over terms whose
            uncorrected one is not 0; beyond a million terms, of an even selection. None where there is no such term.
        changed_terms: share whose coefficient has another sign than the uncorrected one, where 0 is a sign too.
        appeared_terms: share that has a coefficient where the uncorrected one is 0, as of a clipped term.
        cosines: by step; None where all uncorrected ones are 0, and for steps that cannot be replayed.
    """

    mean_weight: float | None
    weight_std: float | None
    max_weight: float | None
    ess: float | None
    rejected_terms: float
    rejected_samples: float
    clipped: float | None
    loss: float
    cosine: float | None
    least_cosine: float | None
    relative_norm: float | None
    factors: Sequence[float] | None
    changed_terms: float
    appeared_terms: float
    cosines: Sequence[float | None]

    @property
    def same(self) -> bool:
        """Whether it acts as no correction does, up to the length of the gradient."""
        return self.changed_terms <= SAME_TERMS and self.cosine is not None and self.cosine >= SAME_COSINE


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A preset at one scale.

    Attributes:
        name: the preset's, or `THIS_RUN` for the run's own correction where it is none of the presets.
        aliases: its other names.
        mode: `decoupled`, `bypass` or `auto`.
        scale: its `log_ratio_scale`.
        of_run: whether the run trained with it.
        outcome: None where it cannot be replayed.
        reason: why it cannot be replayed on any step.
    """

    name: str
    aliases: tuple[str, ...]
    mode: str
    scale: Scale
    of_run: bool
    outcome: Outcome | None = None
    reason: str = ""

    @property
    def label(self) -> str:
        """Its name, with its scale where that is not the usual one."""
        scale = self.scale if isinstance(self.scale, str) else f"{self.scale:.4g}"
        return self.name if scale == "mean" else f"{self.name}, {scale}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LabReport:
    """All replays of a run, those nearest to no correction first.

    Attributes:
        run_dir: the run's folder.
        loss_mode: its loss.
        steps: the dumped training steps.
        num_bypass: how many of them were in bypass mode.
        num_samples: samples in all of them.
        window: SDE steps a sample, `T`.
        num_elements: `D`; None where it was not dumped.
        replays: one a preset and scale.
        reading: what differs from no correction and what does not, in words.
        notes: what was not dumped and what it would give, a line each.
    """

    run_dir: str
    loss_mode: str
    steps: Sequence[int]
    num_bypass: int
    num_samples: int
    window: int
    num_elements: int | None
    replays: Sequence[Replay]
    reading: str
    notes: Sequence[str] = ()

    def to_mapping(self) -> dict[str, Any]:
        """Plain, finite values for JSON."""
        return asdict(self)


def replay_run(
    run_dir: Path,
    *,
    presets: Sequence[str] = (),
    scales: Sequence[Scale] = (),
    allow_imports: Collection[str] = (),
) -> LabReport:
    """Replay presets on all dumped steps of a run.

    Args:
        run_dir: the run's folder.
        presets: their names; none takes all.
        scales: values of `log_ratio_scale` to try besides each preset's own.
        allow_imports: see `read_dumped`; a loss of the run's own has to be among them.

    Raises:
        ConfigError: there is no such run, preset or scale, the run dumped nothing that can be read, its loss is not to
            be imported, or nothing of what is asked for can be replayed.
    """
    run = read_dumped(run_dir, allow_imports=allow_imports)
    config, files = run.config, run.files
    if LOSS in run.left_out:
        raise ConfigError(
            f"{run_dir}: {LOSS}={run.loss_mode!r} is code of the run's own, without which no loss can be replayed; "
            f"{how_to_allow(run.loss_mode)}"
        )
    if not run.of_flowcorr or MODES in run.left_out:  # what corrected it is not known, or cannot be replayed
        config = replace(config, algorithm=replace(config.algorithm, rollout_correction=OFF))
    corrections = _corrections(config, presets, scales)
    tallies = [_Tally() for _ in corrections]
    bands = [MeasuredBands(config) for _ in corrections]
    num_samples, num_bypass = 0, 0
    for steps in chunks(list(files.values()), run.levels, of_flowcorr=run.of_flowcorr):
        num_samples += sum(steps.sizes)
        num_bypass += steps.bypass * len(steps.sizes)
        uncorrected = replay(
            steps, config, RolloutCorrectionConfig.preset("bypass_ppo_clip") if steps.bypass else OFF
        )
        for correction, tally, measured in zip(corrections, tallies, bands, strict=True):
            resolved = _in_mode(correction, "bypass" if steps.bypass else "decoupled")
            if reason := obstacle(steps, config, resolved):
                tally.skip(steps, reason)
            else:
                tally.add(steps, replay(steps, config, resolved, measured), uncorrected)
    replays = [_finished(config, *found) for found in zip(corrections, tallies, strict=True)]
    if all(found.outcome is None for found in replays):
        raise ConfigError(f"no preset that was asked for can be replayed on {run_dir}: {replays[0].reason}")
    replays.sort(key=_distance)
    return LabReport(
        run_dir=str(run_dir),
        loss_mode=run.loss_mode,
        steps=list(files),
        num_bypass=num_bypass,
        num_samples=num_samples,
        window=steps.terms.log_prob.shape[1],
        num_elements=steps.terms.num_elements,
        replays=replays,
        reading=read(replays),
        notes=run.notes,
    )


def read(replays: Sequence[Replay]) -> str:
    """The presets that differ from no correction and those that do not, in words."""
    replayed = [(replay.label, replay.outcome) for replay in replays if replay.outcome is not None]
    same = [name for name, outcome in replayed if outcome.same]
    left = f"{_counted(same, 'change')} only the gradient's length, which Adam ignores"
    parts = [
        f"of {len(replayed)} replay{'s'[: len(replayed) > 1]}, {left}"
        + (f": {', '.join(same)}" if same else "")
    ]
    for cause in ("rejection", "clipping", "not clipping", "weights"):
        turned = {
            name: outcome for name, outcome in replayed if not outcome.same and _cause(outcome) == cause
        }
        if turned:
            cosines = [_or_zero(outcome.cosine) for outcome in turned.values()]
            bounds = " to ".join(dict.fromkeys(f"{bound:.3f}" for bound in (min(cosines), max(cosines))))
            names = f": {', '.join(turned)}" if len(turned) <= _MAX_NAMES else ""
            parts.append(f"{_counted(turned, 'turn')} the gradient by {cause} (cosine {bounds}){names}")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _counted(names: Sized, verb: str) -> str:
    return f"{len(names) or 'none'} {verb}{'s' if len(names) < 2 else ''}"


def _cause(outcome: Outcome) -> str:
    """The cause that turns the gradient most."""
    if outcome.rejected_terms > SAME_TERMS:
        return "rejection"
    if outcome.appeared_terms > SAME_TERMS:
        return "not clipping"
    return "clipping" if min(outcome.changed_terms, _or_zero(outcome.clipped)) > SAME_TERMS else "weights"


def _or_zero(value: float | None) -> float:
    return 0.0 if value is None else value


def parse_scales(text: str) -> list[Scale]:
    """`mean,sqrt,2.5` as a list.

    Raises:
        ConfigError: an entry is neither the name of a scale nor a positive number.
    """
    return [_scale(entry.strip()) for entry in text.split(",")]


def _scale(text: str) -> Scale:
    if text in SCALES:
        return cast(ScaleName, text)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ConfigError(unknown_choice("--scales", text, (*SCALES, "a positive number")))
    return number


# What is replayed --------------------------------------------------------------------------------------------


def _corrections(
    config: Config, presets: Sequence[str], scales: Sequence[Scale]
) -> list[RolloutCorrectionConfig]:
    """Each preset at its own scale and at `scales`, and the run's own correction if it is none of them."""
    for name in presets:
        if name not in NAMES:
            raise ConfigError(unknown_choice("--presets", name, (*NAMES, "all")))
    names = presets or list(PRESETS)
    found: list[RolloutCorrectionConfig] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a scale that has nothing to act on
        for name in names:
            preset = RolloutCorrectionConfig.from_preset(name)
            other = [scale for scale in scales if scale != preset.log_ratio_scale and _is_scaled(preset)]
            found += [preset, *(replace(preset, log_ratio_scale=scale) for scale in other)]
        own = config.algorithm.rollout_correction
        if own.mode != "off" and own not in found:
            changed = own.preset is None or own != RolloutCorrectionConfig.from_preset(own.preset)
            found.append(replace(own, preset=None) if changed else own)
    return found


def _is_scaled(correction: RolloutCorrectionConfig) -> bool:
    return (
        correction.applies_weights
        or correction.rollout_rs is not None
        or correction.rollout_token_veto_threshold is not None
    )


def _in_mode(
    correction: RolloutCorrectionConfig, mode: Literal["decoupled", "bypass"]
) -> RolloutCorrectionConfig:
    """The correction as a step in `mode` has it, where its own mode is `auto`."""
    if correction.mode != "auto":
        return correction
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return correction.in_mode(mode)


# Comparing -----------------------------------------------------------------------------------------------------


class _Tally:
    """Sums that make an `Outcome`, chunk by chunk."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.sums: dict[str, float] = {}
        # By step, [., 3]: coefficients times uncorrected ones, and both squared.
        self.products: list[Tensor] = []
        self.factors = torch.empty(0)
        self.stride = 1  # of the terms whose factor is kept
        self.reason = ""

    def skip(self, steps: LoggedSteps, reason: str) -> None:
        self.reason = reason
        self.products.append(torch.zeros(len(steps.sizes), 3, dtype=torch.float64))

    def add(self, steps: LoggedSteps, replayed: Replayed, uncorrected: Replayed) -> None:
        ours, theirs = replayed.coefficients, uncorrected.coefficients
        pairs = ((ours, theirs), (ours, ours), (theirs, theirs))
        self.products.append(torch.stack([steps.sums(one * other) for one, other in pairs], dim=1))
        self._add_factors((ours / theirs)[theirs != 0].float())
        self.metrics = self.metrics.merge(replayed.metrics).on_host()
        sums = {
            **replayed.corrected.counts(),
            "changed_terms": int((ours.sign() != theirs.sign()).sum()),
            "appeared_terms": int(((theirs == 0) & (ours != 0)).sum()),
            "loss": replayed.loss_sum,
            "count": replayed.count,
        }
        self.sums = {name: self.sums.get(name, 0.0) + value for name, value in sums.items()}

    def _add_factors(self, factors: Tensor) -> None:
        self.factors = torch.cat([self.factors, factors[:: self.stride]])
        while len(self.factors) > MAX_FACTORS:
            self.factors = self.factors[::2]
            self.stride *= 2

    def outcome(self, *, weighted: bool) -> Outcome:
        values, sums = self.metrics.compute(), self.sums
        products = torch.cat(self.products)
        dots, ours, theirs = products.unbind(1)
        found = theirs > 0
        cosines = torch.where(ours > 0, dots / (ours * theirs).sqrt(), 0.0).clamp(-1, 1)
        factors = self.factors.quantile(torch.tensor(FACTOR_LEVELS)).tolist() if len(self.factors) else None

        def weight(name: str) -> float | None:
            return values.get(f"rollout_corr/rollout_is_{name}") if weighted else None

        return Outcome(
            mean_weight=weight("mean"),
            weight_std=weight("std"),
            max_weight=weight("max"),
            ess=weight("eff_sample_size"),
            rejected_terms=sums["rejected_terms"] / sums["terms"],
            rejected_samples=sums["rejected_samples"] / sums["samples"],
            clipped=values.get("actor/pg_clipfrac"),
            loss=sums["loss"] / max(sums["count"], 1.0),
            cosine=float(cosines[found].mean()) if found.any() else None,
            least_cosine=float(cosines[found].min()) if found.any() else None,
            relative_norm=math.sqrt(float(ours.sum() / theirs.sum())) if found.any() else None,
            factors=factors,
            changed_terms=sums["changed_terms"] / sums["terms"],
            appeared_terms=sums["appeared_terms"] / sums["terms"],
            cosines=[value if there else None for value, there in zip(cosines.tolist(), found, strict=True)],
        )


def _finished(config: Config, correction: RolloutCorrectionConfig, tally: _Tally) -> Replay:
    outcome, reason = None, tally.reason
    if tally.sums:
        outcome, reason = tally.outcome(weighted=correction.applies_weights), ""
        if not math.isfinite(outcome.loss):
            outcome, reason = None, "its loss is not finite on these terms"
    name = correction.preset
    return Replay(
        name=THIS_RUN if name is None else name,
        aliases=PRESETS[name].aliases if name in PRESETS else (),
        mode=correction.mode,
        scale=correction.log_ratio_scale,
        of_run=correction == config.algorithm.rollout_correction,
        outcome=outcome,
        reason=reason,
    )


def _distance(replay: Replay) -> tuple[float, ...]:
    """How far it is from no correction, for sorting; what cannot be replayed comes last."""
    outcome = replay.outcome
    if outcome is None:
        return (math.inf,)
    cosine = -1.0 if outcome.cosine is None else outcome.cosine
    return 1 - round(cosine, 4), round(outcome.changed_terms, 3)
