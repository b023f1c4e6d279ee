"""The gap between a quantized trainer and an engine on the unquantized base: the table in `results.md`.

`python -m tests.benchmarks.quantized_gap` takes half a minute on a CPU; nf4 needs bitsandbytes.
"""

import warnings
from dataclasses import replace

from flowcorr.actor import DiffusionActor
from flowcorr.config import load
from flowcorr.data import PromptStream, load_prompts
from flowcorr.health.setting import Setting
from flowcorr.instruments.audit.facts import Facts
from flowcorr.instruments.audit.gap import measure_gap
from flowcorr.instruments.audit.judge import report_of
from flowcorr.instruments.gap_table import Gap
from flowcorr.models.prompt_cache import PromptCache
from flowcorr.records import Terms
from flowcorr.trainer.setup import load_model
from tests.planted.plants import own_engine
from tests.prompts import prompts_of

STEPS = 4
ROWS = {
    "int8": ("model.quantization=int8",),
    "bfloat16": ("model.dtype=bfloat16",),
    "nf4": ("model.quantization=nf4",),
    "int8 in bfloat16": ("model.quantization=int8", "model.dtype=bfloat16"),
    "nf4 in bfloat16": ("model.quantization=nf4", "model.dtype=bfloat16"),
}
# An engine with a model of its own, for which one in process stands.
BESIDE = ("rollout.name=vllm_omni", "rollout.emulate=none", "trainer.device=cpu")


def measured(*keys):
    """The audit's report on the recipe with these keys, its engine in float32."""
    config, plain = (load("tiny_ocr_lora", [*BESIDE, *more]) for more in (keys, ()))
    data = load_prompts(config.data)
    stream = PromptStream(data.train, seed=config.trainer.seed)
    batches = [[prompt.text for prompt in stream.next(config.rollout.prompts_per_step)] for _ in range(STEPS)]
    exact = DiffusionActor(load_model(plain), plain)
    cache = PromptCache(exact.family, exact.guidance, prompts_of(text for texts in batches for text in texts))
    actor = DiffusionActor(load_model(config), config)
    engine = own_engine(exact, plain)
    engine.sync(actor.weights.snapshot())
    gaps = []
    for step, texts in enumerate(batches, 1):
        rollout = engine.sample(
            cache(prompts_of(texts)), range(len(texts)), training_step=step, with_means=True
        )
        rows = {name: rows.to(actor.family.dtype) for name, rows in rollout.conditioning.items()}
        gaps.append(measure_gap(actor, replace(rollout, conditioning=rows)))
    gap = Gap.of(Terms.concatenate(gaps), Setting.of(config))
    return report_of("", gap, Facts.of(gap))


def main():
    """Print a row for each trainer."""
    warnings.simplefilter("ignore")
    print(
        "| trainer | joint nats | outside a clip of 1e-3 | clip that bypass needs | advice |\n|---|---|---|---|---|"
    )
    for name, keys in ROWS.items():
        report = measured(*keys)
        needed = max(step["clip_needed"] for step in report.table("steps"))
        print(
            f"| {name} | {report.fact('joint_nats'):.2g} | {report.fact('outside_clip'):.1%} | {needed:.1e} | "
            f"{report.verdict} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
