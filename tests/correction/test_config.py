"""The section `algorithm.rollout_correction`: values, contradictions, modes."""

from __future__ import annotations

import math
import pickle
from dataclasses import fields

import pytest

from flowcorr.config.build import build, to_mapping
from flowcorr.config.schema import AlgorithmConfig
from flowcorr.correction import MEASURED, OFF, RolloutCorrectionConfig
from flowcorr.errors import ConfigError

BYPASS = {"bypass_mode": True}
REINFORCE = {"bypass_mode": True, "loss_type": "reinforce"}
TOKEN = {"rollout_is": "token", "rollout_is_threshold": 2.0}
SEQUENCE = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
AUTO = {"bypass_mode": "auto"}
K1_AUTO = {"rollout_rs": "token_k1", "rollout_rs_threshold": "auto"}


@pytest.mark.parametrize(
    ("preset", "key", "value"),
    [
        ("token_is", "rollout_is", "sequence"),
        ("token_is", "bypass_mode", True),
        ("geo_rs", "rollout_rs", "token_k1"),
        ("bypass_ppo_clip", "loss_type", "reinforce"),
        ("pg_rs", "bypass_scope", "step"),
        ("bypass_pg_is", "bypass_mode", False),
        ("seq_is", "loss_type", "reinforce"),
    ],
)
def test_other_keys_beside_a_preset_contradict_it(preset, key, value):
    with pytest.raises(ConfigError, match=f"{key}={value!r} .*preset='{preset}',.* {key}, "):
        RolloutCorrectionConfig.from_mapping({"preset": preset, key: value})


def test_auto_beside_a_preset_of_bypass_mode_only_is_refused():
    with pytest.raises(ConfigError, match="bypass_mode='auto': .*'bypass_pg_is' .*ppo_clip,"):
        RolloutCorrectionConfig.from_mapping({"preset": "bypass_pg_is", **AUTO})


def test_a_preset_named_without_its_values_is_refused():
    with pytest.raises(ConfigError, match=r"rollout_is=None .*\.from_preset\('token_is'\)"):
        RolloutCorrectionConfig(preset="token_is")


def test_an_unknown_key_shows_the_nearest():
    with pytest.raises(ConfigError, match=r"'rollout_is_treshold' .*rollout_is_threshold\?"):
        RolloutCorrectionConfig.from_mapping({"rollout_is_treshold": 2.0})


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"rollout_is": "tokn"}, r"rollout_is='tokn' .*token\?"),
        ({"loss_type": "ppo"}, r"loss_type='ppo' .*ppo_clip\?"),
        ({"bypass_scope": "steps"}, r"bypass_scope='steps' .*step\?"),
        ({"rollout_rs_denominator": "some"}, r"rollout_rs_denominator='some'"),
        ({"bypass_mode": "yes"}, "bypass_mode='yes' .*auto$"),
        ({"bypass_mode": 1}, "bypass_mode=1 .*auto$"),
        ({"rejection_groups": "recenter"}, r"rejection_groups='recenter' .*recentre\?"),
        (BYPASS | {"rejection_groups": "recentre"}, "rejection_groups='recentre' .*batch"),
        (AUTO | TOKEN | {"rollout_is_batch_normalize": True}, "rollout_is_batch_normalize=True .*batch"),
        (AUTO | {"rejection_groups": "drop_small"}, "rejection_groups='drop_small' .*batch"),
        (AUTO | {"loss_type": "reinforce"}, "loss_type='reinforce' .*bypass_mode: true"),
        (AUTO | {"auto_enter": 0.0}, r"auto_enter=0\.0 "),
        (AUTO | {"auto_leave": math.inf}, "auto_leave=inf "),
        (AUTO | {"auto_enter": 0.4}, r"auto_leave=0\.5 .*auto_enter=0\.4,"),
        (AUTO | {"auto_leave": 1.0}, "auto_leave=1 .*auto_enter=1,"),
        ({"rollout_is_apply": 1}, "rollout_is_apply=1 "),
        (
            {"rollout_is": "token", "rollout_is_threshold": None},
            "rollout_is_threshold .*null .*rollout_is='token'",
        ),
        ({"rollout_is": "token", "rollout_is_threshold": "2.0_0.5"}, r"rollout_is_threshold='2.0_0.5'"),
        ({"rollout_is": "token", "rollout_is_threshold": math.nan}, r"rollout_is_threshold=nan"),
        ({"rollout_is": "token", "rollout_is_threshold": 0}, r"rollout_is_threshold=0"),
        ({"rollout_is": "token", "rollout_is_threshold": -1.0}, r"rollout_is_threshold=-1.0"),
        ({"rollout_rs": "token_k1"}, "rollout_rs_threshold .*missing .*rollout_rs='token_k1'"),
        (
            {"rollout_rs": "token_k1,seq_sum_k1", "rollout_rs_threshold": "2_3"},
            r"rollout_rs_threshold=\[2\.0, 3\.0\] .* band ",
        ),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 2}, "rollout_rs='token_k4' "),
        ({"rollout_token_veto_threshold": 1.0}, r"rollout_token_veto_threshold=1.0"),
        ({"log_ratio_scale": "men"}, r"log_ratio_scale='men' .*mean\?"),
        ({"log_ratio_scale": 0.0}, r"log_ratio_scale=0.0"),
        ({"loss_type": "reinforce"}, "loss_type='reinforce' .*bypass_mode: true"),
        (
            {"bypass_mode": True, "rollout_is": "token", "rollout_is_batch_normalize": True},
            "rollout_is_batch_normalize=True .*batch",
        ),
        (REINFORCE | SEQUENCE, "bypass_scope='step' .*trajectory"),
        (REINFORCE | {"rollout_is": "geometric"}, "bypass_scope='step' .*trajectory"),
    ],
)
def test_bad_values_name_their_key(values, named):
    with pytest.raises(ConfigError, match=rf"^algorithm\.rollout_correction\.{named}"):
        RolloutCorrectionConfig(**values)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"rollout_is_threshold": 3.0}, "rollout_is_threshold"),
        ({"rollout_is_apply": False}, "rollout_is_apply"),
        ({"rollout_is_batch_normalize": True}, "rollout_is_batch_normalize"),
        ({"rollout_rs_threshold": 2.0}, "rollout_rs_threshold"),
        ({"rollout_is": "token", "bypass_scope": "trajectory"}, "bypass_scope"),
        ({"log_ratio_scale": "sum"}, "log_ratio_scale"),
        ({"rollout_is": "token", "rejection_groups": "recentre"}, "rejection_groups"),
        ({"auto_enter": 2.0}, "auto_enter"),
        (BYPASS | {"auto_leave": 0.1}, "auto_leave"),
    ],
)
def test_keys_without_effect_warn(values, key):
    with pytest.warns(UserWarning, match=rf"^algorithm\.rollout_correction\.{key}=.* no effect"):
        RolloutCorrectionConfig(**values)


def test_weights_in_bypass_ppo_clip_are_for_diagnostics():
    config = RolloutCorrectionConfig(bypass_mode=True, rollout_is="sequence")
    assert not config.applies_weights
    assert RolloutCorrectionConfig.pg_is().applies_weights
    assert not RolloutCorrectionConfig(rollout_is="token", rollout_is_apply=False).applies_weights


@pytest.mark.parametrize("mode", [BYPASS, AUTO, {}])
def test_thresholds_may_be_measured_in_every_mode(mode):
    config = RolloutCorrectionConfig(
        **mode, rollout_rs="token_k1,step_z,token_k2", rollout_rs_threshold="auto,6,0.1"
    )
    assert config.needs_batch
    assert [criterion.auto for criterion in config.criteria] == [True, False, False]
    assert not RolloutCorrectionConfig(**mode, rollout_rs="token_k1", rollout_rs_threshold=2.0).needs_batch


def test_auto_is_one_mode_or_the_other():
    config = RolloutCorrectionConfig(
        **AUTO,
        **SEQUENCE,
        rollout_rs="token_k1",
        rollout_rs_threshold=1.01,
        bypass_scope="trajectory",
        auto_enter=2.0,
    )
    bypass, decoupled = config.in_mode("bypass"), config.in_mode("decoupled")
    shared = SEQUENCE | {"rollout_rs": "token_k1", "rollout_rs_threshold": 1.01}
    assert bypass == RolloutCorrectionConfig(**BYPASS, **shared, bypass_scope="trajectory")
    assert decoupled == RolloutCorrectionConfig(**shared)
    assert (bypass.applies_weights, decoupled.applies_weights) == (False, True)


@pytest.mark.parametrize("preset", ["seq_is_rs", "bypass_ppo_clip_geo_rs"])
def test_auto_beside_a_preset_does_in_both_modes_what_the_preset_does(preset):
    config = RolloutCorrectionConfig.from_mapping({"preset": preset, "bypass_mode": "auto"})
    assert (config.preset, config.bypass_mode) == (preset, "auto")
    plain = RolloutCorrectionConfig.from_preset(preset)
    for mode in ("bypass", "decoupled"):
        concrete = config.in_mode(mode)
        assert (concrete.mode, concrete.preset) == (mode, None)
        assert (concrete.rollout_is, concrete.criteria) == (plain.rollout_is, plain.criteria)


@pytest.mark.parametrize(
    ("values", "label"),
    [
        ({}, "measured only"),
        ({"preset": "disabled"}, "measured only"),
        ({"rollout_is": "token", "rollout_is_apply": False}, "measured only"),
        ({"rollout_is": "token"}, "decoupled"),
        ({"rollout_token_veto_threshold": 1e-4}, "decoupled"),
        (BYPASS, "bypass"),
        (AUTO, "auto"),
        ({"preset": "seq_is"}, "seq_is"),
        ({"preset": "seq_is", **AUTO}, "seq_is, auto"),
    ],
)
def test_what_a_correction_is_called(values, label):
    assert RolloutCorrectionConfig.from_mapping(values).label == label


def test_exact_kl_asks_for_means():
    config = RolloutCorrectionConfig(rollout_rs="step_kl", rollout_rs_threshold=1e-4)
    assert config.needs_means
    assert not RolloutCorrectionConfig.geo_rs().needs_means


def test_values_are_normalised_and_survive_a_round_trip():
    config = RolloutCorrectionConfig(
        rollout_is="token",
        rollout_is_threshold="0.5_2",
        rollout_rs="token, sequence",
        rollout_rs_threshold="2, 0.9_1.1",
    )
    assert config.rollout_is_threshold == (0.5, 2.0)
    assert config.rollout_rs == "token_k1,seq_sum_k1"
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    assert RolloutCorrectionConfig.from_mapping(values) == config
    automatic = RolloutCorrectionConfig(rollout_rs="token_k1,step_z", rollout_rs_threshold=["auto", 6])
    assert automatic.rollout_rs_threshold == "auto,6.0"
    written = {field.name: getattr(automatic, field.name) for field in fields(automatic)}
    assert RolloutCorrectionConfig.from_mapping(written) == automatic
    assert RolloutCorrectionConfig(**K1_AUTO).rollout_rs_threshold == "auto"
    listed = {**values, "rollout_is_threshold": [0.5, 2.0]}
    assert RolloutCorrectionConfig.from_mapping(listed) == config
    assert hash(config) == hash(RolloutCorrectionConfig.from_mapping(values))


def test_off_is_a_mode_of_its_own_that_asks_for_nothing():
    assert (OFF.mode, OFF.label, OFF.rollout_rs_denominator) == ("off", "not measured", "kept")
    assert not OFF.applies_weights
    assert not OFF.needs_means
    assert OFF.criteria == ()
    assert RolloutCorrectionConfig() != OFF
    assert pickle.loads(pickle.dumps(OFF)) == OFF


def test_off_is_null_in_yaml():
    config = build(AlgorithmConfig, {"rollout_correction": None})
    assert config.rollout_correction == OFF
    assert to_mapping(config)["rollout_correction"] is None


@pytest.mark.parametrize(
    "section", [{}, {"rollout_correction": {}}, {"rollout_correction": {"preset": "disabled"}}]
)
def test_a_correction_that_is_left_out_measures_the_gap_alone(section):
    correction = build(AlgorithmConfig, section).rollout_correction
    assert (correction.mode, correction.label) == ("decoupled", "measured only")
    assert correction == MEASURED != OFF
    assert pickle.loads(pickle.dumps(build(AlgorithmConfig, section))).rollout_correction == MEASURED
