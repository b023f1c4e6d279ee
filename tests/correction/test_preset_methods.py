"""Class methods of presets: a method for each name, and what their arguments set."""

import inspect
import math

import pytest

from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.correction.preset_methods import PresetMethods
from flowcorr.correction.presets import NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_method_without_arguments_makes_its_preset(name):
    made = getattr(RolloutCorrectionConfig, name)()
    assert made == RolloutCorrectionConfig.from_preset(name)
    assert NAMES[made.preset] is NAMES[name]


def test_no_method_is_of_no_preset():
    methods = inspect.getmembers(PresetMethods, inspect.ismethod)
    assert {name for name, _ in methods} == set(NAMES)


def test_the_class_makes_presets_by_name_and_an_instance_names_its_own():
    made = RolloutCorrectionConfig.preset("seq_is", rollout_is_threshold=3.0)
    assert (made.preset, made.rollout_is_threshold) == ("seq_is", 3.0)
    assert RolloutCorrectionConfig().preset is None


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
