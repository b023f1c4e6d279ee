"""Gaps of legs, in limits."""

from dataclasses import replace

import pytest
import torch

from flowcorr import sde
from flowcorr.instruments.doctor.conventions import CONVENTIONS, MEAN
from flowcorr.instruments.doctor.legs import Legs, _beyond
from flowcorr.instruments.doctor.stack import Stack
from flowcorr.questions.question import OUTSIDE

LEGS = ("before", "log_probs", "between", "after")


def test_a_clean_replay_stays_far_below_its_limits(stack_of):
    stack = stack_of()
    legs = Legs(stack)
    assert (legs.known, legs.convention, legs.agrees) == (LEGS, MEAN, True)
    assert max(float(score.max()) for score in legs.scores(stack.captured, LEGS).values()) < 0.5


@pytest.mark.parametrize("leg", ["before", "between", "after"])
def test_only_the_leg_that_was_altered_differs(leg, stack_of, captured):
    changes = {
        "before": {"initial_noise": captured["initial_noise"] * 1.01},
        "between": {"latents": captured["latents"] * torch.tensor([1.0, 1.01]).view(1, 2, 1, 1, 1)},
        "after": {"final_latents": captured["final_latents"] * 1.01},
    }[leg]
    stack = stack_of(**changes)
    scores = Legs(stack).scores(stack.captured, LEGS)
    assert bool((scores[leg] > 10).all())
    others = {"log_probs"} if leg == "between" else set()
    assert all(bool((scores[name] < 1).all()) for name in {*LEGS} - {leg} - others)


def test_latents_stored_in_half_precision_widen_the_limits(stack_of, captured):
    changes = {
        name: captured[name].bfloat16()
        for name in ("initial_noise", "latents", "next_latents", "final_latents")
    }
    stack = stack_of(**changes)
    scores = Legs(stack).scores(stack.captured, LEGS)
    assert {leg: float(score.max()) for leg, score in scores.items() if float(score.max()) > 1} == {}


def test_without_log_probs_the_spread_of_noise_tells(stack_of):
    stack = stack_of(log_probs=None)
    legs = Legs(stack)
    assert legs.convention is None
    assert float(legs.scores(stack.captured, ["log_probs"])["log_probs"].max()) < 1
    off = replace(stack.captured, guidance_scale=-20.0)
    assert float(legs.scores(off, ["log_probs"])["log_probs"].min()) > 1


@pytest.mark.parametrize("first", [0, 4])
def test_the_last_step_of_cps_is_an_euler_step(first, stack_of, captured):
    """As published, it is a step of the window like the others, of a std of 0."""
    stack, rows, noise = stack_of(), [0, 1, 2, 3], torch.Generator().manual_seed(0)
    latents, sigmas = captured["initial_noise"][:4], captured["sigmas"]
    befores, afters, log_probs = [], [], []
    for index in range(5):
        velocity = stack.velocity(latents, [index] * 4, rows, stack.captured)
        sigma, following = sigmas[index].expand(4), sigmas[index + 1].expand(4)
        moved = latents - (sigmas[index] - sigmas[index + 1]) * velocity
        log_prob = torch.zeros(4)
        if first <= index < 4:
            step = sde.transition("cps", latents, velocity, sigma, following, 0.7)
            moved = sde.sample(step, torch.randn(moved.shape, generator=noise))
            log_prob = sde.log_prob(moved, step, cps_unscaled=True)
        befores.append(latents)
        afters.append(moved)
        log_probs.append(log_prob)
        latents = moved
    given = {"latents": befores, "next_latents": afters, "log_probs": log_probs}
    samples = replace(
        stack.samples,
        sde_type="cps",
        step_indices=range(first, 5),
        final_latents=latents,
        **{name: torch.stack(values[first:], 1) for name, values in given.items()},
    )
    cps = Stack(stack.family, samples)
    legs = Legs(cps)
    assert legs.known == (() if first else LEGS)
    assert legs.convention == (None if first else CONVENTIONS[3])
    assert all(float(score.max()) < 0.5 for score in legs.scores(cps.captured, legs.known).values())


@pytest.mark.parametrize(("dtype", "scale"), [("float16", 4.8e-3), ("bfloat16", 0.038)])
def test_a_leg_has_the_limit_of_its_question_in_the_precision_of_both_stacks(
    dtype, scale, stack_of, captured
):
    """A share of the way, in the largest gap that the precision explains."""
    stack = stack_of(dtype=dtype)
    assert stack_of(guidance_scale=4.0).gaps_in(dtype) == pytest.approx((scale, 3 * scale))
    error = OUTSIDE["after"].limit * stack.gaps_in(dtype)[1]
    final = captured["final_latents"]
    way = final - captured["next_latents"][:, -1]
    for share in (0.8, 1.6):
        changed = stack_of(dtype=dtype, final_latents=final + share * error * way)
        scores = Legs(changed).scores(changed.captured, ["after"])["after"]
        assert scores.tolist() == pytest.approx([share / (1 + share * error)] * len(scores), rel=0.05)


@pytest.mark.parametrize("seed", range(701, 711))
def test_what_lies_along_the_velocity_is_no_noise(seed):
    """As where a step was left out: by its moments alone, a velocity that looks standard normal could be noise."""
    draw = torch.Generator().manual_seed(seed)
    noise, moved = torch.randn(2, 4, 8, 16, dtype=torch.float64, generator=draw)
    assert _beyond(noise, moved, 0.0) <= 1
    assert _beyond(noise, 0.3 * noise, 0.0) > 3
    assert _beyond(0.9 * noise + 0.43 * moved, moved, 0.0) > 1
