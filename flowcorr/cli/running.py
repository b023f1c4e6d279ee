"""`flowcorr train`, `eval` and `export`. torch and all that follows it is imported only when one runs."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import sys
from pathlib import Path

from flowcorr.cli.command import (
    OVERRIDES,
    RECIPE,
    RECIPES,
    Argument,
    Command,
    checked,
    find_own_code,
    writable_folder,
)
from flowcorr.errors import RolloutFault
from flowcorr.processes import StopRequest

EXIT_FAULT = 3


def train(arguments: argparse.Namespace) -> int:
    """Train by a recipe.

    Train a model with FlowGRPO. RECIPE is a YAML file, or the name of a recipe that ships with flowcorr.
    dotted.key=value overrides a key of the recipe; the value is YAML. `flowcorr config RECIPE` prints all keys.

    Examples:
      flowcorr train tiny_ocr_lora
      flowcorr train tiny_ocr_lora trainer.seed=1 trainer.total_steps=50 --out runs/seed1
      flowcorr train tiny_ocr_lora algorithm.rollout_correction.preset=bypass_ppo_clip --out runs/bypass
      flowcorr train tiny_ocr_lora algorithm.rollout_correction=null --out runs/uncorrected
      flowcorr train runs/seed1/config.yaml --resume
      torchrun --nproc_per_node 2 -m flowcorr train tiny_ocr_lora        on two ranks

    The run's folder gets config.yaml, metrics.jsonl, checkpoints/ and images/. Ctrl-C finishes the step, saves and
    prints the command that resumes; another Ctrl-C, 2 seconds later or more, stops at once. A closed terminal and a
    scheduler's SIGTERM or SIGUSR1 end a run like the first Ctrl-C.

    A training step that measures what only a broken rollout engine explains ends the run before anything is learned
    from it, with the part at fault, the evidence and the command that resumes. trainer.on_fault=warn trains on.

    Exit codes: 0 finished, 1 failed, 2 bad configuration, 3 stopped at a fault of the rollout engine and saved, 128 +
    signal interrupted and saved, trainer.requeue after SIGUSR1
    """
    if os.environ.get("RANK", "0") == "0":
        print(f"loading {arguments.recipe}", flush=True)  # torch alone takes seconds to import
    config = checked(arguments)
    default = Path() if arguments.out else _run_folder(Path(arguments.recipe), resume=arguments.resume)
    out_dir = writable_folder(arguments.out, default, only_named=os.environ.get("RANK", "0") != "0")

    # After the checks: a mistake is told before the trainer is imported, which takes as long as torch does.
    from flowcorr import distributed
    from flowcorr.instruments import page
    from flowcorr.instruments.doctor import examine_before_start, examines_before_start
    from flowcorr.instruments.plan.check import check_this_gpu
    from flowcorr.instruments.progress import TerminalObserver
    from flowcorr.instruments.stopped import stopped_run
    from flowcorr.trainer import train as run

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
    except RolloutFault as fault:
        if shows:
            page.show(stopped_run(fault, out_dir))
        return EXIT_FAULT
    except StopRequest as stop:
        if shows:
            print(f"flowcorr: {stop} before the first step; nothing is lost", file=sys.stderr)
        return _exit_code(stop.number, config.trainer.requeue)
    distributed.leave_ranks()
    return 0 if result.signal is None else _exit_code(result.signal, config.trainer.requeue)


def _exit_code(number: int, requeue: int | None) -> int:
    """The exit code after a signal: `trainer.requeue` after the one by which a scheduler warns, else the shell's."""
    return requeue if requeue is not None and number == signal.SIGUSR1 else 128 + number


def _run_folder(recipe: Path, *, resume: bool) -> Path:
    """The default of `--out`: the folder of the resumed `config.yaml`, or a folder named after the recipe."""
    from flowcorr.trainer.run_config import CONFIG_FILE
    from flowcorr.trainer.run_folder import was_trained_in

    if resume and recipe.name == CONFIG_FILE and was_trained_in(recipe.parent):
        return recipe.parent
    return Path("runs") / recipe.stem


def evaluate(arguments: argparse.Namespace) -> int:
    """Score a checkpoint on held-out prompts.

    Score a run's checkpoint on its held-out prompts. This runs the rewards and the model family of the run's own, if
    it has any; the log names their files before that.

    Examples:
      flowcorr eval runs/tiny_ocr_lora
      flowcorr eval runs/tiny_ocr_lora --checkpoint last data.num_heldout=512
    """
    from flowcorr.trainer.run_config import imported_by_eval, read_config

    if imported_by_eval(read_config(Path(arguments.run_dir), arguments.overrides).config):
        find_own_code()

    from flowcorr.trainer import evaluate_run

    checkpoint, evaluation = evaluate_run(
        arguments.run_dir, which=arguments.checkpoint, overrides=tuple(arguments.overrides)
    )
    print(checkpoint)
    for name, value in evaluation.metrics.items():
        print(f"{name:<24} {value:.4f}")
    return 0


def export(arguments: argparse.Namespace) -> int:
    """Write a run's weights with a model card, for the hub.

    Write the weights of a run's checkpoint as a folder that can be uploaded: files that diffusers and peft load, a
    model card with scores and the code that loads them, the recipe without its secrets, and images before and after.
    Look through card and recipe before you upload them: they name your files.

    Examples:
      flowcorr export runs/tiny_ocr_lora
      flowcorr export runs/tiny_ocr_lora --checkpoint last --merge --out exported
    """
    from flowcorr.trainer import export_run
    from flowcorr.trainer.run_config import check_folder

    check_folder(Path(arguments.run_dir))
    if arguments.merge:
        find_own_code()
    out_dir = writable_folder(arguments.out, Path(arguments.run_dir) / "export")
    made = export_run(arguments.run_dir, out_dir, which=arguments.checkpoint, merge=arguments.merge)
    print(f"{made.folder}: the weights of {made.checkpoint}")
    for name in made.files:
        print(f"  {name}")
    upload = ["hf", "upload", Path(arguments.run_dir).resolve().name, str(made.folder), "."]
    print(f"upload: {shlex.join(upload)}")
    return 0


CHECKPOINT = Argument("--checkpoint", default="best", metavar="best|last|PATH", help="default: best")
COMMANDS = (
    Command(
        name="train",
        run=train,
        arguments=(
            RECIPE,
            OVERRIDES,
            Argument("--out", metavar="DIR", help="the run's folder (default: runs/RECIPE)"),
            Argument(
                "--resume",
                action="store_true",
                help="continue from the folder's newest intact checkpoint, or start if it holds no run; RECIPE may be "
                "the config.yaml of a run, whose folder is then the default of --out",
            ),
        ),
        epilog=RECIPES,
    ),
    Command(
        name="eval",
        run=evaluate,
        arguments=(
            Argument("run_dir", metavar="RUN_DIR", help="the folder of a run"),
            CHECKPOINT,
            OVERRIDES,
        ),
    ),
    Command(
        name="export",
        run=export,
        arguments=(
            Argument("run_dir", metavar="RUN_DIR", help="the folder of a run"),
            CHECKPOINT,
            Argument("--out", metavar="DIR", help="a new folder (default: export in RUN_DIR)"),
            Argument(
                "--merge",
                action="store_true",
                help="also write the transformer with the adapter merged into it, which loads the model",
            ),
        ),
    ),
)
