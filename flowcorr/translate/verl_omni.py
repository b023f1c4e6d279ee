"""The table for verl-omni's configuration, by its Hydra keys."""

from __future__ import annotations

from typing import Any

from flowcorr.translate import rewards
from flowcorr.translate.table import Get, Row, Table, same
from flowcorr.translate.verl_omni_checks import LOSSES, refuse
from flowcorr.translate.verl_omni_defaults import (
    ACTOR,
    ALGO,
    CORRECTION,
    DEFAULTS,
    ENGINE,
    JUDGE,
    KINDS,
    LOSS,
    MODEL,
    PIPELINE,
    REWARD,
    REWARDS,
    ROLLOUT,
    VALIDATION,
)
from flowcorr.translate.verl_omni_values import (
    adapted,
    adapter_dtype,
    advantage_std,
    computes_in_autocast,
    corrects,
    dtype,
    engine,
    family,
    grad_clip,
    guidance,
    is_mix,
    is_veomni,
    loss,
    pair,
    reward_functions,
    rewards_note,
    targets,
    text_file,
    trackers,
    trackers_note,
    updates,
    warmup,
    weights_dtype,
    window_range,
    window_size,
)

_ALL_PROMPTS = 100_000
_NO_CLAMP = 1e6


def _correction(key: str, *, belongs_to: str = "") -> Row:
    source = f"{CORRECTION}.{key}"

    def value(get: Get) -> Any:
        in_use = not belongs_to or get(f"{CORRECTION}.{belongs_to}") is not None
        return get(source) if in_use and corrects(get) else None

    return Row(key=source, value=value, sources=(source,), always=key == "bypass_mode")


def _guidance(key: str) -> Row:
    return Row(
        key=f"sampling.{key}",
        value=lambda get: guidance(get) if family(get).guidance_key == key else None,
        sources=(f"{PIPELINE}.{key}",),
    )


ROWS = (
    same(f"{MODEL}.path", "model.path"),
    Row(
        key="model.dtype",
        value=weights_dtype,
        sources=(
            *(f"{ACTOR}.fsdp_config.model_dtype", f"{ACTOR}.veomni_config.model_dtype"),
            *(f"{ACTOR}.strategy", ENGINE),
        ),
        note=lambda get: "of veomni_config" if is_veomni(get) else "",
    ),
    same(f"{PIPELINE}.max_sequence_length", "model.max_sequence_length"),
    same(f"{MODEL}.lora_rank", "model.lora.rank", "0 trains all weights"),
    Row(
        key="model.lora.alpha",
        value=lambda get: float(get(f"{MODEL}.lora_alpha")) if adapted(get) else None,
        sources=(f"{MODEL}.lora_alpha",),
    ),
    Row(
        key="model.lora.targets",
        value=targets,
        sources=(f"{MODEL}.target_modules", f"{MODEL}.target_parameters", f"{MODEL}.exclude_modules"),
        note=lambda get: "every linear layer" if get(f"{MODEL}.target_modules") == "all-linear" else "",
    ),
    Row(
        key="model.lora.dtype",
        value=adapter_dtype,
        sources=(f"{MODEL}.lora_dtype",),
        note="that of the weights unless it is set",
    ),
    Row(
        key="model.lora.init",
        value=lambda get: (
            ("gaussian" if get(f"{MODEL}.lora_init_weights") == "gaussian" else "kaiming")
            if adapted(get)
            else None
        ),
        sources=(f"{MODEL}.lora_init_weights",),
    ),
    same(f"{MODEL}.lora_adapter_path", "model.lora.warm_start"),
    same(f"{ALGO}.sde_type", "sampling.sde_type"),
    same(f"{ALGO}.noise_level", "sampling.noise_level"),
    same(f"{PIPELINE}.num_inference_steps", "sampling.num_inference_steps"),
    Row(key="sampling.sde_window_size", value=window_size, sources=(f"{ALGO}.sde_window_size",)),
    Row(key="sampling.sde_window_range", value=window_range, sources=(f"{ALGO}.sde_window_range",)),
    Row(
        key="sampling.window_per",
        value=lambda get: "group" if is_mix(get) else "sample",
        sources=(f"{MODEL}.algorithm",),
        note=lambda get: (
            "mix_grpo draws one window for all samples of an iteration; one for each prompt is the closest"
            if is_mix(get)
            else ""
        ),
    ),
    _guidance("guidance_scale"),
    _guidance("true_cfg_scale"),
    Row(
        key="sampling.negative_prompt",
        value=lambda get: " " if family(get).name == "qwen_image" and guidance(get) > 1 else None,
        note="verl-omni reads it from its data, where its examples of Qwen-Image write this",
    ),
    same(f"{PIPELINE}.height", "sampling.height"),
    same(f"{PIPELINE}.width", "sampling.width"),
    Row(
        key="sampling.cps_unscaled",
        value=lambda get: True if get(f"{ALGO}.sde_type") == "cps" else None,
        note="verl-omni's cps log-probs lack 1 / (2 s^2)",
    ),
    same(f"{ROLLOUT}.name", "rollout.name"),
    Row(
        key="rollout.engine",
        value=engine,
        sources=tuple(
            f"{ROLLOUT}.{key}"
            for key in ("tensor_model_parallel_size", "gpu_memory_utilization", "quantization")
        ),
    ),
    Row(
        key="rollout.dtype",
        value=lambda get: dtype(get, f"{ROLLOUT}.dtype"),
        sources=(f"{ROLLOUT}.dtype",),
    ),
    same("data.train_batch_size", "rollout.prompts_per_step", "prompts"),
    same(f"{ROLLOUT}.n", "rollout.n"),
    Row(key="rollout.same_initial_noise", value=lambda get: False),
    Row(
        key="actor.loss_mode",
        value=lambda get: LOSSES[loss(get)],
        sources=(f"{LOSS}.loss_mode", f"{MODEL}.algorithm"),
    ),
    Row(
        key="actor.clip_ratio",
        value=lambda get: None if loss(get) == "flow_dppo" else get(f"{LOSS}.clip_ratio"),
        sources=(f"{LOSS}.clip_ratio",),
    ),
    Row(
        key="actor.kl_threshold",
        value=lambda get: get(f"{LOSS}.kl_mask_threshold") if loss(get) == "flow_dppo" else None,
        sources=(f"{LOSS}.kl_mask_threshold", f"{LOSS}.add_kl_coefficient"),
    ),
    Row(
        key="actor.adv_clip_max",
        value=lambda get: _NO_CLAMP if loss(get) == "flow_dppo" else get(f"{LOSS}.adv_clip_max"),
        sources=(f"{LOSS}.adv_clip_max",),
        note=lambda get: "its flow_dppo clamps no advantages" if loss(get) == "flow_dppo" else "",
    ),
    Row(
        key="actor.kl_coef",
        value=lambda get: get(f"{ACTOR}.kl_loss_coef") if get(f"{ACTOR}.use_kl_loss") else 0.0,
        sources=(f"{ACTOR}.kl_loss_coef", f"{ACTOR}.use_kl_loss"),
        note="only used with use_kl_loss",
    ),
    Row(
        key="actor.kl_weighting",
        value=lambda get: (
            "flow_grpo"
            if get(f"{ACTOR}.use_kl_loss")
            and get(f"{ACTOR}.kl_loss_coef")
            and get(f"{ALGO}.sde_type") == "sde"
            else None
        ),
        note="its KL of sde steps is divided by the length of a step, that of cps and dance_sde is exact",
    ),
    Row(
        key="actor.optimizer",
        value=lambda get: "adamw_8bit" if get(f"{ACTOR}.optim.optimizer") == "AdamW8bit" else "adamw",
        sources=(f"{ACTOR}.optim.optimizer", f"{ACTOR}.optim.optimizer_impl"),
        note="AdamW of torch, in 8 bits of bitsandbytes",
    ),
    same(f"{ACTOR}.optim.lr", "actor.lr"),
    Row(
        key="actor.betas",
        value=lambda get: pair(f"{ACTOR}.optim.betas", get(f"{ACTOR}.optim.betas")),
        sources=(f"{ACTOR}.optim.betas",),
    ),
    same(f"{ACTOR}.optim.eps", "actor.eps"),
    same(f"{ACTOR}.optim.weight_decay", "actor.weight_decay"),
    Row(
        key="actor.warmup_steps",
        value=warmup,
        sources=(f"{ACTOR}.optim.lr_warmup_steps", f"{ACTOR}.optim.lr_warmup_steps_ratio"),
        note="its training steps times the updates of one",
    ),
    same(f"{ACTOR}.optim.lr_scheduler_type", "actor.lr_schedule", "by training steps there, by updates here"),
    Row(
        key="actor.lr_min_ratio",
        value=lambda get: (
            None
            if get(f"{ACTOR}.optim.lr_scheduler_type") == "constant"
            else float(get(f"{ACTOR}.optim.min_lr_ratio") or 0)
        ),
        sources=(f"{ACTOR}.optim.min_lr_ratio",),
    ),
    Row(
        key="actor.grad_clip",
        value=grad_clip,
        sources=(f"{ACTOR}.optim.clip_grad", f"{ACTOR}.optim.grad_clip"),
    ),
    same(f"{ACTOR}.ppo_epochs", "actor.epochs"),
    Row(
        key="actor.mini_batches",
        value=updates,
        sources=(f"{ACTOR}.ppo_mini_batch_size",),
        note="updates per step: train_batch_size / ppo_mini_batch_size",
    ),
    same(f"{ACTOR}.ppo_micro_batch_size_per_gpu", "actor.micro_batch_size"),
    Row(
        key="actor.autocast",
        value=computes_in_autocast,
        sources=(f"{ACTOR}.fsdp_config.dtype",),
        note="FSDP's mixed precision",
    ),
    same(f"{MODEL}.enable_gradient_checkpointing", "actor.gradient_checkpointing"),
    Row(
        key="algorithm.advantage_std",
        value=advantage_std,
        sources=("algorithm.global_std", "algorithm.norm_adv_by_std_in_grpo"),
    ),
    Row(
        key=f"{CORRECTION}.preset",
        value=lambda get: None if corrects(get) else "disabled",
        sources=(f"{ROLLOUT}.calculate_log_probs",),
        note="it corrects nothing; this measures the gap",
    ),
    _correction("bypass_mode"),
    _correction("loss_type"),
    _correction("rollout_is"),
    _correction("rollout_is_threshold", belongs_to="rollout_is"),
    _correction("rollout_is_batch_normalize", belongs_to="rollout_is"),
    _correction("rollout_rs"),
    _correction("rollout_rs_threshold", belongs_to="rollout_rs"),
    Row(
        key=f"{CORRECTION}.rollout_rs_denominator",
        value=lambda get: "all" if corrects(get) and get(f"{CORRECTION}.rollout_rs") else None,
        note="verl-omni's losses divide by all terms",
    ),
    Row(
        key="reward.terms",
        value=lambda get: rewards.terms(reward_functions(get)),
        sources=(
            *(f"{REWARD}.path", f"{REWARD}.name", f"{REWARD}.reward_kwargs", REWARDS, JUDGE),
            *("reward.reward_manager.name", "reward.aggregation", f"{PIPELINE}.output_type"),
        ),
        note=rewards_note,
    ),
    Row(
        key="data.path",
        value=lambda get: text_file(get, "data.train_files"),
        sources=("data.train_files",),
        note="the prompts as text, such as the train.txt from which the parquet file was made",
    ),
    Row(
        key="data.heldout_path",
        value=lambda get: text_file(get, "data.val_files"),
        sources=("data.val_files",),
    ),
    Row(
        key="data.num_heldout",
        value=lambda get: get("data.val_max_samples") if get("data.val_max_samples") > 0 else _ALL_PROMPTS,
        sources=("data.val_max_samples",),
        note=lambda get: "" if get("data.val_max_samples") > 0 else "all of them",
    ),
    Row(
        key="trainer.total_steps",
        value=lambda get: get("trainer.total_training_steps"),
        sources=("trainer.total_training_steps", "trainer.total_epochs"),
        note="total_epochs would end it before, if the prompts are few",
    ),
    same("data.seed", "trainer.seed"),
    Row(
        key="trainer.eval_every",
        value=lambda get: max(0, get("trainer.test_freq")),
        sources=("trainer.test_freq",),
        note=lambda get: "" if get("trainer.test_freq") > 0 else "never there; at the start and the end here",
    ),
    same(f"{VALIDATION}.pipeline.num_inference_steps", "trainer.eval_num_inference_steps"),
    same(f"{VALIDATION}.pipeline.height", "trainer.eval_height"),
    same(f"{VALIDATION}.pipeline.width", "trainer.eval_width"),
    Row(
        key="trainer.save_every",
        value=lambda get: (
            get("trainer.save_freq") if get("trainer.save_freq") > 0 else get("trainer.total_training_steps")
        ),
        sources=("trainer.save_freq",),
        note=lambda get: "" if get("trainer.save_freq") > 0 else "never there; the last step here",
    ),
    same("trainer.max_actor_ckpt_to_keep", "trainer.keep_checkpoints"),
    Row(
        key="trainer.trackers",
        value=trackers,
        sources=("trainer.logger",),
        note=trackers_note,
    ),
)


NO_PLACE = {
    f"{ALGO}.sde_contiguous": "its pipelines of SD3 and Qwen-Image sample consecutive windows whatever it says",
    f"{ALGO}.s*": "windows are drawn from trainer.seed",
    f"{ALGO}.iters_per_group": "windows are drawn from trainer.seed",
    f"{VALIDATION}.*": "evaluations are deterministic: one image per prompt, with the recipe's guidance",
    f"{ACTOR}.optim.*": "the optimizer is AdamW",
    f"{ACTOR}.fsdp_config.*": "sharding does not change the numbers; see actor.fsdp",
    f"{ACTOR}.veomni_config.*": "sharding does not change the numbers; see actor.fsdp",
    f"{ACTOR}.rollout_correction.*": "read from algorithm.rollout_correction",
    f"{ACTOR}.*loss*": "belongs to losses that are not used, or that flowcorr does not have",
    f"{ACTOR}.*": "belongs to its workers: strategy, offloading, profiling, order of batches",
    "actor_rollout_ref.ref.*": "the reference is the model without its adapter",
    f"{PIPELINE}.*": "belongs to videos, or to its pipeline",
    f"{ROLLOUT}.engine_kwargs.*": "options of its engine; set them in rollout.engine",
    f"{ROLLOUT}.rollout_attn_backend": "the engine's own choice; see diffusion_attention_config in rollout.engine",
    f"{ROLLOUT}.*": "belongs to its engine and workers; see rollout.engine, placement and num_workers",
    f"{MODEL}.attn_backend": "diffusers' own choice; see model.attention",
    f"{MODEL}.*": "read from the pipeline itself, or belongs to its workers",
    "actor_rollout_ref.*": "belongs to its workers",
    "algorithm.*": "belongs to algorithms that flowcorr does not have",
    "reward.*": "see reward.placement; a judge is served apart",
    "data.train_max_samples": "shorten the file of prompts",
    "data.shuffle": "prompts are shuffled anew in every pass",
    "data.*": "prompts come from a file; text encoders read model.max_sequence_length tokens",
    "trainer.v1.*": "to sample ahead of training: rollout.placement=ray with rollout.max_staleness",
    "trainer.use_v1": "to sample ahead of training: rollout.placement=ray with rollout.max_staleness",
    "trainer.*": "belongs to its trainer: names, folders (--out), devices, validation",
    "critic.*": "there is no critic",
    "distillation.*": "flowcorr does not distil",
    "ray_kwargs.*": "see rollout.ray_address",
    "global_profiler.*": "belongs to its profiler",
    "transfer_queue.*": "belongs to its workers",
    "skip.*": "belongs to its workers",
    "hydra.*": "belongs to Hydra",
    "diffusion.*": "belongs to Hydra",
    "model_engine": "belongs to Hydra",
}

DIFFERENCES = (
    "verl applies an asymmetric k1 band to the reciprocal ratio; here the band is of exp(delta)",
    "verl-omni's grpo_guard uses the mean std of a step over the batch; here each sample has its own",
    "verl-omni keeps all checkpoints unless max_actor_ckpt_to_keep is set; here trainer.keep_checkpoints",
)

TABLE = Table(
    name="verl-omni",
    defaults=DEFAULTS,
    kinds=KINDS,
    required=(),
    sections=(REWARDS, f"{REWARD}.reward_kwargs", f"{ACTOR}.optim.override_optimizer_config"),
    rows=ROWS,
    no_place=NO_PLACE,
    differences=DIFFERENCES,
    refuse=refuse,
)
