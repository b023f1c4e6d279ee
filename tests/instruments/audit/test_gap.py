"""The gap between a rollout and the actor's scores of it."""

import math

import pytest
import torch
from instruments.gaps import D, normal_gap

from flowcorr.errors import BackendError
from flowcorr.instruments.audit.gap import measure_gap
from flowcorr.instruments.audit.tables import joint_nats
from flowcorr.instruments.faults import delta


def test_unusable_rollouts(make_run):
    run = make_run(sampling={"num_inference_steps": 3, "sde_window_range": (0, 2)})
    with pytest.raises(BackendError, match=r"Window\.means .*exact KL"):
        measure_gap(run.actor, run.sample(with_means=False))
    rollout = run.sample()
    rollout.log_probs[0, 0] = math.nan
    with pytest.raises(BackendError, match=r"^1 of \d+ log-probs of the rollout engine "):
        measure_gap(run.actor, rollout)


def test_the_exact_kl_of_a_window_is_the_sum_of_its_steps():
    gap = normal_gap(0.1, samples=8)
    assert joint_nats(gap) == pytest.approx(2 * D * 0.1**2 / 2)
    torch.testing.assert_close(delta(gap), gap.old_log_prob)


def test_one_model_for_both_leaves_no_gap(make_run):
    run = make_run(sampling={"num_inference_steps": 3, "sde_window_range": (0, 2)})
    gap = measure_gap(run.actor, run.sample())
    assert gap.old_rollout_kl.dtype == torch.float64
    assert gap.old_rollout_kl.max() < 1e-8
    assert delta(gap).abs().max() < 1e-5
