"""The size of a drift by itself."""

import math

import pytest
import torch

from flowcorr.correction import compute_rollout_correction_and_rejection_mask
from flowcorr.correction.describe import SIZES, drift_metrics

ROLLOUT = torch.tensor([[-1.0, -1.5], [-2.0, -0.5]])
DELTA = torch.tensor([[0.1, -0.3], [0.2, -0.2]])
STEP_KL = torch.tensor([[0.01, 0.02], [0.03, 0.04]])


def test_sizes_by_hand():
    values = drift_metrics(ROLLOUT + DELTA, ROLLOUT, step_kl=STEP_KL, prefix="part/").compute()
    k3 = [math.expm1(delta) - delta for delta in (0.1, -0.3, 0.2, -0.2)]
    assert values == pytest.approx(
        {
            "part/kl": 0.05,
            "part/k3_kl": sum(k3) / 4,
            "part/logprob_abs_diff_mean": 0.2,
            "part/logprob_abs_diff_max": 0.3,
            "part/exact_kl": 0.025,
        },
        rel=1e-5,
    )


def test_only_terms_that_the_mask_has_on_count():
    mask = torch.tensor([[True, False], [True, True]])
    values = drift_metrics(ROLLOUT + DELTA, ROLLOUT, mask=mask, prefix="").compute()
    assert set(values) == set(SIZES) - {"exact_kl"}
    assert values["kl"] == pytest.approx(-0.1 / 3, rel=1e-5)
    assert values["logprob_abs_diff_max"] == pytest.approx(0.2, rel=1e-5)


def test_they_are_those_of_the_correction():
    draw = torch.Generator().manual_seed(0)
    rollout, target, step_kl = (torch.randn(3000, 3, generator=draw) for _ in range(3))
    step_kl = step_kl.square()
    target[5, 1] = math.nan
    whole = compute_rollout_correction_and_rejection_mask(target, rollout, step_kl=step_kl).metrics.compute()
    sizes = drift_metrics(target, rollout, step_kl=step_kl, prefix="rollout_corr/").compute()
    assert sizes == {name: whole[name] for name in sizes}
    assert len(sizes) == len(SIZES)


def test_no_samples_are_no_metrics():
    empty = torch.zeros(0, 2)
    part = drift_metrics(ROLLOUT + DELTA, ROLLOUT, prefix="")
    assert drift_metrics(empty, empty, prefix="").compute() == {}
    assert drift_metrics(empty, empty, prefix="").merge(part).compute() == part.compute()
