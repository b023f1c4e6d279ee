"""Gaps beside what a run states of its precision."""

from dataclasses import replace

import pytest
import torch
from instruments.foreign_dumps import draw_steps
from instruments.gaps import normal_gap

from flowcorr.config import load
from flowcorr.instruments.audit import audit_folder
from flowcorr.instruments.audit.explained import Stated, beyond
from flowcorr.rollout.precision import ROUNDINGS
from flowcorr.rollout.step_distance import distances

NOISE_LEVEL = 0.7


def limit_of(stated, sigma, following):
    levels = (torch.tensor([value], dtype=torch.float64) for value in (sigma, following))
    return float(distances("sde", *levels, NOISE_LEVEL, stated.velocity_gap))


def test_unstated_precision_is_the_coarsest():
    assert Stated.of_captured(None).velocity_gap == ROUNDINGS["int4"].guided
    assert Stated.of(load("tiny_ocr_lora", ["rollout.emulate=fp8"])).velocity_gap < ROUNDINGS["int4"].guided


@pytest.mark.parametrize(("share", "told"), [(0.9, False), (1.2, True)])
def test_a_step_is_beyond_where_its_own_size_says_so(share, told):
    stated = replace(Stated.of_captured(None), guidance_scale=1.0, sigmas=(1.0, 0.9, 0.8))
    found = beyond(normal_gap(share * limit_of(stated, 1.0, 0.9)), stated)
    assert (found is not None and found.step_index == 0) == told


def test_steps_of_unknown_size_are_not_judged():
    gap = normal_gap(0.3)
    unknown = torch.full_like(gap.old_log_prob, torch.nan)
    assert beyond(replace(gap, sigma=unknown, step=unknown), Stated.of_captured(None)) is None


def test_a_gap_beyond_precision_sends_to_the_doctor_and_advises_nothing_else(tmp_path):
    report = audit_folder(draw_steps(tmp_path / "large", r=0.3))
    assert "flowcorr doctor" in report.verdict
    assert not any(finding.keys for finding in report.findings)
    assert {"weights", "rejection", "mode"}.isdisjoint(finding.cause for finding in report.findings)
    small = audit_folder(draw_steps(tmp_path / "small", r=0.02))
    assert "flowcorr doctor" not in small.verdict


def test_samples_of_older_weights_are_not_judged(tmp_path):
    report = audit_folder(draw_steps(tmp_path, r=0.3, policy_versions=[0] * 32))
    assert report.verdict == next(one.sentence for one in report.findings if one.cause == "stale")
    assert "gap" in [finding.cause for finding in report.findings]
