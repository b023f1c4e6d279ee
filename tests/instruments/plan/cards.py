"""Every shipped recipe on common GPUs, as `flowcorr plan` predicts it: the table of `recipes/README.md`.

`python -m tests.instruments.plan.cards` writes it; its test plans each recipe anew.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from flowcorr.config import load, recipe_names
from flowcorr.instruments.plan.answers import MARGIN, Memory, Plan, duration
from flowcorr.instruments.plan.devices import GPUS
from flowcorr.instruments.plan.estimate import FP8, OFFLOAD, SLEEP, plan_of
from flowcorr.instruments.plan.traces import Traces, trace

RECIPES = tuple(name for name in recipe_names() if not name.startswith("tiny_"))
CARDS = tuple(
    GPUS[name]
    for name in (
        *("rtx4070-12gb", "rtx4080-16gb", "rtx4090-24gb", "rtx5090-32gb"),
        *("l40s-48gb", "a100-80gb-sxm", "h100-80gb", "h200-141gb"),
    )
)
RANKS = {"qwen_image_ocr_lora_2x32gb": 2}
"""Training ranks of recipes that are for more than one."""
PAGE = Path(__file__).parents[3] / "recipes" / "README.md"
BEGIN, END = "<!-- cards -->\n", "<!-- end of cards -->"
SHARED_BY = {SLEEP: " (a)", f"{SLEEP} {FP8}": " (b)"}
FITTED_BY = {OFFLOAD: "c", "actor.micro_batch_size=1": "d", FP8: "e"}


def cell(plan: Plan) -> str:
    """Time of a step on a GPU for each rank, with its engine, else on two; empty if the recipe fits neither."""
    seconds = plan.seconds()
    time = f"{seconds / 60:.0f} min" if seconds >= 100 else duration(seconds)
    memory = plan.memory
    if plan.fits(alone(memory)):
        return time if plan.ranks == 1 else f"{plan.ranks} x: {time}"
    for overrides, mark in SHARED_BY.items():
        if overrides in plan.shared_changes and plan.fits(plan.shared_changes[overrides]):
            return time + mark
    if plan.fitting:
        return f"2 x: {time}"
    offloaded = plan.changes.get(OFFLOAD)
    if offloaded and plan.fits(alone(offloaded)):
        return f"{time} (c)"
    return (
        f"2 x: {time} (c)"
        if offloaded and plan.fits(offloaded.trainer) and plan.fits(offloaded.engine)
        else ""
    )


def alone(memory: Memory) -> float:
    """Peak bytes of the run on one GPU."""
    return memory.trainer if memory.shared is None else memory.shared


def smallest_for_trainer(plan: Plan) -> str:
    """The GPU of least memory that the trainer fits, with the letters of the overrides with which it does."""
    ways = {"": plan.memory, **plan.changes}
    peaks = {overrides: memory.trainer for overrides, memory in ways.items()}
    for overrides, memory in ways.items():
        one = " ".join(filter(None, (overrides, "actor.micro_batch_size=1")))
        peaks.setdefault(one, memory.with_one_sample)
    return _smallest(peaks)


def smallest_for_engine(plan: Plan) -> str:
    """The same of an engine in its own process."""
    return _smallest({"": plan.memory.engine, **plan.engine_changes})


def _smallest(peaks: Mapping[str, float]) -> str:
    for gpu in sorted(GPUS.values(), key=lambda gpu: gpu.memory):
        for overrides, peak in peaks.items():
            if peak * MARGIN <= gpu.memory:
                letters = ", ".join(FITTED_BY[key] for key in overrides.split())
                return f"{gpu.name} ({letters})" if letters else gpu.name
    return ""


@cache
def traced(recipe: str) -> Traces:
    """The recipe's trace on its ranks."""
    return trace(load(recipe), RANKS.get(recipe, 1))


@cache
def row(recipe: str) -> str:
    """A recipe's row: memory in GB of trainer, engine and both on one GPU, then a cell for each card."""
    config = load(recipe)
    ranks = RANKS.get(recipe, 1)
    plans = [plan_of(traced(recipe), config, gpu=gpu, ranks=ranks, title=recipe) for gpu in CARDS]
    memory = plans[0].memory
    sizes = "".join(f" {size / 1e9:.0f} |" for size in (memory.trainer, memory.engine, alone(memory)))
    trainer = smallest_for_trainer(plans[0])
    engine = smallest_for_engine(plans[0]) if memory.engine else "in process"
    return f"| `{recipe}` |{sizes} {trainer} | {engine} |{''.join(f' {cell(plan)} |' for plan in plans)}\n"


def table() -> str:
    """All rows, below their header."""
    cards = "".join(f" {gpu.name} |" for gpu in CARDS)
    header = (
        "| recipe | trainer, GB | engine, GB | both, GB | smallest for the trainer | smallest for the engine |"
        f"{cards}\n|{'---|' * (6 + len(CARDS))}\n"
    )
    return header + "".join(map(row, RECIPES))


if __name__ == "__main__":  # python -m tests.instruments.plan.cards
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}", encoding="utf-8")
