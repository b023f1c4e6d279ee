"""Configurations of verl-omni that flowcorr cannot run."""

import pytest

from flowcorr.errors import ConfigError
from flowcorr.translate.verl_omni import TABLE
from flowcorr.translate.verl_omni_checks import _OF_ADAPTERS, _ONLY
from tests.translate.configs import OMNI

OPTIM = f"{OMNI}actor.optim"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("algorithm.trainer_type=direct_preference",),
            "direct_preference has no equivalent here; flowcorr has pol",
        ),
        (("algorithm.adv_estimator=dual_grpo",), "^algorithm.adv_estimator=dual_grpo has no equivalent here"),
        (("algorithm.sample_source=offline",), "^algorithm.sample_source=offline has no equivalent here"),
        ((f"{OMNI}model.algorithm=dual_grpo",), "model.algorithm=dual_grpo has no equivalent here"),
        (
            (f"{OMNI}actor.diffusion_loss.loss_mode=diffusion_nft",),
            "loss_mode=diffusion_nft has no equivalent here",
        ),
        ((f"{OMNI}actor.use_distill_loss=True",), "use_distill_loss=True has no equivalent here"),
        (("distillation.enabled=True",), "^distillation.enabled=True has no equivalent here"),
        (
            (f"{OMNI}rollout.algo.sample_strategy=progressive",),
            "progressive has no equivalent here; flowcorr has random",
        ),
        (
            (f"{OPTIM}.optimizer=Muon",),
            "optimizer=Muon has no equivalent here; flowcorr has AdamW, AdamW8bit, adamw",
        ),
        ((f"{OPTIM}.num_cycles=1",), "num_cycles=1.0 has no equivalent here"),
        (
            (f"+{OPTIM}.override_optimizer_config.amsgrad=true",),
            "override_optimizer_config={'amsgrad': True} has no",
        ),
        (("reward.aggregation=product",), "^reward.aggregation=product has no equivalent here"),
        (("reward.reward_manager.name=Mine",), "^reward.reward_manager.name=Mine has no equivalent here"),
        ((f"{OMNI}model.lora_init_weights=pissa",), "lora_init_weights=pissa has no equivalent here"),
        ((f"{OMNI}model.exclude_modules=img_in",), "exclude_modules=img_in has no equivalent here"),
        (("diffusion/model_engine=megatron",), "^diffusion/model_engine=megatron has no equivalent here"),
        ((f"{OMNI}rollout.pipeline.num_frames=81",), "num_frames=81 makes videos"),
        (
            (f"{OMNI}model.path=Qwen/Qwen-Image-Edit",),
            "Qwen-Image-Edit names no model of the families that flowcorr",
        ),
        ((f"{OMNI}model.path=black-forest-labs/FLUX.1-dev",), "FLUX.1-dev names no model of the families"),
        ((f"{OMNI}rollout.name=null",), "rollout.name is not set, which verl-omni needs"),
        ((f"{OMNI}rollout.n=1",), "gives an image no other to be compared with"),
        (
            ("trainer.total_training_steps=null",),
            r"^trainer.total_training_steps is not set, .*give it: total_epochs=30",
        ),
        (
            ("data.train_batch_size=8",),
            r"^data.train_batch_size=8 must be a multiple of .*ppo_mini_batch_size=16",
        ),
        (("data.train_batch_size=24",), r"^data.train_batch_size=24 must be a multiple of"),
        ((f"{OMNI}actor.ppo_mini_batch_size=0",), "ppo_mini_batch_size=0 must be at least 1"),
        (
            (f"{OMNI}model.algorithm=flow_dppo", f"{OMNI}actor.diffusion_loss.add_kl_coefficient=False"),
            "bounds a squared distance",
        ),
        (
            (f"{OMNI}model.algorithm=grpo_guard", f"{OMNI}rollout.algo.sde_type=cps"),
            "sde_type=cps gives grpo_guard a std multiplied by sqrt",
        ),
        (
            (f"{OMNI}model.algorithm=flow_dppo", f"{OMNI}rollout.algo.sde_type=dance_sde"),
            "sde_type=dance_sde gives flow_dppo a std",
        ),
        (
            ("trainer.use_v1=True", "trainer.v1.trainer_mode=separate_async"),
            "^trainer.v1.separate_async.parameter_sync_step=4 counts as many batches as one step",
        ),
        (
            (f"{OMNI}actor.strategy=veomni", f"{OPTIM}.lr_scheduler_type=cosine"),
            "lr_scheduler_type=cosine falls otherwise with VeOmni than here",
        ),
        (
            (f"{OPTIM}.lr_scheduler_type=linear",),
            "lr_scheduler_type=linear is none of verl-omni's schedules with FSDP: constant, cosine",
        ),
        ((f"{OPTIM}.lr_warmup_steps_ratio=.nan",), "lr_warmup_steps_ratio=nan must be a finite number"),
        ((f"{OMNI}actor.fsdp_config.dtype=fp16",), "dtype=fp16 with weights of bfloat16 has no equivalent"),
    ],
)
def test_what_is_no_run_of_flowcorr_is_refused(omni, overrides, message):
    with pytest.raises(ConfigError, match=message):
        omni(*overrides)


def test_keys_of_adapters_count_with_an_adapter_only(omni):
    found, _ = omni(
        f"{OMNI}model.lora_rank=0",
        f"{OMNI}actor.fsdp_config.model_dtype=fp32",
        f"{OMNI}model.lora_init_weights=pissa",
        f"{OMNI}model.target_modules=all-linear",
    )
    assert found.model.lora.rank == 0


def test_a_default_has_an_equivalent():
    assert all(TABLE.defaults[key] in values for key, values in {**_ONLY, **_OF_ADAPTERS}.items())
