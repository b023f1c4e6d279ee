"""The engine's half: every family in float32 and bfloat16 on tiny random pipelines, and what one batch may hold."""

from dataclasses import replace

import pytest
import torch
from tiny_pipelines import FAMILIES

from flowcorr.errors import BackendError

pytestmark = [pytest.mark.vllm_omni, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("family", FAMILIES)
def test_float32(start, family):
    stack = start(family, sampling=FAMILIES[family].guidance)
    assert stack.mismatch(stack.sample()).mean() <= 1e-6
    stack.stir()
    stack.sync()
    found = stack.sample()
    assert stack.mismatch(found).mean() <= 1e-6
    expected = stack.in_process().sample(stack.conditioning, range(2), training_step=1, with_means=True)
    torch.testing.assert_close(found.window.latents, expected.window.latents, rtol=0, atol=1e-4)
    assert (found.images.int() - expected.images.int()).abs().max() <= 1


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16(start, family):
    stack = start(family, dtype="bfloat16")
    rollout = stack.sample()
    assert rollout.window.latents.dtype == rollout.log_probs.dtype == torch.float32
    assert stack.mismatch(rollout).mean() <= 6e-5  # a missed sync of `stir` makes 1.4e-4
    fed = stack.family.in_dtype(stack.engine.plan.schedule, torch.bfloat16).timesteps
    assert rollout.window.timesteps.float().equal(torch.tensor(fed)[rollout.window.step_indices])


def test_references_of_a_family_that_also_draws_without_them(start):
    stack = start("flux2_klein", images=2, sampling=FAMILIES["flux2_klein"].guidance)
    assert stack.conditioning["references"].shape[:2] == (2, 2)
    assert stack.mismatch(stack.sample()).mean() <= 1e-6
    stack.stir()
    stack.sync()
    assert stack.mismatch(stack.sample()).mean() <= 1e-6


def test_captions_of_different_lengths_do_not_share_a_batch(start):
    """Z-Image: the engine's attention has no mask, so padding one caption to another's length would change it."""
    sampling = {"guidance_scale": 2.0, "negative_prompt": "blurry and dark and far too small"}
    stack = start("z_image", model={"max_sequence_length": 64}, sampling=sampling)
    lengths = {
        name: int(rows.sum(1)[0]) for name, rows in stack.conditioning.items() if name.endswith("mask")
    }
    assert lengths["prompt_embeds_mask"] <= 32 < lengths["negative_prompt_embeds_mask"]
    assert stack.mismatch(stack.sample()).mean() <= 1e-6


def test_bfloat16_on_a_trained_model(start):
    """Two stacks that round differently: r = 0.01, which at D = 512 is 3e-4 nats and falls as 1 / sqrt(D)."""
    stack = start("tiny_ocr", dtype="bfloat16")
    rollout = stack.sample()
    assert 1e-5 < stack.mismatch(rollout).mean() <= 6e-4
    means = stack.actor.log_probs(rollout, with_means=True).means
    r = ((means - rollout.window.means) / rollout.window.stds[..., None, None, None]).square().mean().sqrt()
    assert r <= 0.02


def outputs(stack, jobs):
    """Trajectories of `jobs`, sent together."""
    requests = [
        stack.engine.request(job, {name: rows[job.group] for name, rows in stack.conditioning.items()})
        for job in jobs
    ]
    return [output.multimodal_output["trajectory"] for output in stack.engine.client.generate(requests)]


def test_requests_of_one_batch_may_differ_in_everything(stack):
    base = stack.engine.jobs(range(2), 1, True)
    sampling = stack.config.sampling
    louder = replace(base[1].plan, sampling=replace(sampling, noise_level=1.1))
    shorter = replace(base[2].plan, sampling=replace(sampling, sde_window_size=1), with_means=False)
    jobs = [
        base[0],
        replace(base[1], plan=louder),
        replace(base[2], plan=shorter, window=(2,)),
        replace(base[3], window=(0, 2), seed=9),
        base[5],
    ]
    mixed = outputs(stack, jobs)
    assert "means" not in mixed[2]
    assert len(mixed[2]["log_probs"]) == 1
    for job, found in zip(jobs, mixed, strict=True):
        (alone,) = outputs(stack, [job])
        assert found.keys() == alone.keys()
        assert torch.equal(found["step_indices"], alone["step_indices"])
        torch.testing.assert_close(found["latents"], alone["latents"], rtol=0, atol=1e-4)
        torch.testing.assert_close(found["log_probs"], alone["log_probs"], rtol=0, atol=1e-6)
    assert mixed[1]["stds"][0] / mixed[0]["stds"][0] == pytest.approx(1.1 / sampling.noise_level)
    assert mixed[2]["step_indices"].tolist() == [2]


def test_a_request_without_our_arguments_is_refused(stack):
    _, params = stack.engine.request(stack.engine.jobs([0], 1, True)[0], {})
    params.extra_args = {}
    with pytest.raises(BackendError, match=r"extra_args\['flowcorr'\]"):
        stack.engine.client.generate([({"prompt": "cat"}, params)])
    assert stack.sample().num_samples == 8  # and the engine lives on
