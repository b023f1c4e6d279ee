"""Configurations of other trainers, and the recipes that they become."""

import warnings

import yaml
from omegaconf import OmegaConf

from flowcorr import config
from flowcorr.config import yaml_text

OMNI = "actor_rollout_ref."


def nested(flat):
    """Values by dotted keys as sections of sections."""
    made = OmegaConf.create({})
    for key, value in flat.items():
        OmegaConf.update(made, key, value, merge=False)
    return OmegaConf.to_container(made)


RESOLVED = nested(
    {
        "model_engine": "dp_diffusion",
        f"{OMNI}actor.strategy": "fsdp",
        f"{OMNI}actor.fsdp_config": {"model_dtype": "bfloat16", "dtype": "bfloat16", "param_offload": True},
        f"{OMNI}actor.optim": {
            "_target_": "verl.workers.config.FSDPOptimizerConfig",
            "optimizer": "AdamW",
            "lr": 1e-6,
            "optimizer_impl": "torch.optim",
            "betas": [0.9, 0.999],
            "weight_decay": 0.01,
            "clip_grad": 1.0,
            "lr_warmup_steps": -1,
            "lr_warmup_steps_ratio": 0.0,
            "lr_scheduler_type": "constant",
            "min_lr_ratio": 0.0,
            "num_cycles": 0.5,
            "warmup_style": None,
            "override_optimizer_config": None,
        },
        f"{OMNI}actor.diffusion_loss": {
            "loss_mode": "${oc.select:actor_rollout_ref.model.algorithm,flow_grpo}",
            "clip_ratio": 1e-4,
            "adv_clip_max": 5.0,
            "kl_mask_threshold": 1e-5,
            "add_kl_coefficient": True,
        },
        **{f"{OMNI}actor.{key}": False for key in ("use_kl_loss", "use_distill_loss", "shuffle")},
        f"{OMNI}actor.kl_loss_coef": 0.001,
        f"{OMNI}actor.ppo_epochs": 1,
        f"{OMNI}actor.ppo_mini_batch_size": 16,
        f"{OMNI}actor.ppo_micro_batch_size_per_gpu": None,
        f"{OMNI}model": {
            "path": "Qwen/Qwen-Image",
            "algorithm": "flow_grpo",
            "model_type": "diffusion_model",
            "lora_rank": 64,
            "lora_alpha": 64,
            "lora_init_weights": "gaussian",
            "lora_dtype": "fp32",
            "target_modules": ["to_q", "to_k"],
            "target_parameters": None,
            "exclude_modules": None,
            "lora_adapter_path": None,
            "enable_gradient_checkpointing": True,
            "external_lib": None,
        },
        f"{OMNI}rollout": {
            "name": "vllm_omni",
            "dtype": "bfloat16",
            "n": 16,
            "calculate_log_probs": False,
            "tensor_model_parallel_size": 2,
            "gpu_memory_utilization": 0.5,
            "quantization": None,
            "pipeline": {
                "height": 512,
                "width": 512,
                "num_inference_steps": 10,
                "max_sequence_length": 512,
                "true_cfg_scale": 1.0,
                "guidance_scale": None,
                "num_frames": 1,
            },
            "algo": {
                "noise_level": 1.0,
                "sde_type": "sde",
                "sde_window_size": 2,
                "sde_window_range": [0, 5],
                "sample_strategy": "random",
                "sde_contiguous": True,
            },
            "val_kwargs": {
                "pipeline": {
                    **{key: f"${{actor_rollout_ref.rollout.pipeline.{key}}}" for key in ("height", "width")},
                    "num_inference_steps": 50,
                }
            },
        },
        "algorithm": {
            "trainer_type": "policy_gradient",
            "sample_source": "online",
            "global_std": True,
            "adv_estimator": "${actor_rollout_ref.model.algorithm}",
            "norm_adv_by_std_in_grpo": True,
            "rollout_correction": {
                "bypass_mode": False,
                "loss_type": "ppo_clip",
                "rollout_is": None,
                "rollout_rs": None,
                "rollout_is_threshold": 2.0,
                "rollout_is_batch_normalize": False,
                "rollout_rs_threshold": None,
            },
        },
        "reward": {
            "custom_reward_function": {
                "path": "verl_omni/reward_score/genrm_ocr.py",
                "name": "compute_score_ocr",
            },
            "reward_manager": {"name": "VisualRewardManager"},
            "reward_model": {"model_path": "judges/vision"},
            "reward_functions": {},
        },
        "data": {
            "train_files": "data/train.parquet",
            "val_files": "data/test.parquet",
            "train_batch_size": 32,
            "val_max_samples": -1,
            "seed": None,
            "train_max_samples": -1,
            "shuffle": True,
        },
        "trainer": {
            "total_training_steps": 300,
            "total_epochs": 30,
            "test_freq": -1,
            "save_freq": -1,
            "use_v1": False,
            "logger": ["console", "wandb"],
            "max_actor_ckpt_to_keep": None,
            "project_name": "flow_grpo",
            "v1": {"trainer_mode": "sync", "separate_async": {"parameter_sync_step": 4}},
        },
    }
)
"""verl-omni's configuration: the keys that are read, and some others."""


def omni_yaml(*overrides):
    """The YAML of `RESOLVED` with overrides, `key=value`."""
    changed = OmegaConf.create(RESOLVED)
    for override in overrides:
        key, _, value = override.partition("=")
        OmegaConf.update(changed, key.lstrip("+"), yaml_text.parse(value), merge=True)
    return OmegaConf.to_yaml(changed)


GRPO = nested(
    {
        "seed": 42,
        "save_freq": 20,
        "eval_freq": 20,
        "num_checkpoint_limit": 5,
        "mixed_precision": "fp16",
        "use_lora": True,
        "dataset": "dataset/ocr",
        "resolution": 512,
        "prompt_fn": "general_ocr",
        "prompt_fn_kwargs": {},
        "per_prompt_stat_tracking": True,
        "logdir": "logs",
        "reward_fn": {"pickscore": 1.0, "geneval": 0.5},
        "pretrained": {"model": "stabilityai/stable-diffusion-3.5-medium", "revision": "main"},
        "sample": {
            "num_steps": 10,
            "eval_num_steps": 40,
            "guidance_scale": 4.5,
            "train_batch_size": 8,
            "num_image_per_prompt": 16,
            "num_batches_per_epoch": 8,
            "global_std": True,
            "noise_level": 0.7,
        },
        "train": {
            "batch_size": 1,
            "use_8bit_adam": False,
            "learning_rate": 3e-4,
            "adam_beta1": 0.9,
            "adam_beta2": 0.999,
            "adam_weight_decay": 1e-4,
            "adam_epsilon": 1e-8,
            "max_grad_norm": 1.0,
            "gradient_accumulation_steps": 4,
            "num_inner_epochs": 1,
            "cfg": True,
            "adv_clip_max": 5,
            "clip_range": 1e-4,
            "timestep_fraction": 0.99,
            "beta": 0.04,
            "lora_path": None,
            "ema": False,
        },
    }
)
"""flow_grpo's configuration, of 4 GPUs."""


FACTORY = {
    "launcher": "accelerate",
    "num_processes": 8,
    "mixed_precision": "bf16",
    "data": {"dataset_dir": "dataset/signs", "max_dataset_size": 1000},
    "model": {
        "model_name_or_path": "stabilityai/stable-diffusion-3.5-medium",
        "model_type": "sd3-5",
        "finetune_type": "lora",
        "lora_rank": 32,
        "target_modules": "default",
        "master_weight_dtype": "fp32",
    },
    "train": {
        "trainer_type": "grpo",
        "advantage_aggregation": "sum",
        "resolution": 512,
        "num_inference_steps": 10,
        "guidance_scale": 4.5,
        "per_device_batch_size": 8,
        "group_size": 24,
        "unique_sample_num_per_epoch": 48,
        "ema_decay": 0.9,
        "ema_update_interval": 4,
    },
    "scheduler": {"noise_level": 0.8, "num_sde_steps": 2, "sde_steps": [1, 2, 3]},
    "eval": {"resolution": 512, "eval_freq": 20},
    "log": {"logging_backend": "wandb"},
    "rewards": [{"name": "pick", "reward_model": "PickScore", "batch_size": 16}],
}


def factory_yaml(**changes):
    """The YAML of `FACTORY` with some keys changed, written `section__key=value`."""
    values = {
        name: dict(section) if isinstance(section, dict) else section for name, section in FACTORY.items()
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        place, name = (values[section], name) if name else (values, section)
        place[name] = value
    return yaml.safe_dump(values)


def loaded(tmp_path, text):
    """The configuration of a recipe's text; no key of it may be without effect."""
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return config.load(path)


def value_at(config, key):
    """The value of a dotted key of a configuration."""
    for name in key.split("."):
        config = getattr(config, name)
    return config
