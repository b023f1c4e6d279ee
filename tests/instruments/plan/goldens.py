"""Numbers of `flowcorr plan` for every recipe: memory, arithmetic and time by phase.

`python -m tests.instruments.plan.goldens [RECIPE ...]` writes those of these recipes, or of all, to `goldens.json`.
"""

import json
import sys
from pathlib import Path
from typing import Any

from flowcorr.actor.passes import is_bounded
from flowcorr.config import load, recipe_names
from flowcorr.instruments.plan.answers import MARGIN
from flowcorr.instruments.plan.devices import GPUS
from flowcorr.instruments.plan.estimate import make_plan, plan_of
from tests.instruments.plan.cards import RANKS, alone, traced

FILE = Path(__file__).with_suffix(".json")
STORED: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
LARGE = GPUS["h200-141gb"]
SMALL = tuple(GPUS[name] for name in ("rtx4070-12gb", "rtx4090-24gb", "l40s-48gb"))
"""Cards that bound the passes of `auto`."""


def numbers(recipe: str) -> dict[str, Any]:
    """Memory in GB, arithmetic in TFLOP and time in seconds of a step, on a card that holds the largest pass."""
    config, ranks = load(recipe), RANKS.get(recipe, 1)
    traces = traced(recipe)
    plan = plan_of(traces, config, gpu=LARGE, ranks=ranks)
    memory, training = plan.memory, traces.training
    weights = {name: getattr(training, name) for name in ("transformer", "adapter", "gradients", "moments")}
    weights |= {"text": traces.text[False].weights, "decoder": traces.decoder.weights}
    return {
        "weights": {name: size / 1e9 for name, size in weights.items()},
        "peaks": {name: peak / 1e9 for name, peak in memory.phases.items()},
        "engine": memory.engine / 1e9,
        "shared": alone(memory) / 1e9,
        "flops": {phase.name: phase.flops / 1e12 for phase in plan.phases if phase.flops},
        "seconds": {phase.name: phase.seconds for phase in plan.phases if phase.seconds},
    }


def bounded(recipe: str) -> dict[str, Any]:
    """Micro-batch and peak of the update in GB on each small card on which `auto` takes smaller passes."""
    config, ranks = load(recipe), RANKS.get(recipe, 1)
    largest = plan_of(traced(recipe), config, gpu=LARGE, ranks=ranks).memory.phases["update"]
    plans = {
        gpu.name: make_plan(config, gpu=gpu, ranks=ranks)
        for gpu in SMALL
        if is_bounded(config.actor) and largest * MARGIN > gpu.memory
    }
    return {
        name: {"micro_batch": plan.micro_batch, "update": plan.memory.phases["update"] / 1e9}
        for name, plan in plans.items()
    }


def rounded(value: Any) -> Any:
    """Numbers with seven digits."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return float(f"{value:.7g}") if isinstance(value, float) else value


if __name__ == "__main__":  # python -m tests.instruments.plan.goldens
    for name in sys.argv[1:] or recipe_names():
        STORED[name] = rounded({**numbers(name), "bounded": bounded(name)})
        ordered = dict(sorted(STORED.items()))
        FILE.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
        traced.cache_clear()
