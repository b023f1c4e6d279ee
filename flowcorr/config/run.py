"""How a run goes: its length, its seed, its files and its device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flowcorr.config.checks import MOST_PIXELS, MOST_STEPS, above, at_least, at_most, within
from flowcorr.errors import ConfigError

SERVED = "eval/served/"
"""Begins the names of metrics of evaluations with the adapter on the unquantized base."""
_LARGEST_SEED = 2**63 - 1  # what torch's generators take


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """`trainer`: the run.

    Attributes:
        total_steps: training steps.
        seed: of everything random: noise, windows, order of prompts, initial adapter. With it the global generators of
            torch, NumPy and `random` begin anew at each training step and evaluation, for code of one's own that draws
            from them in the trainer's process.
        eval_every: training steps between evaluations on held-out prompts; 0 evaluates at start and end only.
        eval_num_inference_steps: ODE steps of an evaluation; null takes `sampling.num_inference_steps`.
        eval_on: `both` evaluates under `model.quantization` also as an adapter is served: on the unquantized base, as
            `eval/served/...`. That base is loaded into main memory at the first evaluation and is on the device only
            while it samples, beside the quantized one. It samples in the trainer's process, whatever `rollout.name` is.
        eval_height, eval_width: image size of an evaluation in pixels; null takes that of `sampling`.
        save_every: training steps between checkpoints; the last step is always saved.
        keep_checkpoints: newest checkpoints kept, besides the best.
        requeue: exit code after SIGUSR1, by which a scheduler warns that a job's time ends, so that the job is queued
            again: one that `RequeueExit` of Slurm lists, or that the job's script looks for; null is 128 + the signal.
        best_metric: the `eval/` metric by which the best checkpoint is chosen (higher is better).
        image_every: training steps between saved sample images; 0 is off.
        trackers: besides `metrics.jsonl`: `tensorboard`, `wandb`, `swanlab`, or your own `package.module:name`.
        metrics: besides those of every run, your own: `package.module:name` of a `flowcorr.health.Metric`.
        checks: questions of your own about what the engine returned, which training steps and the doctor ask:
            `package.module:name` of a `flowcorr.questions.question.Question`.
        device: `auto` takes CUDA if there is any.
        num_threads: CPU threads of torch; null leaves torch's own choice.
        collective_timeout: seconds that a rank waits for the others before it gives up.
        doctor: let `flowcorr train` examine both stacks at its start, as `flowcorr doctor` does, write the findings to
            `doctor.json`, and stop if a check fails. `auto` does so where the engine has processes or a model of its
            own (any `rollout.name` but `in_process`, or `rollout.placement: ray`), which takes a minute or more;
            `in_process` samples with the trainer's own code and weights, be they rounded or older ones, and needs no
            exam. `auto` leaves it out where ranks share a transformer (`actor.fsdp`).
        on_fault: where a training step measures what only a fault of the rollout engine explains, `stop` the run before
            it learns from it, with the state before the step saved, and exit code 3. A Ray worker whose samples alone
            prove it is taken out, and the run goes on with the others. `warn` trains on: for an engine that keeps
            latents in bfloat16, or draws noise of its own, by choice.
        dump_log_probs: write the log-probs of every training step to `log_probs/`, which `flowcorr audit` replays
            under other presets and `flowcorr report` draws; some 50 bytes a term.
    """

    total_steps: int = 30
    seed: int = 0
    eval_every: int = 10
    eval_num_inference_steps: int | None = None
    eval_on: Literal["trained", "both"] = "trained"
    eval_height: int | None = None
    eval_width: int | None = None
    save_every: int = 10
    keep_checkpoints: int = 2
    requeue: int | None = None
    best_metric: str = "eval/reward"
    image_every: int = 0
    trackers: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    device: str = "auto"
    num_threads: int | None = None
    collective_timeout: float = 1800.0
    doctor: bool | Literal["auto"] = "auto"
    on_fault: Literal["stop", "warn"] = "stop"
    dump_log_probs: bool = False

    def __post_init__(self) -> None:
        for key in ("total_steps", "save_every", "keep_checkpoints"):
            at_least(f"trainer.{key}", getattr(self, key), 1)
        for key in ("seed", "eval_every", "image_every"):
            at_least(f"trainer.{key}", getattr(self, key), 0)
        at_most("trainer.seed", self.seed, _LARGEST_SEED)
        for key, most in (
            ("eval_num_inference_steps", MOST_STEPS),
            ("eval_height", MOST_PIXELS),
            ("eval_width", MOST_PIXELS),
        ):
            if getattr(self, key) is not None:
                within(f"trainer.{key}", getattr(self, key), 1, most)
        if self.num_threads is not None:
            at_least("trainer.num_threads", self.num_threads, 1)
        if self.requeue is not None and not 3 <= self.requeue <= 125:
            raise ConfigError(
                f"trainer.requeue={self.requeue} is out of range; use an exit code in 3..125 that nothing else has, "
                "such as 75, or null"
            )
        above("trainer.collective_timeout", self.collective_timeout, 0)
        at_most("trainer.collective_timeout", self.collective_timeout, 1e9)
        if not self.best_metric.startswith("eval/"):
            raise ConfigError(
                f"trainer.best_metric={self.best_metric!r} is not an evaluation metric; use one under eval/, "
                "such as eval/reward or eval/exact_match"
            )
        if self.best_metric.startswith(SERVED) and self.eval_on != "both":
            raise ConfigError(
                f"trainer.best_metric={self.best_metric!r} is of the unquantized base, on which "
                f"trainer.eval_on={self.eval_on!r} does not evaluate; set eval_on: both, or use "
                f"eval/{self.best_metric.removeprefix(SERVED)}, which is of the trained base"
            )
