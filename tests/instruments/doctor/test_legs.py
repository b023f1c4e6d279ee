"""Gaps of legs, in limits."""

from dataclasses import replace

import pytest
import torch

from flowcorr.instruments.doctor.legs import CONVENTIONS, MEAN, Legs

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


@pytest.mark.parametrize("convention", CONVENTIONS, ids=lambda convention: convention.name)
def test_conventions_of_log_probs_are_told(convention, stack_of):
    legs = Legs(stack_of())
    elements = legs.noise[0, 0].numel()
    claimed = convention.of(legs.square, legs.std, elements)
    given = torch.cat([claimed, claimed]).float()
    found = Legs(stack_of(log_probs=given))
    assert (found.convention, found.agrees) == (convention, True)


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
