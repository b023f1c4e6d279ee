"""Causes about prompts, guidance and adapter: those that were planted are found by undoing them."""

import pytest

from flowcorr.instruments.doctor.replayed.inputs import examine_inputs, hypotheses
from flowcorr.instruments.doctor.replayed.legs import Legs

POOL = ["cat", "dog", "sun", "bee"]


def verdicts(stack):
    return {one.part: one for one in examine_inputs(stack, Legs(stack), POOL, 3)}


@pytest.mark.parametrize(
    ("changes", "part", "cause", "confidence"),
    [
        ({"guidance_scale": 3.5}, None, "", ""),  # none of the known causes
        ({"prompts": ("dog", "cat", "sun", "bee")}, "prompts", "wrong_prompt", "certain"),
        ({"max_sequence_length": 77}, None, "", ""),  # 16 is none of the usual lengths
    ],
)
def test_what_was_captured_wrongly(changes, part, cause, confidence, stack_of):
    found = verdicts(stack_of(**changes))
    assert {one.cause for one in found.values() if one.status == "FAIL"} == ({cause} if part else set())
    if part:
        assert (found[part].confidence, found[part].step) == (confidence, 3)
        assert [value > 1 for value in found[part].samples] == [True, True, False, False]
    else:
        assert found["log_probs"].status == "WARN"
        assert found["log_probs"].message.endswith("none of the known causes explains it")


@pytest.mark.system
def test_a_prompt_that_was_not_captured_leaves_a_likely_cause(stack_of):
    found = verdicts(stack_of(prompts=("dog", "owl", "sun", "bee")))
    assert found["prompts"].cause == "wrong_prompt"
    assert found["prompts"].confidence == "certain"  # both are in the pool
    stack = stack_of(prompts=("dog", "owl", "sun", "bee"))
    outside = examine_inputs(stack, Legs(stack), ["dog", "owl"], 0)
    (named,) = [one for one in outside if one.part == "prompts"]
    assert (named.cause, named.confidence) == ("wrong_prompt", "likely")


@pytest.mark.system
def test_captures_that_cannot_tell_say_so(stack_of):
    found = verdicts(stack_of(guidance_scale=None))
    assert {one.status for one in found.values()} == {"SKIP"}
    plain = verdicts(stack_of(adapter=None, adapter_alpha=None))
    assert plain["log_probs"].status == "WARN"  # the adapter did act


def test_hypotheses_are_about_what_was_captured(stack_of):
    causes = {
        one.cause for one in hypotheses(stack_of(guidance_scale=1.0, adapter=None, adapter_alpha=None), POOL)
    }
    assert not causes & {"guidance_off", "negative_prompt", "adapter_not_applied"}
    with_negative = {one.cause for one in hypotheses(stack_of(negative_prompt="dog"), POOL)}
    assert "negative_prompt" in with_negative
