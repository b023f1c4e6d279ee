"""The engine's trajectories, through the real vllm-omni."""

import copy
from dataclasses import replace

import pytest
import torch

from flowcorr.errors import BackendError
from flowcorr.models import Guidance
from flowcorr.rollout.vllm_omni.patience import Patience
from flowcorr.rollout.vllm_omni.request import CONDITIONING

pytestmark = [pytest.mark.vllm_omni, pytest.mark.filterwarnings("ignore")]

# Measured on the embedded model: 7e-6 on latents, 6e-8 on log-probs.
LATENTS, LOG_PROBS = {"rtol": 0, "atol": 1e-4}, {"rtol": 0, "atol": 1e-6}


def with_sampling(stack, **changes):
    """The same engine, told to sample otherwise."""
    config = replace(stack.config, sampling=replace(stack.config.sampling, **changes))
    engine = copy.copy(stack.engine)
    engine.config = config
    engine.guidance = Guidance(guidance_scale=config.sampling.guidance_scale)
    conditioning = stack.family.encode(["cat", "dog"], engine.guidance)
    return replace(stack, config=config, engine=engine, conditioning=conditioning)


def outputs(stack, jobs):
    """Trajectories of `jobs`, sent together."""
    rows = stack.engine._cast(stack.conditioning)
    requests = [
        ({"prompt": "", CONDITIONING: {name: row[job.group] for name, row in rows.items()}},
         stack.engine._params(job.to_extra()))
        for job in jobs
    ]  # fmt: skip
    return [output.multimodal_output["trajectory"] for output in stack.engine._client.generate(requests)]


def assert_same_rollout(found, expected):
    for name in ("step_indices", "timesteps", "sigmas", "sigmas_next", "group_ids", "policy_versions"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    for name in ("latents", "next_latents", "means"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), **LATENTS)
    torch.testing.assert_close(found.log_probs, expected.log_probs, **LOG_PROBS)
    torch.testing.assert_close(found.stds, expected.stds)
    assert (found.images.int() - expected.images.int()).abs().max() <= 1
    for name, rows in expected.conditioning.items():
        assert torch.equal(found.conditioning[name], rows)


def test_a_rollout_is_that_of_the_in_process_engine(stack):
    found = stack.sample()
    expected = stack.in_process().sample(stack.conditioning, range(2), training_step=1, with_means=True)
    assert found.latents.dtype == found.log_probs.dtype == torch.float32
    assert found.images.dtype == torch.uint8
    assert_same_rollout(found, expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"guidance_scale": 3.0, "negative_prompt": ""},
        {"sde_type": "cps", "noise_level": 0.5},
        {"window_per": "sample", "sde_window_range": (0, 4), "sde_window_size": 1},
    ],
    ids=["guided", "cps", "window a sample"],
)
def test_sampling_options_reach_the_engine(stack, changes):
    told = with_sampling(stack, **changes)
    expected = told.in_process().sample(told.conditioning, range(2), training_step=1, with_means=True)
    found = told.sample()
    assert_same_rollout(found, expected)
    assert not torch.equal(found.latents, stack.sample().latents)


def test_means_only_on_demand(stack):
    rollout = stack.engine.sample(stack.conditioning, range(2), training_step=1, with_means=False)
    assert rollout.means is None
    assert rollout.stds.shape == (8, 2)


def test_the_actor_recomputes_the_log_probs(stack):
    assert stack.mismatch(stack.sample()).mean() <= 1e-6
    stack.stir()
    stack.sync()
    assert stack.mismatch(stack.sample()).mean() <= 1e-6


def test_a_trajectory_does_not_depend_on_what_it_is_batched_with(stack):
    together, alone = stack.sample(), stack.sample([1])
    torch.testing.assert_close(alone.latents, together.latents[4:], **LATENTS)
    torch.testing.assert_close(alone.log_probs, together.log_probs[4:], **LOG_PROBS)
    job = stack.engine._jobs(range(2), 1, True)[6]
    (single,) = outputs(stack, [job])
    torch.testing.assert_close(single["latents"], together.latents[6], **LATENTS)
    torch.testing.assert_close(single["log_probs"], together.log_probs[6], **LOG_PROBS)


def test_the_same_call_gives_the_same_bits_and_another_step_others(stack):
    first, again, other = stack.sample(), stack.sample(), stack.sample(training_step=2)
    assert torch.equal(first.latents, again.latents)
    assert torch.equal(first.images, again.images)
    assert not torch.equal(first.latents, other.latents)


def test_requests_of_one_batch_may_differ_in_everything(stack):
    base = stack.engine._jobs(range(2), 1, True)
    sampling = stack.config.sampling
    louder = replace(base[1].plan, sampling=replace(sampling, noise_level=1.1))
    shorter = replace(base[2].plan, sampling=replace(sampling, sde_window_size=1), with_means=False)
    jobs = [
        base[0],
        replace(base[1], plan=louder),
        replace(base[2], plan=shorter, start=2),
        replace(base[3], start=1, seed=9),
        base[5],
    ]
    mixed = outputs(stack, jobs)
    assert "means" not in mixed[2]
    assert len(mixed[2]["log_probs"]) == 1
    for job, found in zip(jobs, mixed, strict=True):
        (alone,) = outputs(stack, [job])
        assert found.keys() == alone.keys()
        assert torch.equal(found["step_indices"], alone["step_indices"])
        torch.testing.assert_close(found["latents"], alone["latents"], **LATENTS)
        torch.testing.assert_close(found["log_probs"], alone["log_probs"], **LOG_PROBS)
    assert mixed[1]["stds"][0] / mixed[0]["stds"][0] == pytest.approx(1.1 / sampling.noise_level)
    assert mixed[2]["step_indices"].tolist() == [2]


def test_a_request_without_our_arguments_is_refused(stack):
    with pytest.raises(BackendError, match="samples training rollouts"):
        stack.engine._client.generate([({"prompt": "cat"}, stack.engine._params({}))])
    assert stack.sample().num_samples == 8  # and the engine lives on


def test_answers_that_are_lost_are_requested_again(start, monkeypatch, caplog):
    monkeypatch.setenv(
        "VLLM_OMNI_ASYNC_OUTPUT_TIMEOUT", "0.1"
    )  # or vllm-omni would call it an error after 600 s
    patience = Patience(first=5.0, least=5.0, factor=0.0, attempts=1000)  # however slow this machine is
    stack = start("tiny_ocr", backend="lossy_executor.LossyExecutor", patience=patience)
    first = stack.sample()
    for _ in range(2):
        again = stack.sample()
        torch.testing.assert_close(again.latents, first.latents, **LATENTS)
        torch.testing.assert_close(again.log_probs, first.log_probs, **LOG_PROBS)
    assert "8 of 8 are missing. It may have lost them: their requests are sent again" in caplog.text
