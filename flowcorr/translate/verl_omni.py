"""The table for verl-omni's configuration, as Hydra resolves it."""

from __future__ import annotations

from typing import Any

from flowcorr.config.families import GUIDANCE_KEYS, find_family
from flowcorr.translate import rewards
from flowcorr.translate import verl_omni_values as there
from flowcorr.translate.table import ALL_PROMPTS, TRACKERS, Given, Row, Table, dtype_of, under
from flowcorr.translate.verl_omni_left import APART, LEFT
from flowcorr.translate.verl_omni_values import (
    ACTOR,
    ALGO,
    CORRECTION,
    FUNCTION,
    FUNCTIONS,
    JUDGE,
    LOSS,
    LOSSES,
    MODEL,
    OPTIM,
    PIPELINE,
    ROLLOUT,
    VALIDATION,
)

_NO_CLAMP = 1e6
_ABSENT: dict[str, Any] = {
    "model_engine": "dp_diffusion",
    "distillation.enabled": False,
    "trainer.use_v1": False,
    "trainer.max_actor_ckpt_to_keep": None,
    "reward.reward_manager.name": "VisualRewardManager",
    "reward.aggregation": "weighted_sum",
    FUNCTIONS: {},
    f"{FUNCTION}.reward_kwargs": {},
    f"{MODEL}.target_parameters": None,
    f"{MODEL}.exclude_modules": None,
    f"{MODEL}.lora_dtype": None,
    f"{MODEL}.lora_adapter_path": None,
    f"{PIPELINE}.num_frames": 1,
    f"{PIPELINE}.output_type": None,
    f"{ALGO}.sample_strategy": "random",
    f"{ROLLOUT}.quantization": None,
    f"{ACTOR}.use_distill_loss": False,
    f"{OPTIM}.eps": 1e-8,
    f"{OPTIM}.grad_clip": None,
    f"{OPTIM}.lr_warmup_steps": -1,
    f"{OPTIM}.min_lr_ratio": 0.0,
    f"{OPTIM}.num_cycles": 0.5,
    f"{OPTIM}.override_optimizer_config": None,
}
"""Keys that not every version or engine of verl-omni has, with the values that count without them."""
_ONLY: dict[str, tuple[Any, ...]] = {
    f"{MODEL}.model_type": ("diffusion_model",),
    f"{MODEL}.algorithm": tuple(LOSSES),
    f"{LOSS}.loss_mode": (None, *LOSSES),
    "algorithm.adv_estimator": (None, *LOSSES),
    "algorithm.trainer_type": ("policy_gradient",),
    "algorithm.sample_source": ("online",),
    "distillation.enabled": (False,),
    f"{ACTOR}.use_distill_loss": (False,),
    f"{ALGO}.sample_strategy": ("random",),
    f"{OPTIM}.optimizer": ("AdamW", "AdamW8bit", "adamw"),
    f"{OPTIM}.override_optimizer_config": (None, {}),
    f"{OPTIM}.num_cycles": (0.5,),
    "reward.aggregation": ("weighted_sum",),
    "reward.reward_manager.name": ("VisualRewardManager", "MultiVisualRewardManager"),
    "model_engine": ("dp_diffusion", "veomni_diffusion"),
}
_CORRECTIONS = {
    "bypass_mode": "",
    "loss_type": "",
    "rollout_is": "",
    "rollout_is_threshold": "rollout_is",
    "rollout_is_batch_normalize": "rollout_is",
    "rollout_rs": "",
    "rollout_rs_threshold": "rollout_rs",
}
"""Keys of rollout correction, which have the same names here, with those that turn them on."""


def _correction(get: Given) -> dict[str, str | Row]:
    """The keys of rollout correction that are in use, if verl-omni measures the gap itself."""
    rows: dict[str, str | Row] = {}
    for name, switch in _CORRECTIONS.items():
        key = f"{CORRECTION}.{name}"
        in_use = not switch or get(f"{CORRECTION}.{switch}") is not None
        rows[key] = Row(key, get(key) if in_use and there.corrects(get) else None)
    return rows


def _rows(get: Given) -> dict[str, str | Row]:
    family, algorithm, loss = there.family(get), get(f"{MODEL}.algorithm"), there.loss_of(get)
    adapted, corrects = there.adapted(get), there.corrects(get)
    weights_dtype, lora_dtype = there.weights_dtype(get), get(f"{MODEL}.lora_dtype") if adapted else None
    sde_type, kl_coef = get(f"{ALGO}.sde_type"), there.kl_coef(get)
    guidance_key = find_family(family).guidance_key
    guidance = get(f"{PIPELINE}.{guidance_key}", float | None) or 1.0
    updates = get("data.train_batch_size", int) // get(f"{ACTOR}.ppo_mini_batch_size", int)
    clip_grad = get(f"{OPTIM}.grad_clip")
    functions, scored = there.reward_functions(get), get(f"{PIPELINE}.output_type")
    of_latents = f"; {PIPELINE}.output_type={scored} scores latents there, images here"
    trackers = get("trainer.logger", list)
    lacking = [str(name) for name in trackers if name not in (*TRACKERS, "console")]
    if get("algorithm.norm_adv_by_std_in_grpo", bool):
        advantage_std = "global" if get("algorithm.global_std", bool) else "group"
    else:
        advantage_std = "none"

    def evaluated(side: str) -> Row:
        key, sampled = f"{VALIDATION}.{side}", get(f"{PIPELINE}.{side}")
        return Row(key, None if get(key) == sampled else get(key), "null is the size of sampling")

    return {
        "model.path": f"{MODEL}.path",
        "model.dtype": Row(
            (
                *(f"{ACTOR}.{key}_config.model_dtype" for key in ("fsdp", "veomni")),
                *(f"{ACTOR}.strategy", "model_engine"),
            ),
            weights_dtype,
            "of veomni_config with VeOmni",
        ),
        "model.max_sequence_length": f"{PIPELINE}.max_sequence_length",
        "model.lora.rank": Row(f"{MODEL}.lora_rank", get(f"{MODEL}.lora_rank"), "0 trains all weights"),
        "model.lora.alpha": Row(
            f"{MODEL}.lora_alpha", get(f"{MODEL}.lora_alpha", float) if adapted else None
        ),
        "model.lora.targets": Row(
            (f"{MODEL}.target_modules", f"{MODEL}.target_parameters", f"{MODEL}.exclude_modules"),
            there.targets(get) if adapted else None,
            "all-linear is every linear layer",
        ),
        "model.lora.dtype": Row(
            f"{MODEL}.lora_dtype",
            (weights_dtype if lora_dtype is None else dtype_of(get, f"{MODEL}.lora_dtype"))
            if adapted
            else None,
            "that of the weights unless it is set",
        ),
        "model.lora.init": Row(
            f"{MODEL}.lora_init_weights",
            ("gaussian" if get(f"{MODEL}.lora_init_weights") == "gaussian" else "kaiming")
            if adapted
            else None,
        ),
        "model.lora.warm_start": f"{MODEL}.lora_adapter_path",
        "sampling.sde_type": f"{ALGO}.sde_type",
        "sampling.noise_level": f"{ALGO}.noise_level",
        "sampling.num_inference_steps": f"{PIPELINE}.num_inference_steps",
        "sampling.sde_window_size": Row(f"{ALGO}.sde_window_size", there.window_size(get)),
        "sampling.sde_window_range": Row(f"{ALGO}.sde_window_range", there.window_range(get)),
        "sampling.window_per": Row(
            f"{MODEL}.algorithm",
            "group" if algorithm == "mix_grpo" else "sample",
            "mix_grpo draws one window for all samples of an iteration; the closest here is one for each prompt",
        ),
        **{
            f"sampling.{key}": Row(f"{PIPELINE}.{key}", guidance if key == guidance_key else None)
            for key in GUIDANCE_KEYS
        },
        "sampling.negative_prompt": Row(
            (),
            " " if family == "qwen_image" and guidance > 1 else "",
            "verl-omni reads it from its data, where its examples of Qwen-Image write this",
        ),
        "sampling.height": f"{PIPELINE}.height",
        "sampling.width": f"{PIPELINE}.width",
        "sampling.cps_unscaled": Row((), sde_type == "cps", "verl-omni's cps log-probs lack 1 / (2 s^2)"),
        "rollout.name": f"{ROLLOUT}.name",
        "rollout.engine": Row(
            under(ROLLOUT, "tensor_model_parallel_size gpu_memory_utilization quantization"),
            there.engine_options(get),
        ),
        "rollout.dtype": Row(f"{ROLLOUT}.dtype", dtype_of(get, f"{ROLLOUT}.dtype")),
        "rollout.prompts_per_step": Row("data.train_batch_size", get("data.train_batch_size"), "prompts"),
        "rollout.n": f"{ROLLOUT}.n",
        "rollout.same_initial_noise": Row((), False),
        "actor.loss_mode": Row((f"{LOSS}.loss_mode", f"{MODEL}.algorithm"), LOSSES[loss]),
        "actor.clip_ratio": Row(
            f"{LOSS}.clip_ratio", None if loss == "flow_dppo" else get(f"{LOSS}.clip_ratio")
        ),
        "actor.kl_threshold": Row(
            (f"{LOSS}.kl_mask_threshold", f"{LOSS}.add_kl_coefficient"),
            get(f"{LOSS}.kl_mask_threshold") if loss == "flow_dppo" else None,
        ),
        "actor.adv_clip_max": Row(
            f"{LOSS}.adv_clip_max",
            _NO_CLAMP if loss == "flow_dppo" else get(f"{LOSS}.adv_clip_max"),
            "its flow_dppo clamps no advantages",
        ),
        "actor.kl_coef": Row(
            (f"{ACTOR}.kl_loss_coef", f"{ACTOR}.use_kl_loss"), kl_coef, "only used with use_kl_loss"
        ),
        "actor.kl_weighting": Row(
            (),
            "flow_grpo" if kl_coef and sde_type == "sde" else "exact",
            "its KL of sde steps is divided by the length of a step, that of cps and dance_sde is exact",
        ),
        "actor.optimizer": Row(
            (f"{OPTIM}.optimizer", f"{OPTIM}.optimizer_impl"),
            "adamw_8bit" if get(f"{OPTIM}.optimizer") == "AdamW8bit" else "adamw",
            "AdamW of torch, in 8 bits of bitsandbytes",
        ),
        "actor.lr": f"{OPTIM}.lr",
        "actor.betas": Row(f"{OPTIM}.betas", there.pair(f"{OPTIM}.betas", get(f"{OPTIM}.betas"))),
        "actor.eps": f"{OPTIM}.eps",
        "actor.weight_decay": f"{OPTIM}.weight_decay",
        "actor.warmup_steps": Row(
            (f"{OPTIM}.lr_warmup_steps", f"{OPTIM}.lr_warmup_steps_ratio"),
            there.warmup(get, updates),
            "its training steps times the updates of one",
        ),
        "actor.lr_schedule": Row(
            f"{OPTIM}.lr_scheduler_type",
            get(f"{OPTIM}.lr_scheduler_type"),
            "by training steps there, by updates here",
        ),
        "actor.lr_min_ratio": Row(
            f"{OPTIM}.min_lr_ratio",
            None
            if get(f"{OPTIM}.lr_scheduler_type") == "constant"
            else get(f"{OPTIM}.min_lr_ratio", float | None) or 0.0,
        ),
        "actor.grad_clip": Row(
            (f"{OPTIM}.clip_grad", f"{OPTIM}.grad_clip"),
            get(f"{OPTIM}.clip_grad") if clip_grad is None else clip_grad,
        ),
        "actor.epochs": f"{ACTOR}.ppo_epochs",
        "actor.mini_batches": Row(
            f"{ACTOR}.ppo_mini_batch_size",
            updates,
            "updates per step: train_batch_size / ppo_mini_batch_size",
        ),
        "actor.micro_batch_size": f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        "actor.autocast": Row(f"{ACTOR}.fsdp_config.dtype", there.autocast(get), "FSDP's mixed precision"),
        "actor.gradient_checkpointing": f"{MODEL}.enable_gradient_checkpointing",
        "algorithm.advantage_std": Row(
            ("algorithm.global_std", "algorithm.norm_adv_by_std_in_grpo"), advantage_std
        ),
        f"{CORRECTION}.preset": Row(
            f"{ROLLOUT}.calculate_log_probs",
            None if corrects else "disabled",
            "it corrects nothing; this measures the gap",
        ),
        **_correction(get),
        f"{CORRECTION}.rollout_rs_denominator": Row(
            (),
            "all" if corrects and get(f"{CORRECTION}.rollout_rs") else None,
            "verl-omni's losses divide by all terms",
        ),
        "reward.terms": Row(
            (
                *(f"{FUNCTION}.path", f"{FUNCTION}.name", f"{FUNCTION}.reward_kwargs", FUNCTIONS, JUDGE),
                *("reward.reward_manager.name", "reward.aggregation", f"{PIPELINE}.output_type"),
            ),
            rewards.terms(functions),
            rewards.note(functions) + ("" if scored is None else of_latents),
        ),
        "data.path": Row(
            "data.train_files",
            there.text_file(get, "data.train_files"),
            "the prompts as text, such as the train.txt from which the parquet file was made",
        ),
        "data.heldout_path": Row("data.val_files", there.text_file(get, "data.val_files")),
        "data.num_heldout": Row(
            "data.val_max_samples",
            get("data.val_max_samples") if get("data.val_max_samples", int) > 0 else ALL_PROMPTS,
            "-1 there is all of them",
        ),
        "trainer.total_steps": Row(
            ("trainer.total_training_steps", "trainer.total_epochs"),
            get("trainer.total_training_steps"),
            "total_epochs would end it before, if the prompts are few",
        ),
        "trainer.seed": "data.seed",
        "trainer.eval_every": Row(
            "trainer.test_freq",
            max(0, get("trainer.test_freq", int)),
            "-1 there is never; 0 here is at the start and the end",
        ),
        "trainer.eval_num_inference_steps": f"{VALIDATION}.num_inference_steps",
        "trainer.eval_height": evaluated("height"),
        "trainer.eval_width": evaluated("width"),
        "trainer.save_every": Row(
            "trainer.save_freq",
            get("trainer.save_freq" if get("trainer.save_freq", int) > 0 else "trainer.total_training_steps"),
            "-1 there is never; here at least the last step",
        ),
        "trainer.keep_checkpoints": "trainer.max_actor_ckpt_to_keep",
        "trainer.trackers": Row(
            "trainer.logger",
            [name for name in TRACKERS if name in trackers],
            f"without {', '.join(lacking)}" if lacking else "",
        ),
    }


TABLE = Table(
    name="verl-omni",
    required=(
        *(f"{MODEL}.path", f"{MODEL}.lora_rank", f"{PIPELINE}.height"),
        *(f"{ALGO}.noise_level", f"{LOSS}.clip_ratio"),
    ),
    absent=_ABSENT,
    foreign=there.foreign,
    only=_ONLY,
    refuse=there.refuse,
    rows=_rows,
    left=LEFT,
    apart=APART,
    differences=(
        "verl applies an asymmetric k1 band to the reciprocal ratio; here the band is of exp(delta)",
        "verl-omni's grpo_guard uses the mean std of a step over the batch; here each sample has its own",
        "verl-omni keeps all checkpoints unless max_actor_ckpt_to_keep is set; here trainer.keep_checkpoints",
    ),
)
