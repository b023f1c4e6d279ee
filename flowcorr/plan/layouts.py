"""Compares the ways in which flowcorr spreads a run over a number of GPUs, and says how to start each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flowcorr.config import load, resolve_engine
from flowcorr.config.schema import Config
from flowcorr.plan.answers import Plan, duration
from flowcorr.plan.devices import GPUS_A_MACHINE, Gpu
from flowcorr.plan.estimate import plan_of
from flowcorr.plan.traces import Traces, trace
from flowcorr.rewards.combine import computes_on_gpu

CORES_A_GPU = 8
"""CPU cores beside each GPU, where nothing else is said."""
GAIN = 0.8
"""A step that twice as many GPUs do not shorten to this share has ended shrinking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way to use a number of GPUs.

    Attributes:
        name: in words.
        ranks: GPUs that train.
        workers: further GPUs that only sample; 0 where every rank has an engine on its own GPU.
        overrides: the keys that make it.
        sharded: whether the ranks share the weights, and so the prompts in equal parts.
    """

    name: str
    ranks: int
    workers: int = 0
    sharded: bool = False
    overrides: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        return self.ranks + self.workers

    def lines(self, recipe: str, overrides: Sequence[str]) -> tuple[str, ...]:
        """The commands that start it."""
        return tuple(self._lines(" ".join(["flowcorr train", recipe, *overrides, *self.overrides])))

    def _lines(self, train: str) -> Iterator[str]:
        machines = -(-self.ranks // GPUS_A_MACHINE)
        launch = f"torchrun --nproc_per_node {min(self.ranks, GPUS_A_MACHINE)}"
        if machines > 1:
            launch += f" --nnodes {machines} --rdzv_backend c10d --rdzv_endpoint HOST:29500"
        command = f"{launch} -m {train}" if self.ranks > 1 else train
        if not self.workers:
            yield command if machines == 1 else f"{command}  # on each of {machines} machines"
        elif self.gpus <= GPUS_A_MACHINE:
            trainers, samplers = (
                ",".join(map(str, gpus)) for gpus in (range(self.ranks), range(self.ranks, self.gpus))
            )
            yield f"CUDA_VISIBLE_DEVICES={samplers} ray start --head"
            yield f"CUDA_VISIBLE_DEVICES={trainers} RAY_ADDRESS=auto {command}"
        else:
            yield f"ray start --head  # then on the other machines: ray start --address HOST:6379; {self.workers} GPUs"
            yield f"RAY_ADDRESS=HOST:6379 {command}  # on {self.ranks} other GPUs"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLayout:
    """A layout with its plan.

    Attributes:
        layout: the layout.
        plan: of one rank.
        micro_batch: the largest `actor.micro_batch_size` that fits, up to the recipe's; 0 if none does.
        groups: prompts of a step.
        images: images of a step.
        lines: the commands that start it.
        spent: seconds of a step by kind of work.
    """

    layout: Layout
    plan: Plan
    micro_batch: int
    groups: int
    images: int
    lines: tuple[str, ...] = ()
    spent: Mapping[str, float] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        return self.micro_batch > 0

    def to_mapping(self) -> dict[str, Any]:
        """The layout for JSON."""
        return {
            "layout": self.layout.name,
            "ranks": self.layout.ranks,
            "workers": self.layout.workers,
            "fits": self.fits,
            "micro_batch": self.micro_batch,
            "step_seconds": self.seconds,
            "step_band": self.plan.band,
            "images_per_second": self.images_per_second,
            "bound": self.bound,
            "idle": self.idle,
            "lines": self.lines,
        }

    @property
    def seconds(self) -> float:
        return self.plan.seconds()

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds

    @property
    def bound(self) -> str:
        """The kind of work that takes most of a step."""
        return max(self.spent, key=lambda name: self.spent[name])

    @property
    def idle(self) -> str:
        """The GPUs that wait, and for what share of a step."""
        busy = {"trainers": self.spent["training"] + self.spent["weights"]}
        if self.layout.workers:
            busy["engines"] = self.spent["sampling"]
        else:
            busy["trainers"] += self.spent["sampling"]
        waits = {name: 1 - seconds / self.seconds for name, seconds in busy.items()}
        return ", ".join(f"{name} {share:.0%}" for name, share in waits.items() if share > 0.005) or "none"


def compare(
    recipe: str, overrides: Sequence[str], *, gpu: Gpu, gpus: Sequence[int], cores_a_gpu: int = CORES_A_GPU
) -> dict[int, list[PlannedLayout]]:
    """Plan every kind of layout on these numbers of GPUs, the best split of each kind; fastest first, by number.

    Args:
        recipe: the recipe, as on the command line.
        overrides: its overrides.
        gpu: the kind of GPU.
        gpus: numbers of GPUs.
        cores_a_gpu: CPU cores beside each GPU, for rewards on the host.

    Raises:
        ConfigError: see `make_plan`.
    """
    config = load(recipe, overrides)
    traces: dict[bool, Traces] = {}

    def planned(layout: Layout) -> PlannedLayout:
        changed = (*layout.overrides, *_reward_overrides(config, cores_a_gpu * layout.gpus))
        layout = replace(layout, overrides=changed)
        run = load(recipe, [*overrides, *changed])
        shards = run.actor.fsdp and layout.ranks > 1
        if shards not in traces:
            traces[shards] = trace(run, 2 if shards else 1)
        return _planned(recipe, overrides, layout, traces[shards], run, gpu)

    found = {}
    for count in gpus:
        best: dict[str, PlannedLayout] = {}
        for layout in layouts(config, count):
            made = planned(layout)
            if layout.name not in best or _order(made) < _order(best[layout.name]):
                best[layout.name] = made
        found[count] = sorted(best.values(), key=_order)
    return found


def layouts(config: Config, gpus: int) -> list[Layout]:
    """The layouts that flowcorr runs on so many GPUs, each kind with all of its splits; every rank needs a prompt."""
    prompts = config.rollout.prompts_per_step
    found = _layouts(config, gpus)
    return [
        layout
        for layout in found
        if not (prompts % layout.ranks if layout.sharded else layout.ranks > prompts)
    ]


def _layouts(config: Config, gpus: int) -> Iterator[Layout]:
    engine = resolve_engine(config.rollout.name)
    local = ("rollout.placement=local", "rollout.max_staleness=0")
    both = "all train and sample"
    if config.actor.fsdp:
        yield Layout(name=f"{both}, sharded weights", ranks=gpus, sharded=True, overrides=local)
        return
    if not engine.sleeps or not config.rollout.engine.get("enable_sleep_mode"):
        yield Layout(name=both, ranks=gpus, overrides=local)
    if engine.sleeps:
        asleep = "rollout.engine.enable_sleep_mode=true"
        yield Layout(name=f"{both}, the engine asleep in between", ranks=gpus, overrides=(*local, asleep))
    if gpus > 1 and config.model.quantization == "none":
        in_process = ("actor.fsdp=true", "rollout.name=in_process", "rollout.engine={}")
        yield Layout(
            name=f"{both}, sharded weights", ranks=gpus, sharded=True, overrides=(*local, *in_process)
        )
    for workers in range(1, gpus):
        if gpus - workers > GPUS_A_MACHINE and (gpus - workers) % GPUS_A_MACHINE:
            continue  # torchrun starts as many ranks on each machine
        ray = (
            "rollout.placement=ray",
            f"rollout.num_workers={workers}",
            "rollout.worker_resources.num_gpus=1",
        )
        for name, staleness in (("train : sample, in turn", 0), ("train : sample, a step ahead", 1)):
            yield Layout(
                name=name,
                ranks=gpus - workers,
                workers=workers,
                overrides=(*ray, f"rollout.max_staleness={staleness}"),
            )


def end_of_shrinking(found: Mapping[int, Sequence[PlannedLayout]]) -> str:
    """A sentence: up to how many GPUs a step at this batch gets shorter, and why it ends."""
    best = {gpus: made[0] for gpus, made in found.items() if made and made[0].fits}
    if not best:
        return "No layout fits."
    counts = sorted(best)
    for fewer, more in itertools.pairwise(counts):
        if best[more].seconds > GAIN * best[fewer].seconds:
            made = best[more]
            reason = f"{made.bound} bounds it"
            if max(made.layout.ranks, made.layout.workers) >= made.groups:
                reason = f"rollout.prompts_per_step={made.groups}, and a prompt is never split"
            return (
                f"A step stops shrinking at {fewer} GPUs: with {more} it takes {duration(made.seconds)} instead of "
                f"{duration(best[fewer].seconds)}, since {reason}."
            )
    return f"A step shrinks up to {counts[-1]} GPUs."


def _order(made: PlannedLayout) -> tuple[bool, float]:
    return not made.fits, made.seconds


def _reward_overrides(config: Config, cores: int) -> tuple[str, ...]:
    """OCR runs in Ray workers on all cores, unless a reward on the GPU stands beside it."""
    scored = config.reward.step_terms
    on_gpu = any(computes_on_gpu(term) for term in scored)
    if on_gpu or "ocr" not in {term.name for term in scored}:
        return ()
    return ("reward.placement=ray", f"reward.num_workers={cores}")


def _planned(
    recipe: str, overrides: Sequence[str], layout: Layout, traces: Traces, run: Config, gpu: Gpu
) -> PlannedLayout:
    plan = plan_of(traces, run, gpu=gpu, ranks=layout.ranks, title=layout.name)
    memory = plan.memory
    together = bool(memory.engine) and not layout.workers
    fits = plan.fits(memory.shared) if together else plan.fitting
    largest = plan.largest_shared_micro_batch() if together else plan.largest_micro_batch()
    others = max(peak for name, peak in memory.by_phase.items() if name != "update")
    if not fits and not (plan.fits(others) and plan.fits(memory.engine)):
        largest = 0
    micro_batch = plan.micro_batch if fits else min(largest, plan.micro_batch)
    smaller = (f"actor.micro_batch_size={micro_batch}",) if 0 < micro_batch < plan.micro_batch else ()
    return PlannedLayout(
        layout=layout,
        plan=plan,
        micro_batch=micro_batch,
        groups=run.rollout.prompts_per_step,
        images=run.rollout.prompts_per_step * run.rollout.n,
        lines=layout.lines(recipe, (*overrides, *smaller)),
        spent=_spent(plan),
    )


_KINDS = {
    "sample": "sampling",
    "decode": "sampling",
    "recompute": "training",
    "update": "training",
    "reward model": "training",
    "sync": "weights",
}


def _spent(plan: Plan) -> dict[str, float]:
    """Seconds of a step by kind of work."""
    spent = {"sampling": 0.0, "training": 0.0, "weights": 0.0, "rewards": 0.0}
    for phase in plan.phases:
        kind = "rewards" if phase.where == "host" else _KINDS.get(phase.name)
        if kind:
            spent[kind] += phase.seconds or 0.0
    return spent
