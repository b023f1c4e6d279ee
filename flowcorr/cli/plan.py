"""`flowcorr plan`: its arguments."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape

HELP = """\
Predict whether a run fits a GPU, and how long a step takes. This takes seconds and needs neither a GPU nor weights:
flowcorr's actor runs on tensors that have a shape and no values.

examples:
  flowcorr plan sd35_medium_ocr_lora
  flowcorr plan qwen_image_ocr_lora_decoupled --gpu h200-141gb actor.micro_batch_size=8
  flowcorr plan flux_dev_pickscore_lora --gpu memory=48,bandwidth=864,bf16=362 --ranks 4
  flowcorr plan my_recipe.yaml model.path=/models/my_pipeline --json | jq -r '.findings[].remedy'

A GB is 1e9 bytes, and an 80 GB H100 has 85. A run fits if 13 percent are left over: 5 for the prediction's error, 8 for
fragmentation and CUDA's own memory. The time of a phase is the longest of its arithmetic at the share of the GPU's peak
below the table, its memory traffic, and the host's launches. Published times are within 35 percent of it.

The models of the shipped recipes are known. Of others, the configuration files (config.json) are read from a local
folder or the hub. torch.compile, reward models on a CPU and rewards over HTTP are not predicted.
"""
DEFAULT_GPU = "h100-80gb"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options besides recipe and overrides."""
    from flowcorr.instruments.plan.devices import CUSTOM, GPUS

    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help=f"the GPU of each rank: {', '.join(GPUS)}, or by numbers (GB, GB/s, TFLOP/s): {CUSTOM} (default: "
        "h100-80gb)",
    )
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="training ranks (default: 1)")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON, and nothing else")


def plan(arguments: argparse.Namespace) -> int:
    """Plan a run and print what it needs."""
    from flowcorr.cli.commands import find_own_code, show_report
    from flowcorr.config import load
    from flowcorr.errors import ConfigError
    from flowcorr.instruments.plan.devices import find_gpu
    from flowcorr.instruments.plan.preflight import check_settings
    from flowcorr.instruments.plan.report import plan as predict

    if arguments.ranks < 1:
        raise ConfigError(f"--ranks {arguments.ranks} must be at least 1")
    find_own_code()
    gpu = find_gpu(DEFAULT_GPU if arguments.gpu is None else arguments.gpu)
    config = load(arguments.recipe, arguments.overrides)
    check_settings(config)
    title = " ".join((arguments.recipe, *arguments.overrides))
    with _at_work(f"planning {title}: tracing each phase without weights"):
        made = predict(config, gpu=gpu, ranks=arguments.ranks, title=title)
    show_report(made, as_json=arguments.json)
    return 0


@contextlib.contextmanager
def _at_work(text: str) -> Iterator[None]:
    """Show on standard error that something takes its time: a moving line on a terminal, a plain one elsewhere."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console.print(text, markup=False, soft_wrap=True)
    with console.status(escape(text)) if console.is_terminal else contextlib.nullcontext():
        yield
