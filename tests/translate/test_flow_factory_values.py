"""What Flow-Factory's keys mean together, and what flowcorr cannot run."""

import pytest

from flowcorr.errors import ConfigError
from flowcorr.translate.flow_factory_values import _MODELS, _ONLY, DEFAULTS, batches, prompts, updates
from tests.translate.configs import FACTORY

ZERO = {"num_processes": 8, "rewards": FACTORY["rewards"]}


def got(**changes):
    """`get` of the values of a configuration, by the defaults and changes of `train`."""
    values = {**DEFAULTS, **ZERO, **{f"train.{key}": value for key, value in changes.items()}}
    return lambda key: values[key]


@pytest.mark.parametrize(
    ("ranks", "batch", "group", "wanted", "sampler", "found"),
    [
        (8, 8, 24, 48, "auto", 48),
        (8, 8, 18, 64, "auto", 64),  # 64 images of a round, so a multiple of 32 prompts, of two updates 64
        (6, 1, 16, 48, "auto", 48),
        (8, 1, 16, 50, "auto", 50),  # not spread evenly over the ranks, but the images are
        (8, 1, 16, 50, "group_contiguous", 56),
        (8, 8, 24, 50, "distributed_k_repeat", 64),
        (1, 1, 2, 1, "auto", 2),  # a prompt for each of two updates
    ],
)
def test_prompts_are_rounded_up_as_there(ranks, batch, group, wanted, sampler, found):
    get = got(per_device_batch_size=batch, group_size=group, unique_sample_num_per_epoch=wanted)
    values = {"num_processes": ranks, "data.sampler_type": sampler}
    assert prompts(lambda key: values.get(key, get(key))) == found


@pytest.mark.parametrize("key", ["rewards", "eval_rewards"])
def test_rewards_that_are_scored_while_it_samples_keep_groups_on_a_rank(key):
    get = got(per_device_batch_size=1, group_size=16, unique_sample_num_per_epoch=50)
    values = {
        key: [{"reward_model": "a.B", "async_reward": True}],
        "data.sampler_type": "distributed_k_repeat",
    }
    assert prompts(lambda name: values.get(name, get(name))) == 56
    del values[key]
    assert prompts(lambda name: values.get(name, get(name))) == 50


def test_updates_by_backward_passes():
    get = got(
        per_device_batch_size=8,
        group_size=24,
        unique_sample_num_per_epoch=48,
        gradient_accumulation_steps=6,
        num_inference_steps=10,
    )
    assert (batches(get), updates(get)) == (18, 3)


@pytest.mark.parametrize(
    ("path", "kind", "key", "value"),
    [
        ("Qwen/Qwen-Image", "qwen-image", "true_cfg_scale", 4.5),
        ("Tongyi-MAI/Z-Image", "z-image", "guidance_scale", 5.5),
        ("black-forest-labs/FLUX.1-dev", "flux1", "guidance_scale", 4.5),
        ("black-forest-labs/FLUX.2-klein-base-4B", "FLUX2-klein", "guidance_scale", 4.5),
        ("a/local/folder", "sd3-5", "guidance_scale", 4.5),
    ],
)
def test_guidance_of_a_family(factory, path, kind, key, value):
    found, _ = factory(model__model_name_or_path=path, model__model_type=kind)
    assert getattr(found.sampling, key) == value
    assert found.model.lora.targets == (*_MODELS[kind.lower()].attention, *_MODELS[kind.lower()].others)


@pytest.mark.parametrize(("given", "targets"), [("to_q", ("to_q",)), (["to_q", "to_k"], ("to_q", "to_k"))])
def test_layers_by_name(factory, given, targets):
    assert factory(model__target_modules=given)[0].model.lora.targets == targets


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


def test_a_file_of_prompts_as_it_lies_there(factory, tmp_path):
    (tmp_path / "train.jsonl").write_text("", encoding="utf-8")
    found, _ = factory(data__dataset_dir=str(tmp_path))
    assert (found.data.path, found.data.heldout_path) == (f"{tmp_path}/train.jsonl", f"{tmp_path}/test.txt")


def test_a_default_has_an_equivalent():
    assert all(DEFAULTS[key] in values for key, values in _ONLY.items())
