import re
import warnings

import pytest

from flowcorr.config import load, load_mapping
from flowcorr.errors import ConfigError

BYPASS = {"algorithm": {"rollout_correction": {"preset": "bypass_ppo_clip"}}}
AUTO = {"algorithm": {"rollout_correction": {"bypass_mode": "auto"}}}
REINFORCE = {"algorithm": {"rollout_correction": {"preset": "bypass_pg_is"}}}
DECOUPLED = {"algorithm": {"rollout_correction": {"preset": "decoupled_seq_is"}}}
UNMEASURED = {"algorithm": {"rollout_correction": None}}

ON_RAY = {
    "rollout": {
        "placement": "ray",
        "num_workers": 2,
        "worker_resources": {"num_gpus": 0.5, "rack": 1},
        "max_staleness": 1,
        "scheduling": "0" * 56,
    }
}
STALE = {"rollout": {"staleness": 1, "drift_every": 5}}
SHARDED = {"actor": {"fsdp": True}, "model": {"lora": {"rank": 0}}}
QWEN = {"path": "some/pipeline", "family": "qwen_image"}
NF4, INT8 = {"model": {"quantization": "nf4"}}, {"model": {"quantization": "int8"}}
OMNI = {"rollout": {"name": "vllm_omni"}}
MERGED = {"rollout": {"name": "vllm_omni", "engine": {"weight_sync": "merged"}}}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({**BYPASS, "rollout": {"calculate_log_probs": False}}, "calculate_log_probs=False .*bypass mode"),
        ({**DECOUPLED, "rollout": {"calculate_log_probs": False}}, "calculate_log_probs=False .*rollout correction"),
        ({"rollout": {"prompts_per_step": 2}, "actor": {"mini_batches": 3}}, "mini_batches=3 .*prompts_per_step=2: "),
        *(
            (
                {"rollout": {"name": "vllm_omni", "engine": {key: value}}},
                rf"rollout\.engine\.{key}={value!r} .* 1;",
            )
            for key, value in (
                *(("tensor_parallel_size", 0), ("tensor_parallel_size", "two"), ("max_num_seqs", 0)),
                *(("ulysses_degree", 1.5), ("num_gpus", True)),
            )
        ),
        ({**REINFORCE, "actor": {"loss_mode": "grpo_guard"}}, "loss_mode='grpo_guard' .*loss_type='reinforce'"),
        ({"actor": {"loss_options": {"width": 1}}}, r"loss_options=\{'width': 1\} .*'flow_grpo': .*'width'"),
        ({"actor": {"loss_mode": "reinforce"}}, "loss_mode='reinforce' .*loss_type=reinforce "),
        ({**BYPASS, "actor": {"ratio_level": "trajectory_sum"}}, "ratio_level='trajectory_sum' .*scope=trajectory"),
        ({**AUTO, "actor": {"loss_mode": "flow_dppo"}}, "bypass_mode='auto' .*loss_mode='flow_dppo' "),
        (
            {**AUTO, "actor": {"loss_mode": "importance_cap", "importance_cap": 1.0}},
            r"bypass_mode='auto' .*actor\.importance_cap=1\.0 ",
        ),
        ({**AUTO, **STALE, "actor": {"old_policy": "behaviour"}}, "='auto' .*old_policy='behaviour' .*: current"),
        ({**AUTO, "actor": {"ratio_level": "trajectory_sum"}}, "ratio_level='trajectory_sum' .*scope=trajectory"),
        ({"actor": {"clip_ratio": [0.1, 0.1, 0.1]}}, r"clip_ratio=.* 3 values; .*num_inference_steps=10, .* 4,"),
        ({"actor": {"clip_ratio": [0.1] * 11}}, r"clip_ratio=.* 11 values; .*num_inference_steps=10, "),
        ({"actor": {"clip_ratio": []}}, r"clip_ratio=\[\] .* 0 values; .*num_inference_steps=10, "),
        (
            {"actor": {"clip_ratio": [0.1, 0.1, 0.1, 0.2], "ratio_level": "trajectory_sum"}},
            r"clip_ratio=\[0\.1, .*, 0\.2\] .*ratio_level='trajectory_sum' .*ratio_level=step$",
        ),
        ({**SHARDED, "rollout": {"name": "vllm_omni"}}, r"fsdp=True .*rollout\.name='vllm_omni' .*placement='local' "),
        ({**SHARDED, "rollout": {"placement": "ray"}}, r"fsdp=True .*rollout\.name='in_process' .*placement='ray' "),
        (
            {"sampling": {"sde_type": "cps", "cps_unscaled": True}, "actor": {"loss_mode": "grpo_guard"}},
            "cps_unscaled=True .*loss_mode='grpo_guard' .*cps_unscaled: false",
        ),
        (
            {
                "sampling": {"sde_type": "cps", "cps_unscaled": True},
                "algorithm": {"rollout_correction": {"preset": "seq_is", "log_ratio_scale": "sum"}},
            },
            "cps_unscaled=True .*log_ratio_scale='sum' .*cps_unscaled: false",
        ),
        (
            {"sampling": {"sde_type": "dance_sde"}, "actor": {"kl_coef": 0.04, "kl_weighting": "flow_grpo"}},
            "kl_weighting='flow_grpo' .*sde_type='dance_sde', .*kl_weighting: exact",
        ),
        ({**SHARDED, "trainer": {"doctor": True}}, r"trainer\.doctor=True .*actor\.fsdp=True "),
        (
            {"model": {"quantization": "nf4", "lora": {"rank": 0}}},
            r"quantization='nf4' .*model\.lora\.rank=0 ",
        ),
        ({**INT8, "actor": {"fsdp": True}}, r"quantization='int8' .*FSDP2 .*actor\.fsdp: false"),
        (
            {"model": {"quantization": "int8", "dtype": "float16"}},
            r"quantization='int8' .*model\.dtype='float16'; .*dtype: bfloat16",
        ),
        ({"trainer": {"eval_on": "both"}}, "eval_on='both' .*quantization='none' .*eval_on: trained"),
        ({**NF4, **OMNI, **BYPASS}, r"bypass_mode=True .* nf4 .* 0\.034 .* 0\.001; .*bypass_mode: auto"),
        ({**INT8, **OMNI, **BYPASS}, r"bypass_mode=True .* int8 .* 0\.0031 "),
        (
            {**INT8, **OMNI, **BYPASS, "actor": {"clip_ratio": [0.1, 0.1, 0.001, 0.1]}},
            r"bypass_mode=True .* int8 .* 0\.001;",
        ),
        ({"actor": {"fsdp": True}, "trainer": {"doctor": True}}, r"doctor=True .*`flowcorr doctor` .*fsdp=false "),
    ],
)  # fmt: skip
def test_contradictions_between_sections(values, named):
    with pytest.raises(ConfigError, match=named):
        load_mapping(values)


@pytest.mark.parametrize(
    "values",
    [
        {**DECOUPLED, "actor": {"ratio_level": "trajectory_mean"}},
        {
            "actor": {"ratio_level": "trajectory_mean"},
            "algorithm": {"rollout_correction": {"preset": "bypass_ppo_clip", "bypass_scope": "trajectory"}},
        },
        {"algorithm": {"rollout_correction": {"bypass_mode": True, "rollout_is": "token"}}},
        {"model": {"path": "some/pipeline"}, "sampling": {"true_cfg_scale": 4.0}},
        {"sampling": {"guidance_scale": 4.0, "negative_prompt": "blurred"}},
        {"sampling": {"sde_window_layout": "scattered", "sde_noise_range": [0, 10]}},
        {"actor": {"loss_mode": "flow_dppo", "kl_threshold": 1e-5}},
        {"actor": {"loss_mode": "importance_cap", "importance_cap": 1.1}},
        {"actor": {"kl_threshold": 1e-6}},
        {"actor": {"lr_schedule": "cosine", "warmup_steps": 59}},
        {"actor": {"clip_ratio": [0.1, 0.2, 0.3, 0.4]}},
        {"actor": {"clip_ratio": [0.1] * 10}},
        SHARDED,
        {"actor": {"clip_ratio": [0.1] * 4 + [0.2], "ratio_level": "trajectory_mean"}},
        {**DECOUPLED, **STALE, "actor": {"old_policy": "behaviour"}},
        {**BYPASS, **STALE},
        {**AUTO, **STALE},
        {**NF4, **OMNI},
        {**NF4, **OMNI, **AUTO},
        {**NF4, **OMNI, **BYPASS, "actor": {"clip_ratio": 0.05}},
        {**INT8, **OMNI, **REINFORCE},
        {**NF4, **BYPASS},
        {**NF4, **BYPASS, "rollout": {"placement": "ray", "emulate": "int8"}},
        {**NF4, **MERGED, **BYPASS},
        {**ON_RAY, "reward": {"placement": "ray", "num_workers": 2, "worker_resources": {"num_cpus": 1}}},
        {"reward": {"placement": "ray"}, "rollout": {"ray_address": "auto"}},
        {
            "rollout": {"staleness": 1},
            "actor": {"old_policy": "behaviour"},
            "algorithm": {"rollout_correction": None},
        },
    ],
)
def test_sound_combinations_are_silent(values):
    load_mapping(values)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"sampling": {"negative_prompt": "blurred"}}, "sampling.negative_prompt=blurred"),
        ({"sampling": {"cps_unscaled": True}}, "sampling.cps_unscaled=True"),
        (
            {"sampling": {"sde_window_layout": "scattered", "sde_window_size": 1}},
            "sampling.sde_window_layout=scattered",
        ),
        (
            {"sampling": {"sde_window_layout": "scattered", "sde_window_size": 4}},
            "sampling.sde_window_layout=scattered",
        ),
        (
            {"sampling": {"sde_window_size": 4, "sde_noise_range": [0, 4]}},
            "sampling.sde_noise_range=(0, 4)",
        ),
        ({"actor": {"kl_threshold": 1e-3}}, "actor.kl_threshold=0.001"),
        ({"actor": {"importance_cap": 2.0}}, "actor.importance_cap=2.0"),
        ({"actor": {"kl_weighting": "flow_grpo"}}, "actor.kl_weighting=flow_grpo"),
        ({"actor": {"lr_schedule": "cosine", "warmup_steps": 60}}, "actor.lr_schedule=cosine"),
        (
            {"actor": {"ratio_level": "trajectory_mean"}, "sampling": {"sde_window_size": 1}},
            "actor.ratio_level=trajectory_mean",
        ),
        ({"actor": {"loss_mode": "flow_dppo", "clip_ratio": 0.1}}, "actor.clip_ratio=0.1"),
        ({**REINFORCE, "actor": {"clip_ratio": 0.1}}, "actor.clip_ratio=0.1"),
        ({"actor": {"loss_mode": "importance_cap", "clip_ratio": 0.1}}, "actor.clip_ratio=0.1"),
        ({"actor": {"old_policy": "behaviour"}}, "actor.old_policy=behaviour"),
        ({**BYPASS, **STALE, "actor": {"old_policy": "behaviour"}}, "actor.old_policy=behaviour"),
        ({**DECOUPLED, "rollout": {"drift_every": 5}}, "rollout.drift_every=5"),
        ({**STALE, "algorithm": {"rollout_correction": None}}, "rollout.drift_every=5"),
        ({"model": {"lora": {"rank": 0, "alpha": 8}}}, "model.lora.alpha=8.0"),
        (
            {"model": {"offload_text_encoders": True}, "trainer": {"device": "cpu"}},
            "model.offload_text_encoders=True",
        ),
        ({"data": {"heldout_fraction": 0.5}}, "data.heldout_fraction=0.5"),
        ({"data": {"path": "prompts.txt", "num_train": 5}}, "data.num_train=5"),
        ({"data": {"heldout_path": "test.txt"}}, "data.heldout_path=test.txt"),
        ({"data": {"tag_field": "category"}}, "data.tag_field=category"),
        ({"data": {"path": "prompts.txt", "target_field": "words"}}, "data.target_field=words"),
        (
            {"data": {"path": "prompts.txt", "heldout_path": "test.txt", "heldout_fraction": 0.5}},
            "data.heldout_fraction=0.5",
        ),
        ({"rollout": {"engine": {"max_num_seqs": 4}}}, "rollout.engine={'max_num_seqs': 4}"),
        ({"rollout": {"calculate_log_probs": False}, **UNMEASURED}, "rollout.calculate_log_probs=False"),
        ({"rollout": {"num_workers": 2}}, "rollout.num_workers=2"),
        ({"rollout": {"worker_resources": {"num_gpus": 1}}}, "rollout.worker_resources={'num_gpus': 1}"),
        ({"rollout": {"timeout": 60}}, "rollout.timeout=60.0"),
        ({"rollout": {"scheduling": "spread"}}, "rollout.scheduling=spread"),
        ({"rollout": {"ray_address": "auto"}}, "rollout.ray_address=auto"),
        ({"reward": {"num_workers": 2}}, "reward.num_workers=2"),
        ({**ON_RAY, "reward": {"num_workers": 2}}, "reward.num_workers=2"),
        ({"rollout": {"num_workers": 3}, "reward": {"placement": "ray"}}, "rollout.num_workers=3"),
    ],
)  # fmt: skip
def test_keys_without_effect_warn(values, key):
    with pytest.warns(UserWarning, match=f"^{re.escape(key)} has no effect") as caught:
        load_mapping(values)
    assert len(caught) == 1


def test_a_local_engine_of_its_own_processes_has_a_timeout():
    assert load_mapping({"rollout": {"name": "vllm_omni", "timeout": 60}}).rollout.timeout == 60


def test_a_local_reward_has_a_timeout():
    assert load_mapping({"reward": {"timeout": 60}}).reward.timeout == 60


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"lora": {"rank": 0}, "dtype": "bfloat16"},
            r"^model.dtype=bfloat16 .* are lost; set model.dtype=float32 with actor.autocast=true$",
        ),
        (
            {"lora": {"dtype": "float16"}},
            "^model.lora.dtype=float16 .* 11 significant bits.* below a 4096th ",
        ),
        ({"lora": {"dtype": "bfloat16"}}, "^model.lora.dtype=bfloat16 .* set model.lora.dtype=float32$"),
    ],
)
def test_trained_weights_of_16_bits_warn(model, message):
    with pytest.warns(UserWarning, match=message):
        load_mapping({"model": model})


@pytest.mark.parametrize(
    ("modes", "level", "warns"),
    [
        ("token_k1", "trajectory_mean", True),
        ("token_k1", "step", False),
        ("seq_mean_k1", "trajectory_mean", False),
        ("seq_sum_k1", "trajectory_sum", False),
        ("seq_max_k3", "trajectory_sum", True),
        ("seq_kl", "trajectory_mean", True),
    ],
)
def test_measured_bands_of_steps_warn_where_the_window_is_clipped(modes, level, warns):
    correction = {"bypass_mode": True, "rollout_rs": modes, "rollout_rs_threshold": "auto"}
    correction |= {} if level == "step" and modes.startswith("token") else {"bypass_scope": "trajectory"}
    values = {
        "actor": {"ratio_level": level},
        "algorithm": {"rollout_correction": correction},
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_mapping(values)
    assert any(modes in str(warning.message) for warning in caught) == warns


@pytest.mark.parametrize(
    ("lora", "overrides", "said"),
    [
        ("{rank: 64}", (), "rank=64 beside alpha 32 of the default scales the adapter by 0.5 instead of 2"),
        (
            "{rank: 64, alpha: 128}",
            ("model.lora.rank=16",),
            "alpha 128 of the recipe scales the adapter by 8",
        ),
        ("{rank: 64, alpha: 128}", (), ""),
        ("{rank: 64}", ("model.lora.alpha=128",), ""),
        ("{rank: 64, alpha: 128}", ("model.lora.rank=16", "model.lora.alpha=32"), ""),
        ("{rank: 0}", (), ""),
        ("{alpha: 8}", (), ""),
    ],
)
def test_a_rank_that_alone_changes_the_scale_is_said(recipe, caplog, lora, overrides, said):
    load(recipe(f"model: {{lora: {lora}}}"), overrides)
    assert len(caplog.messages) == bool(said)
    assert said in caplog.text
