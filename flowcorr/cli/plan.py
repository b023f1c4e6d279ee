"""`flowcorr plan`: its arguments, and a plan on the terminal."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from flowcorr.instruments.terminal import console_of, show_table

if TYPE_CHECKING:
    from flowcorr.plan.answers import Plan
    from flowcorr.plan.layouts import PlannedLayout

HELP = """\
Predict the memory and time of a run, and whether it fits a GPU. This takes seconds and needs neither a GPU nor
weights. flowcorr's actor runs on a fake device, which counts operations without computing them. It measures
transformers with two and three blocks of each kind, and extrapolates to the real number of blocks.

examples:
  flowcorr plan sd35_medium_ocr_lora
  flowcorr plan qwen_image_ocr_lora_decoupled --gpu h200-141gb actor.micro_batch_size=8
  flowcorr plan flux_dev_pickscore_lora --gpu memory=48,bandwidth=864,bf16=362 --ranks 4
  flowcorr plan qwen_image_ocr_lora_decoupled --gpus 8           # the layouts of a run on 8 GPUs, and how to start them
  flowcorr plan qwen_image_ocr_lora_decoupled --gpus 1..64       # how a step shrinks, and where that ends
  flowcorr plan my_recipe.yaml model.path=/models/my_pipeline --json | jq -r '.answers[]'

How to read it; a GB is 1e9 bytes, and an 80 GB H100 has 85:
  peak       peak memory of one process on its GPU in this phase, including weights and optimizer
  TFLOP, TB  arithmetic and memory traffic of one rank in one step
  time       predicted from the GPU's data sheet at the utilisation below the table; the range is 25 percent, and
             in sampling the band of published engines of its kind
A run fits if 13 percent are left over: 5 for the prediction's error, 8 for fragmentation and CUDA's own memory. The
engine is vllm-omni in its own processes. Reward models on a CPU and rewards over HTTP are not predicted.

The models of the shipped recipes are known. Of others, the configuration files (config.json) are read from a local
folder or the hub. torch.compile is not predicted; it can only lower the numbers.
"""
DEFAULT_GPU = "h100-80gb"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options besides recipe and overrides."""
    from flowcorr.plan.devices import CUSTOM, GPUS

    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help=f"the GPU of each rank: {', '.join(GPUS)}, or by numbers (GB, GB/s, TFLOP/s): {CUSTOM} (default: "
        "h100-80gb)",
    )
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="training ranks (default: 1)")
    parser.add_argument(
        "--gpus",
        metavar="N or M..N",
        help="compare the layouts that flowcorr runs on so many GPUs; M..N shows how a step shrinks on M, 2 M, ... N",
    )
    parser.add_argument(
        "--cores",
        type=int,
        default=8,
        metavar="N",
        help="with --gpus: CPU cores beside each GPU, for OCR (default: 8)",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON, and nothing else")


def plan(arguments: argparse.Namespace) -> int:
    """Plan a run and print what it needs."""
    from flowcorr.cli.commands import find_own_code
    from flowcorr.config import load
    from flowcorr.errors import ConfigError
    from flowcorr.plan.devices import find_gpu
    from flowcorr.plan.estimate import make_plan
    from flowcorr.plan.preflight import check_settings

    for option in ("ranks", "cores"):
        if getattr(arguments, option) < 1:
            raise ConfigError(f"--{option} {getattr(arguments, option)} must be at least 1")
    find_own_code()
    gpu = DEFAULT_GPU if arguments.gpu is None else arguments.gpu
    if arguments.gpus is not None:
        return _plan_layouts(arguments, gpu)
    config = load(arguments.recipe, arguments.overrides)
    check_settings(config)
    title = " ".join((arguments.recipe, *arguments.overrides))
    with _at_work(f"planning {title}: tracing each phase without weights"):
        made = make_plan(config, gpu=find_gpu(gpu), ranks=arguments.ranks, title=title)
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

    console = console_of(console)
    console.print(f"{summary(plan)}\n", style="bold", markup=False)
    rows: list[tuple[str, ...]] = [
        (
            phase.name,
            phase.where,
            "" if phase.peak is None else gigabytes(phase.peak),
            f"{phase.flops / 1e12:,.1f}" if phase.flops else "",
            f"{phase.moved / 1e12:,.2f}" if phase.moved else "",
            *_time(phase.seconds, phase.fastest, phase.slowest),
        )
        for phase in plan.phases
    ]
    rows.append(("step", "", "", "", "", *_time(plan.seconds(), *plan.band)))
    styles = ["dim" if phase.name in BEFORE_TRAINING else None for phase in plan.phases]
    columns = ("phase", "on", "peak", "TFLOP", "TB", "time", "range")
    show_table(console, columns, rows, words=2, styles=[*styles, "bold"])
    used = plan.utilisation
    console.print(
        f"\nthe trainer at {used.matmul:.0%} of the peak in matrix products, {used.attention:.0%} in attention and "
        f"{used.bandwidth:.0%} of the bandwidth, times within {TIME_TOLERANCE:.0%}; not calibrated on your GPU\n",
        style="dim",
        markup=False,
    )
    for answer in plan.answers():
        console.print(answer, markup=False)


def _time(seconds: float | None, fastest: float, slowest: float) -> tuple[str, str]:
    from flowcorr.plan.answers import duration

    if seconds is None:
        return "unknown", ""
    return (duration(seconds), f"{duration(fastest)} to {duration(slowest)}") if seconds else ("", "")


def _plan_layouts(arguments: argparse.Namespace, gpu: str) -> int:
    from flowcorr.errors import ConfigError
    from flowcorr.plan.devices import find_gpu
    from flowcorr.plan.layouts import compare, end_of_shrinking

    if arguments.ranks != 1:
        raise ConfigError("--ranks is one layout and --gpus compares them; leave one of the two out")
    counts = gpu_counts(arguments.gpus)
    found = compare(
        arguments.recipe,
        arguments.overrides,
        gpu=find_gpu(gpu),
        gpus=counts,
        cores_a_gpu=arguments.cores,
    )
    if arguments.json:
        mapping = {count: [made.to_mapping() for made in found[count]] for count in counts}
        print(json.dumps(mapping, indent=2, allow_nan=False))
        return 0
    several = len(counts) > 1
    rows = [made for count in counts for made in (found[count][:1] if several else found[count])]
    show_layouts(rows, " ".join((arguments.recipe, *arguments.overrides, "on", gpu)))
    if several:
        print(end_of_shrinking(found))
    return 0


def gpu_counts(text: str) -> list[int]:
    """The numbers of GPUs that `8` or `1..64` names: one, or a number, twice it, and so on.

    Raises:
        ConfigError: `text` is neither.
    """
    from flowcorr.errors import ConfigError

    first, _, last = text.partition("..")
    if not (first.isdecimal() and (last or first).isdecimal() and 1 <= int(first) <= int(last or first)):
        raise ConfigError(f"--gpus {text!r} must be a number of GPUs, or two, such as 1..64")
    counts = [int(first)]
    while 2 * counts[-1] <= int(last or first):
        counts.append(2 * counts[-1])
    return counts


def show_layouts(rows: Sequence[PlannedLayout], title: str, console: Console | None = None) -> None:
    """Print one row for each layout, and how the fastest one starts."""
    console = console_of(console)
    console.print(f"{title}\n", style="bold", markup=False)
    columns = ("layout", "GPUs", "fits", "step", "range", "images/s", "each GPU", "bound by", "idle")
    show_table(console, columns, map(_layout_row, rows))
    if any(made.fits and made.micro_batch < made.plan.micro_batch for made in rows):
        console.print("A number under fits is the actor.micro_batch_size that does.", style="dim")
    best = min(rows, key=lambda made: (not made.fits, made.seconds), default=None)
    if best is not None and best.fits:
        console.print(f"\nThe fastest, {best.layout.name}, starts by:")
        for line in best.lines:
            console.print(f"  {line}", markup=False, soft_wrap=True)


def _layout_row(made: PlannedLayout) -> tuple[str, ...]:
    from flowcorr.plan.answers import duration

    layout, rate = made.layout, made.images_per_second
    split = f" ({layout.ranks} : {layout.workers})" if layout.workers else ""
    fits = "no"
    if made.fits:
        fits = "yes" if made.micro_batch == made.plan.micro_batch else f"{made.micro_batch}"
    low, high = (duration(seconds) for seconds in made.plan.band)
    return (
        f"{layout.name}{split}",
        f"{layout.gpus}",
        fits,
        duration(made.seconds),
        f"{low} to {high}",
        f"{rate:.3g}",
        f"{rate / layout.gpus:.2g}",
        made.bound,
        made.idle,
    )
