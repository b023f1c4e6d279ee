"""Which configurations of Flow-Factory are refused."""

import pytest

from flowcorr.errors import ConfigError
from flowcorr.translate.flow_factory_checks import _ONLY
from flowcorr.translate.flow_factory_values import DEFAULTS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train__trainer_type": "nft"},
            "^train.trainer_type=nft has no equivalent here; flowcorr translates grpo",
        ),
        (
            {"train__trainer_type": "grpo-guard"},
            "^train.trainer_type=grpo-guard weighs no step by its length",
        ),
        (
            {"model__model_type": "wan2_t2v"},
            "^model.model_type=wan2_t2v belongs to no family that flowcorr knows: sd3",
        ),
        ({"model__model_type": "flux1"}, "is no model of model.model_type=flux1"),
        ({"train__kl_beta": 0.01}, "^train.kl_beta=0.01 weighs the distance of velocities or latents"),
        ({"train__ema_decay_schedule": "cosine"}, "^train.ema_decay_schedule=cosine has no equivalent here"),
        ({"train__ema_decay": 1.5}, r"^train.ema_decay=1.5 must be in \[0, 1\)"),
        ({"train__advantage_aggregation": "max"}, "^train.advantage_aggregation=max has no equivalent here"),
        (
            {"train__clip_range": [-1e-4, 2e-4]},
            r"^train.clip_range=\[-0.0001, 0.0002\] has no equivalent here",
        ),
        ({"train__adv_clip_range": "much"}, "^train.adv_clip_range=much has no equivalent here"),
        ({"scheduler__dynamics_type": "ODE"}, "^scheduler.dynamics_type=ODE has no equivalent here"),
        ({"scheduler__sde_steps": [1, 3]}, r"^scheduler.sde_steps=\[1, 3\] has gaps"),
        ({"scheduler__sde_steps": []}, r"^scheduler.sde_steps=\[\] has gaps"),
        ({"scheduler__sde_steps": ["a"]}, r"^scheduler.sde_steps=\['a'\] must be a list of whole numbers"),
        ({"scheduler__num_sde_steps": 0}, "^scheduler.num_sde_steps=0 must be a whole number of at least 1"),
        (
            {"data__sampler_type": "group_distributed"},
            "^data.sampler_type=group_distributed has no equivalent here",
        ),
        ({"model__target_modules": "all"}, "^model.target_modules=all adapts every linear layer"),
        (
            {"model__lora_rank": 0},
            "^model.lora_rank=0 makes no adapter; use at least 1, or finetune_type=full",
        ),
        (
            {"model__target_components": "transformer_2"},
            "^model.target_components=transformer_2 has no equivalent",
        ),
        (
            {"model__resume_type": "state"},
            "^model.resume_type=state has no equivalent here; flowcorr translates lora",
        ),
        (
            {"model__finetune_type": "full", "model__resume_path": "x"},
            "^model.resume_path is of a run that trains all",
        ),
        (
            {"model__finetune_type": "full", "model__master_weight_dtype": "fp16"},
            "^model.master_weight_dtype=fp16 with mixed_precision=bf16 has no equivalent here",
        ),
        # Names of older revisions, with which other defaults held.
        (
            {"scheduler__train_steps": [1, 2]},
            r"^scheduler.train_steps=\[1, 2\] is of .*; write scheduler.sde_steps",
        ),
        (
            {"scheduler__num_train_steps": 1},
            "^scheduler.num_train_steps=1 is .*; write scheduler.num_sde_steps",
        ),
        ({"mixed_precision": "fp8"}, "^mixed_precision='fp8' is unknown; choose from"),
        ({"num_processes": None}, "^num_processes is not set, which decides the prompts per step"),
        ({"num_processes": 0}, "^num_processes=0 must be at least 1"),
        (
            {"train__group_size": 1},
            "^train.group_size=1 gives an image no other to be compared with; use 2 or more",
        ),
        ({"train__num_inference_steps": 10**9}, "^train.num_inference_steps=1000000000 must be 2 to 1000"),
        (
            {"train__gradient_accumulation_steps": 3},
            "^train.gradient_accumulation_steps=3 splits a batch's SDE steps",
        ),
        ({"train__gradient_accumulation_steps": 8}, "use a multiple of 2 that divides 36"),
        (
            {
                "train__gradient_accumulation_steps": 2,
                "num_processes": 1,
                "train__unique_sample_num_per_epoch": 1,
            },
            "^3 updates of an epoch have 1 prompts, but flowcorr never splits a group",
        ),
        ({"train__resolution": "large"}, "^train.resolution=large must be a whole number, or a list of two"),
        ({"rewards": []}, r"^rewards=\[\] must name a reward_model"),
        ({"rewards": [{"name": "a"}]}, "^rewards={'name': 'a'} must be a section with a reward_model"),
        (
            {"rewards": [{"reward_model": "OCR", "weight": "x"}]},
            r"^rewards\[0\]\.weight='x' must be a number",
        ),
    ],
)
def test_what_is_no_run_of_flowcorr_is_refused(factory, changes, message):
    with pytest.raises(ConfigError, match=message):
        factory(**changes)


def test_a_default_has_an_equivalent():
    assert all(DEFAULTS[key] in values for key, values in _ONLY.items())
