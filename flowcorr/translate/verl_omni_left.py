"""Keys of verl-omni's configuration that are not translated, with and without a possible effect."""

from __future__ import annotations

from flowcorr.translate import verl_omni_values as there
from flowcorr.translate.table import Left, under
from flowcorr.translate.verl_omni_values import (
    ACTOR,
    ALGO,
    CORRECTION,
    LOSS,
    MODEL,
    OPTIM,
    PIPELINE,
    ROLLOUT,
    VALIDATION,
)

_KERNEL = "another attention kernel rounds otherwise; see model.attention and rollout.engine"
_AHEAD = "to sample ahead of training: rollout.placement=ray with rollout.max_staleness"
_EVALUATED = "evaluations here draw one image a prompt, without noise, and else as sampling does"
_REFERENCE = "the reference is the model without its adapter, in the dtype of the actor"
_JUDGE = "the judge is served apart, and asked at temperature 0"
_SHARDING = """
    param_offload optimizer_offload offload_policy reshard_after_forward fsdp_size forward_prefetch forward_only
    full_determinism seed strategy use_orig_params ulysses_sequence_parallel_size ulysses_parallel_size
    expert_parallel_size wrap_policy.* init_device enable_reentrant enable_activation_offload activation_gpu_limit
"""
"""Keys of FSDP and VeOmni that choose where weights and activations lie."""
_SERVING = """
    load_format layered_summon free_cache_engine skip_tokenizer_init max_num_seqs data_parallel_size
    pipeline_model_parallel_size expert_parallel_size disaggregation.* cudagraph_capture_sizes disable_log_stats
    scheduling_policy profiler.* max_num_batched_tokens enable_chunked_prefill enable_prefix_caching
"""
"""Keys of an engine that choose where and in what order it computes."""
_REF, _JUDGE_ROLLOUT = "actor_rollout_ref.ref", "reward.reward_model.rollout"
LEFT = (
    Left(f"{OPTIM}.warmup_style", "an older name of lr_scheduler_type"),
    Left(f"{OPTIM}.lr_start", "a warm-up begins at 0"),
    Left(f"{OPTIM}.lr_min", "see actor.lr_min_ratio"),
    Left(f"{OPTIM}.lr_decay_ratio", "a schedule falls until the end of the run", (1.0,)),
    Left(f"{OPTIM}.zero_indexed_step", "a schedule begins with the first update", (True,)),
    Left(f"{ACTOR}.grad_clip", "gradients are clipped at actor.optim.clip_grad", like=f"{OPTIM}.clip_grad"),
    Left(f"{ACTOR}.loss_scale_factor", "losses are divided by the number of terms"),
    Left(f"{ACTOR}.shuffle", "batches keep the order of their prompts"),
    Left(f"{ACTOR}.rollout_n", "see rollout.n", like=f"{ROLLOUT}.n"),
    Left(
        f"{ACTOR}.rollout_correction.*",
        "the section algorithm.rollout_correction counts",
        like=f"{CORRECTION}.*",
    ),
    Left(f"{ACTOR}.veomni_config.*_implementation", "another kernel rounds otherwise", ("eager",)),
    Left(
        f"{ACTOR}.veomni_config.mixed_precision*",
        "see actor.autocast",
        (True, "bfloat16", "float32"),
        when=there.is_veomni,
    ),
    *(
        Left(f"{_REF}.{config}.{key}", _REFERENCE, like=f"{ACTOR}.{config}.{key}", when=there.kl_coef)
        for config in ("fsdp_config", "veomni_config")
        for key in ("model_dtype", "dtype", "mixed_precision*", "*_implementation")
    ),
    Left(f"{ALGO}.sde_window_seed", "windows are drawn from trainer.seed"),
    Left(
        f"{ALGO}.sde_contiguous", "its pipelines of images draw consecutive windows whatever it says", (True,)
    ),
    Left(f"{ALGO}.iters_per_group", "belongs to progressive windows", (1,)),
    Left(f"{ALGO}.*", "may belong to its sampling"),
    Left(f"{PIPELINE}.frame_rate", "belongs to videos", (24.0,)),
    Left(f"{PIPELINE}.video_flow_shift", "belongs to videos", (12.0,)),
    Left(f"{PIPELINE}.*", "may belong to its sampling"),
    Left(f"{VALIDATION}.*", _EVALUATED, like=f"{PIPELINE}.*"),
    Left(f"{ROLLOUT}.val_kwargs.n", _EVALUATED, (1,)),
    Left(f"{ROLLOUT}.val_kwargs.algo.noise_level", _EVALUATED),
    Left(f"{ROLLOUT}.val_kwargs.algo.*", _EVALUATED, like=f"{ALGO}.*"),
    Left(f"{ROLLOUT}.val_kwargs.*", _EVALUATED),
    Left(f"{ROLLOUT}.rollout_attn_backend", _KERNEL),
    Left(f"{MODEL}.attn_backend", _KERNEL),
    Left(f"{ROLLOUT}.engine_kwargs.*", "options of its engine; set them in rollout.engine", ({},)),
    Left(f"{ROLLOUT}.enforce_eager", "an option of its engine; set it in rollout.engine"),
    Left(f"{ROLLOUT}.step_execution", "an option of its engine; set it in rollout.engine"),
    Left(f"{ROLLOUT}.seed", "noise is drawn from trainer.seed"),
    Left(
        f"{ROLLOUT}.prompt_length",
        "prompts are cut to model.max_sequence_length tokens",
        like="data.max_prompt_length",
    ),
    Left(f"{ROLLOUT}.max_prompt_embed_length", "prompts are cut to model.max_sequence_length tokens"),
    Left(f"{ROLLOUT}.rollout_adapter", "there is one adapter", ("default",)),
    Left(f"{MODEL}.policy_state_adapters", "there is one adapter", (["default"],)),
    Left(f"{ROLLOUT}.agent.default_agent_loop", "code of its user", ("diffusion_single_turn_agent",)),
    *(
        Left(f"{ROLLOUT}.agent.{key}", "code of its user")
        for key in ("agent_loop_config_path", "agent_loop_manager_class", "custom_async_server.*")
    ),
    Left(f"{ROLLOUT}.disaggregation.enabled", "an option of its engine; set it in rollout.engine"),
    Left(f"{ROLLOUT}.multi_turn.enable", "each prompt makes its images once"),
    Left(f"{ROLLOUT}.external_lib", "code of its user"),
    Left(f"{MODEL}.external_lib", "code of its user"),
    Left(f"{MODEL}.algo.*", "see sampling", like=f"{ALGO}.*"),
    Left(f"{MODEL}.pipeline.*", "see sampling", like=f"{PIPELINE}.*"),
    Left(f"{MODEL}.custom_chat_template", "prompts are encoded as the pipeline does"),
    *(
        Left(f"{MODEL}.{key}", "the parts of model.path are loaded")
        for key in ("config_path", "tokenizer_path", "extra_tokenizers*", "mtp.enable")
    ),
    Left(f"{MODEL}.transformer_subfolder", "the pipeline's transformer is trained", ("transformer",)),
    Left("algorithm.paired_preference", "each image is scored by itself"),
    Left("data.train_max_samples", "shorten the file of prompts", (-1,)),
    Left("data.shuffle", "prompts are shuffled anew in every pass", (True,)),
    Left("data.custom_cls.*", "code of its user"),
    Left("data.datagen.*", "code of its user"),
    Left("data.sampler.*", "code of its user"),
    Left("data.apply_chat_template_kwargs*", "prompts are encoded as the pipeline does"),
    Left("data.filter_overlong_prompts", "prompts are cut to model.max_sequence_length tokens"),
    Left(
        "data.max_prompt_length",
        "prompts are cut to model.max_sequence_length tokens",
        like=f"{PIPELINE}.max_sequence_length",
    ),
    Left("data.truncation", "prompts are cut to model.max_sequence_length tokens", ("error",)),
    Left("data.tokenizer", "prompts are encoded as the pipeline does"),
    Left("data.prompt_key", "the file of prompts as text has them in its lines", ("prompt",)),
    Left("data.reward_fn_key", "each prompt gets all rewards, or those of its tag", ("data_source",)),
    Left(
        "reward.reward_manager.module.path",
        "code of its user",
        ("pkg://verl_omni.reward_loop.reward_manager",),
    ),
    *(
        Left(key, _JUDGE, when=there.is_judged)
        for key in (
            *under(
                _JUDGE_ROLLOUT, "do_sample temperature top_k top_p ignore_eos prompt_length response_length"
            ),
            *under(_JUDGE_ROLLOUT, "max_model_len limit_images dtype quantization*"),
        )
    ),
    Left("trainer.val_only", "evaluate a run by flowcorr eval"),
    Left("trainer.resume_from_path", "start from the weights of a run by model.lora.warm_start"),
    Left("trainer.use_v1", _AHEAD),
    Left("trainer.v1.trainer_mode", _AHEAD, ("sync",), when=lambda get: get("trainer.use_v1", bool)),
    Left("trainer.v1.*", _AHEAD, when=there.samples_ahead),
    Left("skip.*.enable", "each step samples anew"),
)
APART = (
    *under(OPTIM, "total_training_steps fused"),
    *under(f"{ACTOR}.fsdp_config", _SHARDING),
    *under(f"{ACTOR}.veomni_config", _SHARDING),
    *under(f"{_REF}.fsdp_config", _SHARDING),
    *under(f"{_REF}.veomni_config", _SHARDING),
    *under(_REF, "strategy rollout_n log_prob_* profiler.* optim.*"),  # it is not trained
    *under(ACTOR, "distill_loss_* strategy profiler.* checkpoint.* data_loader_seed"),
    *under(LOSS, "mix_beta ref_kl_coef adaptive_weight_min dpo_beta"),  # of other losses
    *under(MODEL, "trust_remote_code use_shm fsdp_layer_prefixes"),
    *under(ROLLOUT, _SERVING),
    *under(ROLLOUT, "agent.num_workers mode nnodes n_gpus_per_node checkpoint_engine.* prometheus.*"),
    *under(ROLLOUT, "log_prob_*"),
    # Of language models, which none of these families samples with.
    *under(ROLLOUT, "temperature top_k top_p repetition_penalty max_new_tokens max_model_len mtp.*"),
    *under(ROLLOUT, "logprobs_mode llm_calculate_log_probs enable_rollout_routing_replay multi_turn.*"),
    *under("algorithm", "old_policy_* timestep_fraction adv_mode"),  # of other losses
    *under("actor_rollout_ref", "hybrid_engine nccl_timeout"),
    *under("data", "dataloader_num_workers filter_overlong_prompts_workers val_batch_size use_shm"),
    *under("data", "validation_shuffle trust_remote_code return_* max_response_length tool_config_path"),
    *under("data", "image_key image_patch_size video_key"),  # these families take no references
    *under("reward", "num_workers reward_manager.source sandbox_fusion.*"),
    *under("reward.reward_model", "enable enable_resource_pool nnodes n_gpus_per_node"),
    *under(_JUDGE_ROLLOUT, _SERVING),
    *under(_JUDGE_ROLLOUT, "name n enforce_eager engine_kwargs* gpu_memory_utilization mtp"),
    *under(_JUDGE_ROLLOUT, "tensor_model_parallel_size multi_stage_wake_up"),
    *under("trainer", "default_hdfs_dir default_local_dir del_local_ckpt_after_load device resume_mode"),
    *under("trainer", "esi_redundant_time experiment_name project_name n_gpus_per_node nnodes"),
    *under("trainer", "log_val_generations ray_master_port_range ray_wait_register_center_timeout"),
    *under("trainer", "rollout_data_* validation_data_* val_before_train video_fps v1.*"),
    *("critic.*", "distillation.*", "ray_kwargs.*", "global_profiler.*", "transfer_queue.*", "hydra.*"),
    *under("skip.*", "action dump_dir steps"),
)
