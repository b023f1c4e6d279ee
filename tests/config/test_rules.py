import pytest

from flowcorr.config import load_mapping
from flowcorr.errors import ConfigError

BYPASS = {"algorithm": {"rollout_correction": {"preset": "bypass_ppo_clip"}}}
REINFORCE = {"algorithm": {"rollout_correction": {"preset": "bypass_pg_is"}}}
DECOUPLED = {"algorithm": {"rollout_correction": {"preset": "decoupled_seq_is"}}}

QWEN = {"path": "some/pipeline", "family": "qwen_image"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**BYPASS, "rollout": {"calculate_log_probs": False}}, r"calculate_log_probs=False leaves bypass mode"),
        ({**DECOUPLED, "rollout": {"calculate_log_probs": False}}, r"=False leaves rollout correction"),
        ({"rollout": {"prompts_per_step": 2}, "actor": {"mini_batches": 3}}, r"mini_batches=3 does not fit .*=2"),
        ({**REINFORCE, "actor": {"loss_mode": "grpo_guard"}}, r"loss_mode='grpo_guard' contradicts .*reinforce"),
        ({"actor": {"loss_mode": "reinforce"}}, r"loss_mode='reinforce' is chosen by the correction"),
        ({**BYPASS, "actor": {"ratio_level": "trajectory_sum"}}, r"ratio_level='trajectory_sum' needs"),
    ],
)  # fmt: skip
def test_contradictions_between_sections(values, message):
    with pytest.raises(ConfigError, match=message):
        load_mapping(values)


@pytest.mark.parametrize(
    "values",
    [
        {"rollout": {"calculate_log_probs": False}},
        {**DECOUPLED, "actor": {"ratio_level": "trajectory_mean"}},
        {
            "actor": {"ratio_level": "trajectory_mean"},
            "algorithm": {"rollout_correction": {"preset": "bypass_ppo_clip", "bypass_scope": "trajectory"}},
        },
        {"algorithm": {"rollout_correction": {"bypass_mode": True, "rollout_is": "token"}}},
        {"model": {"path": "some/pipeline"}, "sampling": {"true_cfg_scale": 4.0}},
        {"sampling": {"guidance_scale": 4.0, "negative_prompt": "blurred"}},
        {"actor": {"loss_mode": "flow_dppo", "kl_threshold": 1e-5}},
        {"actor": {"loss_mode": "importance_cap", "importance_cap": 1.1}},
        {"actor": {"kl_threshold": 1e-6}},
    ],
)
def test_sound_combinations_are_silent(values):
    load_mapping(values)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"sampling": {"true_cfg_scale": 4.0}}, "sampling.true_cfg_scale=4.0"),
        ({"model": QWEN, "sampling": {"guidance_scale": 4.0}}, "sampling.guidance_scale=4.0"),
        ({"sampling": {"negative_prompt": "blurred"}}, "sampling.negative_prompt=blurred"),
        ({"sampling": {"cps_unscaled": True}}, "sampling.cps_unscaled=True"),
        ({"actor": {"kl_threshold": 1e-3}}, "actor.kl_threshold=0.001"),
        ({"actor": {"importance_cap": 2.0}}, "actor.importance_cap=2.0"),
        ({"actor": {"kl_weighting": "flow_grpo"}}, "actor.kl_weighting=flow_grpo"),
        ({"actor": {"loss_mode": "flow_dppo", "clip_ratio": 0.1}}, "actor.clip_ratio=0.1"),
        ({**REINFORCE, "actor": {"clip_ratio": 0.1}}, "actor.clip_ratio=0.1"),
        ({"model": {"lora": {"rank": 0, "alpha": 8}}}, "model.lora.alpha=8.0"),
        ({"data": {"heldout_fraction": 0.5}}, "data.heldout_fraction=0.5"),
        ({"data": {"path": "prompts.txt", "num_train": 5}}, "data.num_train=5"),
    ],
)  # fmt: skip
def test_keys_without_effect_warn(values, key):
    with pytest.warns(UserWarning, match="has no effect") as caught:
        load_mapping(values)
    assert [str(warning.message).split(" has no effect")[0] for warning in caught] == [key]
