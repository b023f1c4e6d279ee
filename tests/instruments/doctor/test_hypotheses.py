"""Causes about prompts, guidance and adapter: those that were planted are found by undoing them."""

import pytest

from flowcorr.instruments.doctor.hypotheses import examine_inputs, hypotheses
from flowcorr.instruments.doctor.legs import Legs

POOL = ["cat", "dog", "sun", "bee"]


def findings(stack):
    return examine_inputs(stack, Legs(stack), POOL)


@pytest.mark.parametrize(
    ("changes", "check", "cause", "confidence"),
    [
        ({"guidance_scale": 3.5}, None, "", ""),  # none of the known causes
        ({"prompts": ("dog", "cat", "sun", "bee") * 2}, "embeddings", "wrong_prompt", "certain"),
        ({"max_sequence_length": 77}, None, "", ""),  # 16 is none of the usual lengths
    ],
)
def test_what_was_captured_wrongly(changes, check, cause, confidence, stack_of):
    found = findings(stack_of(**changes))
    assert {one.cause for one in found.values() if one.level == "serious"} == ({cause} if check else set())
    if check:
        assert found[check].numbers["confidence"] == confidence
        assert [value > 1 for value in found[check].numbers["samples"]] == [True, True, False, False]
    else:
        assert found["log_probs"].level == "warning"


def test_prompts_of_other_samples_are_found_in_a_run_of_many_prompts(stack_of):
    stack = stack_of(prompts=("dog", "cat", "sun", "bee") * 2)
    many = [f"prompt {number}" for number in range(40)]
    assert examine_inputs(stack, Legs(stack), many)["embeddings"].cause == "wrong_prompt"


@pytest.mark.system
def test_a_prompt_that_was_not_captured_leaves_a_likely_cause(stack_of):
    found = findings(stack_of(prompts=("dog", "owl", "sun", "bee") * 2))
    assert found["embeddings"].cause == "wrong_prompt"
    assert found["embeddings"].numbers["confidence"] == "certain"  # both are in the pool
    stack = stack_of(prompts=("dog", "owl", "sun", "bee") * 2)
    named = examine_inputs(stack, Legs(stack), ["dog", "owl"])["embeddings"]
    assert (named.cause, named.numbers["confidence"]) == ("wrong_prompt", "likely")


@pytest.mark.system
def test_captures_that_cannot_tell_say_so(stack_of):
    found = findings(stack_of(guidance_scale=None))
    assert {one.level for one in found.values()} == {"note"}
    plain = findings(stack_of(adapter=None, adapter_alpha=None))
    assert plain["log_probs"].level == "warning"  # the adapter did act


def test_hypotheses_are_about_what_was_captured(stack_of):
    causes = {
        one.cause for one in hypotheses(stack_of(guidance_scale=1.0, adapter=None, adapter_alpha=None), POOL)
    }
    assert not causes & {"guidance_off", "negative_prompt", "adapter_not_applied"}
    with_negative = {one.cause for one in hypotheses(stack_of(negative_prompt="dog"), POOL)}
    assert "negative_prompt" in with_negative
