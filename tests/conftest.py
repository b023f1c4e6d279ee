"""Settings for all tests: one thread, no network, a fixed hypothesis profile; and the embedded model at work."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Ray gives way to other processes, on a machine that has others for minutes.
os.environ.setdefault("RAY_worker_niceness", "0")
# Some virtual machines announce AMX and then forbid it: bfloat16 would end in an illegal instruction.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import copy
import logging
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from tests.prompts import check_told_apart, prompts_of
from tests.shallow import SHALLOW
from tests.tiny_pipelines import engine_beside, stir

if TYPE_CHECKING:
    from flowcorr.actor import DiffusionActor
    from flowcorr.actor.update import Update
    from flowcorr.config.schema import Config
    from flowcorr.metrics import Metrics
    from flowcorr.models import Guidance, ModelFamily
    from flowcorr.records import ActorBatch, Rollout
    from flowcorr.rollout import InProcessEngine
    from tests.ranks import Ranks

torch.set_num_threads(1)
# Tests leave few cycles behind, and imports leave millions of objects to look through.
gc.set_threshold(20_000, 20, 20)
# A shell lets background jobs ignore it, and Python leaves it at that.
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("flowcorr", deadline=None, derandomize=True)
settings.load_profile("flowcorr")


def pytest_configure():
    """Undo what a launcher such as nohup ignores: tests send these signals, and started processes inherit them."""
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGINT):
        if signal.getsignal(number) == signal.SIG_IGN:
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)


# Files whose tests share what takes long to start: a Ray cluster and two ranks, finished runs, a vllm-omni engine.
SHARED = {
    "processes": (
        "actor/test_adamw",
        "actor/test_pass_bound",
        "actor/test_update",
        "algorithm/test_by_worker",
        "correction/test_correct",
        "distributed/test_fsdp",
        "distributed/test_ranks",
        "faults/test_reward_service",
        "faults/test_trainer",
        "instruments/plan/test_sharding",
        "questions/test_replay",
        "test_invariants",
        "test_metrics",
        "trainer/test_asynchronous",
        "trainer/test_ranks",
        "workers/test_cluster",
        "workers/test_pool",
        "workers/test_process",
        "workers/test_reward",
        "workers/test_rollout",
        "workers/test_shared",
    ),
    "runs": (
        "trainer/test_evaluate",
        "trainer/test_failures",
        "trainer/test_loop",
        "trainer/test_run_folder",
        "trainer/test_state",
    ),
    "engine": (
        "rollout/vllm_omni/test_client",
        "rollout/vllm_omni/test_doctor",
        "rollout/vllm_omni/test_engine",
        "rollout/vllm_omni/test_executor",
        "rollout/vllm_omni/test_ray",
        "rollout/vllm_omni/test_worker",
    ),
}
SCOPES = {f"tests/{name}.py": scope for scope, names in SHARED.items() for name in names}
BY_MODEL = "tests/instruments/doctor/test_recipes.py"
"""Takes as long as all others on the engine; its tests share a model, which is the first part of their ids."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let `-n` keep the tests of a file in one process, and those of files that share more: it is made once."""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            # The method by which xdist lets schedulers group tests.
            file = super()._split_scope(nodeid)
            return nodeid.partition("-")[0] if file == BY_MODEL else SCOPES.get(file, file)

    config.option.loadscopereorder = False  # files come in the order of the items
    return ByFile(config, log)


FROZEN = {"modules": 0, "tests": 0}


def pytest_runtest_teardown() -> None:
    """Keep the garbage collector off what imports and fixtures leave, which each freed text encoder has it walk."""
    FROZEN["tests"] += 1
    if len(sys.modules) > FROZEN["modules"] + 100:
        FROZEN["modules"] = len(sys.modules)
        gc.collect()
        gc.freeze()
    elif FROZEN["tests"] % 10 == 0:
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `-n`, begin with what takes long, so that it does not keep one process busy at the end."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.nodeid.partition("::")[0] not in SCOPES)


SMALL: dict[str, dict[str, Any]] = {
    "model": {"path": SHALLOW, "max_sequence_length": 8},
    "sampling": {
        "height": 16,
        "width": 32,
        "num_inference_steps": 4,
        "sde_window_size": 2,
        "sde_window_range": (0, 3),
    },
    "rollout": {"prompts_per_step": 2, "n": 4},
    "actor": {"mini_batches": 1, "grad_clip": 1e9},
    "trainer": {"device": "cpu"},
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """The embedded model with its actor and its engine, and two prompts."""

    config: Config
    family: ModelFamily
    actor: DiffusionActor
    engine: InProcessEngine
    conditioning: dict[str, Tensor]

    def sample(self, training_step: int = 1, *, with_means: bool = True) -> Rollout:
        groups = range(self.config.rollout.prompts_per_step)
        rollout = self.engine.sample(
            self.conditioning, groups, training_step=training_step, with_means=with_means
        )
        return replace(rollout, members=torch.arange(rollout.num_samples) % self.config.rollout.n)

    def stir(self, scale: float = 0.02, seed: int = 0) -> None:
        """Move the trained weights, as training would, and tell the engine."""
        stir(self.actor, scale, seed)
        self.actor.weights.version += 1
        self.engine.sync(self.actor.weights.snapshot())

    def batch(self, rollout: Rollout | None = None) -> ActorBatch:
        """An on-policy batch whose advantages differ from sample to sample."""
        from flowcorr.records import ActorBatch

        rollout = self.sample() if rollout is None else rollout
        scores = self.actor.log_probs(rollout, with_means=True)
        return ActorBatch(
            rollout=rollout,
            advantages=torch.linspace(-1.5, 1.2, rollout.num_samples),
            old_log_probs=scores.log_probs,
            old_means=scores.means,
        )

    def in_float64(self, batch: ActorBatch) -> ActorBatch:
        """Let the actor compute in float64, so that no float32 log-prob depends on its batch; `batch` to match."""
        self.actor.weights.transformer.double()
        conditioning = {name: rows.double() for name, rows in batch.rollout.conditioning.items()}
        return replace(batch, rollout=replace(batch.rollout, conditioning=conditioning))

    def update(self, batch: ActorBatch, *, training_step: int = 1) -> Metrics:
        """The metrics of an update under the configured correction, in the mode that a run begins in."""
        return self.learn(batch, training_step=training_step).metrics

    def learn(self, batch: ActorBatch, *, training_step: int = 1) -> Update:
        """An update under the configured correction, in the mode that a run begins in."""
        from flowcorr.algorithm import AutoMode

        correction = AutoMode.of(self.config).correction
        return self.actor.update(batch, correction, training_step=training_step)

    def gradient(self) -> dict[str, Tensor]:
        return {name: parameter.grad.clone() for name, parameter in self.actor.weights.parameters.items()}


def small_config(**sections: dict[str, Any]) -> Config:
    """A configuration of the embedded model in which little is computed; each section may be overridden."""
    from flowcorr.config.schema import Config

    return Config(
        **{
            entry.name: entry.default_factory(**{**SMALL.get(entry.name, {}), **sections.get(entry.name, {})})
            for entry in fields(Config)
        }
    )


@lru_cache
def loaded_family(path: str, dtype: str, quantization: str = "none") -> ModelFamily:
    """The model as it lies on disk, which nothing may change."""
    from flowcorr.config import ModelConfig
    from flowcorr.models import load_family

    return load_family(ModelConfig(path=path, dtype=dtype, quantization=quantization, max_sequence_length=8))


@lru_cache
def encoded(path: str, dtype: str, prompts: tuple[str, ...], guidance: Guidance) -> dict[str, Tensor]:
    """Prompts as the model's text encoders put them, which nothing may change."""
    family = loaded_family(path, dtype)
    check_told_apart(family, prompts_of(prompts), guidance)
    return family.encode(prompts_of(prompts), guidance)


def start_run(config: Config, prompts: Sequence[str] = ("cat", "dog")) -> Run:
    """Connect the embedded model, actor and engine as the trainer does."""
    from flowcorr.actor import DiffusionActor

    family = copy.copy(loaded_family(config.model.path, config.model.dtype, config.model.quantization))
    family.pipeline = copy.copy(family.pipeline)
    family.pipeline.transformer = copy.deepcopy(family.transformer)
    actor = DiffusionActor(family, config)
    rows = encoded(config.model.path, config.model.dtype, tuple(prompts), actor.guidance)
    conditioning = {name: tensor.clone() for name, tensor in rows.items()}
    return Run(
        config=config, family=family, actor=actor, engine=engine_beside(actor), conditioning=conditioning
    )


@pytest.fixture(scope="session", autouse=True)
def pipelines_in_memory() -> None:
    """A process reads the embedded pipelines from disk once, and copies them from there on."""
    from flowcorr.models import EMBEDDED, load

    folders = {SHALLOW, *map(str, EMBEDDED.values())}
    read, in_memory = load._read_pipeline, {}

    def copied(location: str, path: str, *options: Any) -> Any:
        if location not in folders:
            return read(location, path, *options)
        key = location, str(options)
        if key not in in_memory:
            in_memory[key] = read(location, path, *options)
        return copy.deepcopy(in_memory[key])

    load._read_pipeline = copied


@pytest.fixture(scope="session")
def make_config() -> Callable[..., Config]:
    return small_config


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Run]:
    """Sections of the configuration -> a `Run`."""

    def make(**sections: dict[str, Any]) -> Run:
        return start_run(small_config(**sections))

    return make


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two ranks, started once."""
    from tests.ranks import Ranks

    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """Ray, on a small cluster of this machine, started once."""
    import ray

    from flowcorr.workers.cluster import init_ray

    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # a socket's path must be short
    init_ray(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=200_000_000,
        logging_level=logging.ERROR,
        _temp_dir=folder,
    )
    yield ray
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
