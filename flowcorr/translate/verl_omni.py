"""The table for verl-omni's configuration, as Hydra resolves it."""

from __future__ import annotations

from typing import Any

from flowcorr.config.families import find_family
from flowcorr.translate import rewards
from flowcorr.translate import verl_omni_values as there
from flowcorr.translate.table import TRACKERS, Given, How, Row, Table, dtype_of
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

_ALL_PROMPTS, _NO_CLAMP = 100_000, 1e6
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


def _correction(key: str, *, belongs_to: str = "") -> Row:
    source = f"{CORRECTION}.{key}"

    def value(get: Given) -> Any:
        in_use = not belongs_to or get(f"{CORRECTION}.{belongs_to}") is not None
        return get(source) if in_use and there.corrects(get) else None

    return Row(source, source, value)


def _guidance(key: str) -> Row:
    return Row(
        f"{PIPELINE}.{key}",
        f"sampling.{key}",
        there.guidance,
        when=lambda get: find_family(there.family(get)).guidance_key == key,
    )


def _eval_size(side: str) -> How:
    def value(get: Given) -> Any:
        size = get(f"{VALIDATION}.{side}")
        return None if size == get(f"{PIPELINE}.{side}") else size

    return value


ROWS = (
    Row(f"{MODEL}.path", "model.path"),
    Row(
        (
            *(f"{ACTOR}.{key}_config.model_dtype" for key in ("fsdp", "veomni")),
            f"{ACTOR}.strategy",
            "model_engine",
        ),
        "model.dtype",
        there.weights_dtype,
        "of veomni_config with VeOmni",
    ),
    Row(f"{PIPELINE}.max_sequence_length", "model.max_sequence_length"),
    Row(f"{MODEL}.lora_rank", "model.lora.rank", None, "0 trains all weights"),
    Row(
        f"{MODEL}.lora_alpha",
        "model.lora.alpha",
        lambda get: get(f"{MODEL}.lora_alpha", float),
        when=there.adapted,
    ),
    Row(
        (f"{MODEL}.target_modules", f"{MODEL}.target_parameters", f"{MODEL}.exclude_modules"),
        "model.lora.targets",
        there.targets,
        "all-linear is every linear layer",
    ),
    Row(
        f"{MODEL}.lora_dtype", "model.lora.dtype", there.adapter_dtype, "that of the weights unless it is set"
    ),
    Row(f"{MODEL}.lora_init_weights", "model.lora.init", there.adapter_init),
    Row(f"{MODEL}.lora_adapter_path", "model.lora.warm_start"),
    Row(f"{ALGO}.sde_type", "sampling.sde_type"),
    Row(f"{ALGO}.noise_level", "sampling.noise_level"),
    Row(f"{PIPELINE}.num_inference_steps", "sampling.num_inference_steps"),
    Row(f"{ALGO}.sde_window_size", "sampling.sde_window_size", there.window_size),
    Row(f"{ALGO}.sde_window_range", "sampling.sde_window_range", there.window_range),
    Row(
        f"{MODEL}.algorithm",
        "sampling.window_per",
        lambda get: "group" if get(f"{MODEL}.algorithm") == "mix_grpo" else "sample",
        "mix_grpo draws one window for all samples of an iteration; the closest here is one for each prompt",
    ),
    _guidance("guidance_scale"),
    _guidance("true_cfg_scale"),
    Row(
        (),
        "sampling.negative_prompt",
        lambda get: " ",
        "verl-omni reads it from its data, where its examples of Qwen-Image write this",
        when=lambda get: there.family(get) == "qwen_image" and there.guidance(get) > 1,
    ),
    Row(f"{PIPELINE}.height", "sampling.height"),
    Row(f"{PIPELINE}.width", "sampling.width"),
    Row(
        (),
        "sampling.cps_unscaled",
        lambda get: True,
        "verl-omni's cps log-probs lack 1 / (2 s^2)",
        when=lambda get: get(f"{ALGO}.sde_type") == "cps",
    ),
    Row(f"{ROLLOUT}.name", "rollout.name"),
    Row(
        tuple(
            f"{ROLLOUT}.{key}"
            for key in ("tensor_model_parallel_size", "gpu_memory_utilization", "quantization")
        ),
        "rollout.engine",
        there.engine_options,
    ),
    Row(f"{ROLLOUT}.dtype", "rollout.dtype", lambda get: dtype_of(get, f"{ROLLOUT}.dtype")),
    Row("data.train_batch_size", "rollout.prompts_per_step", None, "prompts"),
    Row(f"{ROLLOUT}.n", "rollout.n"),
    Row((), "rollout.same_initial_noise", lambda get: False),
    Row(
        (f"{LOSS}.loss_mode", f"{MODEL}.algorithm"), "actor.loss_mode", lambda get: LOSSES[there.loss_of(get)]
    ),
    Row(f"{LOSS}.clip_ratio", "actor.clip_ratio", when=lambda get: there.loss_of(get) != "flow_dppo"),
    Row(
        (f"{LOSS}.kl_mask_threshold", f"{LOSS}.add_kl_coefficient"),
        "actor.kl_threshold",
        lambda get: get(f"{LOSS}.kl_mask_threshold"),
        when=lambda get: there.loss_of(get) == "flow_dppo",
    ),
    Row(
        f"{LOSS}.adv_clip_max",
        "actor.adv_clip_max",
        lambda get: _NO_CLAMP if there.loss_of(get) == "flow_dppo" else get(f"{LOSS}.adv_clip_max"),
        "its flow_dppo clamps no advantages",
    ),
    Row(
        (f"{ACTOR}.kl_loss_coef", f"{ACTOR}.use_kl_loss"),
        "actor.kl_coef",
        there.kl_coef,
        "only used with use_kl_loss",
    ),
    Row(
        (),
        "actor.kl_weighting",
        lambda get: "flow_grpo",
        "its KL of sde steps is divided by the length of a step, that of cps and dance_sde is exact",
        when=lambda get: there.kl_coef(get) and get(f"{ALGO}.sde_type") == "sde",
    ),
    Row(
        (f"{OPTIM}.optimizer", f"{OPTIM}.optimizer_impl"),
        "actor.optimizer",
        lambda get: "adamw_8bit" if get(f"{OPTIM}.optimizer") == "AdamW8bit" else "adamw",
        "AdamW of torch, in 8 bits of bitsandbytes",
    ),
    Row(f"{OPTIM}.lr", "actor.lr"),
    Row(f"{OPTIM}.betas", "actor.betas", lambda get: there.pair(f"{OPTIM}.betas", get(f"{OPTIM}.betas"))),
    Row(f"{OPTIM}.eps", "actor.eps"),
    Row(f"{OPTIM}.weight_decay", "actor.weight_decay"),
    Row(
        (f"{OPTIM}.lr_warmup_steps", f"{OPTIM}.lr_warmup_steps_ratio"),
        "actor.warmup_steps",
        there.warmup,
        "its training steps times the updates of one",
    ),
    Row(f"{OPTIM}.lr_scheduler_type", "actor.lr_schedule", None, "by training steps there, by updates here"),
    Row(
        f"{OPTIM}.min_lr_ratio",
        "actor.lr_min_ratio",
        lambda get: get(f"{OPTIM}.min_lr_ratio", float | None) or 0.0,
        when=lambda get: get(f"{OPTIM}.lr_scheduler_type") != "constant",
    ),
    Row(
        (f"{OPTIM}.clip_grad", f"{OPTIM}.grad_clip"),
        "actor.grad_clip",
        lambda get: (
            get(f"{OPTIM}.clip_grad") if get(f"{OPTIM}.grad_clip") is None else get(f"{OPTIM}.grad_clip")
        ),
    ),
    Row(f"{ACTOR}.ppo_epochs", "actor.epochs"),
    Row(
        f"{ACTOR}.ppo_mini_batch_size",
        "actor.mini_batches",
        there.updates,
        "updates per step: train_batch_size / ppo_mini_batch_size",
    ),
    Row(f"{ACTOR}.ppo_micro_batch_size_per_gpu", "actor.micro_batch_size"),
    Row(f"{ACTOR}.fsdp_config.dtype", "actor.autocast", there.autocast, "FSDP's mixed precision"),
    Row(f"{MODEL}.enable_gradient_checkpointing", "actor.gradient_checkpointing"),
    Row(
        ("algorithm.global_std", "algorithm.norm_adv_by_std_in_grpo"),
        "algorithm.advantage_std",
        there.advantage_std,
    ),
    Row(
        f"{ROLLOUT}.calculate_log_probs",
        f"{CORRECTION}.preset",
        lambda get: "disabled",
        "it corrects nothing; this measures the gap",
        when=lambda get: not there.corrects(get),
    ),
    _correction("bypass_mode"),
    _correction("loss_type"),
    _correction("rollout_is"),
    _correction("rollout_is_threshold", belongs_to="rollout_is"),
    _correction("rollout_is_batch_normalize", belongs_to="rollout_is"),
    _correction("rollout_rs"),
    _correction("rollout_rs_threshold", belongs_to="rollout_rs"),
    Row(
        (),
        f"{CORRECTION}.rollout_rs_denominator",
        lambda get: "all",
        "verl-omni's losses divide by all terms",
        when=lambda get: there.corrects(get) and get(f"{CORRECTION}.rollout_rs"),
    ),
    Row(
        (
            *(f"{FUNCTION}.path", f"{FUNCTION}.name", f"{FUNCTION}.reward_kwargs", FUNCTIONS, JUDGE),
            *("reward.reward_manager.name", "reward.aggregation", f"{PIPELINE}.output_type"),
        ),
        "reward.terms",
        lambda get: rewards.terms(there.reward_functions(get)),
        there.rewards_note,
    ),
    Row(
        "data.train_files",
        "data.path",
        there.text_file("data.train_files"),
        "the prompts as text, such as the train.txt from which the parquet file was made",
    ),
    Row("data.val_files", "data.heldout_path", there.text_file("data.val_files")),
    Row(
        "data.val_max_samples",
        "data.num_heldout",
        lambda get: get("data.val_max_samples") if get("data.val_max_samples", int) > 0 else _ALL_PROMPTS,
        "-1 there is all of them",
    ),
    Row(
        ("trainer.total_training_steps", "trainer.total_epochs"),
        "trainer.total_steps",
        lambda get: get("trainer.total_training_steps"),
        "total_epochs would end it before, if the prompts are few",
    ),
    Row("data.seed", "trainer.seed"),
    Row(
        "trainer.test_freq",
        "trainer.eval_every",
        lambda get: max(0, get("trainer.test_freq", int)),
        "-1 there is never; 0 here is at the start and the end",
    ),
    Row(f"{VALIDATION}.num_inference_steps", "trainer.eval_num_inference_steps"),
    Row(f"{VALIDATION}.height", "trainer.eval_height", _eval_size("height"), "null is the size of sampling"),
    Row(f"{VALIDATION}.width", "trainer.eval_width", _eval_size("width"), "null is the size of sampling"),
    Row(
        "trainer.save_freq",
        "trainer.save_every",
        lambda get: get(
            "trainer.save_freq" if get("trainer.save_freq", int) > 0 else "trainer.total_training_steps"
        ),
        "-1 there is never; here at least the last step",
    ),
    Row("trainer.max_actor_ckpt_to_keep", "trainer.keep_checkpoints"),
    Row(
        "trainer.logger",
        "trainer.trackers",
        lambda get: [name for name in TRACKERS if name in get("trainer.logger", list)],
        there.lacking_trackers,
    ),
)

DIFFERENCES = (
    "verl applies an asymmetric k1 band to the reciprocal ratio; here the band is of exp(delta)",
    "verl-omni's grpo_guard uses the mean std of a step over the batch; here each sample has its own",
    "verl-omni keeps all checkpoints unless max_actor_ckpt_to_keep is set; here trainer.keep_checkpoints",
)
TABLE = Table(
    name="verl-omni",
    required=(
        f"{MODEL}.path",
        f"{MODEL}.lora_rank",
        f"{PIPELINE}.height",
        f"{ALGO}.noise_level",
        f"{LOSS}.clip_ratio",
    ),
    absent=_ABSENT,
    only=_ONLY,
    refuse=there.refuse,
    rows=ROWS,
    left=LEFT,
    apart=APART,
    differences=DIFFERENCES,
)
