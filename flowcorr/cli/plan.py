"""`flowcorr plan`: its arguments, and a plan on the terminal."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from flowcorr.plan.answers import Plan

HELP = """\
Predict the memory and time of a run, and whether it fits a GPU. This takes seconds and needs neither a GPU nor
weights. flowcorr's actor runs on a fake device, which counts operations without computing them. It measures
transformers with two and three blocks of each kind, and extrapolates to the real number of blocks.

examples:
  flowcorr plan sd35_medium_ocr_lora
  flowcorr plan qwen_image_ocr_lora_decoupled --gpu h200-141gb actor.micro_batch_size=8
  flowcorr plan flux_dev_pickscore_lora --gpu memory=48,bandwidth=864,bf16=362 --ranks 4
  flowcorr plan my_recipe.yaml model.path=/models/my_pipeline --json | jq -r '.answers[]'

How to read it; a GB is 1e9 bytes, and an 80 GB H100 has 85:
  peak       peak memory of one process on its GPU in this phase, including weights and optimizer
  TFLOP, TB  arithmetic and memory traffic of one rank in one step
  time       predicted from the GPU's data sheet at the utilisation below the table, with a range of 25 percent
A run fits if 13 percent are left over: 5 for the prediction's error, 8 for fragmentation and CUDA's own memory. The
engine is vllm-omni in its own processes. Reward models on a CPU and rewards over HTTP are not predicted.

The models of the shipped recipes are known. Of others, the configuration files (config.json) are read from a local
folder or the hub. torch.compile is not predicted; it can only lower the numbers.
"""
_WIDTH = 110  # columns, if the output is not a terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options besides recipe and overrides."""
    from flowcorr.plan.devices import CUSTOM, GPUS

    parser.add_argument(
        "--gpu",
        default="h100-80gb",
        metavar="NAME",
        help=f"the GPU of each rank: {', '.join(GPUS)}, or by numbers (GB, GB/s, TFLOP/s): {CUSTOM} (default: "
        "h100-80gb)",
    )
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="training ranks (default: 1)")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON, and nothing else")


def plan(arguments: argparse.Namespace) -> int:
    """Plan a run and print what it needs."""
    from flowcorr.cli.commands import find_own_code
    from flowcorr.config import load
    from flowcorr.errors import ConfigError
    from flowcorr.plan.devices import find_gpu
    from flowcorr.plan.estimate import make_plan
    from flowcorr.plan.preflight import check_settings

    if arguments.ranks < 1:
        raise ConfigError(f"--ranks {arguments.ranks} must be at least 1")
    find_own_code()
    config, gpu = load(arguments.recipe, arguments.overrides), find_gpu(arguments.gpu)
    check_settings(config)
    title = " ".join((arguments.recipe, *arguments.overrides))
    with _at_work(f"planning {title}: tracing each phase without weights"):
        made = make_plan(config, gpu=gpu, ranks=arguments.ranks, title=title)
    if arguments.json:
        print(json.dumps(made.to_mapping(), indent=2, allow_nan=False))
    else:
        show_plan(made)
    return 0


@contextlib.contextmanager
def _at_work(text: str) -> Iterator[None]:
    """Show on standard error that something takes its time: a moving line on a terminal, a plain one elsewhere."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console.print(text, markup=False, soft_wrap=True)
    with console.status(escape(text)) if console.is_terminal else contextlib.nullcontext():
        yield


def show_plan(plan: Plan, console: Console | None = None) -> None:
    """Print one row for each phase, the assumed utilisation, and the answers."""
    from flowcorr.plan.answers import BEFORE_TRAINING, TIME_TOLERANCE, gigabytes, summary

    console = console or Console(highlight=False)
    if not console.is_terminal:
        console = Console(file=console.file, width=_WIDTH, highlight=False)
    console.print(f"{summary(plan)}\n", style="bold", markup=False)
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("phase", no_wrap=True)
    table.add_column("on", no_wrap=True)
    for column in ("peak", "TFLOP", "TB", "time", "range"):
        table.add_column(column, justify="right", no_wrap=True)
    for phase in plan.phases:
        table.add_row(
            phase.name,
            phase.where,
            "" if phase.peak is None else gigabytes(phase.peak),
            f"{phase.flops / 1e12:,.1f}" if phase.flops else "",
            f"{phase.moved / 1e12:,.2f}" if phase.moved else "",
            *_time(phase.seconds),
            style="dim" if phase.name in BEFORE_TRAINING else None,
        )
    table.add_row("step", "", "", "", "", *_time(plan.seconds()), style="bold")
    console.print(table)
    used = plan.utilisation
    console.print(
        f"\nat {used.matmul:.0%} of the peak in matrix products, {used.attention:.0%} in attention and "
        f"{used.bandwidth:.0%} of the bandwidth; times within {TIME_TOLERANCE:.0%}, not calibrated on your GPU\n",
        style="dim",
        markup=False,
    )
    for answer in plan.answers():
        console.print(answer, markup=False)


def _time(seconds: float | None) -> tuple[str, str]:
    from flowcorr.plan.answers import TIME_TOLERANCE, duration

    if seconds is None:
        return "unknown", ""
    if not seconds:
        return "", ""
    low, high = seconds * (1 - TIME_TOLERANCE), seconds * (1 + TIME_TOLERANCE)
    return duration(seconds), f"{duration(low)} to {duration(high)}"
