"""Configurations of other trainers, and the recipes that they become."""

import warnings

from flowcorr import config

OMNI = "actor_rollout_ref."


SCRIPT = """
MODEL=Qwen/Qwen-Image
python3 -m verl_omni.trainer.main_diffusion \\
    data.train_files=data/train.parquet data.train_batch_size=32 \\
    actor_rollout_ref.model.path=$MODEL actor_rollout_ref.model.lora_rank=64 \\
    actor_rollout_ref.rollout.n=16 actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    actor_rollout_ref.rollout.algo.sde_window_size=2 actor_rollout_ref.rollout.algo.sde_window_range="[0,5]" \\
    actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16 \\
    actor_rollout_ref.actor.fsdp_config.param_offload=True \\
    reward.custom_reward_function.path=verl_omni/utils/reward_score/genrm_ocr.py \\
    trainer.logger='["console", "wandb"]' trainer.total_training_steps=300 {} "$@"
"""


GRPO = """
import ml_collections

def get():
    gpu_number = 4
    config = ml_collections.ConfigDict()
    config.resolution = 512
    config.dataset = "dataset/ocr"
    config.reward_fn = {"pickscore": 1.0, "geneval": 0.5}
    config.pretrained = ml_collections.ConfigDict()
    config.pretrained.model = "stabilityai/stable-diffusion-3.5-medium"
    config.sample = ml_collections.ConfigDict()
    config.sample.train_batch_size = 8
    config.sample.num_image_per_prompt = 16
    config.sample.num_batches_per_epoch = 8
    config.sample.num_steps = 10
    config.train = ml_collections.ConfigDict()
    config.train.beta = 0.04
    config.train.timestep_fraction = 0.99
    config.train.gradient_accumulation_steps = 4
    return config
"""


def loaded(tmp_path, text):
    """The configuration of a recipe's text; no key of it may be without effect."""
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return config.load(path)
