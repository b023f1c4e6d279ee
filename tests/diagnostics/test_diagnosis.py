"""Faults planted in drawn log-probs, and what `diagnose` makes of them."""

import math
from dataclasses import replace

import pytest
import torch

from flowcorr.diagnostics.diagnosis import StepTerms, diagnose

B, T, D = 32, 4, 512


def clean(r=(0.01, 0.012, 0.02, 0.04), *, steps=3, seed=0, ages=None):
    """Training steps whose gap is rounding: step means off by `r` stds, each sample in its own direction."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for step in range(1, steps + 1):
        size = torch.tensor(r, dtype=torch.float64)
        rollout = 2 + 0.05 * torch.randn(B, T, generator=draw, dtype=torch.float64)
        noise = torch.randn(B, T, generator=draw, dtype=torch.float64)
        found.append(
            StepTerms(
                step=step,
                log_probs=rollout - size**2 / 2 + size / math.sqrt(D) * noise,
                rollout_log_probs=rollout,
                step_indices=torch.arange(T).repeat(B, 1),
                ages=ages,
            )
        )
    return found


def causes(steps):
    return [diagnosis.cause for diagnosis in diagnose(steps)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "r",
    [(0, 0, 0, 0), (1e-6,) * 4, (0.01,) * 4, (0.06, 0.07, 0.1, 0.3), (0.02, 0.02, 0.02, 0.1)],
    ids=["none", "float32", "bf16", "int4", "late"],
)
def test_rounding_is_no_fault(r, seed):
    assert diagnose(clean(r, seed=seed)) == []


def test_one_step_with_another_sigma_is_named():
    steps = clean(r=(1e-6, 1e-6, 0.3, 1e-6))
    (found,) = diagnose(steps)
    assert (found.cause, found.sure) == ("one_step", True)
    assert found.verdict == "the gap lies in step 2 of the schedule alone"
    assert "sigma, the next sigma and the timestep of step 2" in found.remedy


def test_beside_bfloat16_one_step_is_likely_and_not_sure():
    (found,) = diagnose(clean(r=(0.02, 0.02, 0.3, 0.02)))
    assert (found.cause, found.sure) == ("one_step", False)


def test_non_finite_log_probs_are_counted_and_placed():
    steps = clean(steps=4)
    steps[1].log_probs[3, 2] = math.nan
    steps[3].rollout_log_probs[5:7, 2] = math.inf
    (found,) = diagnose(steps)
    assert found.verdict == "log-probs are not finite in 3 of 128 samples, since training step 2"
    assert found.evidence.startswith(
        "the engine's and the trainer's log-probs, at step 2 of the schedule, in 2 of 4"
    )


def test_a_step_that_nobody_trained_is_no_fault():
    steps = clean()
    for one in steps:
        one.log_probs[:, 3] = math.nan
    keep = torch.tensor([True, True, True, False]).expand(B, T)
    assert diagnose([replace(one, keep=keep) for one in steps]) == []
    assert causes(steps) == ["non_finite"]


def test_sums_in_place_of_means_hide_everything_else():
    steps = clean()
    for one in steps:
        one.log_probs.mul_(D)
        one.rollout_log_probs.mul_(D)
    assert causes(steps)[0] == "summed"


@pytest.mark.parametrize(("ages", "expected"), [(None, []), ([0] * B, []), ([0] * (B - 1) + [4], ["stale"])])
def test_older_weights_are_told_by_their_versions(ages, expected):
    assert causes(clean(ages=None if ages is None else torch.tensor(ages))) == expected


def test_the_age_is_told_in_numbers():
    (found,) = diagnose(clean(ages=torch.tensor([2] * (B // 2) + [4] * (B // 2))))
    assert found.verdict == "the weights that sampled were 3 versions old on average, 4 at most"
