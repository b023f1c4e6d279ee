"""The engine's trajectories, through the real vllm-omni."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch

from flowcorr.errors import BackendError
from flowcorr.models import SamplingPlan
from tests.prompts import prompts_of
from tests.rollouts import columns

pytestmark = [pytest.mark.vllm_omni, pytest.mark.filterwarnings("ignore")]

# Measured on the embedded model: 7e-6 on latents, 6e-8 on log-probs.
LATENTS, LOG_PROBS = {"rtol": 0, "atol": 1e-4}, {"rtol": 0, "atol": 1e-6}


def with_sampling(stack, **changes):
    """The same engine, told to sample otherwise."""
    config = replace(stack.config, sampling=replace(stack.config.sampling, **changes))
    engine = copy.copy(stack.engine)
    engine.config = config
    engine.plan = SamplingPlan.of(stack.family, config.sampling)
    conditioning = stack.family.encode(prompts_of(["cat", "dog"]), engine.plan.guidance)
    return replace(stack, config=config, engine=engine, conditioning=conditioning)


def assert_same_rollout(found, expected):
    for name in ("step_indices", "timesteps", "sigmas", "sigmas_next", "group_ids", "policy_versions"):
        assert torch.equal(columns(found)[name], columns(expected)[name]), name
    for name in ("latents", "next_latents", "means"):
        torch.testing.assert_close(columns(found)[name], columns(expected)[name], **LATENTS)
    torch.testing.assert_close(found.log_probs, expected.log_probs, **LOG_PROBS)
    torch.testing.assert_close(found.window.stds, expected.window.stds)
    assert (found.images.int() - expected.images.int()).abs().max() <= 1
    for name, rows in expected.conditioning.items():
        assert torch.equal(found.conditioning[name], rows)


def test_a_rollout_is_that_of_the_in_process_engine(stack):
    found = stack.sample()
    expected = stack.in_process().sample(stack.conditioning, range(2), training_step=1, with_means=True)
    assert found.window.latents.dtype == found.log_probs.dtype == torch.float32
    assert found.images.dtype == torch.uint8
    assert_same_rollout(found, expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"guidance_scale": 3.0, "negative_prompt": ""},
        {"sde_type": "cps", "noise_level": 0.5},
        {"window_per": "sample", "sde_window_range": (0, 4), "sde_window_size": 1},
        {"window_per": "sample", "sde_window_range": (0, 4), "sde_window_layout": "scattered"},
        {"sde_noise_range": (0, 4)},
    ],
    ids=["guided", "cps", "window a sample", "scattered windows", "noise outside the window"],
)
def test_sampling_options_reach_the_engine(stack, changes):
    told = with_sampling(stack, **changes)
    expected = told.in_process().sample(told.conditioning, range(2), training_step=1, with_means=True)
    found = told.sample()
    assert_same_rollout(found, expected)
    assert not torch.equal(found.window.latents, stack.sample().window.latents)


def test_longer_steps_leave_every_bit_of_the_window(stack):
    told = with_sampling(stack, post_window_stride=2)
    expected = told.in_process().sample(told.conditioning, range(2), training_step=1, with_means=True)
    whole, found = stack.sample(), told.sample()
    assert_same_rollout(found, expected)
    # To the bit where requests arrive in equal batches, which the engine does not promise.
    for name, tensor in whole.window.columns().items():
        torch.testing.assert_close(found.window.columns()[name], tensor, rtol=0, atol=1e-4, msg=name)
    torch.testing.assert_close(found.log_probs, whole.log_probs, rtol=0, atol=1e-5)
    assert not torch.equal(found.final_latents, whole.final_latents)


def test_means_only_on_demand(stack):
    rollout = stack.engine.sample(stack.conditioning, range(2), training_step=1, with_means=False)
    assert rollout.window.means is None
    assert rollout.window.stds.shape == (8, 2)


def test_the_actor_recomputes_the_log_probs(stack):
    assert stack.mismatch(stack.sample()).mean() <= 1e-6
    stack.stir()
    stack.sync()
    assert stack.mismatch(stack.sample()).mean() <= 1e-6


def test_a_trajectory_does_not_depend_on_what_it_is_batched_with(stack):
    together, alone = stack.sample(), stack.sample([1])
    torch.testing.assert_close(alone.window.latents, together.window.latents[4:], **LATENTS)
    torch.testing.assert_close(alone.log_probs, together.log_probs[4:], **LOG_PROBS)
    job = stack.engine.jobs(range(2), 1, True)[6]
    request = stack.engine.request(job, {name: rows[1] for name, rows in stack.conditioning.items()})
    (output,) = stack.engine.client.generate([request])
    single = output.multimodal_output["trajectory"]
    torch.testing.assert_close(single["latents"], together.window.latents[6], **LATENTS)
    torch.testing.assert_close(single["log_probs"], together.log_probs[6], **LOG_PROBS)


def test_the_same_call_gives_the_same_bits_and_another_step_others(stack):
    first, again, other = stack.sample(), stack.sample(), stack.sample(training_step=2)
    assert torch.equal(first.window.latents, again.window.latents)
    assert torch.equal(first.images, again.images)
    assert not torch.equal(first.window.latents, other.window.latents)


def test_an_answer_that_is_lost_ends_the_run_at_its_timeout(start):
    stack = start("tiny_ocr", backend="lossy_executor.LossyExecutor")
    # A slow machine's requests reach the engine in two batches, of which one is lost.
    stack.sample()
    stack.engine.client.timeout = 5.0
    with pytest.raises(BackendError, match=r" [1-8] of 8 answers .*rollout\.timeout=5 "):
        stack.sample()


def test_a_stale_engine_samples_with_older_weights_and_can_be_restored(start):
    stack = start("sd3", rollout={"staleness": 1})
    stack.stir(seed=1)
    stack.sync()
    assert stack.sample().policy_versions.unique().tolist() == [0]
    history = stack.engine.history
    stack.stir(seed=2)
    stack.sync()
    newer = stack.sample()
    assert newer.policy_versions.unique().tolist() == [1]
    stack.engine.restore(history)
    assert stack.sample().policy_versions.unique().tolist() == [0]
    assert not torch.equal(stack.sample().window.latents, newer.window.latents)


def test_an_engine_in_sleep_mode_is_awake_only_while_it_loads_weights_or_samples(stack, monkeypatch):
    """No sleep on a CPU: the real engine samples, and its client notes when it would sleep and wake."""
    calls = []

    def noted(name, forward):
        def call(self, *args, **options):
            calls.append(name)
            return forward(self, *args, **options)

        return call

    client_class = type(stack.engine.client)
    for name in ("generate", "rpc", "wake_up"):
        monkeypatch.setattr(client_class, name, noted(name, getattr(client_class, name)))
    monkeypatch.setattr(client_class, "sleep", noted("sleep", lambda self: None))
    monkeypatch.setattr(stack.engine, "sleeps", True)
    probe = stack.engine._probe
    velocity = noted("actor's velocity", lambda self, weights: self.velocity(weights))
    monkeypatch.setattr(stack.engine, "_probe", replace(probe, velocity=partial(velocity, probe)))
    for step in range(2):
        stack.stir(seed=step)
        stack.sync()
        stack.sample(training_step=step)
    sync = ["wake_up", "rpc", "generate", "rpc", "sleep", "actor's velocity"]
    assert calls == 2 * [*sync, "wake_up", "generate", "rpc", "sleep"]
