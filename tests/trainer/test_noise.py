"""The step noise as the actor's means show it: right in every mode, and each fault at the first training step."""

import math
from dataclasses import replace

import pytest
import torch

from flowcorr import sde
from flowcorr.instruments.rules import Units, examine_step
from flowcorr.trainer.noise import NoiseMeter

NAMES = {f"rollout/noise_{name}" for name in ("std", "mean", "tails", "shared_by")}


def measured(run, rollout=None):
    """`rollout/noise_*` of the pass that computes old log-probs, and the gap that goes with it."""
    rollout = run.sample(with_means=False) if rollout is None else rollout
    meter = NoiseMeter(rollout, run.config.sampling)
    scores = run.actor.log_probs(rollout, observe=meter.add)
    gap = (scores.log_probs - rollout.log_probs).abs().mean().item()
    return {**meter.metrics().compute(), "rollout_corr/logprob_abs_diff_mean": gap}


def named(run, values):
    rollout = run.config.rollout
    terms = rollout.prompts_per_step * rollout.n * run.config.sampling.sde_window_size
    elements = run.engine.plan.latent_shape
    return [
        finding.cause
        for finding in examine_step(values, Units(num_terms=terms, num_elements=math.prod(elements)))
    ]


@pytest.mark.parametrize(
    "sampling", [{}, {"sde_type": "cps", "noise_level": 0.5, "cps_unscaled": True}, {"sde_type": "dance_sde"}]
)
def test_noise_of_a_healthy_rollout(make_run, sampling):
    run = make_run(sampling=sampling)
    rollout = run.sample()
    values = measured(run, rollout)
    noise = (rollout.window.next_latents - rollout.window.means) / rollout.window.stds[..., None, None, None]
    noise = noise.double()
    assert values["rollout/noise_std"] == pytest.approx(
        (noise.square().sum() / (noise.numel() - 1)).sqrt().item(), rel=1e-4
    )
    assert values["rollout/noise_mean"] == pytest.approx(noise.mean().item(), abs=1e-5)
    tails = (noise**4 - 6 * noise**2 + 3).mean().item()
    assert values["rollout/noise_tails"] == pytest.approx(tails, abs=1e-3)
    together = noise.flatten(2).sum((0, 1)).square().mean().item()
    assert values["rollout/noise_shared_by"] == pytest.approx(together / noise.shape[:2].numel(), rel=1e-3)
    assert named(run, values) == []


@pytest.mark.parametrize("emulate", ["fp8", "int4"])
def test_rounding_is_no_fault_of_the_noise(make_run, emulate):
    run = make_run(rollout={"emulate": emulate, "n": 8}, sampling={"guidance_scale": 4.0})
    run.stir()
    values = measured(run)
    assert values["rollout_corr/logprob_abs_diff_mean"] > 1e-4
    assert named(run, values) == []


def larger(noise):
    return 1.1 * noise


def uniform(noise):
    """Of unit variance."""
    return math.sqrt(12) * (torch.special.ndtr(noise.double()).float() - 0.5)


FAULTS = {
    "a tenth too large": (larger, "noise_std", 1.1),
    "none at all": (lambda noise: 0 * noise, "noise_std", 0.0),
    "off its mean": (lambda noise: noise + 0.2, "noise_mean", 0.2),
    "uniform": (uniform, "noise_tails", -1.2),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_other_noise_is_named(make_run, monkeypatch, fault):
    change, rule, expected = FAULTS[fault]
    run = make_run(rollout={"n": 8})
    true = sde.step_noise
    monkeypatch.setattr(sde, "step_noise", lambda *args, **kwargs: change(true(*args, **kwargs)))
    values = measured(run)
    assert values[f"rollout/{rule}"] == pytest.approx(expected, abs=0.15)
    assert rule in named(run, values)


@pytest.mark.parametrize(("same", "sharing"), [("member", 4), ("step_index", 2), ("group", 2)])
def test_noise_that_is_shared(make_run, monkeypatch, same, sharing):
    """By the four images of a prompt, the two steps of a sample, or two ranks of which each counts its own prompts."""
    run, true = make_run(sampling={"height": 32, "width": 64}), sde.step_noise

    def shared(shape, groups, members, *, step_index, **kwargs):
        members = [0] * len(members) if same == "member" else members
        groups = [0] * len(groups) if same == "group" else groups
        return true(shape, groups, members, step_index=0 if same == "step_index" else step_index, **kwargs)

    monkeypatch.setattr(sde, "step_noise", shared)
    monkeypatch.setattr(sde, "draw_windows", lambda groups, *_, **__: torch.tensor([[0, 1]] * len(groups)))
    values = measured(run)
    assert values["rollout/noise_shared_by"] == pytest.approx(sharing, rel=0.4)
    assert named(run, values) == ["noise_shared"]


def test_terms_without_a_finite_score_are_left_out(make_run):
    run = make_run()
    rollout = run.sample()
    meter, some = (NoiseMeter(rollout, run.config.sampling) for _ in range(2))
    scores = run.actor.log_probs(rollout, with_means=True)
    scores.log_probs[2, 1] = scores.means[2, 1] = math.nan
    meter.add(rollout, scores)
    for rows in (slice(0, 2), slice(3, None)):
        some.add(rollout.select(rows), scores.select(torch.arange(8)[rows]))
    first = rollout.select(slice(2, 3)).step(0)
    some.add(first, replace(scores.select(torch.tensor([2])), **{
        name: getattr(scores, name)[2:3, :1] for name in ("log_probs", "means", "stds")
    }))  # fmt: skip
    assert meter.metrics().compute() == pytest.approx(some.metrics().compute(), rel=1e-5)


@pytest.mark.parametrize("parts", [1, 2])
def test_bypass_observes_what_is_scored_before_the_first_optimizer_step(make_run, parts):
    correction = make_run().config.algorithm.rollout_correction
    run = make_run(
        actor={"mini_batches": parts, "micro_batch_size": 2},
        algorithm={"rollout_correction": replace(correction, bypass_mode=True)},
    )
    rollout = run.sample()
    batch = replace(run.batch(rollout), old_log_probs=rollout.log_probs)
    meter, seen = NoiseMeter(rollout, run.config.sampling), []

    def observe(part, scores):
        seen.append(part.num_samples * part.num_steps)
        meter.add(part, scores)

    run.actor.update(batch, run.config.algorithm.rollout_correction, training_step=1, observe=observe)
    assert sum(seen) == rollout.log_probs.numel() // parts
    assert meter.metrics().compute().keys() == NAMES
