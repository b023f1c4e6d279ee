"""verl-omni's keys."""

import pytest

from flowcorr.errors import ConfigError
from tests.translate.configs import OMNI


def test_verl_omnis_values_and_defaults(omni):
    found, text = omni()
    assert (found.model.path, found.model.dtype, found.model.lora.rank) == ("Qwen/Qwen-Image", "bfloat16", 64)
    assert (found.sampling.height, found.sampling.window_per) == (512, "sample")
    assert found.sampling.sde_window_range == (0, 5)
    assert (found.rollout.dtype, found.rollout.same_initial_noise) == ("bfloat16", False)
    assert (found.rollout.prompts_per_step, found.actor.mini_batches) == (32, 2)
    assert (found.actor.betas, found.actor.weight_decay, found.actor.lr) == ((0.9, 0.999), 0.01, 1e-6)
    assert found.actor.gradient_checkpointing
    assert found.model.max_sequence_length == 512
    assert found.actor.kl_coef == 0
    assert found.rollout.engine["tensor_parallel_size"] == 2
    assert found.algorithm.advantage_std == "global"
    assert found.algorithm.rollout_correction.mode == "off"
    assert not found.rollout.calculate_log_probs
    assert [term.name for term in found.reward.terms] == ["ocr"]
    assert (found.data.path, found.trainer.trackers) == ("data/train.txt", ("wandb",))
    assert f"  path: Qwen/Qwen-Image  # {OMNI}model.path\n" in text
    assert f"height: 512  # verl-omni's default of {OMNI}rollout.pipeline.height; default here: null" in text
    assert f"#   {OMNI}actor.fsdp_config.param_offload=True" in text
    assert "asymmetric k1 band" in text
    assert "unknown to flowcorr translate" not in text


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        ((f"{OMNI}actor.kl_loss_coef=0.04",), "actor.kl_coef", 0.0),
        ((f"{OMNI}actor.kl_loss_coef=0.04", f"{OMNI}actor.use_kl_loss=True"), "actor.kl_coef", 0.04),
        ((f"{OMNI}model.algorithm=grpo_guard",), "actor.loss_mode", "grpo_guard"),
        ((f"{OMNI}model.algorithm=flow_dppo",), "actor.kl_threshold", 1e-5),
        ((f"{OMNI}model.algorithm=mix_grpo",), "sampling.window_per", "group"),
        ((f"{OMNI}model.algorithm=dance_grpo",), "actor.loss_mode", "flow_grpo"),
        (
            (f"{OMNI}rollout.algo.sde_type=cps", f"{OMNI}rollout.algo.noise_level=0.8"),
            "sampling.cps_unscaled",
            True,
        ),
        ((f"{OMNI}rollout.algo.sde_window_size=null",), "sampling.sde_window_size", 9),
        ((f"{OMNI}rollout.algo.sde_contiguous=False",), "sampling.sde_window_layout", "scattered"),
        (
            (f"{OMNI}rollout.algo.sde_contiguous=False", f"{OMNI}rollout.algo.sde_window_size=5"),
            "sampling.sde_window_layout",
            "consecutive",
        ),
        (("algorithm.norm_adv_by_std_in_grpo=False",), "algorithm.advantage_std", "none"),
        (("algorithm.global_std=False",), "algorithm.advantage_std", "group"),
        (("data.val_files=data/test.parquet",), "data.heldout_path", "data/test.txt"),
        ((f"{OMNI}model.lora_rank=0", f"{OMNI}actor.fsdp_config.model_dtype=fp32"), "model.lora.rank", 0),
        ((f"{OMNI}actor.fsdp_config.model_dtype=fp32",), "actor.autocast", True),
        ((f"{OMNI}model.target_modules=\"['to_q','to_k']\"",), "model.lora.targets", ("to_q", "to_k")),
        ((f"{OMNI}actor.optim.lr_warmup_steps_ratio=0.1",), "actor.warmup_steps", 30),
        (
            (f"{OMNI}actor.optim.optimizer=AdamW8bit", f"{OMNI}actor.optim.optimizer_impl=torchao.optim"),
            "actor.optimizer",
            "adamw_8bit",
        ),
        (
            (f"{OMNI}actor.optim.lr_scheduler_type=cosine", f"{OMNI}actor.optim.min_lr_ratio=0.1"),
            "actor.lr_min_ratio",
            0.1,
        ),
        ((f"{OMNI}rollout.val_kwargs.pipeline.height=1024",), "trainer.eval_height", 1024),
        (("trainer.test_freq=-1", "trainer.save_freq=20"), "trainer.save_every", 20),
    ],
)
def test_keys_that_depend_on_others(omni, overrides, key, value):
    found, _ = omni(*overrides)
    for name in key.split("."):
        found = getattr(found, name)
    assert found == value


def test_the_correction_of_verl_omni(omni):
    correction = "algorithm.rollout_correction"
    bypass = (f"{correction}.bypass_mode=True", f"{correction}.rollout_is=sequence")
    found, _ = omni(
        *bypass, f"{correction}.rollout_rs=seq_mean_k1", f"{correction}.rollout_rs_threshold=0.5_2.0"
    )
    ours = found.algorithm.rollout_correction
    assert (ours.bypass_mode, ours.rollout_is, ours.rollout_rs) == (True, "sequence", "seq_mean_k1")
    assert ours.rollout_rs_threshold == (0.5, 2.0)
    assert ours.rollout_rs_denominator == "all"
    measured, _ = omni(f"{OMNI}rollout.calculate_log_probs=True")
    assert measured.algorithm.rollout_correction.mode == "decoupled"


def test_rewards_by_name(omni):
    found, text = omni(
        "+reward.reward_functions.a.path=score/jpeg_compressibility.py",
        "+reward.reward_functions.a.weight=0.5",
        "+reward.reward_functions.hps.path=score/hpsv3.py",
    )
    assert [(term.name, term.weight) for term in found.reward.terms] == [
        ("jpeg_compressibility", 0.5),
        ("my_rewards:hps", 1.0),
    ]
    assert "write my_rewards:NAME yourself" in text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.trainer_type=direct_preference", "is not policy_gradient"),
        (
            f"{OMNI}actor.diffusion_loss.loss_mode=diffusion_nft",
            "loss_mode=diffusion_nft has no equivalent here",
        ),
        (f"{OMNI}rollout.pipeline.num_frames=81", "makes videos"),
        (f"{OMNI}model.path=Qwen/Qwen-Image-Edit", "to no family that flowcorr knows: sd3"),
        (f"{OMNI}rollout.n=1", "gives an image no other to be compared with"),
        ("distillation.enabled=True", "learns from a teacher"),
        ("data.train_batch_size=8", "but must be at least that"),
    ],
)
def test_what_is_no_run_of_flowcorr_is_refused(omni, override, message):
    with pytest.raises(ConfigError, match=message):
        omni(override)
