"""When does a mismatch between rollout and training hurt FlowGRPO, and which correction repairs it?

    python examples/mismatch_study/run.py all --jobs 2 --out runs/study

A phase trains arms, each with several seeds, and was written down before it ran, most of them in an `arms*.yaml`;
`--help` lists them. The rows of a run are written to the phase's `*.csv` when it ends; runs that have rows are not done
again, so an interrupted study goes on where it was. `analyse` writes a table of each phase and a picture of some;
`results/` holds ours. Needs `pip install -e '.[ocr]'`, `quantized` also `'.[quantized]'`.
"""

import argparse
import csv
import math
import multiprocessing
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from analysis import Study, analyse
from arms import CONTROL, CORRUPTED_SHARE, RANDOM, UNCORRECTED, Arm, chosen, screened
from hooks import (
    ExchangedImages,
    OneOfFour,
    RandomRejection,
    StepMeanWeights,
    UnquantizedEngine,
    WrongPrompts,
)
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from flowcorr import config
from flowcorr.trainer import train_step
from flowcorr.trainer.evaluate import evaluate
from flowcorr.trainer.setup import build_run

HERE = Path(__file__).parent
RECIPE = "tiny_ocr_lora"
IN_TURN = ("rollout.batch_size=null", "reward.placement=local")  # a phase's CPU time is then its own
PHASES = ("rollout", "reward", "old_log_prob", "correction", "update")
METRICS = {  # column -> metric, meaned over the training steps since the last evaluation
    "train_reward": "reward/mean",
    "gap": "rollout_corr/logprob_abs_diff_mean",
    "kl": "rollout_corr/kl",
    "clip_noise": "rollout_corr/clip_noise_fraction",
    "ess": "rollout_corr/rollout_is_eff_sample_size",
    "rejected": "rollout_corr/rollout_rs_masked_fraction",
    "clipped": "actor/pg_clipfrac",
    "grad_norm": "actor/grad_norm",
}
Row = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of the study.

    Attributes:
        name: of its file.
        arms: what is compared.
        seeds: training seeds; every arm gets all of them. `bypass` has those of `confirm`, `exchanged` some of
            `longer`; no other phases share one.
        words: held-out words of an evaluation.
        steps: training steps by window, or by rollout.
        overrides: configuration keys for all its runs.
        served: whether its runs are also evaluated on the unquantized base.
        recipe: that its runs vary.
        evaluated: after which step, beside the end; None: half way.
    """

    name: str
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    words: int
    steps: Mapping[str, int]
    overrides: tuple[str, ...] = ()
    served: bool = False
    recipe: str = RECIPE
    evaluated: int | None = None

    def evaluations(self, arm: Arm) -> list[int]:
        """The training steps of an arm after which it is evaluated, the last at its end."""
        end = self.steps[arm.rollout if arm.rollout in self.steps else arm.window]
        return sorted({self.evaluated or end // 2, end})


@dataclass(frozen=True, slots=True)
class Run:
    """One arm with one seed; `rejected` is the share of terms that a control has to reject at random."""

    phase: Phase
    arm: Arm
    seed: int
    rejected: float = 0.0


def screen() -> Phase:
    """The arms of `arms.py` on two seeds; 1.9 CPU-hours."""
    return Phase(name="screen", arms=tuple(screened()), seeds=(0, 1), words=128, steps={"two": 12, "all": 8})


def confirm() -> Phase:
    """The arms of `arms.yaml`, chosen from the screen before any ran, on eight other seeds; 1.3 CPU-hours."""
    return Phase(
        name="confirm",
        arms=tuple(chosen(HERE / "arms.yaml")),
        seeds=tuple(range(10, 18)),
        words=512,
        steps={"two": 12, "all": 8},
    )


def bypass() -> Phase:
    """Rejection in bypass mode, in longer runs, as the first three steps of a band only measure; 2 CPU-hours."""
    arms = tuple(chosen(HERE / "arms_bypass.yaml"))
    return Phase(name="bypass", arms=arms, seeds=tuple(range(10, 18)), words=512, steps={"two": 18})


def bypass_again() -> Phase:
    """Two settings of `bypass` on twelve other seeds; 2 CPU-hours."""
    arms = tuple(chosen(HERE / "arms_bypass_again.yaml"))
    return replace(bypass(), name="bypass_again", arms=arms, seeds=tuple(range(44, 56)))


def quantized() -> Phase:
    """A trainer in NF4 beside an engine on the unquantized base; .5 CPU-hours."""
    arms = tuple(chosen(HERE / "arms_quantized.yaml"))
    seeds = tuple(range(40, 44))
    return Phase(name="quantized", arms=arms, seeds=seeds, words=256, steps={"two": 12}, served=True)


def equivalence() -> Phase:
    """Does int4 do harm that is worth a name? More seeds of two arms of `confirm`; .8 CPU-hours."""
    arms = tuple(Arm(rollout, "two", UNCORRECTED) for rollout in ("fp32", "int4"))
    return Phase(name="equivalence", arms=arms, seeds=tuple(range(18, 38)), words=512, steps={"two": 12})


def centering() -> Phase:
    """Score centering where all steps learn; 1 CPU-hour."""
    arms = tuple(chosen(HERE / "arms_centering.yaml"))
    return Phase(name="centering", arms=arms, seeds=tuple(range(60, 72)), words=512, steps={"all": 8})


def samples() -> Phase:
    """Learning from 12 of 24 images, in runs of equal CPU time by `arms_samples.yaml`; 2 CPU-hours."""
    arms = tuple(chosen(HERE / "arms_samples.yaml"))
    steps = {"fp32": 36, "fp32_12_of_24": 20, "fp32_24_of_24": 18}
    return Phase(name="samples", arms=arms, seeds=tuple(range(72, 84)), words=512, steps=steps)


def samples_again(rows: Sequence[Mapping[str, str]]) -> Phase:
    """The reference, and the better of the other arms of `samples` by these rows, on new seeds; 2 CPU-hours."""
    study = Study(rows)
    reference, *others = samples().arms
    better = max(others, key=lambda arm: statistics.fmean(study.last(arm, "exact_match")))
    return replace(samples(), name="samples_again", arms=(reference, better), seeds=tuple(range(84, 112)))


def longer() -> Phase:
    """Longer steps after the window, after as many training steps as the recipe and in its CPU time; 2 CPU-hours."""
    return Phase(
        name="longer",
        arms=tuple(chosen(HERE / "arms_longer.yaml")),
        seeds=tuple(range(120, 148)),
        words=512,
        steps={"fp8": 18, "fp8_longer_2": 20, "fp8_longer_6": 22},
        evaluated=18,
    )


def longer_jpeg() -> Phase:
    """The same under a reward of fine detail; .6 CPU-hours."""
    return Phase(
        name="longer_jpeg",
        arms=tuple(chosen(HERE / "arms_longer_jpeg.yaml")),
        seeds=tuple(range(150, 162)),
        words=512,
        steps={"two": 30},
        recipe="tiny_jpeg_lora",
    )


def longer_elsewhere() -> Phase:
    """The same with a later window, guidance and few steps; .9 CPU-hours."""
    return Phase(
        name="longer_elsewhere",
        arms=tuple(chosen(HERE / "arms_longer_elsewhere.yaml")),
        seeds=tuple(range(170, 178)),
        words=512,
        steps={"later": 18, "guided": 12, "few": 12},
    )


def longer_jpeg_again() -> Phase:
    """`longer_jpeg` on other seeds; .9 CPU-hours."""
    return replace(longer_jpeg(), name="longer_jpeg_again", seeds=tuple(range(220, 248)))


def longer_guided() -> Phase:
    """The arms with guidance of `longer_elsewhere` on other seeds; .8 CPU-hours."""
    arms = tuple(arm for arm in longer_elsewhere().arms if arm.window == "guided")
    return replace(longer_elsewhere(), name="longer_guided", arms=arms, seeds=tuple(range(190, 210)))


def exchanged() -> Phase:
    """Rewards of other samples, beside the runs of `longer` on the same seeds; .5 CPU-hours."""
    return replace(
        longer(),
        name="exchanged",
        arms=tuple(chosen(HERE / "arms_exchanged.yaml")),
        seeds=tuple(range(120, 132)),
        steps={"two": 18},
    )


PARTS = {
    phase.__name__: phase
    for phase in (
        *(screen, confirm, bypass, bypass_again, quantized, equivalence, centering),
        *(samples, longer, longer_jpeg, longer_jpeg_again, longer_elsewhere, longer_guided, exchanged),
    )
}
PHASE_NAMES = (*PARTS, "samples_again")


class PhaseClock:
    """CPU seconds of each phase of a step; a wall clock would also count what else the machine does."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._phase, self._since = "", time.process_time()

    def __call__(self, phase: str) -> None:
        now = time.process_time()
        self.seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now


def train(run: Run) -> list[Row]:
    """Train and evaluate; one row an evaluation. Its times are of training alone, but for `cpu_total`."""
    born = time.process_time()
    evaluations = run.phase.evaluations(run.arm)
    keys = [f"trainer.seed={run.seed}", f"data.num_heldout={run.phase.words}", *IN_TURN, *run.phase.overrides]
    keys.append("trainer.on_fault=warn")  # some arms plant the faults that would stop them
    training, data = build_run(config.load(run.phase.recipe, [*run.arm.overrides(), *keys]))
    if run.arm.corrupted:
        training = replace(
            training, engine=WrongPrompts(training.engine, share=CORRUPTED_SHARE, seed=run.seed)
        )
    if run.arm.exchanged:
        engine = ExchangedImages(training.engine, share=run.arm.exchanged, seed=run.seed)
        training = replace(training, engine=engine)
    if run.arm.rollout.startswith("quarter_"):
        faulty = OneOfFour(training.engine, training.actor.weights, run.arm.rollout)
        training = replace(training, engine=faulty)
    served = training.actor
    if run.arm.rollout == "nf4_trainer":
        engine = UnquantizedEngine(training.config, training.actor.weights)
        served, training = engine.actor, replace(training, engine=engine)
    if run.arm.correction == CONTROL:
        training = replace(training, actor=StepMeanWeights(training.actor))
    if run.arm.correction in RANDOM:
        actor = RandomRejection(training.actor, share=run.rejected, seed=run.seed)
        training = replace(training, actor=actor)
    training.engine.sync(training.actor.weights.snapshot())

    rows: list[Row] = []
    seen: list[Mapping[str, float]] = []
    clock, wall = PhaseClock(), 0.0
    for step in range(1, evaluations[-1] + 1):
        begin = time.perf_counter()
        clock("other")
        result = train_step(training, step, clock)
        clock("other")
        wall += time.perf_counter() - begin
        seen.append(result.metrics.compute())
        if step in evaluations:
            scores = evaluate(training, data.heldout).metrics
            of_served: Row = {}
            if run.phase.served:
                found = evaluate(replace(training, actor=served), data.heldout).metrics
                of_served = {f"served_{name}": found[f"eval/{name}"] for name in ("exact_match", "reward")}
            rows.append(
                {
                    "arm": str(run.arm),
                    "seed": run.seed,
                    "step": step,
                    "exact_match": scores.get("eval/exact_match", math.nan),
                    "reward": scores["eval/reward"],
                    **of_served,
                    **{column: _mean(seen, name) for column, name in METRICS.items()},
                    "wall_seconds": wall,
                    "cpu_seconds": sum(clock.seconds[name] for name in PHASES),
                    "cpu_total": time.process_time() - born,
                    **{f"cpu_{name}": clock.seconds[name] for name in PHASES},
                }
            )
            seen = []
            clock("other")
    training.engine.close()
    return rows


def do(phase: Phase, out: Path, jobs: int) -> None:
    """Do the runs of a phase that `out` does not hold yet, seed by seed, so that a part of it is paired too."""
    controls = tuple(arm for arm in phase.arms if arm.correction in RANDOM)
    if 0 < len(controls) < len(phase.arms):  # which need the others' results
        others = tuple(arm for arm in phase.arms if arm not in controls)
        do(replace(phase, arms=others), out, jobs)
        phase = replace(phase, arms=controls)
    path = out / f"{phase.name}.csv"
    rows = read(path)
    done = {(row["arm"], int(row["seed"])) for row in rows}
    todo = [
        Run(phase, arm, seed, rejected_share(rows, arm, seed))
        for seed in phase.seeds
        for arm in phase.arms
        if (str(arm), seed) not in done
    ]
    with _mapper(jobs) as mapper, _progress(phase.name, len(todo)) as report:
        for rows in mapper(train, todo):
            append(path, rows)
            report(rows[-1])


def rejected_share(rows: Sequence[Mapping[str, str]], arm: Arm, seed: int) -> float:
    """The share of terms that a control has to reject: that of the run that it is the control of, same seed."""
    if arm.correction not in RANDOM:
        return 0.0
    rejecting = str(replace(arm, correction=RANDOM[arm.correction]))
    shares = [float(row["rejected"]) for row in rows if (row["arm"], int(row["seed"])) == (rejecting, seed)]
    return sum(shares) / len(shares)


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a phase; none if it has not begun."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def append(path: Path, rows: Sequence[Row]) -> None:
    """Add the rows of a run in one write, so that the file never holds half of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [] if path.exists() else [",".join(rows[0])]
    lines += [",".join(map(_text, row.values())) for row in rows]
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines))


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _mean(records: Sequence[Mapping[str, float]], name: str) -> float:
    """Mean of a metric over steps; NaN where the arm does not have it."""
    values = [record[name] for record in records if name in record]
    return sum(values) / len(values) if values else float("nan")


@contextmanager
def _mapper(jobs: int) -> Iterator:
    """`map` in this process, or over `jobs` processes in the order in which runs end."""
    if jobs == 1:
        yield map
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield pool.imap_unordered


@contextmanager
def _progress(name: str, total: int) -> Iterator:
    """A bar on a terminal, a line a run elsewhere; both estimate the time that is left."""
    console = Console(highlight=False)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[last]}"))
    bar = Progress(
        *(TextColumn(name), *columns),
        speed_estimate_period=3600,
        console=console,
        disable=not console.is_terminal,
    )
    task, begin = bar.add_task(name, total=total, last=""), time.monotonic()
    count = 0

    def report(row: Row) -> None:
        nonlocal count
        count += 1
        last = f"{row['arm']} seed {row['seed']}: {row['exact_match']:.3f}"
        bar.update(task, completed=count, last=last)
        if not console.is_terminal:
            left = (time.monotonic() - begin) / count * (total - count) / 60
            console.print(f"{name} {count}/{total}  {last}  {left:.0f} min left", soft_wrap=True)

    with bar:
        yield report


if __name__ == "__main__":
    about = {name: (PARTS.get(name) or samples_again).__doc__ for name in PHASE_NAMES}
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="\n".join(["phases:", *(f"  {name:18} {text}" for name, text in about.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    choices = (*PHASE_NAMES, "analyse", "all")
    parser.add_argument(
        "phase", choices=choices, nargs="?", default="all", metavar="PHASE", help="or analyse, or all"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one thread")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    # Which ends the pool's processes too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    for name in PHASE_NAMES:
        if arguments.phase in (name, "all"):
            phase = PARTS[name]() if name in PARTS else samples_again(read(arguments.out / "samples.csv"))
            do(phase, arguments.out, arguments.jobs)
    if arguments.phase in ("analyse", "all"):
        rows = {name: read(arguments.out / f"{name}.csv") for name in PHASE_NAMES}
        print(analyse(rows, arguments.out))
