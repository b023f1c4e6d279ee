"""Requests for samples and probes, as plain values."""

import json
from dataclasses import replace

import pytest

from flowcorr.config.schema import SamplingConfig
from flowcorr.models import Schedule
from flowcorr.rollout.vllm_omni.request import Job, Plan, Probe, from_extra

JOB = Job(
    plan=Plan(
        sampling=SamplingConfig(num_inference_steps=2, sde_window_range=(0, 2), sde_noise_range=(1, 2)),
        schedule=Schedule(sigmas=(1.0, 0.5, 0.0), timesteps=(1000.0, 500.0)),
        latent_shape=(4, 8, 8),
    ),
    seed=1, training_step=2, group=3, member=4, window=(0, 1), same_initial_noise=True, policy_version=5,
)  # fmt: skip


@pytest.mark.parametrize("job", [JOB, Probe(guidance_scale=1.0, true_cfg_scale=4.0)], ids=["job", "probe"])
def test_requests_survive_a_transport_of_plain_values(job):
    found = from_extra(json.loads(json.dumps(job.to_extra())))
    assert found == job
    assert hash(found) == hash(job)


@pytest.mark.parametrize("extra", [None, {}, {"other": 1}])
def test_foreign_requests_are_refused(extra):
    with pytest.raises(ValueError, match=r"extra_args\['flowcorr'\]"):
        from_extra(extra)


def test_jobs_with_the_same_plan_may_share_a_batch():
    assert replace(JOB, member=1).plan == JOB.plan
    assert replace(JOB.plan, with_means=True) != JOB.plan
