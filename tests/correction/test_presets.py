"""Presets: their keys, their names, and their class methods."""

from __future__ import annotations

import math

import pytest

from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.correction.presets import NAMES, find_preset
from flowcorr.errors import ConfigError

DECOUPLED = {"bypass_mode": False}


BYPASS = {"bypass_mode": True}


REINFORCE = {"bypass_mode": True, "loss_type": "reinforce"}


TRAJECTORY = {"bypass_scope": "trajectory"}


TOKEN = {"rollout_is": "token", "rollout_is_threshold": 2.0}


SEQUENCE = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}


ICEPOP = {"rollout_is": "token", "rollout_is_threshold": (0.5, 5.0)}


SEQ_RS = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": (0.5, 2.0)}


GEO_RS = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": (0.999, 1.001)}


K3_RS = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}


VETO = {"rollout_token_veto_threshold": 1e-4}


EXPECTED = {
    ("decoupled_token_is", "token_is", "token_tis"): DECOUPLED | TOKEN,
    ("decoupled_seq_is", "seq_is"): DECOUPLED | SEQUENCE,
    ("decoupled_seq_is_rs", "seq_is_rs", "seq_mis"): DECOUPLED | SEQUENCE | SEQ_RS,
    ("decoupled_geo_rs",): DECOUPLED | GEO_RS,
    ("geo_rs", "geo_mis"): DECOUPLED | GEO_RS | VETO,
    ("decoupled_geo_rs_seq_tis",): DECOUPLED | SEQUENCE | GEO_RS,
    ("geo_rs_seq_tis",): SEQUENCE | GEO_RS | VETO,
    ("decoupled_geo_rs_token_tis",): DECOUPLED | TOKEN | GEO_RS,
    ("decoupled_k3_rs",): DECOUPLED | K3_RS,
    ("decoupled_k3_rs_seq_tis",): DECOUPLED | SEQUENCE | K3_RS,
    ("decoupled_k3_rs_token_tis",): DECOUPLED | TOKEN | K3_RS,
    ("decoupled_token_icepop",): DECOUPLED | ICEPOP,
    ("bypass_ppo_clip", "ppo_is_bypass"): BYPASS,
    ("bypass_ppo_clip_geo_rs",): BYPASS | GEO_RS,
    ("bypass_ppo_clip_k3_rs",): BYPASS | K3_RS,
    ("bypass_ppo_clip_auto_rs",): BYPASS | {"rollout_rs": "token_k1", "rollout_rs_threshold": "auto"},
    ("bypass_pg_is", "pg_is", "pure_is"): REINFORCE | TRAJECTORY | SEQUENCE,
    ("bypass_pg_token_icepop",): REINFORCE | ICEPOP,
    ("bypass_pg_geo_rs",): REINFORCE | TRAJECTORY | GEO_RS,
    ("pg_rs", "bypass_pg_rs"): REINFORCE | TRAJECTORY | GEO_RS | VETO,
    ("bypass_pg_geo_rs_seq_tis",): REINFORCE | TRAJECTORY | SEQUENCE | GEO_RS,
    ("bypass_pg_geo_rs_token_tis",): REINFORCE | TRAJECTORY | TOKEN | GEO_RS,
    ("disabled",): DECOUPLED,
}


@pytest.mark.parametrize(("name", "values"), [(name, v) for names, v in EXPECTED.items() for name in names])
def test_every_preset_by_every_door(name, values):
    expected = RolloutCorrectionConfig(**values)
    by_name = RolloutCorrectionConfig.preset(name)
    assert by_name == expected
    assert by_name.preset == name
    assert getattr(RolloutCorrectionConfig, name)() == expected
    assert RolloutCorrectionConfig.from_mapping({"preset": name}) == expected
    assert find_preset(name).summary


def test_no_preset_is_missing_from_the_tests_or_the_list():
    assert {name for names in EXPECTED for name in names} == set(NAMES)


def test_class_methods_take_thresholds():
    config = RolloutCorrectionConfig
    assert config.token_is(threshold=3.0).rollout_is_threshold == 3.0
    assert config.geo_rs(rs_threshold=1.01).criteria[0].lower == pytest.approx(-math.log(1.01))
    assert config.geo_rs(rs_threshold_lower=0.99).rollout_rs_threshold == (0.99, 1.001)
    assert config.geo_rs(rs_threshold=1.1, rs_threshold_lower=0.9).rollout_rs_threshold == (0.9, 1.1)
    assert config.geo_rs(veto_threshold=None) == config.decoupled_geo_rs()
    assert config.seq_is_rs(rs_threshold="0.6_3").rollout_rs_threshold == (0.6, 3.0)
    assert config.decoupled_token_icepop(4.0, threshold_lower=0.3).rollout_is_threshold == (0.3, 4.0)
    assert config.bypass_ppo_clip_k3_rs(0.02).rollout_rs_threshold == 0.02


def test_thresholds_beside_a_preset_override_it():
    mapping = {"preset": "geo_rs", "rollout_rs_threshold": "0.9_1.1", "rollout_token_veto_threshold": None}
    config = RolloutCorrectionConfig.from_mapping(mapping)
    assert config == RolloutCorrectionConfig.decoupled_geo_rs("0.9_1.1")
    assert config.preset == "geo_rs"
    scaled = RolloutCorrectionConfig.preset("seq_is", log_ratio_scale="sum", rollout_is_apply=False)
    assert scaled.log_ratio_scale == "sum"


def test_an_unknown_preset_shows_the_nearest():
    with pytest.raises(ConfigError, match="did you mean token_tis"):
        RolloutCorrectionConfig.preset("token_tiss")
