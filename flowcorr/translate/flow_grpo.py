"""The table for flow_grpo's configuration, a `ConfigDict` of a Python file; defaults are of `scripts/train_sd3.py`."""

from __future__ import annotations

import re
from typing import Any

from flowcorr.models import FAMILIES
from flowcorr.translate.rewards import reward_terms
from flowcorr.translate.table import Get, Row, Table

DEFAULTS: dict[str, Any] = {
    "pretrained.model": "runwayml/stable-diffusion-v1-5",
    "seed": 42,
    "resolution": 768,
    "mixed_precision": "fp16",
    "use_lora": True,
    "dataset": "",
    "reward_fn": {},
    "save_freq": 20,
    "eval_freq": 20,
    "num_checkpoint_limit": 5,
    "per_prompt_stat_tracking": True,
    "gpus": None,
    "sample.num_steps": 40,
    "sample.eval_num_steps": 40,
    "sample.guidance_scale": 4.5,
    "sample.train_batch_size": 1,
    "sample.num_image_per_prompt": 1,
    "sample.num_batches_per_epoch": 2,
    "sample.global_std": True,
    "sample.noise_level": 0.7,
    "sample.sde_window_size": 0,
    "sample.sde_window_range": None,
    "sample.sde_type": "sde",
    "sample.same_latent": False,
    "train.algorithm": "grpo",
    "train.batch_size": 1,
    "train.learning_rate": 3e-4,
    "train.use_8bit_adam": False,
    "train.adam_beta1": 0.9,
    "train.adam_beta2": 0.999,
    "train.adam_weight_decay": 1e-4,
    "train.adam_epsilon": 1e-8,
    "train.gradient_accumulation_steps": 1,
    "train.max_grad_norm": 1.0,
    "train.num_inner_epochs": 1,
    "train.adv_clip_max": 5.0,
    "train.clip_range": 1e-4,
    "train.timestep_fraction": 1.0,
    "train.beta": 0.0,
    "train.lora_path": None,
    "train.ema": False,
}


def _prompts(get: Get) -> float:
    images = get("gpus") * get("sample.train_batch_size") * get("sample.num_batches_per_epoch")
    return images / get("sample.num_image_per_prompt")


def _window(get: Get) -> tuple[int, list[int]]:
    """Size and range of the SDE window; without a window, all steps that are trained on."""
    size = get("sample.sde_window_size")
    if size:
        return size, list(get("sample.sde_window_range") or (0, get("sample.num_steps") // 2))
    trained = int(get("sample.num_steps") * get("train.timestep_fraction"))
    return trained, [0, trained]


def _noise_range(get: Get) -> list[int] | None:
    """Without a window every step has noise, trained on or not; the last one of cps has none."""
    end = get("sample.num_steps") - (get("sample.sde_type") == "cps")
    return None if get("sample.sde_window_size") or end <= _window(get)[0] else [0, end]


def _advantage_std(get: Get) -> str:
    return "global" if get("sample.global_std") or not get("per_prompt_stat_tracking") else "group"


def _dtype(get: Get) -> str:
    return {"fp16": "float16", "bf16": "bfloat16"}.get(get("mixed_precision"), "float32")


def _refuse(get: Get) -> str:
    model = get("pretrained.model")
    if not re.search(r"stable-diffusion-3|sd3|flux|z-image|qwen-?image(?!.*edit)", model.lower()):
        return f"pretrained.model={model} belongs to no family that flowcorr knows: {', '.join(FAMILIES)}"
    if get("train.algorithm") != "grpo":
        return f"train.algorithm={get('train.algorithm')} has no equivalent here; flowcorr has only policy gradients"
    if get("sample.num_image_per_prompt") < 2:
        return "sample.num_image_per_prompt=1 gives an image no other to be compared with; use 2 or more"
    if get("gpus") is None:
        return "the file does not contain the number of GPUs, which decides the prompts per step; give it with --gpus N"
    for key in ("gpus", "train.gradient_accumulation_steps"):
        if get(key) < 1:
            return f"{key}={get(key)} must be at least 1"
    if _prompts(get) < 1:
        return f"{get('gpus')} GPUs sample less than one prompt per step; give the right number with --gpus N"
    return ""


def _same(source: str, key: str, note: str = "") -> Row:
    return Row(key=key, value=lambda get: get(source), sources=(source,), note=note)


def _number(source: str, key: str, note: str = "") -> Row:
    return Row(key=key, value=lambda get: float(get(source)), sources=(source,), note=note)


ROWS = (
    _same("pretrained.model", "model.path"),
    Row(key="model.dtype", value=_dtype, sources=("mixed_precision",)),
    Row(key="model.max_sequence_length", value=lambda get: 128),
    Row(key="model.lora.rank", value=lambda get: 32 if get("use_lora") else 0, sources=("use_lora",)),
    Row(key="model.lora.alpha", value=lambda get: 64.0 if get("use_lora") else None),
    _same("train.lora_path", "model.lora.warm_start"),
    _same("sample.sde_type", "sampling.sde_type"),
    _number("sample.noise_level", "sampling.noise_level"),
    _same("sample.num_steps", "sampling.num_inference_steps"),
    Row(
        key="sampling.sde_window_size",
        value=lambda get: _window(get)[0],
        sources=("sample.sde_window_size", "train.timestep_fraction"),
        note="flow_grpo adds noise in every step, and trains on the first timestep_fraction of the steps",
    ),
    Row(
        key="sampling.sde_noise_range",
        value=_noise_range,
        sources=("train.timestep_fraction",),
    ),
    Row(
        key="sampling.sde_window_range",
        value=lambda get: _window(get)[1],
        sources=("sample.sde_window_range",),
    ),
    _number(
        "sample.guidance_scale", "sampling.guidance_scale", "Qwen-Image reads sampling.true_cfg_scale instead"
    ),
    _same("resolution", "sampling.height"),
    _same("resolution", "sampling.width"),
    Row(key="rollout.dtype", value=_dtype, sources=("mixed_precision",)),
    Row(
        key="rollout.prompts_per_step",
        value=lambda get: round(_prompts(get)),
        sources=("gpus", "sample.train_batch_size", "sample.num_batches_per_epoch"),
        note="GPUs * batch * batches / images per prompt",
    ),
    _same("sample.num_image_per_prompt", "rollout.n"),
    Row(
        key="rollout.batch_size",
        value=lambda get: get("sample.train_batch_size"),
        sources=("sample.train_batch_size",),
    ),
    _same("sample.same_latent", "rollout.same_initial_noise"),
    _number("train.clip_range", "actor.clip_ratio"),
    _number("train.adv_clip_max", "actor.adv_clip_max"),
    _number("train.beta", "actor.kl_coef"),
    Row(key="actor.kl_weighting", value=lambda get: "flow_grpo" if get("train.beta") else None),
    Row(
        key="actor.optimizer",
        value=lambda get: "adamw_8bit" if get("train.use_8bit_adam") else "adamw",
        sources=("train.use_8bit_adam",),
        note="AdamW of bitsandbytes in both",
    ),
    _number("train.learning_rate", "actor.lr"),
    Row(
        key="actor.betas",
        value=lambda get: [get("train.adam_beta1"), get("train.adam_beta2")],
        sources=("train.adam_beta1", "train.adam_beta2"),
    ),
    _number("train.adam_weight_decay", "actor.weight_decay"),
    _number("train.adam_epsilon", "actor.eps"),
    _number("train.max_grad_norm", "actor.grad_clip"),
    _same("train.num_inner_epochs", "actor.epochs"),
    Row(
        key="actor.mini_batches",
        value=lambda get: min(
            max(1, get("sample.num_batches_per_epoch") // get("train.gradient_accumulation_steps")),
            round(_prompts(get)),
        ),
        sources=("train.gradient_accumulation_steps",),
        note="updates per step; groups are never split here",
    ),
    _same("train.batch_size", "actor.micro_batch_size"),
    Row(key="actor.ema", value=lambda get: 0.9 if get("train.ema") else None, sources=("train.ema",)),
    Row(
        key="algorithm.advantage_std",
        value=_advantage_std,
        sources=("sample.global_std", "per_prompt_stat_tracking"),
    ),
    Row(
        key="algorithm.rollout_correction.bypass_mode",
        value=lambda get: True,
        note="old log-probs are the rollout's",
    ),
    Row(
        key="reward.terms",
        value=lambda get: reward_terms(get("reward_fn")),
        sources=("reward_fn",),
        note="write my_rewards:NAME yourself (examples/custom_reward.py)",
    ),
    Row(
        key="data.path",
        value=lambda get: f"{get('dataset')}/train.txt",
        sources=("dataset",),
        note="or train_metadata.jsonl, if its prompts are in that file",
    ),
    Row(key="data.heldout_path", value=lambda get: f"{get('dataset')}/test.txt", sources=("dataset",)),
    Row(
        key="trainer.total_steps",
        value=lambda get: 100_000,
        note="it trains until it is stopped; a lower number ends the run",
    ),
    _same("seed", "trainer.seed"),
    _same("eval_freq", "trainer.eval_every", "epochs"),
    _same("sample.eval_num_steps", "trainer.eval_num_inference_steps"),
    _same("save_freq", "trainer.save_every", "epochs"),
    _same("num_checkpoint_limit", "trainer.keep_checkpoints"),
)

NO_PLACE = {
    "train.cfg": "training uses the guidance of sampling",
    "train.*": "belongs to algorithms or options that flowcorr does not have",
    "sample.*": "rollout.batch_size sets the size of batches",
    "prompt_fn*": "prompts come from the file data.path",
    "save_dir": "give --out",
    "logdir": "give --out",
    "run_name": "give --out",
    "num_epochs": "flow_grpo trains until it is stopped; see trainer.total_steps",
    "pretrained.revision": "flowcorr loads the newest revision",
    "allow_tf32": "set it in torch",
    "*": "belongs to its script",
}

DIFFERENCES = (
    "flow_grpo's advantages use the population std, which is sqrt((n - 1) / n) of the std here",
    "flow_grpo leaves samples with advantage 0 out of the mean of the loss; here they count",
    "flow_grpo's GRPO-Guard averages std and step over the batch; here each sample has its own",
)

KINDS: dict[str, type] = {"gpus": int, "sample.sde_window_range": list, "train.lora_path": str}

TABLE = Table(
    name="flow_grpo",
    defaults=DEFAULTS,
    kinds=KINDS,
    rows=ROWS,
    no_place=NO_PLACE,
    differences=DIFFERENCES,
    refuse=_refuse,
)
