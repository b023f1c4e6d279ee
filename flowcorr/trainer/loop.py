"""A run from its configuration to its last checkpoint: set-up, resume, evaluation, signals, bookkeeping."""

from __future__ import annotations

import json
import logging
import shlex
import signal
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol

import torch

from flowcorr import config as configs
from flowcorr.actor import DiffusionActor
from flowcorr.config.schema import Config
from flowcorr.data import PromptSet, PromptStream, load_prompts
from flowcorr.errors import CheckpointError, ConfigError
from flowcorr.models import DTYPES, Guidance, load_family
from flowcorr.models.prompt_cache import PromptCache
from flowcorr.rewards import build_reward
from flowcorr.rollout import InProcessEngine, Weights
from flowcorr.trackers import Tracker, build_trackers
from flowcorr.trainer import checkpoint
from flowcorr.trainer.checkpoint import TrainingState
from flowcorr.trainer.evaluate import Evaluation, evaluate
from flowcorr.trainer.images import before_after, image_grid, labelled
from flowcorr.trainer.step import Parts, StepResult, train_step

logger = logging.getLogger(__name__)

CHECKPOINTS, CONFIG_FILE, FAILURE_FILE = "checkpoints", "config.yaml", "failure.txt"
_RESUMABLE = {
    "total_steps",
    "eval_every",
    "save_every",
    "keep_checkpoints",
    "image_every",
    "trackers",
    "best_metric",
    "num_threads",
    "device",
}


class Observer(Protocol):
    """Follows a run, such as a terminal does."""

    def on_start(self, config: Config, out_dir: Path, start_step: int) -> None: ...
    def on_phase(self, name: str) -> None: ...
    def on_step(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def on_message(self, text: str) -> None: ...
    def on_finish(self, result: RunResult) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended.

    Attributes:
        status: `interrupted` after a signal, which `signal` names.
        step: training steps done.
        out_dir: the run's folder.
        metrics: the last evaluation.
        resume_command: what continues an interrupted run.
    """

    status: Literal["finished", "interrupted"]
    step: int
    out_dir: Path
    metrics: Mapping[str, float]
    signal: int | None = None
    resume_command: str | None = None


class Silent:
    """An `Observer` that says nothing."""

    def on_start(self, config: Config, out_dir: Path, start_step: int) -> None: ...
    def on_phase(self, name: str) -> None: ...
    def on_step(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def on_message(self, text: str) -> None: ...
    def on_finish(self, result: RunResult) -> None: ...


def train(
    config: Config, out_dir: str | Path, *, resume: bool = False, observer: Observer | None = None
) -> RunResult:
    """Train to `trainer.total_steps` and leave everything in `out_dir`.

    The folder holds `config.yaml`, `metrics.jsonl`, `checkpoints/`, `images/` and, where a run died,
    `failure.txt` with its reason.

    Args:
        config: the configuration.
        out_dir: the run's folder; nothing is written outside of it.
        resume: continue from the newest intact checkpoint, or start if there is none.
        observer: told of every step.

    Raises:
        ConfigError: `out_dir` holds another run, or something in `config` cannot work.
        CheckpointError: no checkpoint of an earlier run is intact, or one cannot be written.
    """
    folder = Path(out_dir)
    _claim(folder, config, resume)
    try:
        return _Run(config, folder, resume, observer or Silent()).run()
    except Exception:
        checkpoint.write_text(folder / FAILURE_FILE, traceback.format_exc())
        raise


def build_parts(config: Config) -> tuple[Parts, PromptSet]:
    """Load and connect everything that a training step works with."""
    if config.trainer.num_threads is not None:
        torch.set_num_threads(config.trainer.num_threads)
    data = load_prompts(
        config.data.path,
        heldout_fraction=config.data.heldout_fraction,
        num_train=config.data.num_train,
        num_heldout=config.data.num_heldout,
        seed=0,
    )
    reward = build_reward(config.reward.terms)
    family = load_family(
        config.model.path,
        family=config.model.family,
        dtype=DTYPES[config.model.dtype],
        device=_device(config.trainer.device),
        max_sequence_length=config.model.max_sequence_length,
    )
    actor = DiffusionActor(family, config)
    engine = build_engine(config, actor)
    cache = PromptCache(family, actor.guidance, [prompt.text for prompt in (*data.train, *data.heldout)])
    stream = PromptStream(data.train, seed=config.trainer.seed)
    return Parts(config=config, actor=actor, engine=engine, cache=cache, prompts=stream, reward=reward), data


def build_engine(config: Config, actor: DiffusionActor) -> InProcessEngine:
    """The rollout engine that `rollout.name` asks for."""
    return InProcessEngine(
        actor.family,
        config.rollout,
        config.sampling,
        seed=config.trainer.seed,
        merge=actor.merged_weights,
        base=actor.base,
    )


class _Run:
    def __init__(self, config: Config, out_dir: Path, resume: bool, observer: Observer) -> None:
        self.config, self.out_dir, self.observer = config, out_dir, observer
        self.parts, self.data = build_parts(config)
        self.trackers: list[Tracker] = build_trackers(config.trainer.trackers)
        self.step = 0
        self.best: tuple[int, float] | None = None
        self.evaluation: Evaluation | None = None
        self.saved_step: int | None = None
        self.boundary = 0
        self.resumed = resume and self._restore()
        if not self.resumed:
            self.parts.engine.sync(self.parts.actor.snapshot())

    def run(self) -> RunResult:
        trainer = self.config.trainer
        for tracker in self.trackers:
            tracker.start(self.out_dir.name, self.out_dir, resume_step=self.step if self.resumed else None)
            tracker.log_config(configs.to_mapping(self.config))
        self.observer.on_start(self.config, self.out_dir, self.step)
        try:
            with _Signals(self.observer) as signals:
                if not self.resumed:
                    self._log({}, self._evaluate())
                while self.step < trainer.total_steps and signals.received is None:
                    self._train_one_step()
                if signals.received is not None and self.step < trainer.total_steps:
                    return self._interrupted(signals.received)
                return self._finished()
        finally:
            self.parts.engine.close()
            for tracker in self.trackers:
                tracker.finish()

    def _train_one_step(self) -> None:
        trainer = self.config.trainer
        step = self.step + 1
        self.boundary = self.parts.prompts.position
        version = self.parts.actor.version
        try:
            result = train_step(self.parts, step, self.observer.on_phase)
        except Exception:
            # Nothing was learned in the failed step yet: what came before it can still be saved.
            if self.parts.actor.version == version and self.saved_step != self.step:
                self.parts.prompts.position = self.boundary
                self._save()
            raise
        self.step = step
        last = step == trainer.total_steps
        due = last or (trainer.eval_every > 0 and step % trainer.eval_every == 0)
        values = result.metrics.compute()
        self.observer.on_step(step, values)
        self._log(values, self._evaluate() if due else {})
        if trainer.image_every and step % trainer.image_every == 0:
            self._log_images(result)
        if last or step % trainer.save_every == 0 or (self.best is not None and self.best[0] == step):
            self._save()

    def _evaluate(self) -> dict[str, float]:
        trainer, parts = self.config.trainer, self.parts
        self.observer.on_phase("evaluation")
        self.evaluation = evaluate(
            parts.actor,
            parts.cache,
            self.data.heldout,
            parts.reward,
            num_inference_steps=trainer.eval_num_inference_steps or self.config.sampling.num_inference_steps,
        )
        metrics = self.evaluation.metrics
        if trainer.best_metric not in metrics:
            raise ConfigError(
                f"trainer.best_metric={trainer.best_metric!r} is not among the evaluation's metrics; "
                f"choose from {', '.join(sorted(metrics))}"
            )
        if self.best is None or metrics[trainer.best_metric] > self.best[1]:
            self.best = (self.step, metrics[trainer.best_metric])
        name = "before" if self.step == 0 else "after"
        grid = image_grid(labelled(self.evaluation.images, self.data.heldout))
        path = self.out_dir / "images" / f"eval_{name}.png"
        path.parent.mkdir(exist_ok=True)
        grid.save(path)
        self.observer.on_eval(self.step, metrics)
        return metrics

    def _log(self, values: Mapping[str, float], evaluated: Mapping[str, float]) -> None:
        for tracker in self.trackers:
            tracker.log({**values, **evaluated}, self.step)

    def _log_images(self, result: StepResult) -> None:
        grid = image_grid(labelled(result.images, result.prompts, result.scores)[:48])
        for tracker in self.trackers:
            tracker.log_images({"rollout": [grid]}, self.step)

    # Checkpoints -----------------------------------------------------------------------------------------

    def _save(self) -> None:
        actor, engine = self.parts.actor, self.parts.engine
        history = engine.history
        groups: dict[str, Mapping[str, torch.Tensor]] = {
            "weights": actor.snapshot().tensors,
            "optimizer": actor.optimizer_state(),
            "ema": actor.ema or {},
            "rng": {"cpu": torch.get_rng_state()},
        }
        groups |= {f"history_{place}": weights.tensors for place, weights in enumerate(history[:-1])}
        state = TrainingState(
            step=self.step,
            tensors={f"{group}/{name}": tensor for group, tensors in groups.items() for name, tensor in tensors.items()},
            facts={
                "version": actor.version,
                "data_position": self.parts.prompts.position,
                "best": self.best,
                "history_versions": [weights.version for weights in history],
                "config": configs.to_mapping(self.config),
            },
        )
        root = self.out_dir / CHECKPOINTS
        checkpoint.save(root, state, actor.save_adapter)
        self.saved_step = self.step
        best = self.best[0] if self.best is not None else None
        checkpoint.prune(root, keep=self.config.trainer.keep_checkpoints, best=best)

    def _restore(self) -> bool:
        """Load the newest intact checkpoint; False if there never was one."""
        root = self.out_dir / CHECKPOINTS
        if not checkpoint.folders(root):
            return False
        found = checkpoint.load_latest(root)
        if found is None:
            raise CheckpointError(
                f"no checkpoint in {root} is intact; start again in another folder with --out, "
                "or restore one from a backup"
            )
        folder, state = found
        restore_actor(self.parts.actor, folder, state)
        versions = state.facts["history_versions"]
        older = [
            Weights(version=version, tensors=_on_device(state.group(f"history_{place}"), self.parts.actor.device))
            for place, version in enumerate(versions[:-1])
        ]
        self.parts.engine.restore([*older, self.parts.actor.snapshot()])
        self.parts.prompts.position = state.facts["data_position"]
        torch.set_rng_state(state.tensors["rng/cpu"])
        self.best = tuple(state.facts["best"]) if state.facts["best"] else None
        self.step = self.saved_step = state.step
        return True

    # Endings ---------------------------------------------------------------------------------------------

    def _finished(self) -> RunResult:
        if self.evaluation is None:
            self._evaluate()
        assert self.evaluation is not None
        before_after(self.out_dir / "images")
        result = RunResult(
            status="finished", step=self.step, out_dir=self.out_dir, metrics=self.evaluation.metrics
        )
        self.observer.on_finish(result)
        return result

    def _interrupted(self, number: int) -> RunResult:
        if self.saved_step != self.step:
            self._save()
        result = RunResult(
            status="interrupted",
            step=self.step,
            out_dir=self.out_dir,
            metrics=self.evaluation.metrics if self.evaluation else {},
            signal=number,
            resume_command=f"flowcorr train {shlex.quote(str(self.out_dir / CONFIG_FILE))} "
            f"--resume --out {shlex.quote(str(self.out_dir))}",
        )
        self.observer.on_finish(result)
        return result


class _Signals:
    """Notes the first SIGINT or SIGTERM, so that the step in flight can end; the second stops at once."""

    _numbers = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, observer: Observer) -> None:
        self.received: int | None = None
        self._observer = observer
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        # Handlers can be set in the main thread alone; elsewhere the caller's own stay in force.
        try:
            self._previous = {number: signal.signal(number, self._handle) for number in self._numbers}
        except ValueError:
            logger.debug("not in the main thread: signals are left to the caller")
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.received = number
        self._restore()
        self._observer.on_message(
            f"{signal.Signals(number).name}: finishing this step and saving; again stops at once"
        )

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}


def restore_actor(actor: DiffusionActor, folder: Path, state: TrainingState) -> None:
    """Put a checkpoint's weights, optimizer and average into `actor`.

    Raises:
        CheckpointError: the checkpoint belongs to another model or adapter.
    """
    device = actor.device
    try:
        actor.load_weights(_on_device(state.group("weights"), device))
    except ValueError as error:
        raise CheckpointError(f"checkpoint {folder} does not fit this run: {error}") from error
    actor.load_optimizer_state(_on_device(state.group("optimizer"), device))
    if actor.ema is not None:
        actor.ema = _on_device(state.group("ema"), device)
    actor.version = state.facts["version"]


def _claim(folder: Path, config: Config, resume: bool) -> None:
    """Make `folder` this run's, or raise if it holds another."""
    path = folder / CONFIG_FILE
    if path.exists():
        if not resume:
            raise ConfigError(
                f"{folder} already holds a run; continue it with --resume, or choose another folder with --out"
            )
        changed = _changes(configs.to_mapping(configs.load(path)), configs.to_mapping(config))
        if changed:
            raise ConfigError(
                f"{folder} holds a run of another configuration, which --resume cannot continue: "
                + "; ".join(changed)
                + ". Use the old values, or another folder with --out"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint.write_text(path, configs.to_yaml(config))
        (folder / FAILURE_FILE).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"the run's folder {folder} cannot be written: {error}") from error


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    changes = []
    for key in old.keys() | new.keys():
        before, after, name = old.get(key), new.get(key), f"{prefix}{key}"
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            changes += _changes(before, after, f"{name}.")
        elif before != after and not (prefix == "trainer." and key in _RESUMABLE):
            changes.append(f"{name} was {json.dumps(before)}, now {json.dumps(after)}")
    return sorted(changes)


def _on_device(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _device(name: str) -> torch.device:
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def evaluate_run(
    run_dir: str | Path, *, which: str = "best", overrides: tuple[str, ...] = ()
) -> tuple[Path, Evaluation]:
    """Evaluate a run's `best` or `last` checkpoint, or one given by its folder, on held-out prompts.

    Raises:
        ConfigError: `run_dir` holds no run.
        CheckpointError: the checkpoint is missing, damaged or does not fit.
    """
    folder = Path(run_dir)
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(f"{folder} holds no run: {CONFIG_FILE} is missing")
    config = configs.load(folder / CONFIG_FILE, overrides)
    chosen = _choose(folder / CHECKPOINTS, which)
    state = checkpoint.load(chosen)
    # The engine is not needed: let it share the actor's weights.
    parts, data = build_parts(replace(config, rollout=replace(config.rollout, emulate="none", staleness=0)))
    restore_actor(parts.actor, chosen, state)
    steps = config.trainer.eval_num_inference_steps or config.sampling.num_inference_steps
    return chosen, evaluate(parts.actor, parts.cache, data.heldout, parts.reward, num_inference_steps=steps)


def _choose(root: Path, which: str) -> Path:
    found = checkpoint.latest(root)
    if found is None:
        raise CheckpointError(f"{root} holds no checkpoint yet")
    if which == "last":
        return found
    if which == "best":
        best = checkpoint.load(found).facts["best"]
        folder = checkpoint.folder_of(root, best[0]) if best else found
        return folder if folder.is_dir() else found
    return Path(which)
