"""From runs to an answer: paired differences with intervals, Holm's correction, the table and the figure."""

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from arms import SCREEN, UNCORRECTED, Arm

ALPHA = 0.05
MARGIN = 0.02  # of held-out exact match, below which a difference is not worth a name
SHARED_PHASES = ("rollout", "reward", "correction", "update")
MARGIN_OF_REWARD = 0.03  # of a JPEG's size as reward, a fifth of what a run gains
Rows = Sequence[Mapping[str, str]]


# Statistics ----------------------------------------------------------------------------------------------


def t_two_sided(t: float, dof: int) -> float:
    """P(|T| > |t|) of Student's t: the finite series for whole `dof` of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    theta = math.atan(abs(t) / math.sqrt(dof))
    odd = dof % 2
    term, series = (math.cos(theta) if odd else 1.0), 0.0
    for k in range(odd, dof - 1, 2):
        series += term
        term *= math.cos(theta) ** 2 * (k + 1) / (k + 2)
    inside = math.sin(theta) * series
    return 1 - (2 / math.pi * (theta + inside) if odd else inside)


def t_quantile(alpha: float, dof: int) -> float:
    """The t that |T| exceeds with probability `alpha`, by bisection."""
    low, high = 0.0, 1e9
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if t_two_sided(middle, dof) > alpha else (low, middle)
    return high


def paired_t(differences: Sequence[float]) -> tuple[float, float, float]:
    """Mean, half width of its 95 % t interval, and two-sided p; without two pairs the last two are NaN."""
    mean, count = statistics.fmean(differences), len(differences)
    if count < 2:
        return mean, math.nan, math.nan
    error = statistics.stdev(differences) / math.sqrt(count)
    if error == 0:
        return mean, 0.0, float(mean == 0)
    return mean, t_quantile(ALPHA, count - 1) * error, t_two_sided(mean / error, count - 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the order given. Source: Holm (1979)."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


# Comparisons ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The outcome of an arm, held-out exact match or reward, against a reference, paired by seed.

    Attributes:
        differences: arm minus reference, one a seed.
        mean: of the differences.
        half_width: of the 95 % t interval of `mean`.
        p: two-sided, of a paired t test.
        adjusted: `p` by Holm over all comparisons of the family.
    """

    arm: Arm
    reference: Arm
    differences: tuple[float, ...]
    mean: float
    half_width: float
    p: float
    adjusted: float = math.nan

    @property
    def label(self) -> str:
        return f"{self.arm} against {self.reference}"


class Study:
    """The runs of one phase.

    Args:
        rows: of its file, one a run and evaluation.
        outcome: the column that is compared.
    """

    def __init__(self, rows: Rows, outcome: str = "exact_match") -> None:
        self.outcome = outcome
        self.runs: dict[Arm, dict[int, list[Mapping[str, str]]]] = {}
        for row in sorted(rows, key=lambda row: int(row["step"])):
            self.runs.setdefault(Arm.parse(row["arm"]), {}).setdefault(int(row["seed"]), []).append(row)

    def last(self, arm: Arm, column: str) -> list[float]:
        """A column at the end of each of the arm's runs."""
        return [float(run[-1][column]) for run in self.runs[arm].values()]

    @property
    def cpu_hours(self) -> float:
        """Of all runs, evaluations included."""
        return sum(sum(self.last(arm, "cpu_total")) for arm in self.runs) / 3600

    def half_way(self) -> "Study":
        """The same runs at their first evaluation, of those that have a later one."""
        rows = [run[0] for runs in self.runs.values() for run in runs.values() if len(run) > 1]
        return Study(rows, self.outcome)

    def seconds_a_step(self, arm: Arm) -> float:
        """Seconds of one thread for a training step.

        Only the recompute pass is the arm's own: the rest is the median over all arms with the same window, as an
        emulated engine and the second rollout of a corrupted one say nothing of what such a rollout would cost.
        """
        alike = [other for other in self.runs if other.window == arm.window and not other.corrupted]

        def seconds(arms: Sequence[Arm], phase: str) -> float:
            runs = [run[-1] for one in arms for run in self.runs[one].values()]
            return statistics.median(float(row[f"cpu_{phase}"]) / int(row["step"]) for row in runs)

        return sum(seconds(alike or [arm], phase) for phase in SHARED_PHASES) + seconds([arm], "old_log_prob")

    def equal_steps(self, arms: Collection[Arm] | None = None) -> list[Comparison]:
        """Every arm, or each of these, against its references after all steps."""
        pairs = [pair for pair in self.pairs() if arms is None or pair[0] in arms]
        return self._compare(lambda arm, _, run: float(run[-1][self.outcome]), pairs)

    def equal_time(self) -> list[Comparison]:
        """Arms that save the recompute pass against references that do not, when the cheaper one ends.

        The dearer one's curve is interpolated between its evaluations.
        """

        def score(arm: Arm, other: Arm, run: Sequence[Mapping[str, str]]) -> float:
            budget = min(1.0, self.seconds_a_step(other) / self.seconds_a_step(arm))
            return interpolate(run, budget * int(run[-1]["step"]), self.outcome)

        saving = [
            pair
            for pair in self.pairs()
            if self.seconds_a_step(pair[0]) < 0.98 * self.seconds_a_step(pair[1])
            and pair[1].correction == UNCORRECTED
            and pair[0].correction != UNCORRECTED
        ]
        return self._compare(score, saving)

    def pairs(self) -> list[tuple[Arm, Arm]]:
        """Every arm with each of its references that was run."""
        return [(arm, other) for arm in self.runs for other in arm.references if other in self.runs]

    def _compare(
        self,
        score: Callable[[Arm, Arm, Sequence[Mapping[str, str]]], float],
        pairs: Sequence[tuple[Arm, Arm]],
    ) -> list[Comparison]:
        found = []
        for arm, other in pairs:
            mine, theirs = self.runs[arm], self.runs[other]
            differences = tuple(
                score(arm, other, mine[seed]) - score(other, arm, theirs[seed])
                for seed in sorted(mine.keys() & theirs.keys())
            )
            if differences:
                mean, half_width, p = paired_t(differences)
                found.append(
                    Comparison(
                        arm=arm,
                        reference=other,
                        differences=differences,
                        mean=mean,
                        half_width=half_width,
                        p=p,
                    )
                )
        adjusted = holm([comparison.p for comparison in found])
        return [replace(one, adjusted=value) for one, value in zip(found, adjusted, strict=True)]


def interpolate(run: Sequence[Mapping[str, str]], step: float, column: str) -> float:
    """A column at a step between the last two evaluations of a run."""
    if len(run) < 2:
        return float(run[-1][column])
    before, after = run[-2:]
    share = (step - int(before["step"])) / (int(after["step"]) - int(before["step"]))
    return (1 - share) * float(before[column]) + share * float(after[column])


# Table ---------------------------------------------------------------------------------------------------


def table(screen: Study, confirmation: Study) -> str:
    """Markdown: what was confirmed, in words and numbers, then the whole screen."""
    parts = [
        f"CPU time: {screen.cpu_hours:.1f} h of screening, {confirmation.cpu_hours:.1f} h of confirmation."
    ]
    if confirmation.runs:
        parts += _confirmed(confirmation)
    return "\n".join([*parts, *_screened(screen)]) + "\n"


def _confirmed(study: Study, title: str = "Confirmed") -> list[str]:
    steps, time = study.equal_steps(), study.equal_time()
    seeds = sorted({len(comparison.differences) for comparison in steps})
    return [
        "",
        f"## {title}",
        "",
        f"Paired differences of held-out exact match, over {' or '.join(map(str, seeds))} seeds, with 95 % t "
        "intervals; p of paired t tests, and by Holm over the table.",
        "",
        *verdict(steps, "at equal steps"),
        *verdict(time, "at equal time"),
        "",
        *_comparisons(study, steps, "At equal steps"),
        "",
        *_comparisons(study, time, "At equal time of one thread"),
    ]


def verdict(comparisons: Sequence[Comparison], where: str) -> list[str]:
    """What was and what was not significant, one line each."""
    sure = [one for one in comparisons if one.adjusted < ALPHA]
    unsure = [one for one in comparisons if not one.adjusted < ALPHA]
    lines = [f"- {one.label}, {where}: {_signed(one)}, significant." for one in sure]
    if unsure:
        width = max((one.half_width for one in unsure), default=math.nan)
        names = "; ".join(one.label for one in unsure)
        lines.append(f"- No significant difference {where} (intervals up to ±{width:.3f}): {names}.")
    return lines


def _comparisons(study: Study, comparisons: Sequence[Comparison], title: str) -> list[str]:
    lines = [
        f"| {title} | {study.outcome.replace('_', ' ')} | against | difference | p | by Holm |",
        "|---" * 6 + "|",
    ]
    for one in comparisons:
        mean = statistics.fmean(study.last(one.arm, study.outcome))
        lines.append(
            f"| {one.arm} | {mean:.3f} | {one.reference} | {_signed(one)} | {one.p:.2g} | {one.adjusted:.2g} |"
        )
    return lines


def _signed(comparison: Comparison) -> str:
    return f"{comparison.mean:+.3f} ± {comparison.half_width:.3f}"


def _screened(study: Study) -> list[str]:
    differences = {
        one.arm: one.differences for one in study.equal_steps() if one.reference == one.arm.references[0]
    }
    lines = [
        "",
        "## Screened",
        "",
        "Exact match, and its difference to uncorrected training (for that, to fp32) by seed: for choosing arms, and "
        "too few seeds to conclude from. Gap: mean |delta log p|, nats per latent element. Noise: terms outside the "
        "clip range before any update. Seconds of one thread a step.",
        "",
        "| arm | exact match | differences | gap | noise | clipped | rejected | ESS | s |",
        "|---" * 9 + "|",
    ]
    for arm in study.runs:
        exact, gap, noise, clipped, rejected, ess = (
            statistics.fmean(study.last(arm, column))
            for column in ("exact_match", "gap", "clip_noise", "clipped", "rejected", "ess")
        )
        shown = " ".join(f"{value:+.3f}" for value in differences.get(arm, ()))
        numbers = f"{gap:.1e} | {noise:.0%} | {clipped:.0%} | {rejected:.0%} | " + (
            "" if math.isnan(ess) else f"{ess:.2f}"
        )
        lines.append(f"| {arm} | {exact:.3f} | {shown} | {numbers} | {study.seconds_a_step(arm):.2f} |")
    reasons = [f"- {setting}: {reason}." for setting, (_, reason) in SCREEN.items()]
    return [*lines, "", "Why these:", "", *reasons]


# Figure --------------------------------------------------------------------------------------------------


def draw(study: Study, path: Path) -> None:
    """Differences at equal steps, by seed, with 95 % intervals; in colour where significant over the figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    comparisons = sorted(study.equal_steps(), key=lambda one: one.arm.setting)
    figure, axes = pyplot.subplots(figsize=(8, 1.1 + 0.24 * len(comparisons)), dpi=120)
    for place, one in enumerate(comparisons):
        several = len(one.differences) > 2  # two may agree by chance
        sure = several and one.adjusted < ALPHA
        colour = "tab:red" if sure and one.mean < 0 else "tab:green" if sure else "tab:gray"
        if several:
            axes.errorbar(
                one.mean, place, xerr=one.half_width, fmt="o", color=colour, markersize=5, capsize=3
            )
        axes.plot(one.differences, [place] * len(one.differences), ".", color=colour, alpha=0.4)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(comparisons)), [one.label for one in comparisons], fontsize=8)
    axes.set(xlabel="difference in held-out exact match")
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def analyse(rows: Mapping[str, Rows], folder: Path) -> str:
    """Write the tables, and a picture of each phase into `folder`, and return the tables.

    Args:
        rows: by phase.
        folder: of the results.
    """
    studies = {name: Study(of_phase) for name, of_phase in rows.items()}
    texts = {"table.md": table(studies["screen"], studies["confirm"])}
    titles = {
        "bypass": "Rejection in bypass mode",
        "bypass_again": "Rejection in bypass mode, on other seeds",
        "centering": "Score centering where all steps learn",
    }
    for name, title in titles.items():
        if studies[name].runs:
            texts[f"{name}.md"] = "\n".join(_confirmed(studies[name], title)) + "\n"
    if studies["quantized"].runs:
        texts["quantized.md"] = quantized(rows["quantized"]) + "\n"
    for name, title in (
        ("samples", "12 of 24 images"),
        ("samples_again", "The better of them, on other seeds"),
    ):
        if studies[name].runs:
            texts[f"{name}.md"] = cheaper(studies[name], title, "at equal CPU time") + "\n"
    if studies["longer"].runs:
        texts["longer.md"] = longer(rows["longer"]) + "\n"
    if studies["exchanged"].runs:
        seeds, end = (
            {row["seed"] for row in rows["exchanged"]},
            max(int(row["step"]) for row in rows["exchanged"]),
        )
        beside = [row for row in rows["longer"] if row["seed"] in seeds and int(row["step"]) <= end]
        title, both = "Rewards of other samples beside longer steps", Study([*beside, *rows["exchanged"]])
        arms = [arm for arm in both.runs if arm.exchanged]
        texts["exchanged.md"] = cheaper(both, title, "at equal steps", arms=arms) + "\n"
    of_detail, harder = "under a reward of fine detail", "with a later window, guidance and few steps"
    for name, title, outcome, margin in (
        ("longer_jpeg", of_detail, "reward", MARGIN_OF_REWARD),
        ("longer_jpeg_again", f"{of_detail}, on other seeds", "reward", MARGIN_OF_REWARD),
        ("longer_elsewhere", harder, "exact_match", MARGIN),
        ("longer_guided", "with guidance, on other seeds", "exact_match", MARGIN),
    ):
        if rows[name]:
            text = cheaper(Study(rows[name], outcome), f"Longer steps {title}", "at equal steps", margin)
            texts[f"{name}.md"] = text + "\n"
    if studies["equivalence"].runs:
        both = Study([*rows["confirm"], *rows["equivalence"]])
        texts["equivalence.md"] = equivalence(both) + "\n"
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    for name in ("screen", "confirm", *titles):
        if studies[name].runs:
            draw(studies[name], folder / f"{name}.png")
    return "\n".join(texts.values())


def quantized(rows: Rows) -> str:
    """The comparisons on the trainer's base and on the unquantized one, and each arm on both."""
    trained, served = Study(rows), Study([{**row, "exact_match": row["served_exact_match"]} for row in rows])
    compared = _comparisons(served, served.equal_steps(), "At equal steps, on the unquantized base")
    lines = ["| Arm | on the trainer's base | on the unquantized base | difference |", "|---|---|---|---|"]
    for arm in trained.runs:
        both = [study.last(arm, "exact_match") for study in (trained, served)]
        mean, half_width, _ = paired_t([after - before for before, after in zip(*both, strict=True)])
        scores = " | ".join(f"{statistics.fmean(values):.3f}" for values in both)
        lines.append(f"| {arm} | {scores} | {mean:+.3f} ± {half_width:.3f} |")
    return "\n".join([*_confirmed(trained, "A trainer in NF4"), "", *compared, "", *lines])


def equivalence(study: Study) -> str:
    """Whether int4 rollouts differ from float32 ones by less than `MARGIN`, where log-probs are recomputed.

    Two one-sided t tests at 5 %: the 90 % interval of the mean difference lies within the margin. Source: Schuirmann,
    "A comparison of the two one-sided tests procedure", J. Pharmacokinet. Biopharm. 15 (1987).
    """
    (found,) = [one for one in study.equal_steps() if str(one.arm) == "int4/two/uncorrected"]
    return within_margin(found)


def within_margin(compared: Comparison, margin: float = MARGIN) -> str:
    """The two one-sided t tests of a comparison in a line: its 90 % interval, and whether it lies within the margin."""
    count = len(compared.differences)
    error = statistics.stdev(compared.differences) / math.sqrt(count)
    half_width = t_quantile(2 * ALPHA, count - 1) * error
    within = abs(compared.mean) + half_width < margin
    verdict = "equivalent" if within else "not shown to be equivalent"
    return (
        f"{compared.label}, {count} seeds: {compared.mean:+.4f}, 90 % interval ± {half_width:.4f}; "
        f"within the margin of {margin}: {verdict}."
    )


def longer(rows: Rows) -> str:
    """Arms with longer steps after as many training steps as the recipe, and after as many as take its CPU time."""
    of_recipe = min(
        max(int(row["step"]) for row in rows if row["arm"] == arm) for arm in {row["arm"] for row in rows}
    )
    at_equal_steps = Study([row for row in rows if int(row["step"]) <= of_recipe])
    title = "Longer steps after the window"
    return "\n\n".join(
        [
            cheaper(at_equal_steps, title, "at equal steps"),
            cheaper(Study(rows), f"{title}, more training steps", "at equal CPU time"),
        ]
    )


def cheaper(
    study: Study, title: str, where: str, margin: float = MARGIN, *, arms: Collection[Arm] | None = None
) -> str:
    """The comparisons of arms whose rollouts cost less, the CPU time of each, and equivalence within the margin.

    Args:
        study: whose last rows are compared.
        title: of the table.
        where: the arms are compared: at equal steps, or at equal CPU time.
        margin: of the outcome.
        arms: those that are compared with their references; by default all.
    """
    compared, half_way = study.equal_steps(arms), study.half_way()
    earlier = half_way.equal_steps(arms)
    lines = ["| Arm | steps | CPU s of training |", "|---|---|---|"]
    for arm in study.runs:
        steps = statistics.fmean(study.last(arm, "step"))
        lines.append(f"| {arm} | {steps:.0f} | {statistics.fmean(study.last(arm, 'cpu_seconds')):.1f} |")
    return "\n".join(
        [
            *(f"## {title}", ""),
            *(*verdict(compared, where), ""),
            *(*_comparisons(study, compared, where[0].upper() + where[1:]), ""),
            *((*_comparisons(half_way, earlier, "Half way"), "") if earlier else ()),
            *(*(f"- {within_margin(one, margin)}" for one in compared), ""),
            *lines,
        ]
    )
