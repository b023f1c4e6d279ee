"""A run from its configuration to its last checkpoint: set-up, resume, evaluation, bookkeeping, endings."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from flowcorr import config as configs
from flowcorr.config.schema import Config
from flowcorr.correction.rejection import idle_modes
from flowcorr.errors import CheckpointError
from flowcorr.trackers import Tracker, build_trackers
from flowcorr.trainer import checkpoint, run_folder, state
from flowcorr.trainer.evaluate import Evaluation, check_best_metric, evaluate
from flowcorr.trainer.images import before_after, image_grid, labelled, save_image
from flowcorr.trainer.observer import Observer, RunResult, Silent
from flowcorr.trainer.setup import build_parts
from flowcorr.trainer.signals import StopSignals
from flowcorr.trainer.step import Parts, StepResult, train_step

logger = logging.getLogger(__name__)


def train(
    config: Config,
    out_dir: str | Path,
    *,
    resume: bool = False,
    observer: Observer | None = None,
    before_start: Callable[[Parts], None] | None = None,
) -> RunResult:
    """Train to `trainer.total_steps` and leave everything in `out_dir`.

    The folder holds `config.yaml`, `metrics.jsonl`, `checkpoints/`, `images/` and, where a run died,
    `failure.txt` with its reason.

    Args:
        config: the configuration.
        out_dir: the run's folder; nothing is written outside of it.
        resume: continue from the newest intact checkpoint, or start if there is none.
        observer: told of every step.
        before_start: looks at the run's parts before its first step, and raises what is to stop it.

    Raises:
        ConfigError: `out_dir` holds another run, or something in `config` cannot work.
        CheckpointError: no checkpoint of an earlier run is intact, or one cannot be written.
        BackendError: the reward failed, or the folder can no longer be written to.
        BatchError: the rollout returned values that cannot be trained on.
    """
    folder = Path(out_dir)
    run_folder.claim(folder, config, resume=resume)
    try:
        return _Run(config, folder, resume, observer or Silent()).run(before_start)
    except Exception:
        run_folder.write_failure(folder, traceback.format_exc())
        raise


class _Run:
    def __init__(self, config: Config, out_dir: Path, resume: bool, observer: Observer) -> None:
        self.config, self.out_dir, self.observer = config, out_dir, observer
        self.trackers: list[Tracker] = build_trackers(config.trainer.trackers)
        self.parts, self.data = build_parts(config)
        self.step = 0
        self.best: tuple[int, float] | None = None
        self.evaluation: Evaluation | None = None
        self.saved_step: int | None = None
        self._warned: set[str] = set()
        self.resumed = resume and self._restore()
        if not self.resumed:
            self.parts.engine.sync(self.parts.actor.snapshot())

    def run(self, before_start: Callable[[Parts], None] | None) -> RunResult:
        total_steps = self.config.trainer.total_steps
        with contextlib.ExitStack() as endings:
            endings.callback(self.parts.engine.close)
            for tracker in self.trackers:
                endings.callback(tracker.finish)
                tracker.start(
                    self.out_dir.name, self.out_dir, resume_step=self.step if self.resumed else None
                )
                tracker.log_config(configs.to_mapping(self.config))
            self.observer.on_start(self.config, self.out_dir, self.step)
            signals = endings.enter_context(StopSignals(self.observer.on_message))
            if before_start is not None:
                before_start(self.parts)
            if not self.resumed:
                self._log({}, self._evaluate())
                self._save()
            while self.step < total_steps and signals.received is None:
                self._train_one_step()
            if signals.received is not None and self.step < total_steps:
                return self._interrupted(signals.received)
            return self._finished()

    def _train_one_step(self) -> None:
        trainer = self.config.trainer
        result = self._attempt(self.step + 1)
        self.step += 1
        values = result.metrics.compute()
        self.observer.on_step(self.step, values)
        self._warn_of_idle_bands(values)
        last = self.step == trainer.total_steps
        evaluates = last or (trainer.eval_every > 0 and self.step % trainer.eval_every == 0)
        self._log(values, self._evaluate() if evaluates else {})
        if trainer.image_every and self.step % trainer.image_every == 0:
            self._log_images(result)
        is_best = self.best is not None and self.best[0] == self.step
        if last or is_best or self.step % trainer.save_every == 0:
            self._save()

    def _attempt(self, step: int) -> StepResult:
        """Do a training step; where it fails before it learned anything, save the state before it."""
        actor, prompts = self.parts.actor, self.parts.prompts
        version, position = actor.version, prompts.position
        try:
            return train_step(self.parts, step, self.observer.on_phase)
        except Exception:
            if actor.version == version and self.saved_step != self.step:
                prompts.position = position
                self._rescue()
            raise

    def _rescue(self) -> None:
        try:
            self._save()
        except CheckpointError as error:
            logger.warning("%s", error)  # the failure that led here is the one to report

    def _warn_of_idle_bands(self, values: Mapping[str, float]) -> None:
        """Say once which rejection bands cannot act on a gap of the size that was measured."""
        correction = self.config.algorithm.rollout_correction
        idle = [] if correction is None else idle_modes(correction.criteria, values)
        for mode in set(idle) - self._warned:
            self._warned.add(mode)
            logger.warning(
                "algorithm.rollout_correction.rollout_rs=%s cannot reject anything here: its threshold lies more than "
                "ten times beyond the largest value measured; tighten it, or set log_ratio_scale: sqrt or sum",
                mode,
            )

    # Scores and images -----------------------------------------------------------------------------------

    def _evaluate(self) -> dict[str, float]:
        trainer, parts = self.config.trainer, self.parts
        self.observer.on_phase("evaluation")
        self.evaluation = evaluate(parts, self.data.heldout)
        metrics = self.evaluation.metrics
        check_best_metric(trainer.best_metric, metrics)
        if self.best is None or metrics[trainer.best_metric] > self.best[1]:
            self.best = (self.step, metrics[trainer.best_metric])
        pictures = labelled(self.evaluation.images, self.data.heldout, self.evaluation.scores)
        name = "before" if self.step == 0 else "after"
        save_image(image_grid(pictures), self.out_dir / run_folder.IMAGES / f"eval_{name}.png")
        self.observer.on_eval(self.step, metrics)
        return metrics

    def _log(self, values: Mapping[str, float], evaluated: Mapping[str, float]) -> None:
        for tracker in self.trackers:
            tracker.log({**values, **evaluated}, self.step)

    def _log_images(self, result: StepResult) -> None:
        grid = image_grid(labelled(result.images, result.prompts, result.scores))
        for tracker in self.trackers:
            tracker.log_images({"rollout": [grid]}, self.step)

    # Checkpoints -----------------------------------------------------------------------------------------

    def _save(self) -> None:
        root = self.out_dir / run_folder.CHECKPOINTS
        captured = state.capture(self.parts, step=self.step, best=self.best)
        checkpoint.save(root, captured, self.parts.actor.save_adapter)
        self.saved_step = self.step
        best_step = self.best[0] if self.best is not None else None
        checkpoint.prune(root, keep=self.config.trainer.keep_checkpoints, best=best_step)

    def _restore(self) -> bool:
        """Load the newest intact checkpoint; False if there never was one."""
        root = self.out_dir / run_folder.CHECKPOINTS
        if not checkpoint.folders(root):
            return False
        folder, found = checkpoint.load_latest(root)
        state.restore(self.parts, folder, found)
        checkpoint.discard_after(root, found.step)
        self.step = self.saved_step = found.step
        # A best score counts only against scores of its own metric.
        same_metric = found.facts["config"]["trainer"]["best_metric"] == self.config.trainer.best_metric
        if same_metric and found.facts["best"] is not None:
            step, score = found.facts["best"]
            self.best = (step, score)
        return True

    # Endings ---------------------------------------------------------------------------------------------

    def _finished(self) -> RunResult:
        if self.evaluation is None:
            self._evaluate()
        assert self.evaluation is not None
        before_after(self.out_dir / run_folder.IMAGES)
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
            resume_command=run_folder.resume_command(self.out_dir),
        )
        self.observer.on_finish(result)
        return result
