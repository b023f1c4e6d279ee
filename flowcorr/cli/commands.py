"""The commands, a function each. torch and all that follows it is imported only when one runs."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from flowcorr.errors import ConfigError
from flowcorr.instruments.terminal import console_of, show_table
from flowcorr.processes import StopRequest

if TYPE_CHECKING:
    from flowcorr.config import Config
    from flowcorr.correction import RolloutCorrectionConfig
    from flowcorr.instruments.finding import Report

Command = Callable[[argparse.Namespace], int]


def find_own_code() -> None:
    """Let the user's own losses and rewards be found in the working directory.

    Only commands that run such code call this: libraries look for optional packages on the same path.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def train(arguments: argparse.Namespace) -> int:
    """Train by a recipe, shown by the main one of several ranks; after a signal, return the exit code for it."""
    if os.environ.get("RANK", "0") == "0":
        print(f"loading {arguments.recipe}", flush=True)  # torch alone takes seconds to import

    from flowcorr import distributed
    from flowcorr.cli.progress import TerminalObserver
    from flowcorr.instruments import page
    from flowcorr.instruments.doctor import examine_before_start, examines_before_start
    from flowcorr.instruments.plan.check import check_this_gpu
    from flowcorr.trainer import train as run

    config = _checked(arguments)
    out_dir = _out_path(arguments.out) or _run_folder(Path(arguments.recipe), resume=arguments.resume)
    check_this_gpu(arguments.recipe, arguments.overrides, config)
    distributed.start_ranks(config.trainer.device, timeout=config.trainer.collective_timeout)
    shows = distributed.is_main()
    doctor = None
    if examines_before_start(config):
        if shows:
            print("examining the rollout engine first (trainer.doctor=false leaves it out)", flush=True)
        doctor = examine_before_start(config, out_dir, page.show if shows else lambda _: None)
    recipe = None if arguments.overrides else arguments.recipe
    try:
        with TerminalObserver(recipe=recipe) if shows else contextlib.nullcontext() as observer:
            result = run(config, out_dir, resume=arguments.resume, observer=observer, before_start=doctor)
    except StopRequest as stop:
        if shows:
            print(f"flowcorr: {stop} before the first step; nothing is lost", file=sys.stderr)
        return _exit_code(stop.number, config.trainer.requeue)
    distributed.leave_ranks()
    return 0 if result.signal is None else _exit_code(result.signal, config.trainer.requeue)


def _exit_code(number: int, requeue: int | None) -> int:
    """The exit code after a signal: `trainer.requeue` after the one by which a scheduler warns, else the shell's."""
    return requeue if requeue is not None and number == signal.SIGUSR1 else 128 + number


def evaluate(arguments: argparse.Namespace) -> int:
    """Score a checkpoint and print its metrics."""
    from flowcorr.trainer import evaluate_run
    from flowcorr.trainer.run_config import imported_by_eval, read_config

    if imported_by_eval(read_config(Path(arguments.run_dir), arguments.overrides).config):
        find_own_code()
    checkpoint, evaluation = evaluate_run(
        arguments.run_dir, which=arguments.checkpoint, overrides=tuple(arguments.overrides)
    )
    print(checkpoint)
    for name, value in evaluation.metrics.items():
        print(f"{name:<24} {value:.4f}")
    return 0


def doctor(arguments: argparse.Namespace) -> int:
    """Examine two stacks, or a dump's samples; the exit code is that of the worst finding."""
    from flowcorr.instruments.doctor import diagnose
    from flowcorr.instruments.doctor.examination import NUM_PROMPTS
    from flowcorr.instruments.page import exit_code
    from flowcorr.instruments.plan.check import check_this_gpu
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
    config = _checked(arguments)
    check_this_gpu(arguments.recipe, arguments.overrides, config)
    prompts = NUM_PROMPTS if arguments.prompts is None else arguments.prompts
    report = diagnose(config, num_prompts=prompts, float32=arguments.float32)
    show_report(report, as_json=arguments.json)
    return exit_code(report)


def show_report(report: Report, *, as_json: bool) -> None:
    """Print a report, as JSON and nothing else where that was asked for."""
    from flowcorr.instruments import page

    if as_json:
        print(page.as_json(report))
    else:
        page.show(report)


def _replay(arguments: argparse.Namespace) -> int:
    """Replay the captured samples of a dump."""
    from flowcorr import distributed
    from flowcorr.config import Config, load
    from flowcorr.config.load import recipe_names
    from flowcorr.instruments.doctor import examine_dump
    from flowcorr.instruments.page import exit_code

    model = arguments.model
    if model is None:
        raise ConfigError(
            f"{arguments.recipe} is a folder of dumped steps; give --model, the pipeline or recipe that replays them"
        )
    of_recipe = Path(model).suffix in (".yaml", ".yml") or model in recipe_names()
    if arguments.overrides and not of_recipe:
        raise ConfigError(
            f"{arguments.overrides[0]} has no effect on a pipeline; give --model a recipe, or leave it out"
        )
    if of_recipe:
        find_own_code()
    chosen: str | Config = load(model, arguments.overrides) if of_recipe else model
    device = chosen.trainer.device if isinstance(chosen, Config) else "auto"
    report = examine_dump(Path(arguments.recipe), chosen, device=distributed.local_device(device))
    show_report(report, as_json=arguments.json)
    return exit_code(report)


def audit(arguments: argparse.Namespace) -> int:
    """Measure the gap between a recipe's two stacks, or of a dump, save what was found, and advise."""
    from flowcorr.config import redact_override
    from flowcorr.instruments import page
    from flowcorr.instruments.audit import audit as measure
    from flowcorr.instruments.audit import audit_folder
    from flowcorr.instruments.audit.measure import NUM_BATCHES
    from flowcorr.instruments.audit.presets import parse_scales
    from flowcorr.instruments.plan.check import check_this_gpu
    from flowcorr.trainer.run_config import is_folder

    out_dir = _out_path(arguments.out)
    scales = [] if arguments.scales is None else parse_scales(arguments.scales)
    if is_folder(Path(arguments.recipe)):
        out_dir = out_dir or Path(arguments.recipe)
        if arguments.overrides:
            raise ConfigError(
                f"{arguments.recipe} is a folder of dumped steps, so {arguments.overrides[0]} has no effect; leave it "
                "out, or give a recipe instead of the folder"
            )
        if arguments.batches is not None:
            raise ConfigError(
                f"--batches {arguments.batches} has no effect on a folder, whose steps are all read; leave it out"
            )
        report = audit_folder(Path(arguments.recipe), allow_imports=_allowed(arguments), scales=scales)
    elif arguments.allow_import:
        raise ConfigError(
            f"--allow-import {arguments.allow_import[0]} has no effect on a recipe, whose own code is imported anyway; "
            "leave it out"
        )
    else:
        config = _checked(arguments)
        check_this_gpu(arguments.recipe, arguments.overrides, config)
        batches = NUM_BATCHES if arguments.batches is None else arguments.batches
        title = " ".join((arguments.recipe, *map(redact_override, arguments.overrides)))
        report = measure(config, num_batches=batches, title=title, scales=scales)
    out_dir = out_dir or Path("runs") / f"{Path(arguments.recipe).stem}_audit"
    files = page.save(report, out_dir, "audit")
    if arguments.json:
        print(page.as_json(report))
    else:
        page.show(report, files)
    return 0


def report(arguments: argparse.Namespace) -> int:
    """Write the page of some runs, and print what was found; a folder gets the charts as PNG as well."""
    from flowcorr.instruments import page
    from flowcorr.instruments.report import report as make
    from flowcorr.instruments.report import write_report

    folders = [Path(folder) for folder in arguments.run_dirs]
    out = _out_path(arguments.out) or folders[0] / "report.html"
    into_folder = out.suffix.lower() not in (".html", ".htm")
    path = out / "report.html" if into_folder else out
    charts = path.with_name(f"{path.stem}_charts") if arguments.png or into_folder else None
    made = make(folders, allow_imports=_allowed(arguments))
    write_report(made, path, charts=charts)
    page.show(made, [path, *([] if charts is None else [charts])])
    return 0


def config(arguments: argparse.Namespace) -> int:
    """Print a resolved recipe; prompts that this machine lacks are only a warning."""
    from flowcorr.config import load, to_yaml
    from flowcorr.instruments.plan.preflight import check_prompts, check_settings

    find_own_code()
    config = load(arguments.recipe, arguments.overrides)
    check_settings(config)
    try:
        check_prompts(config)
    except ConfigError as error:
        warnings.warn(f"flowcorr train would stop here: {error}", UserWarning, stacklevel=2)
    print(to_yaml(config), end="")
    return 0


def translate(arguments: argparse.Namespace) -> int:
    """Print the recipe that another trainer's configuration becomes."""
    from flowcorr.config.load import load_text
    from flowcorr.instruments.plan.preflight import check_settings
    from flowcorr.translate import translate as translated

    text = translated(arguments.source, arguments.overrides, gpus=arguments.gpus, all_keys=arguments.all)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `flowcorr train` says them
        check_settings(load_text(text))
    print(text, end="")
    return 0


def presets(_: argparse.Namespace) -> int:
    """Print the table of presets."""
    from flowcorr.correction import PRESETS, RolloutCorrectionConfig

    rows = []
    for name, preset in PRESETS.items():
        config = RolloutCorrectionConfig.preset(name)
        names = "\n".join([name, *(f"  = {alias}" for alias in preset.aliases)])
        rows.append((names, _mode(config), _weights(config), _rejection(config), preset.summary))
    columns = ("preset", "mode", "weights", "rejection", "what it does")
    show_table(console_of(None), columns, rows, words=4, prose=True)
    return 0


def explain(arguments: argparse.Namespace) -> int:
    """Print what each name means."""
    from flowcorr.instruments.reference.explain import explanation

    print("\n\n".join(explanation(name) for name in arguments.names))
    return 0


def _allowed(arguments: argparse.Namespace) -> list[str]:
    """The names of `--allow-import`; without any, the working directory is not searched for code."""
    if arguments.allow_import:
        find_own_code()
    return arguments.allow_import


def _checked(arguments: argparse.Namespace) -> Config:
    """The configuration of the recipe on the command line, checked as far as that takes no model."""
    from flowcorr.config import load
    from flowcorr.instruments.plan.preflight import check_prompts, check_settings

    find_own_code()
    config = load(arguments.recipe, arguments.overrides)
    check_settings(config)
    check_prompts(config)
    return config


def _out_path(out: str | None) -> Path | None:
    """The path given by `--out`, if it was given."""
    if out is not None and not out.strip():
        raise ConfigError(f"--out {out!r} names no folder; give one, or leave --out away")
    return None if out is None else Path(out)


def _run_folder(recipe: Path, *, resume: bool) -> Path:
    """The default of `--out`: the folder of the resumed `config.yaml`, or a folder named after the recipe."""
    from flowcorr.trainer.run_config import CONFIG_FILE
    from flowcorr.trainer.run_folder import was_trained_in

    if resume and recipe.name == CONFIG_FILE and was_trained_in(recipe.parent):
        return recipe.parent
    return Path("runs") / recipe.stem


def _mode(preset: RolloutCorrectionConfig) -> str:
    return f"bypass, {preset.loss_type}" if preset.mode == "bypass" else "decoupled"


def _weights(preset: RolloutCorrectionConfig) -> str:
    if preset.rollout_is is None:
        return "-"
    return f"{preset.rollout_is} {_bound(preset.rollout_is_threshold)}"


def _rejection(preset: RolloutCorrectionConfig) -> str:
    parts = (
        [] if preset.rollout_rs is None else [f"{preset.rollout_rs} {_bound(preset.rollout_rs_threshold)}"]
    )
    if preset.rollout_token_veto_threshold is not None:
        parts.append(f"veto {preset.rollout_token_veto_threshold:g}")
    return ", ".join(parts) or "-"


def _bound(threshold: object) -> str:
    return "..".join(f"{bound:g}" for bound in threshold) if isinstance(threshold, tuple) else f"{threshold}"
