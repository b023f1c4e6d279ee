"""Presets: their keys and their names."""

from __future__ import annotations

import pytest
import torch

from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.correction import compute_rollout_correction_and_rejection_mask as correct
from flowcorr.correction.presets import NAMES, find_preset
from flowcorr.errors import ConfigError

# Ratios of the two steps of trajectories, on both sides of each threshold.
RATIOS = torch.tensor(
    [
        *((1, 1), (1.9, 1), (3, 1), (4.9, 1), (6, 1), (0.55, 1), (0.45, 1)),
        *((mean, mean) for mean in (0.9985, 0.9995, 1.0005, 1.0015)),
        *((up, 1 / up) for up in (1.05, 1.15, 1.17, 1.5)),
        *((2e-4, 5e3), (0.5e-4, 2e4)),
    ],
    dtype=torch.float64,
)
# The treatment of each preset: weights, rejection, veto. Its name says the rest.
MEANINGS = {
    ("decoupled_token_is", "token_is", "token_tis"): ("token", None, False),
    ("decoupled_seq_is", "seq_is"): ("sequence", None, False),
    ("decoupled_seq_is_rs", "seq_is_rs", "seq_mis"): ("sequence", "product", False),
    ("decoupled_geo_rs",): (None, "mean", False),
    ("geo_rs", "geo_mis"): (None, "mean", True),
    ("decoupled_geo_rs_seq_tis",): ("sequence", "mean", False),
    ("geo_rs_seq_tis",): ("sequence", "mean", True),
    ("decoupled_geo_rs_token_tis",): ("token", "mean", False),
    ("decoupled_k3_rs",): (None, "k3", False),
    ("decoupled_k3_rs_seq_tis",): ("sequence", "k3", False),
    ("decoupled_k3_rs_token_tis",): ("token", "k3", False),
    ("decoupled_token_icepop",): ("icepop", None, False),
    ("bypass_ppo_clip", "ppo_is_bypass"): (None, None, False),
    ("bypass_ppo_clip_geo_rs",): (None, "mean", False),
    ("bypass_ppo_clip_k3_rs",): (None, "k3", False),
    ("bypass_ppo_clip_auto_rs",): (None, None, False),  # until earlier training steps have measured its band
    ("bypass_pg_is", "pg_is", "pure_is"): ("sequence", None, False),
    ("bypass_pg_token_icepop",): ("icepop", None, False),
    ("bypass_pg_geo_rs",): (None, "mean", False),
    ("pg_rs", "bypass_pg_rs"): (None, "mean", True),
    ("bypass_pg_geo_rs_seq_tis",): ("sequence", "mean", False),
    ("bypass_pg_geo_rs_token_tis",): ("token", "mean", False),
    ("disabled",): (None, None, False),
}


def expected_weights(kind, ratios):
    product = ratios.prod(1, keepdim=True).expand_as(ratios)
    return {
        None: None,
        "token": ratios.clamp(max=2),
        "sequence": product.clamp(max=2),
        "icepop": torch.where((ratios >= 0.5) & (ratios <= 5), ratios, 0.0),
    }[kind]


def expected_keep(kind, veto, ratios):
    product, log_ratio = ratios.prod(1), ratios.log()
    mean = product ** (1 / ratios.shape[1])
    keep = {
        None: torch.ones(len(ratios), dtype=torch.bool),
        "product": (product >= 0.5) & (product <= 2),
        "mean": (mean >= 0.999) & (mean <= 1.001),
        "k3": (log_ratio.expm1() - log_ratio).mean(1) <= 0.01,
    }[kind]
    if veto:
        keep = keep & (ratios >= 1e-4).all(1)
    return keep[:, None].expand_as(ratios)


@pytest.mark.parametrize(
    ("name", "meaning"), [(name, meaning) for names, meaning in MEANINGS.items() for name in names]
)
def test_what_a_preset_does_to_trajectories(name, meaning):
    weights, rejection, veto = meaning
    config = RolloutCorrectionConfig.from_preset(name)
    bypass = "bypass" in name or name.startswith(("pg_", "pure_"))
    assert config.mode == ("bypass" if bypass else "decoupled")
    if bypass:
        assert (config.loss_type == "reinforce") == ("ppo" not in name)
    single_steps = bypass and config.bypass_scope == "step"
    ratios = RATIOS.reshape(-1, 1) if single_steps else RATIOS
    judged = (
        {"noise": {}, "step_indices": torch.zeros(ratios.shape, dtype=torch.long)} if single_steps else {}
    )
    found = correct(ratios.log(), torch.zeros_like(ratios), num_elements=512, **judged, **config.options)
    expected = expected_weights(weights, ratios)
    assert (found.weights is None) == (expected is None)
    if expected is not None:
        torch.testing.assert_close(found.weights, expected.float())
    assert torch.equal(found.keep, expected_keep(rejection, veto, ratios))


def test_rejection_of_trajectories_and_their_weights_have_them_whole():
    for names, (weights, rejection, _) in MEANINGS.items():
        config = RolloutCorrectionConfig.from_preset(names[0])
        if config.loss_type == "reinforce" and (weights == "sequence" or rejection):
            assert config.bypass_scope == "trajectory", names


def test_no_preset_is_missing_from_the_tests_or_the_list():
    assert {name for names in MEANINGS for name in names} == set(NAMES)


@pytest.mark.parametrize("names", MEANINGS)
def test_every_name_and_every_door_lead_to_one_preset(names):
    first = RolloutCorrectionConfig.from_preset(names[0])
    for name in names:
        by_name = RolloutCorrectionConfig.from_preset(name)
        assert by_name == first
        assert by_name.preset == name
        assert RolloutCorrectionConfig.from_mapping({"preset": name}) == first
        assert find_preset(name).summary


def test_thresholds_beside_a_preset_override_it():
    mapping = {"preset": "geo_rs", "rollout_rs_threshold": "0.9_1.1", "rollout_token_veto_threshold": None}
    config = RolloutCorrectionConfig.from_mapping(mapping)
    assert config == RolloutCorrectionConfig.decoupled_geo_rs("0.9_1.1")
    assert config.preset == "geo_rs"
    scaled = RolloutCorrectionConfig.from_preset("seq_is", log_ratio_scale="sum", rollout_is_apply=False)
    assert scaled.log_ratio_scale == "sum"


def test_an_unknown_preset_shows_the_nearest():
    with pytest.raises(ConfigError, match=r"preset='token_tiss' .*token_tis\?"):
        RolloutCorrectionConfig.from_preset("token_tiss")
