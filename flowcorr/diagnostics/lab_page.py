"""A lab report as rows of a table, as JSON, and as a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowcorr.diagnostics.lab import THIS_RUN, LabReport, Outcome, Replay
from flowcorr.errors import BackendError

HEADER = (
    "preset",
    "weight",
    "std",
    "largest",
    "ESS",
    "rejected",
    "samples",
    "clipped",
    "loss",
    "cosine",
    "lowest",
    "norm",
    "factors",
    "changed",
)
_MAX_LINES = 8


def row(replay: Replay, outcome: Outcome) -> tuple[str, ...]:
    """The cells under `HEADER`; shares are of terms, but for `samples`; factors are the 1 % and 99 % quantiles."""
    return (
        _label(replay),
        *map(_number, (outcome.mean_weight, outcome.weight_std, outcome.max_weight, outcome.ess)),
        *map(_share, (outcome.rejected_terms, outcome.rejected_samples, outcome.clipped)),
        f"{outcome.loss:.2e}",
        *map(_number, (outcome.cosine, outcome.least_cosine, outcome.relative_norm)),
        "-" if outcome.factors is None else f"{outcome.factors[0]:z.2f}..{outcome.factors[-1]:z.2f}",
        _share(outcome.changed_terms),
    )


def facts(report: LabReport) -> str:
    """What was replayed, in a line."""
    first, last = report.steps[0], report.steps[-1]
    steps = f"step {first}" if len(report.steps) == 1 else f"{len(report.steps)} steps, {first} to {last}"
    modes = {0: "decoupled", len(report.steps): "bypass"}
    mode = modes.get(report.num_bypass, f"{report.num_bypass} of the steps in bypass")
    return (
        f"{steps}: {report.num_samples} samples of {report.window} SDE steps, D = {report.num_elements}; "
        f"loss {report.loss_mode}, {mode}"
    )


def as_json(report: LabReport) -> str:
    """The report as JSON."""
    return json.dumps(report.to_mapping(), indent=2, allow_nan=False)


def save(report: LabReport, folder: Path) -> Path:
    """Write `lab.json`.

    Args:
        report: what was replayed.
        folder: made if it is missing.

    Raises:
        BackendError: the folder cannot be written to.
    """
    path = folder / "lab.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(as_json(report) + "\n", encoding="utf-8")
    except OSError as error:
        raise _cannot_write(path, error) from error
    return path


def draw(report: LabReport, path: Path) -> bool:
    """Draw how far each preset's gradient is from no correction, and how that changes over training, as PNG.

    Returns:
        Whether it was drawn; False without matplotlib.

    Raises:
        BackendError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    shown = [(replay, replay.outcome) for replay in report.replays if replay.outcome is not None]
    moving = _distinct(shown)
    tall, low = 1.6 + 0.24 * len(shown), 3.4 if moving and len(report.steps) > 1 else 0.0
    figure = Figure(figsize=(11, tall + low), dpi=110, layout="constrained")
    figure.suptitle(facts(report), fontsize=10)
    parts = figure.subfigures(2 if low else 1, 1, squeeze=False, height_ratios=(tall, low) if low else None)
    _draw_presets(parts[0, 0].subplots(1, 4, sharey=True), shown)
    if low:
        _draw_steps(parts[1, 0].subplots(), report.steps, moving)
    try:
        figure.savefig(path)
    except OSError as error:
        raise _cannot_write(path, error) from error
    return True


def _draw_presets(panels: Any, shown: Sequence[tuple[Replay, Outcome]]) -> None:
    """A row a preset: direction and length of its gradient, what it drops, what its weights are worth."""
    direction, length, terms, worth = panels
    places = range(len(shown))
    outcomes = [outcome for _, outcome in shown]
    colours = ["tab:gray" if outcome.same else "tab:blue" for outcome in outcomes]
    cosines = [_or_nan(outcome.cosine) for outcome in outcomes]
    least = [_or_nan(outcome.least_cosine) for outcome in outcomes]
    direction.hlines(places, least, cosines, colors=colours)
    direction.scatter(cosines, places, c=colours)
    direction.set(
        title="cosine with no correction",
        xlabel="mean and lowest over steps",
        xlim=(min(0.0, *least) - 0.04, 1.04),
    )
    length.scatter([_or_nan(outcome.relative_norm) for outcome in outcomes], places, c=colours)
    factors = [outcome.factors or (math.nan, math.nan) for outcome in outcomes]
    length.hlines(places, [low[0] for low in factors], [high[-1] for high in factors], colors=colours)
    length.axvline(1, color="tab:gray", linewidth=0.8)
    length.set(title="gradient over uncorrected", xlabel="dot: whole; line: 98 % of terms")
    terms.scatter([100 * outcome.changed_terms for outcome in outcomes], places, c=colours)
    rejected = [100 * outcome.rejected_terms for outcome in outcomes]
    terms.scatter(rejected, places, s=80, facecolors="none", edgecolors="tab:red")
    terms.set(title="changed terms", xlabel="%; red rings: rejected ones", xlim=(-4, 104))
    worth.scatter([_or_nan(outcome.ess) for outcome in outcomes], places, c=colours)
    worth.set(title="effective sample size", xlabel="share; none without weights", xlim=(-0.04, 1.04))
    direction.set_yticks(places, [_label(replay) for replay, _ in shown], fontsize=8)
    direction.set_ylim(len(shown) - 0.4, -0.6)
    for panel in panels:
        panel.grid(alpha=0.3)


def _draw_steps(axes: Any, steps: Sequence[int], moving: Sequence[tuple[Replay, Outcome]]) -> None:
    """Cosines over training, of the presets that are furthest from no correction."""
    for replay, outcome in moving:
        axes.plot(steps, [_or_nan(cosine) for cosine in outcome.cosines], linewidth=1.2, label=_label(replay))
    axes.set(xlabel="training step", ylabel="cosine with the uncorrected gradient", ylim=(None, 1.02))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _distinct(shown: Sequence[tuple[Replay, Outcome]]) -> list[tuple[Replay, Outcome]]:
    """Those that turn the gradient, one of each that do it alike, and evenly chosen where there are too many."""
    kinds: dict[tuple[float, ...], tuple[Replay, Outcome]] = {}
    for replay, outcome in shown:
        if not outcome.same:
            kinds.setdefault(
                tuple(round(_or_nan(cosine), 2) for cosine in outcome.cosines), (replay, outcome)
            )
    found = list(kinds.values())
    stride = max(1, math.ceil(len(found) / _MAX_LINES))
    return found[::stride]


def _label(replay: Replay) -> str:
    marked = replay.of_run and replay.name != THIS_RUN
    return f"{replay.label} (this run)" if marked else replay.label


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if abs(value) < 1000 else f"{value:.1e}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _cannot_write(path: Path, error: OSError) -> BackendError:
    return BackendError(f"{path} cannot be written ({error.strerror or error}); give another --out DIR")
