"""A preset does the same to the terms of an audit and to those of a dump."""

from dataclasses import replace

import pytest
import torch

from flowcorr.algorithm.apply import correct
from flowcorr.config import Config
from flowcorr.correction import OFF, RolloutCorrectionConfig
from flowcorr.instruments.audit.corrected import corrected
from flowcorr.instruments.setting import Setting
from tests.instruments.gaps import normal_gap


def test_terms_that_were_left_out_before_are_neither_judged_nor_rejected():
    gap = normal_gap(0.03, samples=8)
    judged = torch.ones(8, 2, dtype=torch.bool)
    judged[0], judged[1, 0] = False, False
    correction = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold=(1.5, 2.0))
    after = corrected(replace(gap, keep=judged), Setting.of(Config()), correction)
    assert after.counts() == {"terms": 13, "samples": 7, "rejected_terms": 13, "rejected_samples": 7}
    assert corrected(gap, Setting.of(Config()), OFF).counts() == {
        "terms": 16,
        "samples": 8,
        "rejected_terms": 0,
        "rejected_samples": 0,
    }


@pytest.mark.parametrize("preset", ["bypass_ppo_clip_geo_rs", "bypass_pg_geo_rs", "decoupled_geo_rs"])
def test_bypass_judges_single_steps_unless_its_scope_is_the_trajectory(preset):
    gap = normal_gap(0.03)
    correction = RolloutCorrectionConfig.from_preset(preset)
    after = corrected(gap, Setting.of(Config()), correction)
    single = preset == "bypass_ppo_clip_geo_rs"
    assert after.terms.log_prob.dim() == (1 if single else 2)
    expected, _ = correct(gap.per_term() if single else gap, correction)
    assert torch.equal(after.keep.flatten(), expected.keep.flatten())
    assert 0 < after.counts()["rejected_terms"] < 8192


def test_a_correction_of_whole_steps_takes_them_one_by_one():
    terms = [replace(normal_gap(r, samples=64), old_rollout_kl=None) for r in (0.01, 0.3)]
    both = replace(terms[0], **{name: torch.cat([getattr(part, name) for part in terms]) for name in COLUMNS})
    correction = RolloutCorrectionConfig(
        rollout_is="token", rollout_is_threshold=2.0, rollout_is_batch_normalize=True
    )
    after = corrected(both, Setting.of(Config()), correction, steps=[slice(0, 64), slice(64, 128)])
    for rows in (slice(0, 64), slice(64, 128)):
        assert float(after.terms.weight[rows].mean()) == pytest.approx(1.0, rel=1e-6)


COLUMNS = ("log_prob", "old_log_prob", "rollout_log_prob", "advantage", "std", "step", "step_index", "sigma")
