"""verl-omni's keys."""

import pytest

from tests.translate.configs import OMNI, value_at

OPTIM = f"{OMNI}actor.optim"


def test_verl_omnis_values_and_defaults(omni):
    found, text = omni()
    assert (found.model.path, found.model.dtype, found.model.lora.rank) == ("Qwen/Qwen-Image", "bfloat16", 64)
    assert (found.model.lora.targets, found.model.lora.dtype) == (("to_q", "to_k"), "float32")
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
    assert [(term.name, term.options["model"]) for term in found.reward.terms] == [
        ("vlm_judge", "judges/vision")
    ]
    assert (found.data.path, found.trainer.trackers) == ("data/train.txt", ("wandb",))
    assert found.data.num_heldout == 100_000
    assert f"  path: Qwen/Qwen-Image  # {OMNI}model.path\n" in text
    assert f"height: 512  # {OMNI}rollout.pipeline.height" in text
    assert f"#   {OMNI}actor.fsdp_config.param_offload=True" in omni(all_keys=True)[1]
    assert f"{OMNI}actor.fsdp_config 1" not in text
    assert f"{OMNI}actor" in text
    assert "asymmetric k1 band" in text
    assert "unknown to flowcorr translate" not in text


KL = (f"{OMNI}actor.kl_loss_coef=0.04", f"{OMNI}actor.use_kl_loss=True")
CPS = (f"{OMNI}rollout.algo.sde_type=cps", f"{OMNI}rollout.algo.noise_level=0.8")


def test_a_run_without_correction_measures_its_gap_from_the_first_step(omni):
    found, _ = omni()
    assert found.algorithm.rollout_correction.preset == "disabled"
    assert found.rollout.calculate_log_probs


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        ((f"{OMNI}actor.kl_loss_coef=0.04",), "actor.kl_coef", 0.0),
        ((f"{OMNI}actor.kl_loss_coef=0.04", f"{OMNI}actor.use_kl_loss=True"), "actor.kl_coef", 0.04),
        # Its KL of sde steps is divided by the length of a step; where the std is that of the whole step, it is exact.
        ((*KL, f"{OMNI}rollout.algo.sde_type=sde"), "actor.kl_weighting", "flow_grpo"),
        ((*KL, *CPS), "actor.kl_weighting", "exact"),
        ((*KL, f"{OMNI}rollout.algo.sde_type=dance_sde"), "actor.kl_weighting", "exact"),
        ((f"{OMNI}actor.diffusion_loss.adv_clip_max=3",), "actor.adv_clip_max", 3),
        ((f"{OMNI}model.algorithm=flow_dppo",), "actor.adv_clip_max", 1e6),  # it clamps none
        ((f"{OMNI}model.algorithm=grpo_guard",), "actor.loss_mode", "grpo_guard"),
        ((f"{OMNI}model.algorithm=flow_dppo",), "actor.kl_threshold", 1e-5),
        ((f"{OMNI}model.algorithm=mix_grpo",), "sampling.window_per", "group"),
        ((f"{OMNI}model.algorithm=dance_grpo",), "actor.loss_mode", "flow_grpo"),
        (CPS, "sampling.cps_unscaled", True),
        ((f"{OMNI}rollout.algo.sde_window_size=null",), "sampling.sde_window_size", 9),
        # Only its pipeline of LTX-2 reads it.
        ((f"{OMNI}rollout.algo.sde_contiguous=False",), "sampling.sde_window_layout", "consecutive"),
        ((f"{OMNI}rollout.pipeline.true_cfg_scale=4",), "sampling.true_cfg_scale", 4),
        ((f"{OMNI}rollout.pipeline.true_cfg_scale=4",), "sampling.negative_prompt", " "),
        # Its pipeline of SD3 takes the empty text, if the data has none.
        (
            (f"{OMNI}model.path=a/stable-diffusion-3.5-medium", f"{OMNI}rollout.pipeline.guidance_scale=4"),
            "sampling.negative_prompt",
            "",
        ),
        ((f"{OPTIM}.grad_clip=0.5",), "actor.grad_clip", 0.5),
        ((f"{OPTIM}.grad_clip=0.5", f"{OPTIM}.clip_grad=2"), "actor.grad_clip", 0.5),
        ((f"{OPTIM}.clip_grad=2",), "actor.grad_clip", 2),
        ((f"{OMNI}rollout.pipeline.guidance_scale=4",), "sampling.guidance_scale", 1),
        (
            (f"{OMNI}model.path=a/stable-diffusion-3.5-medium", f"{OMNI}rollout.pipeline.guidance_scale=4"),
            "sampling.guidance_scale",
            4,
        ),
        (
            (f"{OMNI}model.path=a/stable-diffusion-3.5-medium", f"{OMNI}rollout.pipeline.true_cfg_scale=4"),
            "sampling.true_cfg_scale",
            1,
        ),
        (("algorithm.norm_adv_by_std_in_grpo=False",), "algorithm.advantage_std", "none"),
        (("algorithm.global_std=False",), "algorithm.advantage_std", "group"),
        (("data.val_files=data/other.parquet",), "data.heldout_path", "data/other.txt"),
        (("data.val_max_samples=32",), "data.num_heldout", 32),
        ((f"{OMNI}model.lora_rank=0", f"{OMNI}actor.fsdp_config.model_dtype=fp32"), "model.lora.rank", 0),
        ((f"{OMNI}actor.fsdp_config.model_dtype=fp32",), "actor.autocast", True),
        (
            (f"{OPTIM}.optimizer=AdamW8bit", f"{OPTIM}.optimizer_impl=torchao.optim"),
            "actor.optimizer",
            "adamw_8bit",
        ),
        ((f"{OPTIM}.lr_scheduler_type=cosine", f"{OPTIM}.min_lr_ratio=0.1"), "actor.lr_min_ratio", 0.1),
        ((f"{OMNI}rollout.val_kwargs.pipeline.height=1024",), "trainer.eval_height", 1024),
        (("trainer.save_freq=20",), "trainer.save_every", 20),
        (("trainer.save_freq=-1",), "trainer.save_every", 300),
        (("trainer.test_freq=-1",), "trainer.eval_every", 0),
        (("trainer.max_actor_ckpt_to_keep=3",), "trainer.keep_checkpoints", 3),
        ((f"{OMNI}rollout.quantization=fp8",), "rollout.engine.quantization", "fp8"),
    ],
)
def test_keys_that_depend_on_others(omni, overrides, key, value):
    found, _ = omni(*overrides)
    if key == "rollout.engine.quantization":
        assert found.rollout.engine["quantization"] == value
    else:
        assert value_at(found, key) == value


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
