import numpy as np
import pytest

from flowcorr.config import load
from flowcorr.errors import BatchError, ConfigError
from flowcorr.rewards import check_prompts
from flowcorr.rewards.references import needed_references, references_of
from tests.prompts import prompts_of


def test_references_have_the_size_of_the_image():
    first, second = prompts_of(["make it red", "add a cat"], images=2)
    found = references_of([first, second, first], 16, 24)
    assert [np.array(pixels).shape for pixels in found] == [(2, 16, 24, 3)] * 3
    np.testing.assert_array_equal(found[0][1], np.asarray(first.images[1].fitted(16, 24)))
    assert found[0] is found[2]
    assert (found[0][0] != found[1][0]).any()


def test_prompts_without_references_have_none():
    assert references_of(prompts_of(["cat"]), 16, 24) == [[]]


def test_a_prompt_without_a_reference_that_is_needed_is_named():
    with pytest.raises(BatchError, match="^reward mine: sample 1 "):
        needed_references("mine", [*prompts_of(["cat"], images=1), *prompts_of(["dog"])], 16, 24)


def test_a_reward_that_compares_with_references_is_refused_without_them_before_the_start():
    reward = load("tiny_jpeg_lora", ["reward.gold=[{name: reference_similarity}]"]).reward
    with pytest.raises(ConfigError, match="^data: .*'cat' .* reference_similarity "):
        check_prompts(reward, prompts_of(["cat"]), prompts_of(["cat"]))
    edits = prompts_of(["cat"], images=1)
    check_prompts(reward, edits, edits)
