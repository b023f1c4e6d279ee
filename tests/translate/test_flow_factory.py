"""Flow-Factory's keys."""

import pytest

from flowcorr.errors import ConfigError
from tests.translate.configs import value_at


def test_flow_factorys_values_and_defaults(factory):
    found, text = factory()
    assert (found.model.path, found.model.family) == ("stabilityai/stable-diffusion-3.5-medium", "sd3")
    assert (found.model.dtype, found.rollout.dtype, found.model.max_sequence_length) == (
        "bfloat16",
        "bfloat16",
        256,
    )
    assert (found.model.lora.rank, found.model.lora.alpha, found.model.lora.dtype) == (32, 64, "float32")
    assert len(found.model.lora.targets) == 8
    assert (found.sampling.sde_type, found.sampling.noise_level) == ("sde", 0.8)
    assert (found.sampling.sde_window_size, found.sampling.sde_window_range) == (2, (1, 4))
    assert (found.sampling.sde_window_layout, found.sampling.guidance_scale) == ("scattered", 4.5)
    assert (found.sampling.height, found.trainer.eval_width) == (512, 512)
    assert (found.rollout.prompts_per_step, found.rollout.n, found.actor.mini_batches) == (48, 24, 2)
    assert (found.actor.lr, found.actor.betas, found.actor.weight_decay) == (1e-5, (0.9, 0.999), 1e-4)
    assert (found.actor.clip_ratio, found.actor.adv_clip_max) == (1e-4, 5)
    assert (found.actor.ema, found.actor.epochs) == (0.986916, 1)
    assert found.algorithm.rollout_correction.mode == "bypass"
    assert found.algorithm.advantage_std == "global"
    assert [(term.name, term.weight, term.normalize) for term in found.reward.terms] == [
        ("pickscore", 1, "none")
    ]
    assert (found.data.path, found.data.heldout_path) == ("dataset/signs/train.txt", "dataset/signs/test.txt")
    assert (found.trainer.total_steps, found.trainer.eval_every, found.trainer.seed) == (100_000, 20, 42)
    assert found.trainer.trackers == ("wandb",)
    assert "rollout.n" not in text
    assert "n: 24  # train.group_size" in text
    assert "#   data.max_dataset_size=1000" in text
    assert "(without rewards[0].batch_size)" in text
    assert "unknown to flowcorr translate" not in text


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        (
            {"train__advantage_aggregation": "gdpo", "train__global_std": False},
            "algorithm.advantage_std",
            "global",
        ),
        ({"train__global_std": False}, "algorithm.advantage_std", "group"),
        ({"scheduler__dynamics_type": "Dance-SDE"}, "sampling.sde_type", "dance_sde"),
        ({"scheduler__dynamics_type": "CPS"}, "sampling.cps_unscaled", True),
        ({"train__clip_range": [-2e-4, 2e-4]}, "actor.clip_ratio", 2e-4),
        ({"train__resolution": [384, 512]}, "sampling.width", 512),
        ({"train__height": 256}, "sampling.height", 256),
        ({"train__max_epochs": 30}, "trainer.total_steps", 30),
        ({"train__max_epochs": -1}, "trainer.total_steps", 100_000),
        ({"train__ema_decay": 0}, "actor.ema", None),
        ({"train__adam_betas": [0.8, 0.9]}, "actor.betas", (0.8, 0.9)),
        ({"log__save_freq": 0, "train__max_epochs": 30}, "trainer.save_every", 30),
        ({"eval__eval_freq": 0}, "trainer.eval_every", 0),
        ({"log__logging_backend": "trackio"}, "trainer.trackers", ()),
        ({"log__logging_backend": None, "logging_backend": "wandb"}, "trainer.trackers", ("wandb",)),
        ({"model__lora_alpha": 8}, "model.lora.alpha", 8),
        ({"model__attn_backend": "native"}, "model.attention", "native"),
    ],
)
def test_keys_that_depend_on_others(factory, changes, key, value):
    found, _ = factory(**changes)
    assert value_at(found, key) == value


def test_gdpo_normalizes_each_reward(factory):
    found, text = factory(
        train__advantage_aggregation="gdpo",
        rewards=[
            {"name": "a", "reward_model": "PickScore", "weight": 0.5},
            {"name": "b", "reward_model": "my_package.rewards.Hps", "aspects": ["x"], "device": "cuda"},
        ],
    )
    assert [(term.name, term.weight, term.normalize, dict(term.options)) for term in found.reward.terms] == [
        ("pickscore", 0.5, "group", {}),
        ("my_rewards:Hps", 1, "group", {"aspects": ["x"]}),
    ]
    assert "write my_rewards:NAME yourself" in text
    assert "gdpo divides each reward by its group's std" in text


def test_all_weights_of_float32_are_computed_in_autocast(factory):
    found, text = factory(model__finetune_type="full", train__ema_decay=0.0)
    assert (found.model.lora.rank, found.model.dtype, found.actor.autocast) == (0, "float32", True)
    assert (
        "rank: 0  # model.finetune_type, model.target_modules (there only weights whose names contain" in text
    )


def test_sigmas_of_sd3_are_spaced_otherwise(factory):
    _, text = factory(train__num_inference_steps=10, eval__num_inference_steps=40)
    assert (
        "  num_inference_steps: 10  # train.num_inference_steps (its N sigmas are linspace(1, 1 / N, N)"
        in text
    )
    assert "  eval_num_inference_steps: 40  # eval.num_inference_steps (its N sigmas are" in text
    _, text = factory(model__model_name_or_path="black-forest-labs/FLUX.1-dev", model__model_type="flux1")
    assert "its N sigmas" not in text


def test_a_width_without_effect_is_named(factory):
    found, text = factory(train__width=1024, eval__width=256)
    assert (found.sampling.width, found.trainer.eval_width) == (512, 512)
    assert "width of the resolution, whatever it says):\n#   eval.width=256\n#   train.width=1024\n" in text


@pytest.mark.parametrize(
    ("model", "negative", "tokens"),
    [
        (("stabilityai/stable-diffusion-3.5-medium", "sd3-5"), "blurry", 256),
        (("black-forest-labs/FLUX.1-dev", "flux1"), "", 512),
        (("black-forest-labs/FLUX.2-klein-base-4B", "flux2-klein"), "blurry", 128),
        (("Qwen/Qwen-Image", "qwen-image"), "blurry", 128),
        (("Tongyi-MAI/Z-Image", "z-image"), "blurry", 128),
    ],
)
def test_keys_that_it_hands_on_to_the_text_encoder_are_carried_over_where_it_takes_them(
    factory, model, negative, tokens
):
    path, kind = model
    keys = {"train__negative_prompt": "blurry", "train__max_sequence_length": 128}
    found, text = factory(model__model_name_or_path=path, model__model_type=kind, **keys)
    assert (found.sampling.negative_prompt, found.model.max_sequence_length) == (negative, tokens)
    assert "unknown to flowcorr translate" not in text
    without, _ = factory(model__model_name_or_path=path, model__model_type=kind)
    assert without.sampling.negative_prompt == ""
    assert without.model.max_sequence_length == {"sd3-5": 256, "qwen-image": 1024}.get(kind, 512)


def test_a_negative_prompt_without_guidance_is_left_out(factory):
    found, _ = factory(train__negative_prompt="blurry", train__guidance_scale=1.0)
    assert found.sampling.negative_prompt == ""


def test_keys_that_its_pipelines_may_take_are_named(factory):
    _, text = factory(train__joint_attention_kwargs={"scale": 0.5}, eval__true_cfg_scale=4.0)
    assert (
        "(unknown to flowcorr translate):\n#   eval.true_cfg_scale=4.0\n#   train.joint_attention_kwargs.scale=0.5\n"
        in text
    )


def test_a_tracker_that_flowcorr_lacks_is_named(factory):
    assert (
        "trackers: []  # log.logging_backend (without trackio)\n"
        in factory(log__logging_backend="trackio")[1]
    )
    assert "trackers: []  # log.logging_backend\n" in factory(log__logging_backend="none")[1]


def test_rewards_of_evaluations_alone_are_gold(factory):
    clip = {"name": "c", "reward_model": "CLIP", "weight": 2}
    found, _ = factory(eval_rewards=[{"name": "pick", "reward_model": "PickScore"}, clip])
    assert [term.name for term in found.reward.gold] == ["my_rewards:CLIP"]
    assert found.reward.gold_every == "evaluation"
    found, _ = factory(eval_rewards={"name": "pick", "reward_model": "PickScore"})
    assert found.reward.gold == ()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (  # its recipes bring other values without an equivalent
            {"train__trainer_type": "nft", "train__ema_decay_schedule": "piecewise_linear"},
            "^train.trainer_type=nft .* grpo ",
        ),
        (
            {"train__trainer_type": "grpo-guard"},
            "^train.trainer_type=grpo-guard .*grpo_guard ",
        ),
        (
            {"model__model_type": "wan2_t2v"},
            "^model.model_type=wan2_t2v .* recipe wan_ocr_lora,",
        ),
        (
            {"model__model_type": "ltx2_t2av"},
            "^model.model_type=ltx2_t2av .*: sd3-5, ",
        ),
        ({"model__model_type": "flux1"}, "^model.model_name_or_path=.* model.model_type=flux1 "),
        ({"train__kl_beta": 0.01}, "^train.kl_beta=0.01 .*actor.kl_coef "),
        ({"train__ema_decay": 1.5}, r"^train.ema_decay=1.5 .* \[0, 1\)"),
        (
            {"train__clip_range": [-1e-4, 2e-4]},
            r"^train.clip_range=\[-0.0001, 0.0002\] .*symmetric",
        ),
        ({"train__adv_clip_range": "much"}, "^train.adv_clip_range='much' .* number"),
        ({"scheduler__sde_steps": [1, 3]}, r"^scheduler.sde_steps=\[1, 3\] .*gaps"),
        ({"scheduler__sde_steps": []}, r"^scheduler.sde_steps=\[\] .*gaps"),
        ({"scheduler__sde_steps": ["a"]}, r"^scheduler.sde_steps=\['a'\] .*whole numbers"),
        ({"scheduler__num_sde_steps": 0}, "^scheduler.num_sde_steps=0 .* 1, or null"),
        ({"model__target_modules": "all"}, "^model.target_modules=all .* list "),
        (
            {"model__lora_rank": 0},
            "^model.lora_rank=0 .* 1, or finetune_type=full ",
        ),
        (
            {"model__finetune_type": "full", "model__resume_path": "x"},
            "^model.resume_path .* all weights; .*model.path ",
        ),
        (
            {"model__finetune_type": "full", "model__master_weight_dtype": "fp16"},
            "^model.master_weight_dtype=fp16 with mixed_precision=bf16 ",
        ),
        # Names of older revisions, with which other defaults held.
        (
            {"scheduler__train_steps": [1, 2]},
            r"^scheduler.train_steps=\[1, 2\] .* scheduler.sde_steps,",
        ),
        (
            {"scheduler__num_train_steps": 1},
            "^scheduler.num_train_steps=1 .* scheduler.num_sde_steps,",
        ),
        ({"mixed_precision": "fp8"}, "^mixed_precision='fp8' .* no, fp32, "),
        ({"num_processes": None}, "^num_processes is not set, "),
        ({"num_processes": 0}, "^num_processes=0 .* 1 "),
        (
            {"train__group_size": 1},
            "^train.group_size=1 .* 2 or more",
        ),
        ({"train__num_inference_steps": 10**9}, "^train.num_inference_steps=1000000000 .* 2 to 1000 "),
        (
            {"train__gradient_accumulation_steps": 3},
            "^train.gradient_accumulation_steps=3 .* 2 that divides 36 ",
        ),
        (
            {"train__gradient_accumulation_steps": 8},
            "^train.gradient_accumulation_steps=8 .* 2 that divides 36 ",
        ),
        (
            {
                "train__gradient_accumulation_steps": 2,
                "num_processes": 1,
                "train__unique_sample_num_per_epoch": 1,
            },
            "^3 updates .* 1 prompts, ",
        ),
        ({"train__resolution": "large"}, "^train.resolution='large' .* whole number"),
        ({"rewards": []}, r"^rewards=\[\] .*reward_model"),
        ({"rewards": [{"name": "a"}]}, "^rewards={'name': 'a'} .*reward_model"),
        (
            {"rewards": [{"reward_model": "OCR", "weight": "x"}]},
            r"^rewards\[0\]\.weight='x' .* number",
        ),
    ],
)
def test_what_is_no_run_of_flowcorr_is_refused(factory, changes, named):
    with pytest.raises(ConfigError, match=named):
        factory(**changes)


KLEIN = {
    "model__model_type": "flux2-klein",
    "model__model_name_or_path": "black-forest-labs/FLUX.2-klein-base-4B",
    "train__condition_image_size": 1024,
}


def test_the_size_and_the_folder_of_reference_images_are_named(factory):
    text = factory(**KLEIN)[1]
    assert "#   train.condition_image_size=1024" in text
    assert "lie in dataset/signs/images/ there" in text
    text = factory(**KLEIN, data__image_dir="photos")[1]
    assert "lie in photos there" in text
    assert "#   data.image_dir=photos" in text
    text = factory(train__condition_image_size=1024)[1]  # SD3.5 takes none
    assert "condition_image_size=1024" not in text
    assert "images/" not in text


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "#   eval.guidance_scale=3.5, Flow-Factory's default"),
        ({"eval__guidance_scale": 4.5}, None),
        ({"eval__guidance_scale": 1.0}, "#   eval.guidance_scale=1.0"),
        ({"eval__seed": 42}, None),
        ({"eval__seed": 7}, "#   eval.seed=7"),
        ({"train__time_shift": 3.0}, "#   train.time_shift=3.0"),
        ({"data__prefix": "a photo of "}, "#   data.prefix=a photo of "),
        ({"model__use_dora": True}, "#   model.use_dora=True"),
        ({"log__unheard_of": 0}, "#   log.unheard_of=0"),
    ],
)
def test_what_may_change_training_or_evaluations_is_named(factory, changes, line):
    changes = {"eval__guidance_scale": 4.5, **changes} if changes else changes
    text = factory(**changes)[1]
    listed = [entry for entry in text.splitlines() if entry.startswith("#   ")]
    names = [key.replace("__", ".") for key in changes if changes[key] != 4.5 or line] or [
        "eval.guidance_scale"
    ]
    if line is None:
        assert not any(name in entry for name in names for entry in listed)
    else:
        assert line.rstrip() in listed
