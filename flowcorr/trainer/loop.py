"""A run from its configuration to its last checkpoint: set-up, resume, evaluation, bookkeeping, endings."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from flowcorr import config as configs
from flowcorr import distributed
from flowcorr.config.schema import Config
from flowcorr.correction.rejection import idle_modes
from flowcorr.errors import BackendError
from flowcorr.trackers import Tracker, build_trackers
from flowcorr.trainer import checkpoint, log_probs, run_folder, state
from flowcorr.trainer.checkpoint import TrainingState
from flowcorr.trainer.evaluate import Evaluation, check_best_metric, evaluate
from flowcorr.trainer.events import EventLog
from flowcorr.trainer.images import before_after, image_grid, labelled, save_image
from flowcorr.trainer.log_probs import LoggedTerms
from flowcorr.trainer.observer import Observer, RunResult, Silent
from flowcorr.trainer.ranks import start_ranks
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

    The folder holds `config.yaml`, `metrics.jsonl`, `events.jsonl`, `checkpoints/`, `images/`, with
    `trainer.dump_log_probs` `log_probs/`, and, where a run died, `failure.txt` with its reason.

    Where torchrun or accelerate started several ranks, they share the work of each step, and the result is that of
    one rank: the main one writes the folder and tells the observer, any other only its `failure_rank1.txt`. A signal
    to one of them, or a failure, ends all. The folder has to be one that all of them see.

    Args:
        config: the configuration.
        out_dir: the run's folder; nothing is written outside of it.
        resume: continue from the newest intact checkpoint, or start if there is none; on any number of ranks.
        observer: told of every step.
        before_start: looks at the run's parts before its first step, on every rank, and raises what is to stop it.

    Raises:
        ConfigError: `out_dir` holds another run, or that of a run at work; or something in `config` cannot work.
        CheckpointError: no checkpoint of an earlier run is intact, or one cannot be written.
        BackendError: the reward failed, or the folder can no longer be written to.
        BatchError: the rollout returned values that cannot be trained on.
        RankError: another rank failed, or did not come within `trainer.collective_timeout`.
    """
    folder = Path(out_dir)
    start_ranks(config)
    with contextlib.ExitStack() as held:
        with distributed.together("taking the run's folder"):
            if distributed.is_main():
                held.enter_context(run_folder.locked(folder))
                run_folder.claim(folder, config, resume=resume)
        events = held.enter_context(EventLog(folder))
        with run_folder.failure_noted(folder, events):
            shown = observer if observer is not None and distributed.is_main() else Silent()
            run = _Run(config, folder, resume, shown, events)
        return run.run(before_start)


class _Run:
    def __init__(
        self, config: Config, out_dir: Path, resume: bool, observer: Observer, events: EventLog
    ) -> None:
        self.config, self.out_dir, self.observer, self.events = config, out_dir, observer, events
        trackers = build_trackers(config.trainer.trackers)
        self.trackers: list[Tracker] = trackers if distributed.is_main() else []
        self.parts, self.data = build_parts(config, on_event=events)
        self.step = 0
        self.best: tuple[int, float] | None = None
        self.evaluation: Evaluation | None = None
        self.saved_step: int | None = None
        self.unevaluated: Mapping[str, float] | None = None  # metrics of a step whose evaluation failed
        self._warned: set[str] = set()
        try:
            self.resumed = resume and self._restore()
            if not self.resumed:
                self.parts.engine.sync(self.parts.actor.snapshot())
        except BaseException:
            self.parts.close()
            raise
        if distributed.is_main():
            events("resume" if self.resumed else "start", total_steps=config.trainer.total_steps)

    def run(self, before_start: Callable[[Parts], None] | None) -> RunResult:
        total_steps = self.config.trainer.total_steps
        with contextlib.ExitStack() as endings:
            # What ends the other ranks may end this one too: by a signal, which is not to cut its endings short.
            signals = endings.enter_context(StopSignals(self._on_signal))
            endings.enter_context(run_folder.failure_noted(self.out_dir, self.events))
            endings.callback(self.parts.close)
            for tracker in self.trackers:
                endings.callback(tracker.finish)
                tracker.start(
                    self.out_dir.name, self.out_dir, resume_step=self._logged_step() if self.resumed else None
                )
                tracker.log_config(configs.to_mapping(self.config))
            if distributed.is_main():
                log_probs.discard_after(self.out_dir, self.step)
            self.observer.on_start(self.config, self.out_dir, self.step)
            with distributed.together("what is done before the start"):
                if before_start is not None:
                    before_start(self.parts)
            if not self.resumed or self.unevaluated is not None:
                values, self.unevaluated = self.unevaluated or {}, None
                self._log(values, self._evaluated_after(values))
                self._save()
            signal = None
            while self.step < total_steps and (signal := _received(signals)) is None:
                self._train_one_step()
            result = self._finished() if signal is None else self._interrupted(signal)
            # Launchers stop all ranks as soon as one is gone.
            distributed.gather(None, "the end of the run")
            return result

    def _train_one_step(self) -> None:
        trainer = self.config.trainer
        result = self._attempt(self.step + 1)
        self.step = self.events.step = self.step + 1
        values = result.metrics.compute()
        self.observer.on_step(self.step, values)
        self._warn_of_idle_bands(values)
        last = self.step == trainer.total_steps
        evaluates = last or (trainer.eval_every > 0 and self.step % trainer.eval_every == 0)
        if trainer.dump_log_probs:
            self._dump(result.terms)
        self._log(values, self._evaluated_after(values) if evaluates else {})
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
            # Sharded weights take all ranks to be saved, and one of them has failed.
            if actor.version == version and self.saved_step != self.step and not actor.sharded:
                prompts.position = position
                self._rescue()
            raise

    def _evaluated_after(self, values: Mapping[str, float]) -> dict[str, float]:
        """Evaluate; where a reward fails at it, keep the training step that was done before, and its metrics.

        A run that goes on from there does the evaluation first.
        """
        try:
            return self._evaluate()
        except BackendError:
            if not values:  # nothing was trained yet
                raise
            self._log(values, {})
            self.unevaluated = values
            if not self.parts.actor.sharded:
                self._rescue()
            raise

    def _rescue(self) -> None:
        try:
            self._write(*self._captured())
        except Exception as error:
            # The failure that led here is the one to report.
            logger.warning("no checkpoint could be saved after the failure: %s", error)

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
        if distributed.is_main():
            pictures = labelled(self.evaluation.images, self.data.heldout, self.evaluation.scores)
            name = "before" if self.step == 0 else "after"
            save_image(image_grid(pictures), self.out_dir / run_folder.IMAGES / f"eval_{name}.png")
        self.observer.on_eval(self.step, metrics)
        return metrics

    def _log(self, values: Mapping[str, float], evaluated: Mapping[str, float]) -> None:
        for tracker in self.trackers:
            tracker.log({**values, **evaluated}, self.step)

    def _dump(self, terms: LoggedTerms | None) -> None:
        """Save what the losses of a training step were computed from, on whatever rank."""
        parts = distributed.gather_on_main(terms, "the log-probs of a step")
        if parts is not None:
            everything = LoggedTerms.concatenate([part for part in parts if part is not None])
            log_probs.save(self.out_dir / log_probs.FOLDER, self.step, everything, self.config)

    def _log_images(self, result: StepResult) -> None:
        """Show samples of the main rank."""
        if not self.trackers:
            return
        grid = image_grid(labelled(result.images, result.prompts, result.scores))
        for tracker in self.trackers:
            tracker.log_images({"rollout": [grid]}, self.step)

    # Checkpoints -----------------------------------------------------------------------------------------

    def _save(self) -> None:
        captured = self._captured()
        with distributed.together("writing a checkpoint"):
            self._write(*captured)
        self.saved_step = self.step

    def _captured(self) -> tuple[TrainingState, dict[str, Tensor]]:
        """What a checkpoint holds: state, and weights for a pipeline; all ranks of a sharded actor take part."""
        actor = self.parts.actor
        captured = state.capture(self.parts, step=self.step, best=self.best, unevaluated=self.unevaluated)
        return captured, actor.exported() if distributed.is_main() or actor.sharded else {}

    def _write(self, captured: TrainingState, weights: Mapping[str, Tensor]) -> None:
        if not distributed.is_main():
            return
        root = self.out_dir / run_folder.CHECKPOINTS
        folder = checkpoint.save(root, captured, partial(self.parts.actor.save_adapter, tensors=weights))
        self.events("checkpoint", folder=folder.name)
        best_step = self.best[0] if self.best is not None else None
        checkpoint.prune(root, keep=self.config.trainer.keep_checkpoints, best=best_step)

    def _restore(self) -> bool:
        """Load the newest intact checkpoint; False if there never was one."""
        root = self.out_dir / run_folder.CHECKPOINTS
        latest: tuple[Path, TrainingState] | None = None
        with distributed.together("looking for a checkpoint"):
            if distributed.is_main() and checkpoint.folders(root):
                latest = checkpoint.load_latest(root)
        folder = distributed.decide(None if latest is None else latest[0], "the choice of a checkpoint")
        if folder is None:
            return False
        with distributed.together("reading a checkpoint"):
            found = checkpoint.load(folder) if latest is None else latest[1]
        state.restore(self.parts, folder, found)
        if distributed.is_main():
            checkpoint.discard_after(root, found.step)
        self.step = self.saved_step = self.events.step = found.step
        self.unevaluated = found.facts.get("unevaluated")
        # A best score counts only against scores of its own metric.
        same_metric = found.facts["config"]["trainer"]["best_metric"] == self.config.trainer.best_metric
        if same_metric and found.facts["best"] is not None:
            step, score = found.facts["best"]
            self.best = (step, score)
        return True

    def _logged_step(self) -> int:
        """The last step whose record is whole."""
        return self.step if self.unevaluated is None else self.step - 1

    # Endings ---------------------------------------------------------------------------------------------

    def _on_signal(self, text: str) -> None:
        self.events("signal", says=text)
        self.observer.on_message(text)

    def _end(self, result: RunResult) -> RunResult:
        if distributed.is_main():
            self.events("end", status=result.status)
        self.observer.on_finish(result)
        return result

    def _finished(self) -> RunResult:
        if self.evaluation is None:
            self._evaluate()
        assert self.evaluation is not None
        if distributed.is_main():
            before_after(self.out_dir / run_folder.IMAGES)
        result = RunResult(
            status="finished", step=self.step, out_dir=self.out_dir, metrics=self.evaluation.metrics
        )
        return self._end(result)

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
        return self._end(result)


def _received(signals: StopSignals) -> int | None:
    """The signal that ends the run, whatever rank it came to."""
    numbers = distributed.gather(signals.received, "the end of a step")
    return next((number for number in numbers if number is not None), None)
