"""Published measurements of other projects' engines and trainers, and what flowcorr plans for the same work.

Rows stand in the order in which they were found. Every third one is held out: no utilisation was ever set by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from pathlib import Path
from statistics import median

from flowcorr.config import load
from flowcorr.instruments.plan.answers import Plan
from flowcorr.instruments.plan.architecture import find_architecture
from flowcorr.instruments.plan.components import trace_decoder
from flowcorr.instruments.plan.devices import ADAPTED, COMPILED, DECODING, EAGER, GPUS, Gpu, Speed
from flowcorr.instruments.plan.estimate import engine_peak, plan_of, roofline
from flowcorr.instruments.plan.traces import engine_pass, trace
from flowcorr.instruments.plan.training import one_optimizer_step, trace_training
from tests.gpu.pages import measured

GB, MIB = 1e9, 2.0**20
TIME, MEMORY = 1.35, 1.15
"""Factors within which times and memory are to be planned."""

QWEN, FLUX = "qwen_image_ocr_lora_decoupled", "flux_dev_pickscore_lora"
KLEIN, Z_IMAGE, SD35 = "flux2_klein_pickscore_lora", "z_image_pickscore_lora", "sd35_medium_ocr_lora"
Planned = Callable[[Gpu], float]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published number.

    Attributes:
        setting: model, size and what was computed.
        gpu: a name of `GPUS`.
        published: seconds, bytes, or a share of the GPU's peak.
        unit: its unit.
        source: where it is published, with its date.
        planned: the same number as flowcorr plans it.
        outside: what the number includes that the plan does not predict; such a row is shown and not asserted.
    """

    setting: str
    gpu: str
    published: float
    source: str
    planned: Planned
    unit: str = "s"
    outside: str = ""

    @property
    def factor(self) -> float:
        """Planned / published."""
        return self.planned(GPUS[self.gpu]) / self.published


def sized(recipe: str, pixels: int, *overrides: str) -> tuple[str, ...]:
    """A recipe with images of another size."""
    size = (f"sampling.height={pixels}", f"sampling.width={pixels}", "sampling.sde_window_size=1")
    return (recipe, *size, "actor.micro_batch_size=1", *overrides)


SHORT = "model.max_sequence_length=32"  # the published prompts have ten to thirty tokens
QWEN_256 = sized(QWEN, 512, "model.max_sequence_length=64")  # recipes' prompts
QWEN_512, QWEN_1024, QWEN_1536 = (sized(QWEN, pixels, SHORT) for pixels in (512, 1024, 1536))
FLUX_1024 = sized(FLUX, 1024, "model.max_sequence_length=512")
KLEIN_1024 = sized(KLEIN, 1024, "model.max_sequence_length=512")
Z_IMAGE_1024 = sized(Z_IMAGE, 1024, SHORT, "sampling.guidance_scale=1")
SD35_512 = sized(SD35, 512, "sampling.guidance_scale=1")
SD35_384 = sized(SD35, 384, "sampling.guidance_scale=1")


@cache
def one_forward(case: tuple[str, ...], adapted: bool):
    """A forward pass of one image in an engine, and the engine's weights."""
    recipe, *overrides = case
    config = load(recipe, overrides)
    return engine_pass(config, find_architecture(config.model.path), "beside" if adapted else "merged")


@cache
def decoder(case: tuple[str, ...], images: int):
    recipe, *overrides = case
    config = load(recipe, overrides)
    (decoder,) = trace_decoder(config, find_architecture(config.model.path), images)
    return decoder


def denoising(case, *, rows: int = 1, steps: int = 1, passes: int = 1, adapted: bool = False) -> Planned:
    """Seconds of so many denoising steps of `rows` images; other engines compute guidance in two `passes`."""
    return forwards(
        case, ADAPTED if adapted else COMPILED, rows=rows, steps=steps, passes=passes, adapted=adapted
    )


def forwards(
    case, speed: Speed, *, rows: int = 1, steps: int = 1, passes: int = 1, adapted: bool = False
) -> Planned:
    def planned(gpu: Gpu) -> float:
        work = one_forward(case, adapted).work
        work = replace(work.times(rows), kernels=passes * work.kernels)
        return steps * roofline(work, gpu, speed, half=True)

    return planned


def decoding(case, images: int) -> Planned:
    return lambda gpu: roofline(decoder(case, min(images, 8)).scaled(images), gpu, DECODING, half=True)


def generation(case, *, images: int, rows: int, steps: int, passes: int, adapted: bool) -> Planned:
    """Seconds of sampling and decoding `images` images in batches of `rows`."""
    batches = ceil(images / rows)
    return total(
        denoising(case, rows=rows, steps=batches * steps, passes=passes, adapted=adapted),
        decoding(case, images),
    )


def total(*parts: Planned) -> Planned:
    return lambda gpu: sum(part(gpu) for part in parts)


def memory(case) -> Planned:
    """Peak bytes of an engine without adapters that samples one image."""

    def planned(gpu: Gpu) -> float:
        engine, vae = one_forward(case, False), decoder(case, 1)
        return engine_peak(engine.weights, engine.work.peak, vae.weights, vae.work.peak)

    return planned


LORA = (QWEN, "actor.micro_batch_size=16", "rollout.batch_size=32")
ALL_WEIGHTS = (
    QWEN, "model.lora.rank=0", "model.lora.alpha=32", "model.dtype=float32", "actor.fsdp=true", "actor.autocast=true",
    "rollout.name=in_process", "rollout.engine={}", "rollout.dtype=bfloat16", "rollout.batch_size=32",
    "sampling.true_cfg_scale=1", "sampling.negative_prompt=''", "actor.micro_batch_size=16",
)  # fmt: skip


@cache
def traced(case: tuple[str, ...], ranks: int):
    recipe, *overrides = case
    return trace(load(recipe, overrides), ranks)


def planned_run(case, ranks: int, gpu: Gpu) -> Plan:
    recipe, *overrides = case
    return plan_of(traced(case, 4), load(recipe, overrides), gpu=gpu, ranks=ranks)


def phases(case, ranks: int, *names: str) -> Planned:
    """Seconds of these phases of a step, of all without names."""
    return lambda gpu: planned_run(case, ranks, gpu).seconds(*names)


def share_of_peak(case, ranks: int, name: str, counted: float = 1.0) -> Planned:
    """The share of the GPU's peak that a phase reaches, if this share of its arithmetic is counted."""

    def planned(gpu: Gpu) -> float:
        (phase,) = (part for part in planned_run(case, ranks, gpu).phases if part.name == name)
        return counted * phase.flops / (phase.seconds * gpu.bf16)

    return planned


@cache
def micro_batches(recipe: str):
    """What a recipe's trainer does in an optimizer step of two micro-batches, sampling in process."""
    config = one_optimizer_step(load(recipe, ["rollout.name=in_process", "rollout.engine={}"]))
    return trace_training(config, find_architecture(config.model.path))


def recomputing(recipe: str) -> Planned:
    return lambda gpu: roofline(micro_batches(recipe).recompute, gpu, EAGER, half=True)


def updating(recipe: str) -> Planned:
    def planned(gpu: Gpu) -> float:
        traced = micro_batches(recipe)
        backward, step = (roofline(work, gpu, EAGER, half=True) for work in (traced.backward, traced.step))
        return 2 * backward + step

    return planned


def update_peak(recipe: str) -> Planned:
    def planned(gpu: Gpu) -> float:
        traced = micro_batches(recipe)
        return traced.gradients + max(traced.backward.peak, traced.step.peak)

    return planned


H100, H200, H800, H20 = "h100-80gb", "h200-141gb", "h800-80gb", "h20-96gb"
SGLANG = "sglang, multimodal_gen/test/server/perf_baselines/h100.json, 2026-08-16"
SGLANG_5090 = "sglang, multimodal_gen/test/server/perf_baselines/5090.json, 2026-08-16"
SGLANG_BATCHES = "sglang, comment in pull request 22183, 2026-04-10"
BATCHING = "verl-omni, docs/start/rollout_batching.md, 2026-07-29"
PERFORMANCE = "verl-omni, docs/algo/performance.md, 2026-06-17"
MFU = "verl-omni, issue 124, 2026-06"
OWN = "tests/gpu/h200.jsonl, 2026-11-26"
JUDGE = "a vision-language judge that scores on the same GPUs"
SMALL = "the engine's work around each request of a small model"

one_by_one = generation(QWEN_256, images=128, rows=1, steps=10, passes=2, adapted=True)
in_batches = generation(QWEN_256, images=128, rows=32, steps=10, passes=2, adapted=True)
trained = phases(LORA, 4, "recompute", "update", "sync")

ROWS = (
    Row(setting="Qwen-Image, 1024 px, guidance, a step", gpu=H100, published=0.248, source=SGLANG,
        planned=denoising(QWEN_1024, passes=2)),
    Row(setting="Qwen-Image, 1024 px, guidance, peak of the engine", gpu=H100, published=44855 * MIB, unit="GB",
        source=SGLANG, planned=memory(QWEN_1024)),
    Row(setting="Qwen-Image, 1024 px, guidance, a step", gpu=H200, published=0.243, source=SGLANG_BATCHES,
        planned=denoising(QWEN_1024, passes=2)),
    Row(setting="Qwen-Image, 1024 px, guidance, a step of 2 images", gpu=H200, published=0.474, source=SGLANG_BATCHES,
        planned=denoising(QWEN_1024, rows=2, passes=2)),
    Row(setting="FLUX.1-dev, 1024 px, a step", gpu=H100, published=0.129, source=SGLANG, planned=denoising(FLUX_1024)),
    Row(setting="FLUX.1-dev, 1024 px, peak of the engine", gpu=H100, published=25667 * MIB, unit="GB", source=SGLANG,
        planned=memory(FLUX_1024)),
    Row(setting="Qwen-Image LoRA, 512 px, guidance, 10 steps, 512 images on 4, in batches of 32", gpu=H800,
        published=107.9, source=BATCHING, planned=in_batches),
    Row(setting="the same, one by one", gpu=H800, published=226.4, source=BATCHING, planned=one_by_one),
    Row(setting="Qwen-Image LoRA, the step, judge beside it", gpu=H800, published=420, source=PERFORMANCE,
        planned=total(one_by_one, trained), outside=JUDGE),
    Row(setting="Qwen-Image LoRA, the step, judge on a GPU of its own", gpu=H800, published=360, source=PERFORMANCE,
        planned=total(one_by_one, trained)),
    Row(setting="Qwen-Image, all weights, no guidance, 512 images on 4, the step", gpu=H200, published=250,
        source=PERFORMANCE, planned=phases(ALL_WEIGHTS, 4), outside=JUDGE),
    Row(setting="the same, share of the peak in recompute", gpu=H200, published=0.327, unit="", source=MFU,
        planned=share_of_peak(ALL_WEIGHTS, 4, "recompute")),
    Row(setting="the same, share of the peak in update, without recomputed activations", gpu=H200, published=0.223,
        unit="", source=MFU, planned=share_of_peak(ALL_WEIGHTS, 4, "update", 3 / 4)),
    Row(setting="SD3.5 Medium LoRA, 512 px, 10 steps, 768 images on 8, one by one", gpu=H20, published=57,
        source="UniRL, issue 108, 2026-06-22", outside=SMALL,
        planned=generation(SD35_512, images=96, rows=1, steps=10, passes=1, adapted=True)),
    Row(setting="SD3.5 Medium LoRA, 384 px, 10 steps, 64 images on 2, one by one", gpu=H800, published=25.4,
        source=BATCHING, outside=SMALL,
        planned=generation(SD35_384, images=32, rows=1, steps=10, passes=1, adapted=True)),
    Row(setting="the same, in a batch", gpu=H800, published=22.3, source=BATCHING, outside=SMALL,
        planned=generation(SD35_384, images=32, rows=32, steps=10, passes=1, adapted=True)),
    Row(setting="Qwen-Image, all weights, no guidance, 512 images on 64, the step", gpu=H100, published=105,
        source=PERFORMANCE, planned=phases(ALL_WEIGHTS, 64), outside=f"{JUDGE}; moments in the host's memory"),
    Row(setting="Qwen-Image LoRA, FlowDPPO, the step, judge beside it", gpu=H200, published=540, source=PERFORMANCE,
        planned=total(one_by_one, trained), outside=JUDGE),
    Row(setting="FLUX.2 klein base 4B, 1024 px, guidance, a step", gpu=H100, published=0.1173, source=SGLANG,
        planned=denoising(KLEIN_1024, passes=2)),
    Row(setting="FLUX.2 klein base 4B, 1024 px, guidance, peak of the engine", gpu=H100, published=10800 * MIB,
        unit="GB", source=SGLANG, planned=memory(KLEIN_1024),
        outside="1 GB beside the weights that is loaded before the first request"),
    Row(setting="Z-Image-Turbo, 1024 px, a step", gpu=H100, published=0.0900, source=SGLANG,
        planned=denoising(Z_IMAGE_1024)),
    Row(setting="Z-Image-Turbo, 1024 px, peak of the engine", gpu=H100, published=15133 * MIB, unit="GB",
        source=SGLANG, planned=memory(Z_IMAGE_1024)),
    Row(setting="FLUX.2 klein base 4B, 1024 px, guidance, a step", gpu="rtx5090-32gb", published=0.346,
        source=SGLANG_5090, planned=denoising(KLEIN_1024, passes=2)),
    Row(setting="Z-Image-Turbo, 1024 px, a step", gpu="rtx5090-32gb", published=0.265, source=SGLANG_5090,
        planned=denoising(Z_IMAGE_1024)),
    *(
        Row(setting=f"Qwen-Image, 512 px, guidance, a step of {rows}", gpu=H200, published=seconds,
            source=SGLANG_BATCHES, planned=denoising(QWEN_512, rows=rows, passes=2))
        for rows, seconds in ((1, 0.167), (2, 0.183), (3, 0.186), (4, 0.240), (8, 0.425), (16, 0.832))
    ),
    Row(setting="Qwen-Image, 1024 px, guidance, a step of 3", gpu=H200, published=0.711, source=SGLANG_BATCHES,
        planned=denoising(QWEN_1024, rows=3, passes=2)),
    Row(setting="the update of all weights of Qwen-Image, 512 images on 4", gpu=H200, published=115.6, source=MFU,
        planned=phases(ALL_WEIGHTS, 4, "update"),
        outside="moments in the host's memory; its own utilisation counts 2.1 times this arithmetic"),
    Row(setting="FLUX.1-dev, 1024 px, 28 steps with diffusers, eager", gpu=H100, published=6.49,
        source="xDiT, issue 378, mean of two machines, 2024-12-04",
        planned=total(forwards(FLUX_1024, EAGER, steps=28), decoding(FLUX_1024, 1))),
    Row(setting="the same, compiled", gpu=H100, published=4.09, source="xDiT, issue 378, 2024-12-04",
        planned=total(denoising(FLUX_1024, steps=28), decoding(FLUX_1024, 1))),
    Row(setting="Qwen-Image, 512 px, guidance, 20 steps in vllm-omni", gpu=H100, published=2.32,
        source="vllm-omni, pull request 2707, 2026-04-12", planned=denoising(QWEN_512, steps=20, passes=2)),
    Row(setting="Qwen-Image, 1536 px, guidance, 35 steps in vllm-omni", gpu=H100, published=23.19,
        source="vllm-omni, pull request 2707, 2026-04-12", planned=denoising(QWEN_1536, steps=35, passes=2)),
    Row(setting="Qwen-Image LoRA, 512 px, guidance, 10 steps, 512 images on 4, in batches", gpu=H800, published=100,
        source="verl-omni, pull request 489, 2026-09-06", planned=in_batches),
    Row(setting="the same, the step, judge beside it", gpu=H800, published=326,
        source="verl-omni, pull request 489, 2026-09-06", planned=total(in_batches, trained), outside=JUDGE),
    *(
        Row(setting=f"{model} LoRA, recompute of {images} images, {pixels} px", gpu=H200,
            published=measured("h200", part, "recompute"), source=OWN, planned=recomputing(recipe))
        for model, part, recipe, images, pixels in (
            ("FLUX.1-dev", "step_flux", FLUX, 3, 512), ("FLUX.2 klein base 4B", "step_flux2_klein", KLEIN, 4, 384),
            ("Z-Image", "step_z_image", Z_IMAGE, 4, 512), ("SD3.5 Medium", "step_sd35", SD35, 8, 384),
        )
    ),
    *(
        row
        for model, part, recipe, images, pixels, outside in (
            ("FLUX.2 klein base 4B", "step_flux2_klein", KLEIN, 8, 384, ""),
            ("Z-Image", "step_z_image", Z_IMAGE, 8, 512, "the plan counts a sixth too much"),
            ("SD3.5 Medium", "step_sd35", SD35, 16, 384, ""),
        )
        for row in (
            Row(setting=f"{model} LoRA, update by {images} images, {pixels} px", gpu=H200,
                published=measured("h200", part, "update of two micro-batches"), source=OWN, planned=updating(recipe)),
            Row(setting="the same, its peak beside the weights", gpu=H200,
                published=measured("h200", part, "update, peak") * GB, unit="GB", source=OWN,
                planned=update_peak(recipe), outside=outside),
        )
    ),
    *(
        Row(setting=f"{model}, {pixels} px, the decoder's peak for an image", gpu=H200,
            published=measured("h200", part, "decode, peak") / images * GB, unit="GB", source=OWN,
            planned=lambda gpu, recipe=recipe: decoder((recipe,), 1).work.peak)
        for model, part, recipe, images, pixels in (
            ("FLUX.1-dev", "step_flux", FLUX, 3, 512), ("FLUX.2 klein base 4B", "step_flux2_klein", KLEIN, 4, 384),
            ("SD3.5 Medium", "step_sd35", SD35, 8, 384),
        )
    ),
)  # fmt: skip

FITTED = tuple(row for place, row in enumerate(ROWS, 1) if place % 3)
HELD_OUT = tuple(row for place, row in enumerate(ROWS, 1) if not place % 3)


PAGE = Path(__file__).with_suffix(".md")
BEGIN, END = "<!-- published -->\n", "<!-- end of published -->"


def summary(rows: Sequence[Row]) -> tuple[float, float]:
    """Median and worst of planned / published, over the rows that the plan predicts."""
    factors = [row.factor for row in rows if not row.outside]
    return median(factors), max(factors, key=lambda factor: max(factor, 1 / factor))


def table() -> str:
    """The rows as a table for a page, and their summary."""
    lines = [
        "| setting | GPU | published | planned | ratio | outside of the plan |",
        "|---|---|---|---|---|---|",
    ]
    for place, row in enumerate(ROWS, 1):
        planned, unit = row.planned(GPUS[row.gpu]), row.unit
        published, planned = (value / (GB if unit == "GB" else 1) for value in (row.published, planned))
        held_out = "" if place % 3 else " (held out)"
        lines.append(
            f"| {row.setting}{held_out} | {row.gpu} | {published:.3g} {unit} | {planned:.3g} {unit} | "
            f"{row.factor:.2f} | {row.outside} |"
        )
    words = []
    for name, rows in (("fitted", FITTED), ("held-out", HELD_OUT)):
        middle, worst = summary(rows)
        words.append(f"median {middle:.2f} and worst {worst:.2f} of the {name} rows")
    return "\n".join([*lines, "", f"Planned / published: {', '.join(words)}.", ""])


def rewritten(page: str) -> str:
    """The page with the table as it is now."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":  # python -m tests.instruments.plan.published
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
