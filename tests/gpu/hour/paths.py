"""A training step by each way through the code that depends on the device, with its host reads; and resuming."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil

from flowcorr import config as configs
from flowcorr.trainer import train
from flowcorr.trainer.setup import build_run
from flowcorr.trainer.step import train_step
from tests.gpu.hour import meter
from tests.gpu.hour.parts import Hour

SMALL = (
    *("reward.terms=[{name: jpeg_compressibility}]", "rollout.prompts_per_step=4", "rollout.n=4"),
    *("data.num_train=16", "data.num_heldout=4", "trainer.total_steps=2", "trainer.eval_every=0"),
)
CORRECTION = "algorithm.rollout_correction"
PATHS: dict[str, tuple[str, ...]] = {
    "as the recipe": (),
    "correction off": (f"{CORRECTION}=null",),
    "weights of sequences": (f"{CORRECTION}.preset=decoupled_seq_is",),
    "rejection, batch statistics": (
        f"{CORRECTION}.preset=null",
        f"{CORRECTION}.rollout_rs='step_z,seq_mean_k3'",
        f"{CORRECTION}.rollout_rs_threshold=[6.0, auto]",
        f"{CORRECTION}.rollout_is=token",
        f"{CORRECTION}.rollout_is_batch_normalize=true",
        "rollout.emulate=fp8",
    ),
    "bypass": (f"{CORRECTION}.preset=bypass_ppo_clip",),
    "bypass, reinforce": (f"{CORRECTION}.preset=bypass_pg_geo_rs",),
    "auto": (f"{CORRECTION}.bypass_mode=auto",),
    "grpo_guard": ("actor.loss_mode=grpo_guard",),
    "flow_dppo": ("actor.loss_mode=flow_dppo",),
    "importance_cap, bypass": ("actor.loss_mode=importance_cap", f"{CORRECTION}.preset=bypass_ppo_clip"),
    "cps": ("sampling.sde_type=cps",),
    "dance_sde": ("sampling.sde_type=dance_sde",),
    "guidance": ("sampling.guidance_scale=3.0",),
    "not folded": ("actor.fold_steps=false",),
    "clip by step": ("actor.clip_ratio=[1e-3, 1e-3, 2e-3, 4e-3]",),
    "ratios of trajectories": ("actor.ratio_level=trajectory_mean",),
    "autocast": ("actor.autocast=true",),
    "bfloat16": ("model.dtype=bfloat16", "rollout.dtype=bfloat16"),
    "rollout in bfloat16": ("rollout.dtype=bfloat16",),
    "base in int8": ("model.quantization=int8",),
    "emulated fp8": ("rollout.emulate=fp8",),
    "emulated int4": ("rollout.emulate=int4",),
    "stale": ("rollout.staleness=1",),
    "checkpointing": ("actor.gradient_checkpointing=true",),
    "reference KL": ("actor.kl_coef=0.01",),
    "average": ("actor.ema=0.9",),
    "all weights": ("model.lora.rank=0", "actor.lr=1e-5"),
    "all weights, reference KL": ("model.lora.rank=0", "actor.lr=1e-5", "actor.kl_coef=0.01"),
    "epochs, micro-batches": ("actor.epochs=2", "actor.micro_batch_size=3"),
    "dumped log-probs": ("trainer.dump_log_probs=true",),
}
WITH_BITSANDBYTES = {
    "8-bit moments": ("model.lora.rank=0", "actor.lr=1e-5", "actor.optimizer=adamw_8bit"),
    "base in nf4": ("model.quantization=nf4",),
    "base in nf4, stale": ("model.quantization=nf4", "rollout.staleness=1"),
}
WORKERS = {
    "Ray workers": ("rollout.placement=ray", "reward.placement=ray"),
    "Ray workers on a GPU": ("rollout.placement=ray", "rollout.worker_resources={num_gpus: 0.5}"),
}


def measure(hour: Hour) -> None:
    device = f"trainer.device={hour.device}"
    for name, overrides in PATHS.items():
        with hour.reported(name):
            _step(hour, name, [*SMALL, *overrides, device])
    with hour.reported("resumed"):
        _resumed(hour, "resumed", [*SMALL, device])
    for name, overrides in WITH_BITSANDBYTES.items():
        if importlib.util.find_spec("bitsandbytes") is None:
            hour.row(name, "skipped", note="bitsandbytes is not installed")
            continue
        with hour.reported(name):
            _step(hour, name, [*SMALL, *overrides, device])
            _resumed(hour, f"{name}, resumed", [*SMALL, *overrides, device])
    if importlib.util.find_spec("ray") is None:
        hour.row("Ray workers", "skipped", note="ray is not installed")
        return
    for name, overrides in WORKERS.items():
        if hour.device.type == "cuda" or "num_gpus" not in str(overrides):
            with hour.reported(name):
                config = configs.load("tiny_jpeg_lora", [*SMALL, *overrides, device])
                result = train(config, _empty(hour, name))
                hour.row(name, result.step, unit="steps", expected=2, within=0.0)


def _step(hour: Hour, name: str, overrides: list[str]) -> None:
    run, _ = build_run(configs.load("tiny_jpeg_lora", overrides))
    with contextlib.closing(run):
        run.engine.sync(run.actor.weights.snapshot())
        train_step(run, 1, lambda _: None)
        found = []
        reads = meter.host_reads(hour.device, lambda: found.append(train_step(run, 2, lambda _: None)))
        metrics = found[0].metrics.compute()
    updates = metrics["actor/updates"]
    gap = metrics.get("rollout_corr/logprob_abs_diff_mean")
    notes = [] if gap is None else [f"mean |delta| {gap:.2g}"]
    notes += [] if reads is None else [f"{sum(reads.values())} host reads"]
    hour.row(
        name,
        updates,
        unit="updates",
        expected=2.0 * run.config.actor.epochs,
        within=0.0,
        note=", ".join(notes),
    )
    if name == "as the recipe" and reads is not None:
        for place, count in reads.most_common():
            hour.row(f"host reads at {place}", count)


def _resumed(hour: Hour, name: str, overrides: list[str]) -> None:
    """Two steps, and one step that is resumed for a second: the weights that come out."""
    whole = train(configs.load("tiny_jpeg_lora", overrides), _empty(hour, "whole"))
    folder = _empty(hour, "halves")
    train(configs.load("tiny_jpeg_lora", [*overrides, "trainer.total_steps=1"]), folder)
    halves = train(configs.load("tiny_jpeg_lora", overrides), folder, resume=True)
    assert whole.step == halves.step == 2
    rows = [metrics_of(hour.folder / run)[-1] for run in ("whole", "halves")]
    for key in ("reward/mean", "actor/grad_norm"):
        hour.row(f"{name}: {key}", rows[1][key], expected=rows[0][key], within=1e-4)


def metrics_of(folder) -> list[dict[str, float]]:
    """The metrics of each training step of a run."""
    from flowcorr.trackers import read_metrics

    return [row for row in read_metrics(folder / "metrics.jsonl") if "actor/updates" in row]


def _empty(hour: Hour, name: str):
    folder = hour.folder / name
    shutil.rmtree(folder, ignore_errors=True)
    return folder
