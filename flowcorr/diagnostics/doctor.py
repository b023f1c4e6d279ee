"""Do the rollout engine and the actor agree, and if not, which part is to blame?

The engine samples the same few prompts again and again while the trained weights are moved by known amounts
(`trials`). From what it returns, and from what the actor makes of the same trajectories, each check tests one
explanation of a gap (`checks`); what is left is the noise floor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from flowcorr.actor import DiffusionActor
from flowcorr.config.schema import Config
from flowcorr.data import load_prompts
from flowcorr.diagnostics.checks import Exam, outside_clip, run_checks
from flowcorr.diagnostics.report import QUANTILES, DoctorReport, StepNoise
from flowcorr.diagnostics.trials import run_trials
from flowcorr.errors import BackendError, ConfigError
from flowcorr.models import DTYPES, Conditioning, load_family
from flowcorr.models.prompt_cache import PromptCache
from flowcorr.rollout import RolloutEngine
from flowcorr.trainer.setup import build_engine, choose_device
from flowcorr.trainer.step import Parts

NUM_PROMPTS = 3
MAX_IMAGES = 4  # a prompt: enough for quantiles, and little to sample


def examine(actor: DiffusionActor, engine: RolloutEngine, conditioning: Conditioning) -> DoctorReport:
    """Compare both stacks on a few prompts; afterwards the weights of both are as they were.

    Args:
        actor: trains.
        engine: samples; built from the same configuration.
        conditioning: the actor's embeddings, one row a prompt, at least two.

    Raises:
        BackendError: the engine fails, or returns no step means.
        BatchError: there are fewer than two prompts.
    """
    exam = Exam(actor=actor, engine=engine, trials=run_trials(actor, engine, conditioning))
    return DoctorReport(
        findings=run_checks(exam),
        noise=_noise_floor(exam),
        num_elements=exam.trials.base.rollout.num_elements,
        clip_ratio=actor.config.actor.clip_ratio,
    )


def diagnose(config: Config, *, num_prompts: int = NUM_PROMPTS) -> DoctorReport:
    """Build the actor and the engine of a configuration, and examine them on its first training prompts.

    Args:
        config: the run's configuration; of `rollout.n` images a prompt, at most `MAX_IMAGES` are sampled.
        num_prompts: how many prompts, at least 2.

    Raises:
        ConfigError: there are too few prompts, or something in `config` cannot work.
    """
    config = replace(config, rollout=replace(config.rollout, n=min(config.rollout.n, MAX_IMAGES)))
    if config.trainer.num_threads is not None:
        torch.set_num_threads(config.trainer.num_threads)
    texts = _first_prompts(config, num_prompts)
    family = load_family(
        config.model.path,
        family=config.model.family,
        dtype=DTYPES[config.model.dtype],
        device=choose_device(config.trainer.device),
        max_sequence_length=config.model.max_sequence_length,
    )
    actor = DiffusionActor(family, config)
    engine = build_engine(config, actor)
    try:
        engine.sync(actor.snapshot())
        return examine(actor, engine, PromptCache(family, actor.guidance, texts)(texts))
    finally:
        engine.close()


def examine_before_start(show: Callable[[DoctorReport], None]) -> Callable[[Parts], None]:
    """A hook for the trainer that examines a run's parts, shows the report and stops a run that would fail.

    The hook raises `BackendError` where a check failed.
    """

    def examine_parts(parts: Parts) -> None:
        position = parts.prompts.position
        texts = list(dict.fromkeys(prompt.text for prompt in parts.prompts.next(NUM_PROMPTS)))
        parts.prompts.position = position
        report = examine(parts.actor, parts.engine, parts.cache(texts))
        show(report)
        if report.failed():
            raise BackendError(
                f"the rollout engine and the actor disagree on {', '.join(report.failed())}, see the report above; "
                "mend that, or train anyway with trainer.doctor=false"
            )

    return examine_parts


def _first_prompts(config: Config, count: int) -> list[str]:
    data = load_prompts(
        config.data.path,
        heldout_fraction=config.data.heldout_fraction,
        num_train=config.data.num_train,
        num_heldout=config.data.num_heldout,
        seed=0,
    )
    texts = list(dict.fromkeys(prompt.text for prompt in data.train))[: max(count, 0)]
    if len(texts) < 2:
        raise ConfigError(
            f"the doctor needs at least 2 different prompts, and got {len(texts)}: give --prompts 2 or more, and "
            f"a file with as many (data.path={config.data.path!r})"
        )
    return texts


def _noise_floor(exam: Exam) -> Sequence[StepNoise]:
    """The gap by step index, under the weights as they are."""
    trial = exam.trials.base
    rollout = trial.rollout
    delta = (trial.log_probs - rollout.log_probs).double().abs()
    squared, outside = trial.squared_distance(), outside_clip(exam)
    steps = []
    for index in rollout.step_indices.unique().tolist():
        here = rollout.step_indices == index
        steps.append(
            StepNoise(
                step_index=index,
                sigma=float(rollout.sigmas[here][0]),
                abs_delta=tuple(torch.quantile(delta[here], delta.new_tensor(QUANTILES)).tolist()),
                exact_kl=float(squared[here].mean() / 2),
                outside_clip=float(outside[here].double().mean()),
            )
        )
    return steps
