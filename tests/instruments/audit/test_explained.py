"""Gaps beside what a run states of its precision."""

import math
from dataclasses import replace

import pytest
import torch
from instruments.foreign_dumps import draw_steps
from instruments.gaps import normal_gap

import flowcorr
from flowcorr import sde
from flowcorr.config import load
from flowcorr.instruments.audit import audit_folder
from flowcorr.instruments.audit.explained import Stated, beyond

NOISE_LEVEL = 0.7
LEVELS = (1.0, 0.9, 0.7, 0.4, 0.1, 0.0)


def moved_by(velocity, sigma, following):
    """How far a velocity moves the mean of a step, in stds."""
    latents, speed = torch.zeros(1, 1), torch.full((1, 1), velocity)
    levels = (torch.tensor([value]) for value in (sigma, following))
    step = sde.transition("sde", latents, speed, *levels, NOISE_LEVEL)
    return float(step.mean.abs() / step.std)


def captured(velocity, places, **changes):
    """Samples whose steps were taken with velocities of this root mean square."""
    draw = torch.Generator().manual_seed(0)
    shape = (4, len(places), 16, 8, 8)
    latents, speed, noise = (torch.randn(shape, generator=draw) for _ in range(3))
    sigma, following = (
        torch.tensor([LEVELS[place + after] for place in places]).expand(4, -1) for after in (0, 1)
    )
    step = sde.transition("sde", latents, velocity * speed, sigma, following, NOISE_LEVEL)
    given = {
        "prompts": ["cat"] * 4,
        "initial_noise": latents[:, 0],
        "images": torch.zeros(4, 8, 8, 3),
        "guidance_scale": 1.0,
        "sigmas": torch.tensor(LEVELS),
        "noise_level": NOISE_LEVEL,
        "latents": latents,
        "next_latents": step.mean + step.std[..., None, None, None] * noise,
        "step_indices": places,
    }
    return flowcorr.ReplaySamples(**given | changes)


def test_unstated_precision_is_the_coarsest():
    unstated, stated = (Stated.of_captured(captured(1.0, [0], dtype=dtype)) for dtype in (None, "bfloat16"))
    int4, fp8 = (
        Stated.of(load("tiny_ocr_lora", [f"rollout.emulate={name}", "rollout.dtype=bfloat16"]))
        for name in ("int4", "fp8")
    )
    assert unstated.velocity_gap == int4.velocity_gap > fp8.velocity_gap > stated.velocity_gap


@pytest.mark.parametrize(("share", "told"), [(0.9, False), (1.5, True)])
@pytest.mark.parametrize("velocity", [1.0, 10.0])
def test_a_step_is_beyond_where_its_own_size_and_the_captured_velocity_say_so(velocity, share, told):
    stated = Stated.of_captured(captured(velocity, [0, 1], dtype="bfloat16"))
    assert velocity <= stated.velocity < 1.4 * velocity
    found = beyond(normal_gap(share * stated.velocity_gap * moved_by(velocity, 1.0, 0.9)), stated)
    assert (found is not None and found.step_index == 0) == told


@pytest.mark.parametrize(("share", "told"), [(0.9, False), (1.2, True)])
def test_steps_that_are_counted_within_the_window_are_found_by_their_noise_levels(share, told):
    stated = Stated.of_captured(captured(1.0, [2, 3]), indexed=False)
    gap = normal_gap(share * stated.velocity_gap * moved_by(1.0, 0.4, 0.1))
    late = replace(
        gap,
        sigma=torch.tensor([[0.7, 0.4]]).expand_as(gap.sigma),
        step=torch.full_like(gap.step, torch.nan),
        old_rollout_kl=gap.old_rollout_kl * torch.tensor([[0.0, 1.0]]),
    )
    found = beyond(late, stated)
    assert (found is not None and found.step_index == 1) == told


def test_a_run_is_judged_by_the_distance_that_it_logged():
    stated = Stated.of(load("tiny_ocr_lora", ["rollout.emulate=none", "rollout.dtype=bfloat16"]))
    gap = normal_gap(1.0)
    distance = math.hypot(moved_by(4.0, 1.0, 0.9), moved_by(4.0, 0.9, 0.8)) / math.sqrt(2)
    assert stated.with_distance(distance, gap).velocity == pytest.approx(4.0)


def test_steps_of_unknown_size_are_not_judged():
    gap = normal_gap(0.3)
    unknown = torch.full_like(gap.old_log_prob, torch.nan)
    assert beyond(replace(gap, sigma=unknown, step=unknown), Stated.of_captured(None)) is None


def test_a_gap_beyond_precision_sends_to_the_doctor_and_advises_nothing_else(tmp_path):
    samples = captured(1.0, [1, 3], dtype="bfloat16")
    report = audit_folder(draw_steps(tmp_path / "large", r=0.3, replay=samples))
    assert "flowcorr doctor" in report.verdict
    assert not any(finding.keys for finding in report.findings)
    assert {"weights", "rejection", "mode"}.isdisjoint(finding.cause for finding in report.findings)
    small = audit_folder(draw_steps(tmp_path / "small", r=0.005, replay=samples))
    assert "flowcorr doctor" not in small.verdict


@pytest.mark.parametrize(("r", "told"), [(0.01, False), (0.2, True)])
def test_what_weights_of_unknown_age_explain_is_no_fault(tmp_path, r, told):
    """Of float32, r = .01 is that of weights of one training step ago, where nothing says that they were the newest."""
    replay = captured(1.0, [1, 3], dtype="float32")
    unknown = audit_folder(draw_steps(tmp_path / "unknown", r=r, replay=replay, without=["policy_versions"]))
    assert ("flowcorr doctor" in unknown.verdict) == told
    assert (unknown.findings[0].cause == "ages") != told
    newest = audit_folder(draw_steps(tmp_path / "newest", r=r, replay=replay))
    assert "flowcorr doctor" in newest.verdict


def test_a_large_gap_of_steps_of_unknown_size_is_not_called_a_fault(tmp_path):
    report = audit_folder(draw_steps(tmp_path, r=0.6))
    assert "flowcorr doctor" not in report.verdict
    assert report.findings[0].cause == "gap"


def test_samples_of_older_weights_are_not_judged(tmp_path):
    report = audit_folder(draw_steps(tmp_path, r=0.3, policy_versions=[0] * 32))
    assert report.verdict == next(one.sentence for one in report.findings if one.cause == "stale")
    assert "gap" in [finding.cause for finding in report.findings]
