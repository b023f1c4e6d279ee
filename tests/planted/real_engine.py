"""Plant faults in the real vllm-omni engine, on a CPU, and print what names each.

    PYTHONPATH=.:tests python -m tests.planted.real_engine --dtype float32 --guidance 3
    PYTHONPATH=.:tests python -m tests.planted.real_engine --family flux_kontext --fault references_scaled=0.01
    PYTHONPATH=.:tests python -m tests.planted.real_engine --dtype float32 --guidance 3 --begin 3 --steps 10

The engine is started once, with its worker in this process (`distributed_executor_backend: uni`), where a fault changes
its pipeline, its sampling loop, its transformer or its worker, and is taken back afterwards. Each fault is shown to the
doctor, in the precision that the engine has, and to a training run, decoupled, as a recipe starts both. A fault with a
size is planted in smaller ones while it is named. With `--begin`, a run without the doctor is shown instead: each fault
begins at that training step, and the row says where the gate stops the run. Needs the environment of
`tests/rollout/vllm_omni/install.sh`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from tiny_pipelines import FAMILIES, make_sensitive

from flowcorr.data import PromptStream
from flowcorr.errors import BackendError, BatchError, RolloutFault
from flowcorr.health.rules import HealthMonitor, units_of
from flowcorr.instruments.doctor import examine
from flowcorr.models import DTYPES
from flowcorr.models.prompt_cache import PromptCache
from flowcorr.records import Prompt
from flowcorr.rewards.base import RewardOutput
from flowcorr.trainer.run import TrainingRun
from flowcorr.trainer.step import train_step
from tests.planted.engine_faults import FAULTS, Place
from tests.planted.fault import Fault, parse_fault, smallest_named
from tests.rollout.vllm_omni.conftest import Stack, running, stack_config

WORDS = ("cat", "dog", "owl", "fox")
NUM_SIZES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What names a fault.

    Attributes:
        doctor: the checks that fail, those that warn in parentheses, or the error that ends the examination.
        rule: the first rule that speaks in training, or the error that ends it; empty if none does.
        step: its training step.
    """

    doctor: str
    rule: str
    step: int

    def within(self, steps: int) -> bool:
        """Whether the doctor fails, or a rule speaks within so many training steps."""
        return (bool(self.doctor) and not self.doctor.startswith("(")) or (
            bool(self.rule) and self.step <= steps
        )


class Bench:
    """A running engine whose faults come and go.

    Args:
        stack: actor and engine.
        steps: training steps of each fault, at most.
    """

    def __init__(self, stack: Stack, steps: int) -> None:
        from flowcorr.rollout.vllm_omni import pipeline
        from flowcorr.rollout.vllm_omni.worker import RolloutWorker

        def the_one(kind: type) -> Any:
            return next(found for found in gc.get_objects() if type(found).__mro__.count(kind))

        self.stack, self.steps = stack, steps
        # The prompts' text encoders leave with the cache.
        encoded = stack.family.embed(stack.prompts, replace(stack.actor.guidance, negative_prompt=""))
        empty = {name: rows for name, rows in encoded.items() if name.startswith("negative_")}
        stack.stir()
        stack.sync()
        self.place = Place(
            engine=stack.engine,
            module=pipeline,
            pipeline=the_one(pipeline.FlowcorrPipeline),
            worker=the_one(RolloutWorker),
            prompts=stack.prompts,
            empty_negative=empty,
        )
        self._initial, self._moves = stack.actor.weights.snapshot(), copy.copy(stack.engine._moves)
        self._cache = PromptCache(stack.family, stack.actor.guidance, stack.prompts)

    def named(self, fault: Fault | None, size: float = 0.0) -> Named:
        """What names a fault of this size; None for a clean engine."""
        with self._planted(fault, size):
            try:
                prompts = self.stack.prompts
                report = examine(self.stack.actor, self.stack.engine, self._cache(prompts), prompts=prompts)
                warned = [f"({check})" for check in report.causes("warning")]
                doctor = ", ".join(report.causes() or warned)
            except (BackendError, BatchError) as error:
                doctor = f"stops: {str(error).splitlines()[0][:60]}"
        with self._planted(fault, size):
            rule, step = self._trained()
        return Named(doctor=doctor, rule=rule, step=step)

    def stopped(self, fault: Fault | None, size: float, begin: int) -> tuple[int, list[str]]:
        """The step at which a run is stopped, and the causes; 0 where it trains to its end.

        Args:
            fault: the fault; None for a clean engine.
            size: of the fault.
            begin: the training step at which it begins.
        """
        with contextlib.ExitStack() as planted:
            planted.callback(self._restore)
            run = self._run("stop")
            for step in range(1, self.steps + 1):
                if step == begin:
                    planted.enter_context(self._planted(fault, size))
                try:
                    train_step(run, step, lambda phase: None)
                except RolloutFault as error:
                    return step, [finding.cause for finding in error.findings]
                except (BackendError, BatchError) as error:
                    return step, [f"stops: {str(error).splitlines()[0][:60]}"]
        return 0, []

    def _run(self, on_fault: Literal["stop", "warn"]) -> TrainingRun:
        stack = self.stack
        return TrainingRun(
            config=replace(stack.config, trainer=replace(stack.config.trainer, on_fault=on_fault)),
            actor=stack.actor,
            engine=stack.engine,
            cache=self._cache,
            prompts=PromptStream(stack.prompts, seed=0),
            reward=brightness,
        )

    def _trained(self) -> tuple[str, int]:
        stack, run = self.stack, self._run("warn")
        monitor: HealthMonitor | None = None
        for step in range(1, self.steps + 1):
            try:
                metrics = train_step(run, step, lambda phase: None).metrics.compute()
            except (BackendError, BatchError) as error:
                return f"stops: {str(error).splitlines()[0][:60]}", step
            monitor = monitor or HealthMonitor(units_of(stack.config, metrics))
            spoke = [finding.cause for finding in monitor.update(metrics) if finding.level != "note"]
            if named := [rule for rule in spoke if rule not in ("flat_groups", "clip_noise")]:
                return named[0], step
        return "", 0

    @contextlib.contextmanager
    def _planted(self, fault: Fault | None, size: float) -> Iterator[None]:
        with contextlib.ExitStack() as undo:
            undo.callback(self._restore)
            if fault is not None:
                with torch.no_grad():
                    fault.plant(size)(self.place, undo)
            yield

    def _restore(self) -> None:
        """Runs last: actor and engine as they were before the fault."""
        engine, weights = self.stack.engine, self.stack.actor.weights
        engine._moves = copy.copy(self._moves)
        weights.load(self._initial.tensors)
        weights.version += 1
        engine.sync(weights.snapshot())


def brightness(images: Any, prompts: list[Prompt]) -> RewardOutput:
    """A reward that differs by image, and costs nothing."""
    return RewardOutput(scores=images.astype(float).mean((1, 2, 3)))


@contextlib.contextmanager
def bench(family: str, dtype: str, guidance: float, steps: int, seed: int) -> Iterator[Bench]:
    """The bench of the embedded model, or of a family's tiny one that reads its prompts closely."""
    tiny, path = FAMILIES.get(family), family
    engine = {"distributed_executor_backend": "uni"}
    keys = ("guidance_scale",) if tiny is None else tuple(tiny.guidance)
    with tempfile.TemporaryDirectory() as folder:
        if tiny is not None:
            path = str(make_sensitive(tiny.build(folder, DTYPES[dtype])))
            engine |= tiny.engine
        config = stack_config(
            path,
            family,
            dtype=dtype,
            sampling={
                **dict.fromkeys(keys, guidance),
                "negative_prompt": "blurry",
                "num_inference_steps": 8,
                "sde_window_range": (0, 4),
            },
            rollout={"engine": engine, "prompts_per_step": len(WORDS)},
        )
        config = replace(config, trainer=replace(config.trainer, seed=seed))
        images = 0 if tiny is None else max(tiny.images, int(family == "flux2_klein"))
        with running(config, images, words=WORDS) as stack:
            yield Bench(stack, steps)


def show(bench: Bench, faults: Sequence[tuple[Fault, float]], *, sizes: bool) -> None:
    """Print a row for a clean engine and for each fault."""
    rows: list[Named] = []
    clean = bench.named(None)
    print(f"clean | {clean.doctor or 'nothing'} | {clean.rule or 'nothing'}", flush=True)
    for fault, size in faults:
        found = bench.named(fault, size)
        rows.append(found)
        number = f"{size:.3g}" if size else ""
        if size and sizes and found.within(bench.steps):
            smallest, unseen = smallest_named(
                lambda smaller, fault=fault: bench.named(fault, smaller).within(bench.steps), size, NUM_SIZES
            )
            number = f"{smallest:.3g}" + ("" if unseen is None else f", not {unseen:.3g}")
        text = f"{found.rule} at {found.step}" if found.rule else "unseen"
        print(
            f"{fault.name} | {found.doctor or 'unseen'} | {text} | {number} | {fault.stands_for}", flush=True
        )
    for steps in sorted({2, bench.steps}):
        print(
            f"{sum(row.within(steps) for row in rows)} of {len(rows)} are named within {steps} training steps"
        )
    failed = sum(row.within(0) for row in rows)
    print(f"{failed} by the doctor before the first")


def show_stops(bench: Bench, faults: Sequence[tuple[Fault, float]], begin: int) -> None:
    """Print where a clean run and runs with each fault are stopped."""
    steps = []
    step, causes = bench.stopped(None, 0.0, begin)
    print(f"clean | {', '.join(causes) or f'not stopped in {bench.steps} steps'}", flush=True)
    for fault, size in faults:
        step, causes = bench.stopped(fault, size, begin)
        steps.append(step)
        print(
            f"{fault.name} | {step or 'not stopped'} | {', '.join(causes)} | {fault.stands_for}", flush=True
        )
    within = sum(begin <= step < begin + 2 for step in steps)
    print(
        f"{within} of {len(steps)} are stopped within two steps, {sum(map(bool, steps))} within {bench.steps}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", choices=("tiny_ocr", *FAMILIES), default="tiny_ocr")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--guidance", type=float, default=4.0)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--fault",
        nargs="+",
        metavar="NAME[=SIZE]",
        type=partial(parse_fault, FAULTS),
        default=[(fault, fault.size or 0.0) for fault in FAULTS],
        help="default: all",
    )
    parser.add_argument(
        "--begin", type=int, metavar="STEP", help="show where the gate stops, of faults from here on"
    )
    parser.add_argument("--sizes", action="store_true", help="also smaller sizes, while they are named")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    torch.set_num_threads(1)
    with bench(
        arguments.family, arguments.dtype, arguments.guidance, arguments.steps, arguments.seed
    ) as started:
        chosen = [row for row in arguments.fault if row[0].applies(started.stack.conditioning)]
        if arguments.begin:
            show_stops(started, chosen, arguments.begin)
        else:
            show(started, chosen, sizes=arguments.sizes)
