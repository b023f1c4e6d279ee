"""Causes about prompts, guidance and adapter: those that were planted are found by undoing them."""

from dataclasses import replace

import pytest
import torch
from instruments.doctor.plain_loop import Loop

from flowcorr.instruments.doctor.conventions import MEAN
from flowcorr.instruments.doctor.explanations import examine_inputs, examine_trainer
from flowcorr.instruments.doctor.legs import Legs

POOL = ["cat", "dog", "sun", "bee"]


def scores_of(stack):
    """The log-probs of the window with the inputs of the stack."""
    window = Legs(stack).window
    return MEAN.of(window.square, window.std, window.step, window.noise[0, 0].numel())


def findings(stack):
    return examine_inputs(Legs(stack), POOL)


@pytest.mark.parametrize(
    ("changes", "check", "cause", "confidence"),
    [
        ({"guidance_scale": 3.5}, "guidance", "guidance_scale", "certain"),
        ({"prompts": ("dog", "cat", "sun", "bee") * 2}, "embeddings", "wrong_prompt", "certain"),
        ({"max_sequence_length": 77}, None, "", ""),  # 16 is none of the usual lengths
    ],
)
def test_what_was_captured_wrongly(changes, check, cause, confidence, stack_of):
    found = findings(stack_of(**changes))
    assert {one.cause for one in found.values() if one.level == "serious"} == ({cause} if check else set())
    if check:
        assert found[check].numbers["confidence"] == confidence
        if cause == "wrong_prompt":
            assert [value > 1 for value in found[check].numbers["samples"]] == [True, True, False, False]
        else:
            assert found[check].numbers["fitted"] == pytest.approx(3.0, rel=1e-4)
    else:
        assert found["log_probs"].level == "warning"


def test_prompts_of_other_samples_are_found_in_a_run_of_many_prompts(stack_of):
    stack = stack_of(prompts=("dog", "cat", "sun", "bee") * 2)
    many = [f"prompt {number}" for number in range(40)]
    assert examine_inputs(Legs(stack), many)["embeddings"].cause == "wrong_prompt"


@pytest.mark.system
def test_a_prompt_that_was_not_captured_leaves_a_likely_cause(stack_of):
    found = findings(stack_of(prompts=("dog", "owl", "sun", "bee") * 2))
    assert found["embeddings"].cause == "wrong_prompt"
    assert found["embeddings"].numbers["confidence"] == "certain"  # both are in the pool
    stack = stack_of(prompts=("dog", "owl", "sun", "bee") * 2)
    named = examine_inputs(Legs(stack), ["dog", "owl"])["embeddings"]
    assert (named.cause, named.numbers["confidence"]) == ("wrong_prompt", "likely")


def test_a_prompt_that_comes_closer_by_chance_is_not_named(stack_of):
    """In bfloat16, the best of five pooled embeddings comes three times closer to that of a text which nobody has."""

    def of_unknown_texts(loop, text):
        embeds, pooled = text["prompt"]
        return {**text, "prompt": (embeds, pooled.roll(4, 0))}

    sampled = Loop(seed=21, plant={"text": of_unknown_texts}).sample() | {"dtype": "bfloat16"}
    found = findings(stack_of(**sampled))
    assert {name: one.cause for name, one in found.items() if one.level == "serious"} == {}
    assert found["log_probs"].level == "warning"


@pytest.mark.system
def test_captures_that_cannot_tell_say_so(stack_of):
    found = findings(stack_of(guidance_scale=None))
    assert {one.level for one in found.values()} == {"note"}
    plain = findings(stack_of(adapter=None, adapter_alpha=None))
    assert plain["log_probs"].level == "warning"  # the adapter did act


def test_a_trainer_that_scores_otherwise_is_told_from_an_engine_that_samples_otherwise(stack_of, captured):
    """The engine's own noise level is captured, and the trainer scores at another."""
    own = torch.as_tensor(captured["log_probs"])[:4]
    stack = stack_of()
    assert examine_trainer(stack, own, POOL).level == "healthy"
    scored = stack_of(noise_level=0.75)
    found = examine_trainer(stack, scores_of(scored), POOL)
    assert (found.cause, found.numbers["side"]) == ("noise_level", "trainer")
    assert found.numbers["fitted"] == pytest.approx(0.75, rel=1e-4)
    newer = own + 1e-2 * torch.randn(own.shape, generator=torch.Generator().manual_seed(0))
    assert examine_trainer(stack, newer, POOL).level == "note"


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda family: {"embeddings_cut": True}, "sequence_length"),
        (lambda family: {"guidance_scale": 1.0}, "guidance_off"),
        (lambda family: {"sigmas": family.schedule(6, (4, 4, 8)).sigmas[:6]}, "other_schedule"),
    ],
    ids=["embeddings cut", "no guidance", "sigmas of one step more"],
)
def test_a_trainer_with_other_inputs_in_the_window_is_named(change, cause, stack_of):
    """Of no guidance, its window alone does not tell that of the first steps from that of all."""
    scored, stack = stack_of(), stack_of()
    scored.captured = replace(scored.captured, **change(scored.family))
    found = examine_trainer(stack, scores_of(scored), POOL)
    assert (found.cause, found.numbers["side"]) == (cause, "trainer")
