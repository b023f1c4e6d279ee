"""A training run from its configuration to its last checkpoint: start or resume, steps, evaluations, endings."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flowcorr import config as configs
from flowcorr import devices, distributed, dumps
from flowcorr.config import rules
from flowcorr.config.schema import Config
from flowcorr.correction.bounds import idle_modes
from flowcorr.errors import BackendError, RolloutFault
from flowcorr.processes import clear_shared_memory
from flowcorr.records import ImageArray, Prompt
from flowcorr.trackers import IMAGES_FOLDER, Ending, Trackers, build_trackers
from flowcorr.trainer import checkpoint, out_of_memory, run_folder, state
from flowcorr.trainer.attempt import attempt
from flowcorr.trainer.best import Best, best_checkpoint, best_so_far
from flowcorr.trainer.checkpoint import TrainingState
from flowcorr.trainer.collect import prefetch
from flowcorr.trainer.evaluate import evaluate
from flowcorr.trainer.events import EventLog
from flowcorr.trainer.fault import keep_evidence
from flowcorr.trainer.images import Shown, before_after
from flowcorr.trainer.log_probs import save_terms
from flowcorr.trainer.observer import Observer, RunResult, Silent
from flowcorr.trainer.run import TrainingRun
from flowcorr.trainer.setup import build_run
from flowcorr.trainer.signals import REPEAT, StopSignals
from flowcorr.trainer.step import StepResult
from flowcorr.trainer.videos import log_samples, save_and_log_rollouts, save_samples
from flowcorr.workers.rollout import RayRollout

logger = logging.getLogger(__name__)


def train(
    config: Config,
    out_dir: str | Path,
    *,
    resume: bool = False,
    observer: Observer | None = None,
    before_start: Callable[[TrainingRun], None] | None = None,
) -> RunResult:
    """Train to `trainer.total_steps` and write everything to `out_dir`.

    The folder holds `config.yaml`, `metrics.jsonl`, `events.jsonl`, `checkpoints/`, `images/`, with
    `trainer.dump_log_probs` also `log_probs/`, after a failure `failure.txt`, and after a fault of the engine `fault/`.

    If torchrun or accelerate started several ranks, they share the work of each step, with the result of one rank. The
    main rank writes the folder and calls the observer; another rank writes only its failure, as `failure_rank1.txt`. A
    signal to any rank, or a failure of one, ends all. All ranks need access to the folder. The global generators of
    torch, NumPy and `random` are seeded at each step, for code of one's own that draws from them.

    Args:
        config: the configuration.
        out_dir: the run's folder; nothing is written outside of it.
        resume: continue from the newest intact checkpoint, or start if there is none; on any number of ranks.
        observer: follows the run.
        before_start: called on every rank before the first step; an exception that it raises ends the run.

    Returns:
        How the run ended: at its last step, or after one of `STOP_SIGNALS`.

    Raises:
        StopRequest: a signal came before the first step; there was nothing to save.
        ConfigError: `out_dir` holds another run or is in use by one, or something in `config` cannot work.
        CheckpointError: an earlier run has no intact checkpoint, or a checkpoint cannot be written.
        BackendError: the reward failed, or the folder can no longer be written to.
        BatchError: the rollout returned values that cannot be trained on.
        RolloutFault: a training step measured what only a fault of the engine explains, see `trainer.on_fault`.
        RankError: another rank failed, or did not reach a collective within `trainer.collective_timeout`.
    """
    rules.check(config)
    folder = Path(out_dir)
    distributed.start_ranks(config.trainer.device, timeout=config.trainer.collective_timeout)
    rules.check_ranks(config, distributed.world_size())
    clear_shared_memory()
    with contextlib.ExitStack() as resources:
        signals = resources.enter_context(StopSignals())
        with distributed.fail_together("taking the run's folder"):
            if distributed.is_main():
                resources.enter_context(run_folder.locked(folder))
                run_folder.claim(folder, config, resume=resume)
        events = resources.enter_context(EventLog(folder))
        if resume:  # also of a failure before a checkpoint is restored
            events.step = max(checkpoint.steps(folder / run_folder.CHECKPOINTS), default=0)
        with run_folder.failure_noted(folder, events, keep_earlier=resume):
            shown = observer if observer is not None and distributed.is_main() else Silent()
            return _Loop(config, folder, resume, shown, events).train(before_start, signals)


class _Loop:
    def __init__(
        self, config: Config, out_dir: Path, resume: bool, observer: Observer, events: EventLog
    ) -> None:
        self.config, self.out_dir, self.observer, self.events = config, out_dir, observer, events
        trackers = build_trackers(config.trainer.trackers)
        self.trackers = Trackers(
            trackers if distributed.is_main() else {}, partial(self._say, "tracker_failed")
        )
        self.run, self.data = build_run(config, on_event=events)
        self.step = 0
        self.best: Best | None = None
        self.evaluated: Mapping[str, float] = {}  # metrics of the last evaluation
        self.ending: Ending = "failed"  # until it ends otherwise
        self.saved_step: int | None = None
        self._before: TrainingState | None = None  # the state before the step in flight, see `_held`
        self._writing = threading.RLock()  # a signal's thread saves, too
        self.unlogged: Mapping[str, float] | None = None  # metrics of a step whose record is not complete
        self._last_logged = -1  # the last step of which the trackers were given a record, complete or not
        self._warned: set[str] = set()
        self._phase = ""
        try:
            self.resumed = resume and self._restore()
            if not self.resumed:
                self.run.engine.sync(self.run.actor.weights.for_engine())
            with distributed.fail_together("writing the run's configuration"):
                if resume and distributed.is_main():
                    run_folder.write_config(out_dir, config)
        except BaseException:
            self.run.close()
            raise
        fresh = f"{out_dir} holds no run to resume; starting at step 0"
        self.notice = fresh if resume and not self.resumed else None
        if distributed.is_main():
            says: dict[str, Any] = {"ranks": distributed.world_size(), **devices.facts(self.run.actor.device)}
            if self.notice is not None:
                says["says"] = self.notice
            events("resume" if self.resumed else "start", total_steps=config.trainer.total_steps, **says)
            if isinstance(self.run.engine, RayRollout):
                events("workers", places=self.run.engine.places)

    def train(self, before_start: Callable[[TrainingRun], None] | None, signals: StopSignals) -> RunResult:
        try:
            result = self._train(before_start, signals)
        except KeyboardInterrupt:
            if self.trackers.beside_folder:  # they may have printed a summary below the line that says it
                self._say("signal", f"resume with: {run_folder.resume_command(self.out_dir)}")
            raise
        self.observer.on_finish(result)
        return result

    def _train(self, before_start: Callable[[TrainingRun], None] | None, signals: StopSignals) -> RunResult:
        with contextlib.ExitStack() as endings:
            endings.callback(self.run.close)
            # Launchers signal every rank when one fails; the signal must not interrupt this rank's endings.
            signals.report_to(self._on_signal)
            endings.callback(signals.report_to, lambda number, again: None)
            logged = self.step if self.unlogged is None else self.step - 1  # the last whole record
            endings.callback(lambda: self.trackers.finish(self.ending))
            mapping = configs.to_mapping(self.config)
            self.trackers.start(self.out_dir.name, self.out_dir, mapping, logged if self.resumed else None)
            if distributed.is_main():
                dumps.discard_after(self.out_dir, self.step)
            self.observer.on_start(self.config, self.out_dir, self.step)
            if self.notice is not None:
                self.observer.on_message(self.notice)
            with distributed.fail_together("the checks before the start"):
                if before_start is not None:
                    before_start(self.run)
            if not self.resumed or self.unlogged is not None:
                with self._kept(self.unlogged):
                    self._evaluate_and_log(self.unlogged or {})
                self._save()
            number = None
            while self.step < self.config.trainer.total_steps and (number := _received(signals)) is None:
                with self._given_up_after(signals):
                    self._train_one_step()
            if self.saved_step != self.step:
                self._save()
            result = self._end(number)
            # Wait for the other ranks: launchers stop all ranks as soon as one exits.
            distributed.gather(None, "the end of the run")
            self.ending = result.status
            return result

    def _train_one_step(self) -> None:
        trainer = self.config.trainer
        self._before = self._held()
        result = self._attempt(self.step + 1)
        self.step = self.events.step = self.step + 1
        values = result.metrics.compute()
        with self._kept(values):
            prefetch(self.run, self.step + 1)  # workers sample while this process logs and evaluates
            if trainer.dump_log_probs:
                save_terms(self.out_dir / dumps.FOLDER, self.step, result.terms, self.config.actor)
            self.observer.on_step(self.step, values)
            self._warn_of_idle_bands(values)
            self._evaluate_and_log(values)
            if trainer.image_every and self.step % trainer.image_every == 0:
                self._log_images(result)
        is_best = self.best is not None and self.best[0] == self.step
        if is_best or self.step == trainer.total_steps or self.step % trainer.save_every == 0:
            self._save()

    def _attempt(self, step: int) -> StepResult:
        """Do a training step; if it fails, save the state before it, if a copy of that was kept."""
        actor, prompts = self.run.actor, self.run.prompts
        version, position = actor.weights.version, prompts.position
        try:
            with out_of_memory.explained(self.config, lambda: self._phase, lambda: actor.scorer.fitting):
                return attempt(self.run, step, self._on_phase)
        except Exception as error:
            fault = error if isinstance(error, RolloutFault) else None  # which stops all ranks alike
            unsaved = actor.weights.version == version and self.saved_step != self.step
            if self._before is not None:
                self._rescue(self._before)
            elif unsaved and (fault or not actor.weights.trains_shards):  # saving shards needs all ranks
                prompts.position = position
                self._rescue()
            if fault:
                keep_evidence(self.out_dir, fault, self.config.actor, self.events)
            raise

    @contextlib.contextmanager
    def _given_up_after(self, signals: StopSignals) -> Iterator[None]:
        """Let a step fail after a signal, which may have ended the engine's processes too.

        The run then ends as if the step had not begun, provided that the state before it is saved.
        """
        try:
            yield
        except Exception as error:
            if signals.received is None or distributed.world_size() > 1 or self.saved_step != self.step:
                raise
            logger.warning("what came after step %d is given up: %s", self.step, error)
            self.events("given_up", error=f"{type(error).__name__}: {error}")

    def _on_phase(self, phase: str) -> None:
        self._phase = phase
        self.observer.on_phase(phase)

    @contextlib.contextmanager
    def _kept(self, values: Mapping[str, float] | None) -> Iterator[None]:
        """If something fails after a training step, log the metrics of the step and save the state after it.

        A run that is resumed from there begins with the record of the step and its evaluation, unless all trackers
        have the whole record.

        Args:
            values: the metrics of the step; None before the first step, when there is nothing to keep.
        """
        self.unlogged = values
        try:
            yield
        except Exception:
            if values is not None:
                self._log_if_missing(values)
                if not self.run.actor.weights.trains_shards:  # saving them needs all ranks
                    self._rescue()
            raise

    def _log_if_missing(self, values: Mapping[str, float]) -> None:
        if self._last_logged == self.step:
            return
        try:
            self._log(values)
        except Exception as error:
            # Report the failure that led here instead.
            logger.warning("the metrics of step %d could not be logged: %s", self.step, error)

    def _rescue(self, captured: TrainingState | None = None) -> None:
        """Save the present state, or one that was captured before unless a newer one is saved already."""
        try:
            with self._writing:
                captured = captured or self._captured()
                if self.saved_step is None or self.saved_step < captured.step:
                    self._write(captured)
        except Exception as error:  # the failure that led here is to be reported
            logger.warning("no checkpoint could be saved: %s", error)

    def _warn_of_idle_bands(self, values: Mapping[str, float]) -> None:
        """Warn, once for each, of rejection bands that cannot act on a gap of the measured size."""
        idle = idle_modes(self.config.algorithm.rollout_correction.criteria, values)
        for mode in set(idle) - self._warned:
            self._warned.add(mode)
            logger.warning(
                "algorithm.rollout_correction.rollout_rs=%s cannot reject anything here: its threshold lies more than "
                "ten times beyond the largest value measured; tighten it, or set log_ratio_scale: sqrt or sum",
                mode,
            )

    # Scores and images -----------------------------------------------------------------------------------

    def _evaluate_and_log(self, values: Mapping[str, float]) -> None:
        """Evaluate, if the present step is to be evaluated, and log its whole record."""
        trainer = self.config.trainer
        regular = trainer.eval_every > 0 and self.step % trainer.eval_every == 0
        evaluates = regular or self.step in (0, trainer.total_steps)
        self._log({**values, **(self._evaluate() if evaluates else {})})
        self.unlogged = None

    def _evaluate(self) -> dict[str, float]:
        self._on_phase("evaluation")
        with out_of_memory.explained(self.config, lambda: self._phase):
            evaluation = evaluate(self.run, self.data.heldout)
        self.evaluated = metrics = evaluation.metrics
        self.best = best_so_far(self.best, self.config.trainer.best_metric, self.step, metrics)
        if distributed.is_main():
            name = "before" if self.step == 0 else "after"
            path = self.out_dir / IMAGES_FOLDER / f"eval_{name}"
            shown = self._shown(evaluation.images, self.data.heldout, evaluation.scores)
            save_samples(shown, path)
            log_samples(self.trackers, "eval", shown, self.step)
        self.observer.on_eval(self.step, metrics)
        return metrics

    def _log(self, record: Mapping[str, float]) -> None:
        """Give a record of the present step to all trackers."""
        self._last_logged = self.step
        self.trackers.log(record, self.step)

    def _log_images(self, result: StepResult) -> None:
        """Save and log samples of the main rank."""
        if distributed.is_main():
            shown = self._shown(result.images, result.prompts, result.scores)
            save_and_log_rollouts(self.trackers, shown, self.out_dir / IMAGES_FOLDER, self.step)

    def _shown(self, images: ImageArray, prompts: Sequence[Prompt], scores: np.ndarray) -> Shown:
        rate = self.run.actor.family.frames_per_second
        return Shown(images=images, prompts=prompts, scores=scores, rate=rate)

    # Checkpoints -----------------------------------------------------------------------------------------

    def _save(self) -> None:
        captured = self._captured()
        with distributed.fail_together("writing a checkpoint"):
            self._write(captured)
        self.saved_step = self.step

    def _held(self) -> TrainingState | None:
        """Copy the state before a step to host memory, so that it can be saved after the step has changed everything.

        None if it is saved already, or is large: without an adapter it is the whole transformer. With one, the copy
        takes 0.3 % of a step of the embedded model.
        """
        if self.saved_step == self.step or self.config.model.lora.rank == 0 or not distributed.is_main():
            return None
        return self._captured().on_host()

    def _captured(self) -> TrainingState:
        """The present state; every rank has to call, as shards are gathered."""
        return state.capture(self.run, step=self.step, best=self.best, unlogged=self.unlogged)

    def _write(self, captured: TrainingState) -> None:
        if not distributed.is_main():
            return
        root = self.out_dir / run_folder.CHECKPOINTS
        with self._writing:
            files = partial(self.run.actor.weights.save, tensors=captured.exported)
            folder = checkpoint.save(root, captured, files)
            self.saved_step = captured.step
            self.events("checkpoint", folder=folder.name)
            best = captured.facts["best"]
            checkpoint.prune(
                root, keep=self.config.trainer.keep_checkpoints, best=None if best is None else best[0]
            )

    def _restore(self) -> bool:
        """Load the newest intact checkpoint; False if the folder has none."""
        root = self.out_dir / run_folder.CHECKPOINTS
        latest: tuple[Path, TrainingState] | None = None
        best: Best | None = None
        with distributed.fail_together("looking for a checkpoint"):
            if distributed.is_main() and checkpoint.folders(root):
                latest = checkpoint.load_latest(root)
                best = best_checkpoint(self.out_dir, self.config.trainer, latest[1])
        folder, self.best = distributed.from_main(
            (None if latest is None else latest[0], best), "the choice of a checkpoint"
        )
        if folder is None:
            return False
        with distributed.fail_together("reading a checkpoint"):
            loaded = checkpoint.load(folder) if latest is None else latest[1]
        state.restore(self.run, folder, loaded)
        if distributed.is_main():
            checkpoint.discard_after(root, loaded.step)
            state.warn_of_another_schedule(self.config, loaded)
        self.step = self.events.step = loaded.step
        # With another `trainer.best_metric`, the state has another best checkpoint than the one that is saved.
        if list(self.best or []) == (loaded.facts["best"] or []):
            self.saved_step = loaded.step
        self.unlogged = loaded.facts["unlogged"]
        if self.unlogged is None and self.step == self.config.trainer.total_steps:
            record = run_folder.record_of(self.out_dir, self.step)
            # The run was to go on after this step, and now ends here.
            self.unlogged = None if "eval/reward" in record else record
        return True

    # Endings ---------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, again: bool) -> None:
        """In a thread, say how the run ends, and save the state before the step in flight: it may not be finished."""
        name = signal.Signals(number).name
        if again:
            command = run_folder.resume_command(self.out_dir)
            text = f"{name} again: stopping at once, without the step in flight; resume with: {command}"
            self._say("signal", text)
            return
        text = f"{name}: finishing this step and saving; to stop at once, press Ctrl-C after {REPEAT:g} s"
        try:
            self._say("signal", text)
        finally:  # an observer of one's own may fail
            if (before := self._before) is not None:
                self._rescue(before)

    def _say(self, kind: str, text: str) -> None:
        self.events(kind, says=text)
        # The main thread notices by itself that nobody listens any more.
        with contextlib.suppress(BackendError):
            self.observer.on_message(text)

    def _end(self, number: int | None) -> RunResult:
        """The result of a run: ended by the signal of this number, or at its last step, with an evaluation."""
        if number is None:
            if not self.evaluated:
                self._evaluate()
            if distributed.is_main():
                before_after(self.out_dir / IMAGES_FOLDER)
        result = RunResult(
            status="finished" if number is None else "interrupted",
            step=self.step,
            out_dir=self.out_dir,
            metrics=self.evaluated,
            signal=number,
            resume_command=None if number is None else run_folder.resume_command(self.out_dir),
        )
        if distributed.is_main():
            self.events("end", status=result.status)
        return result


def _received(signals: StopSignals) -> int | None:
    """The signal that any rank has received, or None."""
    numbers = distributed.gather(signals.received, "the end of a step")
    return next((number for number in numbers if number is not None), None)
