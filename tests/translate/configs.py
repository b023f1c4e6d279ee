"""Configurations of other trainers, and the recipes that they become."""

import warnings

import yaml

from flowcorr import config
from flowcorr.translate import flow_grpo

OMNI = "actor_rollout_ref."


SCRIPT = """
MODEL=Qwen/Qwen-Image
python3 -m verl_omni.trainer.main_diffusion \\
    data.train_files=data/train.parquet data.val_files=data/test.parquet data.train_batch_size=32 \\
    actor_rollout_ref.model.path=$MODEL actor_rollout_ref.model.lora_rank=64 \\
    actor_rollout_ref.model.target_modules="['to_q','to_k']" actor_rollout_ref.model.lora_dtype=fp32 \\
    actor_rollout_ref.rollout.name=vllm_omni \\
    actor_rollout_ref.rollout.n=16 actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    actor_rollout_ref.rollout.algo.sde_window_size=2 actor_rollout_ref.rollout.algo.sde_window_range="[0,5]" \\
    actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16 \\
    actor_rollout_ref.actor.fsdp_config.param_offload=True \\
    reward.custom_reward_function.path=verl_omni/utils/reward_score/genrm_ocr.py \\
    reward.reward_model.model_path=judges/vision \\
    trainer.logger='["console", "wandb"]' trainer.total_training_steps=300 {} "$@"
"""


_GRPO_VALUES = {
    **{key: flow_grpo.TABLE.defaults[key] for key in flow_grpo.TABLE.required},
    "resolution": 512,
    "dataset": "dataset/ocr",
    "prompt_fn": "general_ocr",
    "reward_fn": {"pickscore": 1.0, "geneval": 0.5},
    "pretrained.model": "stabilityai/stable-diffusion-3.5-medium",
    "sample.train_batch_size": 8,
    "sample.num_image_per_prompt": 16,
    "sample.num_batches_per_epoch": 8,
    "sample.num_steps": 10,
    "train.beta": 0.04,
    "train.timestep_fraction": 0.99,
    "train.gradient_accumulation_steps": 4,
}
GRPO = "\n".join(
    [
        "import ml_collections",
        "",
        "def get():",
        "    gpu_number = 4",
        "    config = ml_collections.ConfigDict()",
        *(
            f"    config.{section} = ml_collections.ConfigDict()"
            for section in ("pretrained", "sample", "train")
        ),
        *(f"    config.{key} = {value!r}" for key, value in _GRPO_VALUES.items()),
        "    return config",
        "",
    ]
)


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
