"""The report on a plan: whether the run fits, peaks and times by phase, and changes that make it fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace

from flowcorr.config.schema import Config
from flowcorr.health.finding import Finding, Level, keys_of
from flowcorr.instruments import page
from flowcorr.instruments.outcome import Column, Fact, Report, Table
from flowcorr.instruments.plan.answers import MARGIN, SHARED, Plan, duration, gigabytes
from flowcorr.instruments.plan.devices import Gpu
from flowcorr.instruments.plan.estimate import make_plan


def plan(config: Config, *, gpu: Gpu, ranks: int = 1, title: str = "") -> Report:
    """Predict memory and time of a run on a GPU; see `make_plan`."""
    return report_of(make_plan(config, gpu=gpu, ranks=ranks, title=title))


def report_of(made: Plan) -> Report:
    """The report on the numbers of a plan; its verdict is on the trainer, which has a finding of the same words."""
    trainer = _trainer(made)
    ranks = "1 rank" if made.ranks == 1 else f"{made.ranks} ranks"
    return Report(
        title=made.title,
        verdict=trainer.sentence,
        facts=(
            Fact(
                name="title",
                value=made.title,
                text=f"{made.title} on {made.gpu.name}, {ranks}, {made.images} images a step each",
            ),
            *_facts(made),
        ),
        tables=(_phases(made),),
        findings=(trainer, _micro_batch(made), *_engine(made)),
    )


def exit_code(report: Report) -> int:
    """0 if the run fits, 1 if it may not, 2 if it does not, each with a GPU for the engine if it needs one."""
    own = [finding for finding in report.findings if finding.cause != SHARED]
    return page.exit_code(replace(report, findings=own))


def _facts(made: Plan) -> Iterator[Fact]:
    for name in ("ranks", "images", "micro_batch", "largest_micro_batch"):
        yield Fact(name=name, value=getattr(made, name))
    yield Fact(name="gpu", value=asdict(made.gpu))
    yield Fact(name="memory", value=asdict(made.memory))
    yield Fact(name="fits", value=made.fitting)
    shared = made.memory.shared
    yield Fact(name="shared_fits", value=None if shared is None else made.fits(shared))
    yield Fact(name="step_seconds", value=made.seconds())
    for name, speed in made.speeds.items():
        text = f"{name}: {speed.share:.0%} of the peak; {speed.source}"
        yield Fact(name=f"{name}_speed", value=asdict(speed), text=text)
    overlap = "sampling overlaps with training: a step takes as long as the longer of the two"
    yield Fact(name="overlaps", value=made.overlaps, text=overlap if made.overlaps else "")


def _phases(made: Plan) -> Table:
    """Peak bytes and seconds by phase, including phases before the first step."""
    memory = made.memory
    engine = {"sample": memory.engine, "decode": memory.engine} if memory.engine else {}
    peaks = {**memory.phases, **engine, "reward model": memory.phases["reward"]}
    rows: list[tuple[str, str, float | None, float | None]] = [
        (name, "trainer", peaks[name], 0.0) for name in ("load", "encode", "evaluate") if name in peaks
    ]
    rows += [(phase.name, phase.where, peaks.get(phase.name), phase.seconds) for phase in made.phases]
    rows.append(("step", "", None, made.seconds()))
    return Table(
        name="phases",
        title="phases of a step",
        columns=(
            Column(name="phase", words=True),
            Column(name="on", words=True),
            Column(name="peak", show=gigabytes),
            Column(name="seconds", heading="time", show=lambda seconds: duration(seconds) if seconds else ""),
        ),
        rows=rows,
        marks=["this" if name == "step" else "" for name, *_ in rows],
    )


def _trainer(made: Plan) -> Finding:
    """The finding on the trainer's memory: whether it fits, the phase of its peak, and a change that makes it fit."""
    phases = made.memory.phases
    highest = max(phases, key=lambda name: phases[name])
    peak, card = phases[highest], gigabytes(made.gpu.memory)
    if "=" not in made.gpu.name:  # a GPU given by numbers has no other name
        card = f"{made.gpu.name} ({card})"
    needed = gigabytes(peak * MARGIN)
    size = f"the trainer needs {gigabytes(peak)} at its peak, in {highest}; with the margin {needed}"
    level: Level = "healthy"
    fits = "fits"
    if not made.fits(peak):
        close = peak <= made.gpu.memory
        level, fits = ("warning", "may not fit") if close else ("serious", "does not fit")
    remedy, keys = _less_memory(made)
    sentence = f"{fits} {card}: {size}"
    return Finding(level=level, cause="trainer_memory", sentence=sentence, remedy=remedy, keys=keys)


def _less_memory(made: Plan) -> tuple[str, str]:
    """The remedy by which the trainer fits, and its keys; empty if it fits, or fits with a smaller micro-batch."""
    if made.fits(made.memory.trainer):
        return "", ""
    whole = {overrides: memory.trainer for overrides, memory in made.changes.items()}
    remedy, keys = _first_that_fits(made, whole)
    if remedy or made.fits(made.memory.with_one_sample):
        return remedy, keys
    one = "actor.micro_batch_size=1"
    smallest = {f"{overrides} {one}": memory.with_one_sample for overrides, memory in made.changes.items()}
    remedy, keys = _first_that_fits(made, smallest)
    if remedy:
        return remedy, keys
    batches = [made.memory.phases.get(phase, 0.0) for phase in ("sample", "evaluate")]
    smaller = () if all(map(made.fits, batches)) else ("a smaller rollout.batch_size",)
    ways = ", ".join(("a GPU with more memory", *smaller, *made.other_changes))
    return f"use {ways}, or fewer images a step", ""


def _micro_batch(made: Plan) -> Finding:
    """Whether the micro-batch fits, and the largest that does."""
    largest, now = made.largest_micro_batch, f"a micro-batch of {made.micro_batch} samples"
    level: Level = "healthy"
    remedy = keys = ""
    if largest >= made.micro_batch:
        sentence = f"{now} fits; the largest that does is {largest}"
    elif largest:
        level, sentence = "warning", f"{now} does not fit"
        remedy, keys = "use the largest that does", keys_of(f"actor.micro_batch_size={largest}")
    else:
        needed = gigabytes(made.memory.with_one_sample * MARGIN)
        level = "serious"
        sentence = f"no actor.micro_batch_size fits: one sample takes {needed} with the margin"
    return Finding(level=level, cause="micro_batch", sentence=sentence, remedy=remedy, keys=keys)


def _engine(made: Plan) -> Iterator[Finding]:
    """Whether the engine fits a GPU of its own, and one that it shares with the trainer."""
    memory = made.memory
    if not memory.engine:
        yield _of_engine("note", "the trainer samples by itself, so no engine needs memory")
        return
    alone = f"the engine needs {gigabytes(memory.engine)}"
    if not made.fits(memory.engine):
        yield _of_engine(
            "serious", f"{alone}, which does not fit", *_first_that_fits(made, made.engine_changes)
        )
    elif memory.shared is None:
        yield _of_engine("healthy", f"{alone} on each GPU of its own")
    if memory.shared is None:
        return
    together = f"{alone}, with the trainer on one GPU {gigabytes(memory.shared)}"
    if made.fits(memory.shared):
        yield _of_engine("healthy", f"{together}, which fits", cause=SHARED)
        return
    remedy, keys = _first_that_fits(made, made.shared_changes)
    remedy = remedy or "give it a GPU of its own"
    yield _of_engine("warning", f"{together}, which does not fit", remedy, keys, cause=SHARED)


def _first_that_fits(made: Plan, changes: Mapping[str, float]) -> tuple[str, str]:
    """The first change with a peak that fits, in words and as keys; empty if there is none."""
    for overrides, peak in changes.items():
        if made.fits(peak):
            return f"keep less on the GPU: {gigabytes(peak)} then, which fits", keys_of(overrides)
    return "", ""


def _of_engine(
    level: Level, sentence: str, remedy: str = "", keys: str = "", *, cause: str = "engine_memory"
) -> Finding:
    return Finding(level=level, cause=cause, sentence=sentence, remedy=remedy, keys=keys)
