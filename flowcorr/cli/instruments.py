"""The commands of the instruments. torch and all that follows it is imported only when one runs."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from flowcorr.cli.command import (
    IMPORTS,
    OVERRIDES,
    RECIPE,
    RECIPE_OR_STEPS,
    Argument,
    Command,
    allowed_imports,
    checked,
    find_own_code,
    show_report,
    writable_file,
    writable_folder,
)
from flowcorr.errors import ConfigError
from flowcorr.instruments.plan.devices import CUSTOM, GPUS, find_gpu

if TYPE_CHECKING:
    from flowcorr.instruments.outcome import Report


def doctor(arguments: argparse.Namespace) -> int:
    """Check whether engine and trainer agree, and name the part that is wrong.

    Check whether the rollout engine and the training stack of a recipe agree, and if not, which part is wrong:
    weights, LoRA, schedule, timesteps, latents, guidance, prompts, windows, noise, log-probs, images. A few prompts
    are sampled and scored under weights that are changed by known amounts; nothing is trained or written.
    The report ends with the noise floor: how far the log-probs differ at each step before any update.
    flowcorr train runs these checks first, and stops if one fails, where the engine has processes or a model of its
    own (trainer.doctor: auto); with trainer.doctor=true for every engine.

    Examples:
      flowcorr doctor tiny_ocr_lora
      flowcorr doctor tiny_ocr_lora rollout.emulate=fp8 --prompts 8
      flowcorr doctor tiny_ocr_lora --json | jq '.findings[] | select(.level != "healthy")'
      flowcorr doctor my_dump --model stabilityai/stable-diffusion-3.5-medium

    RECIPE may also be a folder that another trainer wrote with flowcorr.dump, with captured samples. They are
    replayed with the training stack, which tells the part that differs and why, or that it cannot tell and what to
    capture too.

    Exit codes: 0 all checks passed; 1 a check warned, the cause cannot be told, or the engine could not be examined;
    2 a check failed, a cause is named, or bad configuration
    """
    from flowcorr.config import find_recipe
    from flowcorr.trainer.run_config import is_folder

    if is_folder(Path(arguments.recipe)):
        if arguments.prompts is not None or arguments.float32 is not None:
            raise ConfigError(
                f"--prompts and --float32 have no effect on {arguments.recipe}, a folder whose samples are replayed as "
                "they are; leave them out"
            )
        return _replay(arguments)
    if arguments.model is not None:
        raise ConfigError(
            f"--model {arguments.model} has no effect on a recipe, which names its model; leave it out, or give a "
            "folder of dumped steps"
        )
    find_recipe(arguments.recipe, or_folder=True)
    _at_least("--prompts", arguments.prompts, 2)
    config = checked(arguments)

    from flowcorr.instruments.doctor import diagnose
    from flowcorr.instruments.doctor.examination import NUM_PROMPTS
    from flowcorr.instruments.page import exit_code
    from flowcorr.instruments.plan.check import check_this_gpu

    check_this_gpu(arguments.recipe, arguments.overrides, config)
    prompts = NUM_PROMPTS if arguments.prompts is None else arguments.prompts
    report = diagnose(config, num_prompts=prompts, float32=arguments.float32)
    show_report(report, as_json=arguments.json)
    return exit_code(report)


def _replay(arguments: argparse.Namespace) -> int:
    """Replay the captured samples of a dump."""
    from flowcorr.config import Config, load, redact_override
    from flowcorr.config.load import recipe_names
    from flowcorr.trainer.run_config import CONFIG_FILE, is_file

    model, recipe = arguments.model, Path(arguments.recipe) / CONFIG_FILE
    if model is None and is_file(recipe):
        raise ConfigError(f"{arguments.recipe} is the folder of a run; write flowcorr doctor {recipe}")
    if model is None:
        raise ConfigError(
            f"{arguments.recipe} is a folder; give --model, the pipeline or recipe that replays its dumped steps"
        )
    of_recipe = Path(model).suffix in (".yaml", ".yml") or model in recipe_names()
    if arguments.overrides and not of_recipe:
        raise ConfigError(
            f"{redact_override(arguments.overrides[0])} has no effect on a pipeline; give --model a recipe, or leave "
            "it out"
        )
    if of_recipe:
        find_own_code()
    chosen: str | Config = load(model, arguments.overrides) if of_recipe else model
    device = chosen.trainer.device if isinstance(chosen, Config) else "auto"

    from flowcorr import distributed
    from flowcorr.instruments.doctor import examine_dump
    from flowcorr.instruments.page import exit_code

    report = examine_dump(Path(arguments.recipe), chosen, device=distributed.local_device(device))
    show_report(report, as_json=arguments.json)
    return exit_code(report)


def audit(arguments: argparse.Namespace) -> int:
    """Measure the rollout gap and advise on its correction.

    Measure the gap between the log-probs of a recipe's rollout engine and training stack, and recommend a correction:
    bypass or decoupled mode, clip range, weights and rejection, or none at all, with lines to paste.
    A few rollout batches are sampled and their log-probs recomputed. No reward is computed. One training step on random
    advantages is timed; with rollout.staleness=N, N such steps first make the engine's weights stale.

    How to read it, where delta is the log-prob of the training stack minus that of the engine, per latent element:
      |delta| 99%    bypass needs a clip range of about 4 times this, or PPO clips noise
      joint nats     D times the exact KL of a trajectory's window; at x joint nats the effective sample size of exact
                     weights is at most exp(-2 x) of the batch
      ESS            effective sample size, as a share of the batch, of weights at scale mean, sqrt or sum. At scale
                     mean it is near 1 whatever the gap, because these weights stay near 1
      rejected       the share of terms that each preset rejects; 0 may mean that its band is too wide to act
      cosine         between a preset's coefficients d loss / d log_prob and those without weights and rejection, mean
                     and lowest over training steps. At 1 it only changes the length of the gradient, which Adam ignores
      norm           that length, as a multiple of the uncorrected one
      changed        terms whose coefficient changes its sign, becomes 0, or is no longer 0

    Examples:
      flowcorr audit tiny_ocr_lora
      flowcorr audit tiny_ocr_lora rollout.emulate=int4 --out runs/audit_int4
      flowcorr audit tiny_ocr_lora rollout.staleness=4 --batches 4
      flowcorr audit tiny_ocr_lora --json | jq -r '.findings[0].keys'
      flowcorr audit runs/int4                # trained with trainer.dump_log_probs=true
      flowcorr audit tiny_ocr_lora --savings  # or a run, with the weights that it has learned

    With --savings, the same prompts are sampled with longer steps after the window (sampling.post_window_stride) and
    with the other precisions and syncs of the engine, and the recipe's reward scores all images. The table says how
    much time an image takes, how large the gap of the window is, and by how many grey levels images differ from the
    recipe's own; then the rank correlation of rewards within a prompt, and the cosine of advantages, with 95 %
    intervals over prompts. DIR gets savings.json and savings.html.

    RECIPE may also be the folder of a run, or of steps that any trainer wrote with flowcorr.dump. Then no model is
    loaded, nothing is timed, and presets are replayed on these steps: the table shows their effect there, not how a
    run with them would have gone on. A run in bypass mode has no old log-probs for decoupled presets. Of a recipe,
    advantages are random. DIR gets audit.json, audit.html (a self-contained page) and its charts as PNG. If engine
    and training stack disagree by more than rounding, flowcorr doctor says which part is wrong.

    Exit codes: 0 audited, whatever the advice; 1 failed; 2 bad configuration
    """
    from flowcorr.config import find_recipe
    from flowcorr.trainer.run_config import is_folder

    of_folder = is_folder(Path(arguments.recipe))
    default = Path(arguments.recipe)
    if not of_folder:
        find_recipe(arguments.recipe, or_folder=True)
        default = Path("runs") / f"{default.stem}_audit"
    out_dir = writable_folder(arguments.out, default)
    if of_folder and not arguments.savings:
        report = _audit_of_folder(arguments)
    else:
        report = _audit_of_recipe(arguments, of_run=of_folder)

    from flowcorr.instruments import page

    files = page.save(report, out_dir, "savings" if arguments.savings else "audit")
    if arguments.json:
        print(page.as_json(report))
    else:
        page.show(report, files)
    return 0


def _audit_of_folder(arguments: argparse.Namespace) -> Report:
    from flowcorr.config import redact_override

    if arguments.overrides:
        raise ConfigError(
            f"{arguments.recipe} is a folder of dumped steps, so {redact_override(arguments.overrides[0])} has no "
            "effect; leave it out, or give a recipe instead of the folder"
        )
    if arguments.batches is not None:
        raise ConfigError(
            f"--batches {arguments.batches} has no effect on a folder, whose steps are all read; leave it out"
        )

    from flowcorr.instruments.audit import audit_folder

    return audit_folder(Path(arguments.recipe), allow_imports=allowed_imports(arguments))


def _at_least(option: str, value: int | None, least: int) -> None:
    """Check a number of the command line before anything is loaded."""
    if value is not None and value < least:
        raise ConfigError(f"{option} {value} is too few; use {least} or more")


def _audit_of_recipe(arguments: argparse.Namespace, *, of_run: bool) -> Report:
    """Audit a recipe, or with --savings its cheaper ways to sample; with `of_run` the recipe of a run's folder."""
    _at_least("--batches", arguments.batches, 1)
    if arguments.allow_import:
        without = (
            "with --savings, which imports the recipe's own code anyway"
            if arguments.savings
            else "on a recipe, whose own code is imported anyway"
        )
        raise ConfigError(f"--allow-import {arguments.allow_import[0]} has no effect {without}; leave it out")
    run = Path(arguments.recipe) if of_run else None
    if run is not None:
        from flowcorr.trainer.run_config import CONFIG_FILE

        arguments.recipe = str(run / CONFIG_FILE)
    config = checked(arguments)

    from flowcorr.instruments.audit import audit as measure
    from flowcorr.instruments.audit import audit_savings
    from flowcorr.instruments.audit.measure import NUM_BATCHES
    from flowcorr.instruments.plan.check import check_this_gpu

    check_this_gpu(arguments.recipe, arguments.overrides, config)
    batches, title = NUM_BATCHES if arguments.batches is None else arguments.batches, _title(arguments)
    if arguments.savings:
        return audit_savings(config, num_batches=batches, title=title, run=run)
    return measure(config, num_batches=batches, title=title)


def _title(arguments: argparse.Namespace) -> str:
    """The recipe and its overrides, without secrets."""
    from flowcorr.config import redact_override

    return " ".join((arguments.recipe, *map(redact_override, arguments.overrides)))


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Switch garbage collection off in the body, and exempt the body's objects from later collections.

    Python would look for them among the half a million objects that imports leave: a third of the CPU time of a plan.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@_without_garbage_collection()
def plan(arguments: argparse.Namespace) -> int:
    """Predict memory and time of a run, without a GPU.

    Predict whether a run fits a GPU, and how long a step takes. This takes seconds and needs neither a GPU nor weights:
    flowcorr's actor runs on tensors that have a shape and no values.

    Examples:
      flowcorr plan sd35_medium_ocr_lora
      flowcorr plan qwen_image_ocr_lora_decoupled --gpu h200-141gb actor.micro_batch_size=8
      flowcorr plan flux_dev_pickscore_lora --gpu memory=48,bandwidth=864,bf16=362 --ranks 4
      flowcorr plan my_recipe.yaml model.path=/models/my_pipeline --json | jq -r '.findings[].keys'

    A GB is 1e9 bytes, and an 80 GB H100 has 85. A run fits if 13 percent are left over: 5 for the prediction's error,
    8 for fragmentation and CUDA's own memory. The time of a phase is the longest of its arithmetic at the share of
    the GPU's peak below the table, its memory traffic, and the host's launches. Published times are within 35 percent
    of it.

    The models of the shipped recipes are known. Of others, the configuration files (config.json) are read from a local
    folder or the hub. torch.compile, reward models on a CPU and rewards over HTTP are not predicted.

    Exit codes, also with --json: 0 the run fits, if its engine has a GPU of its own where the report says that both do
    not fit on one; 1 it may not fit, or the plan failed; 2 it does not fit, or bad configuration
    """
    # Before numpy and torch start threads, which a plan has no use for: it computes no values.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from flowcorr.config import load
    from flowcorr.config.rules import check_ranks
    from flowcorr.instruments.plan.preflight import check_settings

    _at_least("--ranks", arguments.ranks, 1)
    find_own_code()
    gpu = find_gpu(arguments.gpu)
    config = load(arguments.recipe, arguments.overrides)
    check_ranks(config, arguments.ranks)
    check_settings(config)

    from flowcorr.instruments.plan.report import exit_code  # imports torch: after the checks
    from flowcorr.instruments.plan.report import plan as predict

    title = _title(arguments)
    with _at_work(f"planning {title}: tracing each phase without weights"):
        made = predict(config, gpu=gpu, ranks=arguments.ranks, title=title)
    show_report(made, as_json=arguments.json)
    return exit_code(made)


@contextlib.contextmanager
def _at_work(text: str) -> Iterator[None]:
    """Show on standard error that something takes its time: a moving line on a terminal, a plain one elsewhere."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console.print(text, markup=False, soft_wrap=True)
    with console.status(escape(text)) if console.is_terminal else contextlib.nullcontext():
        yield


def report(arguments: argparse.Namespace) -> int:
    """Write one page about runs, with findings.

    Write one HTML page about runs, without scripts: findings with the number, its limit and a remedy; curves with
    healthy ranges; drift by timestep; time; images; and the settings in which the runs differ. Runs that differ only
    by seed are one curve, with a band from the smallest to the largest value. The same health rules warn during
    training, once each. With trainer.dump_log_probs=true, histograms show the ratios in their clip range and the
    rollout mismatch by step. A run may also be a folder that another trainer wrote with flowcorr.dump, which is a
    curve of its own; notes say which further fields would help.

    Examples:
      flowcorr report runs/tiny_ocr_lora
      flowcorr report runs/tiny_ocr_lora --out shared/    # report.html, report.json and the charts as PNG
      flowcorr report runs/seed0 runs/seed1 runs/seed2 --out seeds.html
      flowcorr report runs/bypass runs/decoupled --out compare.html
    """
    from flowcorr.instruments import page
    from flowcorr.instruments.report import report as make
    from flowcorr.trainer.run_config import check_folder

    folders = [Path(folder) for folder in arguments.run_dirs]
    for folder in folders:
        check_folder(folder)
    is_page = arguments.out is None or Path(arguments.out).suffix.lower() in (".html", ".htm")
    default = folders[0] / "report.html"
    out = (writable_file if is_page else writable_folder)(arguments.out, default)
    made = make(folders, allow_imports=allowed_imports(arguments))
    page.show(made, page.save_page(made, out) if is_page else page.save(made, out, "report"))
    return 0


COMMANDS = (
    Command(
        name="doctor",
        run=doctor,
        arguments=(
            RECIPE_OR_STEPS,
            OVERRIDES,
            Argument("--json", action="store_true", help="print the report as JSON, and nothing else"),
            Argument(
                "--model",
                metavar="PATH|RECIPE",
                help="of a dump: the pipeline that replays its samples, or a recipe with it",
            ),
            Argument("--prompts", type=int, metavar="N", help="prompts to sample (default: 3)"),
            Argument(
                "--float32",
                action=argparse.BooleanOptionalAction,
                help="examine both stacks in float32 first, so that rounding hides no fault (default: if memory "
                "allows)",
            ),
        ),
    ),
    Command(
        name="audit",
        run=audit,
        arguments=(
            RECIPE_OR_STEPS,
            OVERRIDES,
            Argument("--batches", type=int, metavar="N", help="rollout batches of a recipe (default: 2)"),
            Argument(
                "--savings",
                action="store_true",
                help="measure cheaper ways to sample, instead of the gap's correction",
            ),
            Argument(
                "--out",
                metavar="DIR",
                help="the folder to write (default: runs/RECIPE_audit, or the folder of dumped steps)",
            ),
            Argument("--json", action="store_true", help="print audit.json, and nothing else"),
            IMPORTS,
        ),
    ),
    Command(
        name="plan",
        run=plan,
        arguments=(
            RECIPE,
            OVERRIDES,
            Argument(
                "--gpu",
                default="h100-80gb",
                metavar="NAME",
                help=f"the GPU of each rank: {', '.join(GPUS)}, or by numbers (GB, GB/s, TFLOP/s): {CUSTOM} (default: "
                "h100-80gb)",
            ),
            Argument("--ranks", type=int, default=1, metavar="N", help="training ranks (default: 1)"),
            Argument("--json", action="store_true", help="print the plan as JSON, and nothing else"),
        ),
    ),
    Command(
        name="report",
        run=report,
        arguments=(
            Argument("run_dirs", nargs="+", metavar="RUN_DIR", help="the folder of a run"),
            Argument(
                "--out",
                metavar="FILE|DIR",
                help="the .html file to write (default: report.html in the first RUN_DIR), or a folder for it, its "
                "numbers as JSON and its charts as PNG",
            ),
            IMPORTS,
        ),
    ),
)
