"""Do the rollout engine and the actor agree, and if not, which part is to blame?

Samples are of two kinds. The engine at hand samples the same few prompts again and again while the trained weights are
moved by known amounts (`trials`). Those of another trainer were captured, and are replayed (`captured`). From what the
engine returned, and from what the training stack makes of the same trajectories, each check tests one explanation of a
gap (`checks`); what is left is the noise floor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from flowcorr import distributed, dumps
from flowcorr.actor import DiffusionActor
from flowcorr.config import resolve_engine
from flowcorr.config.schema import Config, ModelConfig
from flowcorr.data import load_prompts
from flowcorr.dumps.replay import load_replay, replay_files
from flowcorr.errors import BackendError, ConfigError
from flowcorr.instruments.doctor import precision
from flowcorr.instruments.doctor.captured import Captured
from flowcorr.instruments.doctor.checks.run import check_captured, check_trials
from flowcorr.instruments.doctor.exam import Exam
from flowcorr.instruments.doctor.legs import rounding_notes
from flowcorr.instruments.doctor.report import of_captured, of_trials, with_findings
from flowcorr.instruments.doctor.stack import Stack, prompt_pool
from flowcorr.instruments.doctor.trials import run_trials
from flowcorr.instruments.outcome import Report
from flowcorr.instruments.page import as_json
from flowcorr.instruments.thinning import spread_out
from flowcorr.models import (
    AdapterCheck,
    CannotCompare,
    Conditioning,
    ModelFamily,
    compare_as_sampled,
    load_family,
)
from flowcorr.records import Prompt, distinct
from flowcorr.rollout import RolloutEngine
from flowcorr.rollout.base import shards_weights
from flowcorr.trainer.run import TrainingRun
from flowcorr.trainer.setup import build_stacks, load_model

NUM_PROMPTS = 3
MAX_IMAGES = 4  # a prompt: enough for quantiles, and little to sample
TURNED_OFF = "it was turned off"
NO_MEMORY = "memory does not allow it"
REPORT_FILE = "doctor.json"  # in the folder of a run
RELEASED = "a run has released its text encoders by now; flowcorr doctor with the recipe has them"
MAX_STEPS = 3  # training steps of a dump that are replayed


def examine(
    actor: DiffusionActor,
    engine: RolloutEngine,
    conditioning: Conditioning,
    *,
    prompts: Sequence[Prompt] = (),
    float32: bool | None = None,
    adapter: AdapterCheck | str | None = None,
) -> Report:
    """Compare both stacks on a few prompts, then restore the weights of both.

    Stacks of lower precision are examined in float32 first, where no rounding hides a fault, if the engine can change
    its precision. If a check fails there, the report is that of float32.

    Args:
        actor: trains.
        engine: samples; built from the same configuration.
        conditioning: the actor's embeddings, one row a prompt. With one row, the check `batch_shape` is skipped.
        prompts: those of `conditioning`: what is wrong with reference images is told from the images themselves.
        float32: whether float32 comes first; by default, if memory allows.
        adapter: see `Exam`.

    Raises:
        BackendError: the engine fails, or returns no step means.
    """
    examined = partial(_examine, actor, engine, prompts=prompts, adapter=adapter)
    if precision.float32_config(actor.config) == actor.config:
        return examined(conditioning)
    if not isinstance(engine, precision.ComputesInFloat32):
        first: Report | str = "this engine keeps the precision it was started with; see `flowcorr doctor`"
    elif float32 is False:
        first = TURNED_OFF
    elif float32 is None and not precision.fits(actor.family, copies=2):
        first = NO_MEMORY
    else:
        with precision.actor_in_float32(actor), engine.in_float32():
            first = examined(precision.in_float32(conditioning))
    return _after(first, actor.config, actor.family, lambda: examined(conditioning))


def diagnose(config: Config, *, num_prompts: int = NUM_PROMPTS, float32: bool | None = None) -> Report:
    """Build the actor and the engine of a configuration, and examine them on its first training prompts.

    An engine that cannot change its precision is started in float32 first, and then as the configuration has it.

    Args:
        config: the run's configuration; of `rollout.n` images a prompt, at most `MAX_IMAGES` are sampled.
        num_prompts: how many prompts, at least 2; fewer are taken if the training prompts have fewer texts.
        float32: see `examine`.

    Raises:
        ConfigError: `num_prompts` is too small, or something in `config` cannot work.
    """
    config = _shortened(config)
    prompts = first_prompts(config, num_prompts)
    if precision.float32_config(config) == config or _changes_precision(config):
        return _examine_built(config, load_model(config), prompts, partial(examine, float32=float32))
    first = _first_in_float32(config, prompts, float32=float32)
    family = load_model(config)
    return _after(first, config, family, lambda: _examine_built(config, family, prompts, _examine))


def _first_in_float32(config: Config, prompts: list[Prompt], *, float32: bool | None) -> Report | str:
    """The report on stacks that are started in float32 and closed again, or the reason why there is none.

    Two float32 copies of the model have to fit next to the run's own.
    """
    exact = precision.float32_config(config)
    if float32 is False:
        return TURNED_OFF
    family = load_model(config)
    device, fits = next(family.transformer.parameters()).device, precision.fits(family, copies=2)
    del family
    precision.release(device)
    if float32 is None and not fits:
        return NO_MEMORY
    try:
        return _examine_built(exact, load_model(exact), prompts, _examine)
    except BackendError as error:
        if float32:
            raise
        return f"an engine in float32 does not work here ({error})"
    finally:
        precision.release(device)


def _shortened(config: Config) -> Config:
    """The run with fewer images a prompt, none of which are left out."""
    rollout = replace(config.rollout, n=min(config.rollout.n, MAX_IMAGES), n_learned=None)
    return replace(config, rollout=rollout)


def _changes_precision(config: Config) -> bool:
    """Whether the run's engine computes in float32 when it is asked to."""
    return resolve_engine(config.rollout.name).shares_weights and config.rollout.placement == "local"


def _examine(
    actor: DiffusionActor,
    engine: RolloutEngine,
    conditioning: Conditioning,
    *,
    prompts: Sequence[Prompt],
    adapter: AdapterCheck | str | None,
) -> Report:
    """The report on both stacks in the precision that they have now."""
    trials = run_trials(actor, engine, conditioning)
    exam = Exam(actor=actor, engine=engine, trials=trials, prompts=prompts, adapter=adapter)
    return of_trials(exam, list(check_trials(exam).values()))


def _after(
    first: Report | str, config: Config, family: ModelFamily, examine_run: Callable[[], Report]
) -> Report:
    """The whole report: that of float32 if a check failed there, else that of the run's own precision.

    Args:
        first: the report of float32, or the reason why there is none.
        config: the run's.
        family: the run's.
        examine_run: examines the run's own precision.
    """
    if isinstance(first, str):
        finding = precision.not_examined(config, family, first)
    elif first.level == "serious":
        return replace(first, findings=[precision.marked(finding) for finding in first.findings])
    else:
        finding = precision.agreement(first)
    report = examine_run()
    return with_findings(report, [finding, *report.findings])


def _examine_built(
    config: Config,
    family: ModelFamily,
    prompts: list[Prompt],
    examine_stacks: Callable[..., Report],
) -> Report:
    """The report on an actor and an engine that are built for it."""
    adapter = compared_with_pipeline(config, family, prompts)
    stacks = build_stacks(config, family, prompts)
    try:
        stacks.engine.sync(stacks.actor.weights.snapshot())
        embedded = stacks.cache(prompts)
        return examine_stacks(stacks.actor, stacks.engine, embedded, prompts=prompts, adapter=adapter)
    finally:
        stacks.engine.close()


def compared_with_pipeline(
    config: Config, family: ModelFamily, prompts: Sequence[Prompt]
) -> AdapterCheck | str:
    """Compare a family with its pipeline, in float32 if memory allows; returns the reason if it cannot.

    Args:
        config: the run's.
        family: with its text encoders.
        prompts: the first two are drawn.
    """
    upcasts = config.model.quantization == "none" and precision.fits(family, copies=1)
    with precision.pipeline_in_float32(family) if upcasts else contextlib.nullcontext():
        try:
            return compare_as_sampled(family, prompts[:2], config.sampling)
        except CannotCompare as error:
            return str(error)


def examines_before_start(config: Config) -> bool:
    """Whether `trainer.doctor` asks for an exam; `auto` does for engines with their own processes or model.

    Not where the ranks share the transformer's shards: an exam makes another number of forward passes on each.
    """
    if config.trainer.doctor == "auto":
        return not _changes_precision(config) and not shards_weights(config)
    return config.trainer.doctor


def examine_before_start(
    config: Config, out_dir: Path, show: Callable[[Report], None]
) -> Callable[[TrainingRun], None]:
    """A hook for the trainer that examines a run's stacks, shows the report and stops a run that would fail.

    An engine that cannot change its precision is started in float32, examined and closed before this returns. The hook
    writes the report to `doctor.json` in the run's folder, and raises `BackendError` where a check failed. All ranks
    have to call both together.

    Args:
        config: the run's configuration.
        out_dir: the run's folder.
        show: gets the report.
    """
    lower = precision.float32_config(config) != config
    first: Report | str | None = None
    if lower and not _changes_precision(config):
        shortened = _shortened(config)
        first = _first_in_float32(shortened, first_prompts(shortened, NUM_PROMPTS), float32=None)

    def examine_run(run: TrainingRun) -> None:
        prompts = run.prompts.peek_distinct(NUM_PROMPTS)
        stacks = run.actor, run.engine, run.cache(prompts)
        if first is None:
            report = examine(*stacks, prompts=prompts, adapter=RELEASED)
        else:
            report = _after(
                first,
                config,
                run.actor.family,
                lambda: _examine(*stacks, prompts=prompts, adapter=RELEASED),
            )
        if distributed.is_main():
            (out_dir / REPORT_FILE).write_text(as_json(report) + "\n", encoding="utf-8")
        show(report)
        if report.level == "serious":
            raise BackendError(
                f"the rollout engine and the actor disagree on {', '.join(report.causes('serious'))}, see the report "
                f"above and {out_dir / REPORT_FILE}; repair it, or train anyway with trainer.doctor=false"
            )

    return examine_run


def first_prompts(config: Config, count: int) -> list[Prompt]:
    """The first `count` different training prompts, or all if there are fewer.

    Raises:
        ConfigError: `count` is below 2.
    """
    if count < 2:
        raise ConfigError(f"--prompts {count}: the doctor needs at least 2 different prompts")
    return distinct(load_prompts(config.data).train)[:count]


def examine_dump(folder: Path, model: str | Config, *, device: torch.device | str = "cpu") -> Report:
    """Replay the captured samples of a dump with the training stack.

    Args:
        folder: what `flowcorr.dump` wrote, with `replay`.
        model: a diffusers pipeline, replayed in float32, or a recipe, which also brings its reward.
        device: where the model is put.

    Raises:
        ConfigError: the folder holds no captured samples, or the model is of no family that flowcorr has.
    """
    files = replay_files(folder)
    if not files:
        raise ConfigError(
            f"{folder} holds no captured samples (replay_000000.safetensors); give flowcorr.dump replay="
            "flowcorr.ReplaySamples(...) of the sampling loop, as examples/dump_log_probs.py shows"
        )
    captured = {step: load_replay(path) for step, path in files.items()}
    config = model if isinstance(model, Config) else None
    of_model = ModelConfig(path=str(model)) if config is None else config.model
    family = load_family(of_model, device)
    chosen = spread_out(list(captured), MAX_STEPS)
    by_step = {
        step: check_captured(
            Captured(
                stack=Stack(family, captured[step]),
                step=step,
                earlier={number: samples for number, samples in captured.items() if number < step},
                pool=prompt_pool(captured, step),
                config=config,
                terms=dumps.files(folder),
            )
        )
        for step in chosen
    }
    last = captured[chosen[-1]]
    return of_captured(str(folder), of_model.path, by_step, [*last.missing(), *rounding_notes(last)])
