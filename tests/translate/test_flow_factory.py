"""Flow-Factory's keys."""

import pytest

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
        ({"log__logging_backend": "swanlab"}, "trainer.trackers", ()),
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
        "rank: 0  # model.finetune_type, model.target_modules (there only weights whose names contain one of default; "
        "here all weights)\n" in text
    )
    assert "#   model.lora_rank=32\n" in text  # without effect
    _, text = factory(model__finetune_type="full", model__target_modules="all", train__ema_decay=0.0)
    assert "rank: 0  # model.finetune_type, model.target_modules\n" in text


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


def test_a_tracker_that_flowcorr_lacks_is_named(factory):
    assert (
        "trackers: []  # log.logging_backend (without swanlab)\n"
        in factory(log__logging_backend="swanlab")[1]
    )
    assert "trackers: []  # log.logging_backend\n" in factory(log__logging_backend="none")[1]


def test_rewards_of_evaluations_alone_are_gold(factory):
    clip = {"name": "c", "reward_model": "CLIP", "weight": 2}
    found, _ = factory(eval_rewards=[{"name": "pick", "reward_model": "PickScore"}, clip])
    assert [term.name for term in found.reward.gold] == ["my_rewards:CLIP"]
    assert found.reward.gold_every == "evaluation"
    found, text = factory(eval_rewards={"name": "pick", "reward_model": "PickScore"})
    assert found.reward.gold == ()
    assert "#   eval_rewards=" in text
