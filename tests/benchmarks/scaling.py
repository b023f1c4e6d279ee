"""How training scales: measured here with one and two processes, simulated beyond.

    python tests/benchmarks/scaling.py measure --out measured.json
    python tests/benchmarks/scaling.py validate measured.json
    python tests/benchmarks/scaling.py simulate [--config FILE.yaml] [--out scaling.png] [key=value ...]

`measure` trains a few steps of the embedded model in each arm. `validate` puts the times of their parts into the
simulation, and compares the step times that come out with those measured. `simulate` prints a table and draws
`scaling.png`: **a simulation**, of 8 to 512 GPUs that nobody ran; `Setup` holds its assumptions, each a key.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from flowcorr import config as configs
from flowcorr import trainer
from flowcorr.errors import ConfigError
from flowcorr.ray_workers import WorkerPool
from flowcorr.rewards.ray_pool import RayReward
from flowcorr.rollout.ray_pool import RayPool
from flowcorr.trackers.jsonl import METRICS_FILE, read_metrics
from flowcorr.trainer.step import Parts
from flowcorr.trainer.timing import PHASES

# Simulation ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A cluster and its work; times in seconds. Defaults: Qwen-Image, LoRA, images of 512 x 512, on 80 GB GPUs.

    Attributes:
        engines: GPUs that sample, one engine each; `simulate` tries all.
        ranks: GPUs that train; `simulate` tries all.
        shared_pool: every engine serves all ranks; else each rank has a pool of its own, as the trainer does it.
            `simulate` tries both.
        max_staleness: as `rollout.max_staleness`; `simulate` tries several.
        prompts: a step, a rollout shard each. Assumption: eight times the 32 x 16 images that are published for 4 GPUs
            (verl-omni, docs/algo/performance.md), so that 512 GPUs have work.
        rollout_seconds: mean time of a shard. Source: verl-omni pull request 489, 100 s for 32 prompts on 4 GPUs.
        rollout_sigma: std of the log of a shard's time. Assumption: shards of one shape take about the same time.
        reward_seconds: to score a shard. Assumption: .1 s an image.
        reward_workers: a rank, on CPUs; 0 scores in the trainer.
        train_seconds: a prompt on one rank, old log-probs included. Assumption: the same source's step of 326 s less
            rollout and 26 s for reward and the rest.
        updates: gradient all-reduces a step, as `actor.mini_batches`.
        adapter_gigabytes: trained weights. Rank 64 on all linear layers of 60 blocks, 425 million in float32.
        all_reduce_bandwidth: GB/s of a rank. Assumption: 200 Gbit/s a GPU. Ring: `2 (R - 1) / R` times the bytes.
        all_reduce_latency: a hop of the ring. Assumption.
        put_bandwidth: GB/s from a rank into the object store. Assumption: a copy from GPU to host, and one there.
        fetch_bandwidth: GB/s from there into an engine, once a version. Assumption: a 100 Gbit/s link among 8 engines.
        steps: training steps to simulate.
    """

    engines: int = 1
    ranks: int = 1
    shared_pool: bool = False
    max_staleness: int = 0
    prompts: int = 256
    rollout_seconds: float = 12.5
    rollout_sigma: float = 0.1
    reward_seconds: float = 1.6
    reward_workers: int = 4
    train_seconds: float = 25.0
    updates: int = 2
    adapter_gigabytes: float = 1.7
    all_reduce_bandwidth: float = 25.0
    all_reduce_latency: float = 2e-5
    put_bandwidth: float = 5.0
    fetch_bandwidth: float = 1.5
    steps: int = 40

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= self.prompts:
            raise ConfigError(
                f"ranks={self.ranks} has to be 1 to prompts={self.prompts}: each needs a prompt"
            )
        if self.engines < 1 or (not self.shared_pool and self.engines % self.ranks):
            raise ConfigError(
                f"engines={self.engines} cannot be shared out evenly over ranks={self.ranks}, each with a pool of its "
                "own; use a multiple, or shared_pool=true"
            )
        if self.steps < 2 * (self.max_staleness + 2):
            raise ConfigError(
                f"steps={self.steps} is too few to leave a steady part at max_staleness={self.max_staleness}; use at "
                f"least {2 * (self.max_staleness + 2)}"
            )

    @property
    def busiest(self) -> int:
        """Prompts of the rank that has most, as `flowcorr.distributed.share` deals them."""
        return math.ceil(self.prompts / self.ranks)

    @property
    def all_reduce_seconds(self) -> float:
        """Of a ring, a step. Source: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009), 117-124."""
        hops = 2 * (self.ranks - 1)
        gigabytes = hops / self.ranks * self.adapter_gigabytes
        return self.updates * (gigabytes / self.all_reduce_bandwidth + hops * self.all_reduce_latency)

    @property
    def put_seconds(self) -> float:
        return self.adapter_gigabytes / self.put_bandwidth

    @property
    def fetch_seconds(self) -> float:
        return self.adapter_gigabytes / self.fetch_bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a simulated run did; times in seconds.

    Attributes:
        finished: when each training step ended.
        ages: of the weights that sampled for each, in training steps.
        submitted: shards that were asked for.
        scored: shards that came back.
        step_seconds: mean of the steady part.
        sampling: share of the engines' time that went into sampling, in the steady part.
        training: share of the ranks' time that went into forward and backward passes, in the steady part.
    """

    finished: list[float]
    ages: list[int]
    submitted: int
    scored: int
    step_seconds: float
    sampling: float
    training: float


@dataclass(frozen=True, slots=True)
class Shard:
    step: int
    prompt: int
    version: int


@dataclass(slots=True)
class Pool:
    """Workers that take the next shard when they are idle, as `flowcorr.ray_workers.WorkerPool`."""

    idle: deque[int]
    queue: deque[Shard] = field(default_factory=deque)
    holds: dict[int, int] = field(default_factory=dict)

    def assign(self) -> Iterable[tuple[int, Shard]]:
        while self.idle and self.queue:
            yield self.idle.popleft(), self.queue.popleft()


class Simulation:
    """The events of a run, in the order of `flowcorr.trainer.step.train_step` and `collect.prefetch`.

    A step's shards are submitted `max_staleness` steps ahead, with the newest weights; training waits for all shards of
    its step and their scores, on all ranks; then it publishes its weights and submits again.
    """

    def __init__(self, setup: Setup, seed: int) -> None:
        self.setup = setup
        noise = np.random.default_rng(seed).standard_normal((setup.steps, setup.prompts))
        sigma = setup.rollout_sigma  # the mean of the log-normal is `rollout_seconds` whatever sigma
        self.durations = (setup.rollout_seconds * np.exp(sigma * noise - sigma**2 / 2)).tolist()
        pools = 1 if setup.shared_pool else setup.ranks
        workers = setup.ranks * setup.reward_workers
        self.engines = [Pool(deque(range(setup.engines // pools))) for _ in range(pools)]
        self.scorers = [Pool(deque(range(workers // pools))) for _ in range(pools)]
        self.now, self.version, self.training = 0.0, 0, False
        self.left: dict[int, int] = {}
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.order = itertools.count()
        self.sampled_between: list[tuple[float, float]] = []
        self.finished: list[float] = []
        self.ages: list[int] = []
        self.submitted = self.scored = 0

    def run(self) -> Outcome:
        for step in range(1, self.setup.max_staleness + 2):
            self.submit(step)
        while self.events:
            self.now, _, then, arguments = heapq.heappop(self.events)
            then(*arguments)
        return self.outcome()

    def after(self, seconds: float, then: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), then, arguments))

    def submit(self, step: int) -> None:
        if step > self.setup.steps:
            return
        self.ages.append(step - 1 - self.version)
        self.left[step] = self.setup.prompts
        self.submitted += self.setup.prompts
        for prompt in range(self.setup.prompts):
            pool = prompt * len(self.engines) // self.setup.prompts
            self.engines[pool].queue.append(Shard(step, prompt, self.version))
        for pool in range(len(self.engines)):
            self.sample(pool)

    def sample(self, pool: int) -> None:
        engines = self.engines[pool]
        for engine, shard in engines.assign():
            fetch = 0.0 if engines.holds.get(engine) == shard.version else self.setup.fetch_seconds
            engines.holds[engine] = shard.version
            seconds = self.durations[shard.step - 1][shard.prompt]
            self.sampled_between.append((self.now + fetch, self.now + fetch + seconds))
            self.after(fetch + seconds, self.on_sampled, pool, engine, shard)

    def on_sampled(self, pool: int, engine: int, shard: Shard) -> None:
        self.engines[pool].idle.append(engine)
        self.sample(pool)
        if self.setup.reward_workers:
            self.scorers[pool].queue.append(shard)
            self.score(pool)
        else:
            self.done(shard)

    def score(self, pool: int) -> None:
        for worker, shard in self.scorers[pool].assign():
            self.after(self.setup.reward_seconds, self.on_scored, pool, worker, shard)

    def on_scored(self, pool: int, worker: int, shard: Shard) -> None:
        self.scorers[pool].idle.append(worker)
        self.score(pool)
        self.done(shard)

    def done(self, shard: Shard) -> None:
        self.scored += 1
        self.left[shard.step] -= 1
        self.train()

    def train(self) -> None:
        if self.training or self.left.get(self.version + 1) != 0:
            return
        self.training, setup = True, self.setup
        own_reward = 0.0 if setup.reward_workers else setup.reward_seconds
        compute = setup.busiest * (own_reward + setup.train_seconds)
        self.after(compute + setup.all_reduce_seconds + setup.put_seconds, self.on_trained)

    def on_trained(self) -> None:
        self.version, self.training = self.version + 1, False
        self.finished.append(self.now)
        self.submit(self.version + 1 + self.setup.max_staleness)
        self.train()

    def outcome(self) -> Outcome:
        setup = self.setup
        # The steady part: after the start, and while there was still something to submit.
        first, last = setup.steps // 4, setup.steps - 2 - setup.max_staleness
        begin, end = self.finished[first], self.finished[last]
        sampling = sum(max(0.0, min(e, end) - max(b, begin)) for b, e in self.sampled_between)
        training = (last - first) * setup.prompts * setup.train_seconds
        return Outcome(
            finished=self.finished,
            ages=self.ages,
            submitted=self.submitted,
            scored=self.scored,
            step_seconds=(end - begin) / (last - first),
            sampling=sampling / (setup.engines * (end - begin)),
            training=training / (setup.ranks * (end - begin)),
        )


def simulate(setup: Setup, seed: int = 0) -> Outcome:
    """Simulate a run."""
    return Simulation(setup, seed).run()


# Sweeps --------------------------------------------------------------------------------------------------

SIZES = (8, 16, 32, 64, 128, 256, 512)
STALENESS = (0, 1, 2, 4, 8)
SIGMAS = (0.0, 0.1, 0.2, 0.4, 0.8)
RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
SEEDS = 3
MIDDLE = 64  # GPUs where one size has to do
TABLE_SIZES = (8, 64, 256, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A setup over several seeds: means, and the standard error of `per_hour`."""

    setup: Setup
    per_hour: float
    error: float
    sampling: float
    training: float


def average(setup: Setup, seeds: int = SEEDS) -> Point:
    runs = [simulate(setup, seed) for seed in range(seeds)]
    rates = [3600 / run.step_seconds for run in runs]
    return Point(
        setup=setup,
        per_hour=statistics.fmean(rates),
        error=statistics.stdev(rates) / math.sqrt(seeds) if seeds > 1 else math.nan,
        sampling=statistics.fmean(run.sampling for run in runs),
        training=statistics.fmean(run.training for run in runs),
    )


def splits(setup: Setup, gpus: int) -> list[Setup]:
    """Ways to share out `gpus`: all that pools of single ranks allow, or, with one pool, by sixteenths."""
    if setup.shared_pool:
        ranks = sorted({round(gpus * part / 16) for part in range(1, 16)} - {0, gpus})
    else:
        ranks = [count for count in range(1, gpus // 2 + 1) if gpus % count == 0]
    return [replace(setup, ranks=count, engines=gpus - count) for count in ranks if count <= setup.prompts]


def best(setup: Setup, gpus: int, seeds: int = SEEDS) -> Point:
    """The split with most steps an hour, chosen on one seed."""
    return average(max(splits(setup, gpus), key=lambda split: 1 / simulate(split).step_seconds), seeds)


def alternating(setup: Setup, gpus: int) -> Setup:
    """All GPUs sample, then all train, in the same processes: `rollout.placement=local`."""
    return replace(
        setup,
        engines=gpus,
        ranks=gpus,
        max_staleness=0,
        shared_pool=False,
        put_bandwidth=math.inf,
        fetch_bandwidth=math.inf,
    )


def with_ratio(setup: Setup, ratio: float) -> Setup:
    """The same GPU-seconds a step, of which rollout takes `ratio` times as many as training."""
    total = setup.rollout_seconds + setup.train_seconds
    return replace(setup, rollout_seconds=total * ratio / (1 + ratio), train_seconds=total / (1 + ratio))


def sweep(setup: Setup) -> dict[str, dict[Any, Any]]:
    """Everything that the table and the picture show."""
    kinds = {
        (shared, stale): replace(setup, shared_pool=shared, max_staleness=stale)
        for shared in (False, True)
        for stale in STALENESS
    }
    shown = {kind: kinds[kind] for kind in ((False, 1), (True, 0), (True, 1), (True, 2), (True, 8))}
    return {
        "sizes": {(*kind, gpus): best(kinds[kind], gpus) for kind in kinds for gpus in SIZES},
        "sizes_alternating": {
            gpus: average(alternating(setup, gpus)) for gpus in SIZES if gpus <= setup.prompts
        },
        "splits": {
            stale: [average(split, 1) for split in splits(kinds[True, stale], MIDDLE)] for stale in (0, 1, 8)
        },
        "ratios": {
            (*kind, ratio): best(with_ratio(shown[kind], ratio), MIDDLE) for kind in shown for ratio in RATIOS
        },
        "ratios_alternating": {
            ratio: average(alternating(with_ratio(setup, ratio), MIDDLE)) for ratio in RATIOS
        },
        "sigmas": {
            (*kind, sigma): best(replace(shown[kind], rollout_sigma=sigma), MIDDLE)
            for kind in shown
            for sigma in SIGMAS
        },
        "sigmas_alternating": {
            sigma: average(alternating(replace(setup, rollout_sigma=sigma), MIDDLE)) for sigma in SIGMAS
        },
    }


def table(found: Mapping[str, Mapping[Any, Any]]) -> str:
    """Markdown: steps an hour at the best split, and the split."""
    sizes = TABLE_SIZES
    lines = [
        "Simulated steps an hour · GPUs that sample : GPUs that train · % of their time that they do",
        "",
        "| | " + " | ".join(f"{gpus} GPUs" for gpus in sizes) + " |",
        "|---" * (len(sizes) + 1) + "|",
    ]
    rows = {"alternating on all GPUs": found["sizes_alternating"]}
    for shared in (False, True):
        for stale in STALENESS:
            rows[_name(shared, stale)] = {gpus: found["sizes"][shared, stale, gpus] for gpus in sizes}
    for name, points in rows.items():
        lines.append(f"| {name} | " + " | ".join(_cell(points.get(gpus)) for gpus in sizes) + " |")
    return "\n".join(lines)


def _cell(point: Point | None) -> str:
    if point is None:
        return "-"
    where = f"{point.setup.engines}:{point.setup.ranks}"
    return f"{point.per_hour:.1f}±{point.error:.1f} · {where} · {100 * point.sampling:.0f}:{100 * point.training:.0f}"


# Picture -------------------------------------------------------------------------------------------------


LOOKS = {  # a pool for all ranks?, max_staleness -> colour, line, marker
    (False, 1): ("tab:blue", ":", "s"),
    (True, 0): ("black", "-", "."),
    (True, 1): ("tab:blue", "-", "."),
    (True, 2): ("tab:orange", "-", "."),
    (True, 8): ("tab:red", "--", "."),
}


def _name(shared: bool, stale: int) -> str:
    return f"{'one pool' if shared else 'a pool a rank'}, max_staleness {stale}"


def _curve(axes: Any, points: Mapping[Any, Point], ideals: Mapping[Any, float], **look: Any) -> None:
    """Speed in % of the ideal, with standard errors."""
    speeds = [100 * point.per_hour / ideals[place] for place, point in points.items()]
    errors = [100 * point.error / ideals[place] for place, point in points.items()]
    axes.errorbar(list(points), speeds, errors, markersize=4, **look)


def draw(setup: Setup, found: Mapping[str, Mapping[Any, Any]], path: Path) -> None:
    """Scaling, splits, and what the two assumptions that matter most do."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, ((sizes, splits_), (ratios, sigmas)) = pyplot.subplots(2, 2, figsize=(11, 8), dpi=110)
    # Steps an hour for each GPU that never idles.
    ideal = 3600 / (setup.prompts * (setup.rollout_seconds + setup.train_seconds))
    panels = (
        (sizes, "sizes", {gpus: gpus * ideal for gpus in SIZES}),
        (ratios, "ratios", dict.fromkeys(RATIOS, MIDDLE * ideal)),
        (sigmas, "sigmas", dict.fromkeys(SIGMAS, MIDDLE * ideal)),
    )
    for axes, what, ideals in panels:
        for kind, (colour, style, marker) in LOOKS.items():
            points = {place: found[what][*kind, place] for place in ideals}
            look = {"color": colour, "linestyle": style, "marker": marker}
            _curve(axes, points, ideals, label=_name(*kind), **look)
        look = {"color": "gray", "linestyle": "--", "marker": "x"}
        _curve(axes, found[f"{what}_alternating"], ideals, label="alternating on all GPUs", **look)
        axes.set(ylabel="speed, % of no GPU ever idle", ylim=(0, 105))
        axes.legend(fontsize=7, loc="lower left")
    for axes, places in ((sizes, SIZES), (ratios, RATIOS)):
        axes.set_xscale("log")
        axes.set_xticks(places, places)
        axes.minorticks_off()
    sizes.set(xlabel="GPUs", title="best split of each size")
    ratios.set(xlabel="rollout / training, GPU-seconds", title=f"best split of {MIDDLE} GPUs (engines:ranks)")
    for ratio in RATIOS:
        point = found["ratios"][True, 1, ratio]
        where = (ratio, 100 * point.per_hour / (MIDDLE * ideal))
        text = f"{point.setup.engines}:{point.setup.ranks}"
        ratios.annotate(text, where, (0, -13), textcoords="offset points", fontsize=8, ha="center")
    sigmas.set(xlabel="straggler sigma", title=f"best split of {MIDDLE} GPUs")

    for stale, line in found["splits"].items():
        colour, style, _ = LOOKS[True, stale]
        share = [point.setup.engines / MIDDLE for point in line]
        speed = [100 * point.per_hour / (MIDDLE * ideal) for point in line]
        splits_.plot(share, speed, color=colour, linestyle=style, label=_name(True, stale))
    line = found["splits"][1]
    share = [point.setup.engines / MIDDLE for point in line]
    for style, what in (("-.", "sampling"), (":", "training")):
        used = [100 * getattr(point, what) for point in line]
        splits_.plot(
            share, used, color="tab:green", linestyle=style, label=f"{what} GPUs busy, max_staleness 1"
        )
    splits_.set(xlabel="share of GPUs that sample", ylabel="speed, % of no GPU ever idle; % busy")
    splits_.set(title=f"splits of {MIDDLE} GPUs, one pool", ylim=(0, 145), yticks=range(0, 101, 20))
    splits_.legend(fontsize=7, loc="upper right")
    for axes in (sizes, splits_, ratios, sigmas):
        axes.grid(alpha=0.3)
    figure.suptitle(
        f"SIMULATION, not a measurement: {setup.prompts} prompts a step, {setup.rollout_seconds:g} s rollout and "
        f"{setup.train_seconds:g} s training a prompt, sigma {setup.rollout_sigma:g}",
        fontsize=11,
    )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


# Measurement ---------------------------------------------------------------------------------------------

WARM = 2  # steps that are left out at the start
COMMON = (
    "data.num_heldout=4",
    "rollout.batch_size=12",  # a prompt at a time, as the pool's workers do it
    "trainer.eval_every=0",
    "trainer.image_every=0",
    "trainer.save_every=999",
)
POOL = ("rollout.placement=ray", "rollout.num_workers=2", "reward.placement=ray")
ARMS = {
    "1 process": (),
    "2 workers": POOL,
    "2 workers, 1 step ahead": (*POOL, "rollout.max_staleness=1"),
    "2 ranks": (),
}


def measure(recipe: str, steps: int) -> dict[str, dict[str, Any]]:
    """Train every arm for a few steps.

    Returns:
        By arm: `median` and `mean` of each `timing/*`, `prompts` and `max_staleness`; of workers also `shard_mean` and
        `shard_sigma`, of the log, and `score_mean`, for a prompt. Seconds.
    """
    found: dict[str, dict[str, Any]] = {}
    for arm, overrides in ARMS.items():
        keys = [*COMMON, *overrides, f"trainer.total_steps={steps}"]
        settings = configs.load(recipe, keys)
        ahead = settings.rollout.max_staleness
        # At the end nothing is left to sample ahead, and training has the machine for itself.
        kept = range(WARM + 1, steps - ahead)
        with tempfile.TemporaryDirectory() as folder:
            workers = run_arm(arm, recipe, keys, kept, Path(folder) / "run")
            records = read_metrics(Path(folder) / "run" / METRICS_FILE)
        timings = {
            name: [record[f"timing/{name}"] for record in records if record["step"] in kept]
            for name in ("step", *PHASES)
        }
        found[arm] = {
            "median": {name: statistics.median(values) for name, values in timings.items()},
            "mean": {name: statistics.fmean(values) for name, values in timings.items()},
            **workers,
            "prompts": settings.rollout.prompts_per_step,
            "max_staleness": ahead,
        }
        print(f"{arm}: {found[arm]['median']['step']:.2f} s a step", file=sys.stderr, flush=True)
    return found


def run_arm(arm: str, recipe: str, keys: Sequence[str], kept: range, folder: Path) -> dict[str, float]:
    """Train in `folder`; times of the workers' tasks in the `kept` steps."""
    if arm == "2 ranks":
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
        command = [*launcher, "-m", "flowcorr", "train", recipe, *keys, "--out", str(folder)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=900)
        return {}
    settings = configs.load(recipe, keys)
    sampled: list[float] = []
    scored: list[float] = []

    def before_start(parts: Parts) -> None:
        if isinstance(parts.engine, RayPool) and isinstance(parts.reward, RayReward):
            watch(parts.engine._workers, sampled, lambda shard, *_: shard.training_step in kept)
            watch(parts.reward._workers, scored, lambda _, prompts: len(prompts) == settings.rollout.n)

    trainer.train(settings, folder, before_start=before_start)
    if not sampled:
        return {}
    a_step = settings.rollout.prompts_per_step
    return {
        "shard_mean": statistics.fmean(sampled),
        "shard_sigma": statistics.stdev(map(math.log, sampled)),
        "score_mean": statistics.fmean(scored[(kept.start - 1) * a_step : (kept.stop - 1) * a_step]),
    }


def watch(pool: WorkerPool, seconds: list[float], counts: Callable[..., bool]) -> None:
    """Note how long the pool's workers take for each task that `counts`."""
    do = pool._do

    def timed(worker: Any, task: Any) -> Any:
        begin = perf_counter()
        answer = do(worker, task)
        if task.method in ("sample", "score") and counts(*task.arguments):
            seconds.append(perf_counter() - begin)
        return answer

    pool._do = timed  # type: ignore[method-assign]


def as_setup(arm: str, source: str, measured: Mapping[str, Mapping[str, Any]]) -> Setup:
    """An arm as the simulation sees it, with the times of its parts as they were in the arm `source`."""
    parts, prompts = measured[source], measured[arm]["prompts"]
    seconds = parts["mean"]
    at_once = math.ceil(prompts / (2 if source == "2 ranks" else 1))  # prompts of a rank
    return Setup(
        engines=1 if arm == "1 process" else 2,
        ranks=2 if arm == "2 ranks" else 1,
        max_staleness=measured[arm]["max_staleness"],
        prompts=prompts,
        rollout_seconds=parts.get("shard_mean", seconds["rollout"] / at_once),
        rollout_sigma=parts.get("shard_sigma", 0.0),
        reward_seconds=parts.get("score_mean", seconds["reward"] / at_once),
        reward_workers=int("workers" in arm),
        train_seconds=(seconds["old_log_prob"] + seconds["correction"] + seconds["update"]) / at_once,
        adapter_gigabytes=seconds["sync"],  # at 1 GB/s: the seconds that publishing took
        put_bandwidth=1.0,
        fetch_bandwidth=math.inf,  # within the time of a shard
        all_reduce_bandwidth=math.inf,  # within the time of the update
        all_reduce_latency=0.0,
    )


def validation(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: step times measured and simulated, from the times of the arm's own parts and from one process's."""
    lines = [
        "| arm | steps an hour (median) | mean seconds a step | simulated from its parts | from those of 1 process |",
        "|---|---|---|---|---|",
    ]
    for arm, parts in measured.items():
        step = parts["mean"]["step"]
        cells = [f"{3600 / parts['median']['step']:.0f}", f"{step:.2f}"]
        for source in (arm, "1 process"):
            setup = as_setup(arm, source, measured)
            simulated = statistics.fmean(simulate(setup, seed).step_seconds for seed in range(SEEDS))
            cells.append(f"{simulated:.2f} ({100 * (simulated / step - 1):+.1f} %)")
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# Command line --------------------------------------------------------------------------------------------


def load_setup(file: Path | None, overrides: Sequence[str]) -> Setup:
    """Defaults, then the file's keys, then `key=value`.

    Raises:
        ConfigError: a key is unknown.
    """
    parts = [OmegaConf.load(file)] if file is not None else []
    given = OmegaConf.to_container(OmegaConf.merge(*parts, OmegaConf.from_dotlist(list(overrides))))
    assert isinstance(given, dict)
    names = [part.name for part in fields(Setup)]
    if unknown := sorted(set(map(str, given)) - set(names)):
        raise ConfigError(f"{unknown[0]} is no key of the simulation; choose from {', '.join(names)}")
    return Setup(**{str(name): value for name, value in given.items()})


def main(arguments: argparse.Namespace) -> None:
    if arguments.command == "measure":
        found = measure(arguments.recipe, arguments.steps)
        arguments.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        print(validation(found))
    elif arguments.command == "validate":
        print(validation(json.loads(arguments.measured.read_text(encoding="utf-8"))))
    else:
        setup = load_setup(arguments.config, arguments.overrides)
        found = sweep(setup)
        print(table(found))
        draw(setup, found, arguments.out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure", help="train a few steps of each arm on this machine")
    measuring.add_argument("--recipe", default="tiny_ocr_lora")
    measuring.add_argument("--steps", type=int, default=10)
    measuring.add_argument("--out", type=Path, default=Path("measured.json"))
    validating = commands.add_parser("validate", help="compare what was measured with the simulation")
    validating.add_argument("measured", type=Path)
    simulating = commands.add_parser("simulate", help="simulate 8 to 512 GPUs")
    simulating.add_argument("--config", type=Path)
    simulating.add_argument("--out", type=Path, default=Path("scaling.png"))
    simulating.add_argument("overrides", nargs="*", metavar="key=value")
    main(parser.parse_args())
