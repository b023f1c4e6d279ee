"""Reward functions of other trainers."""

import pytest

from flowcorr.errors import ConfigError
from flowcorr.translate.rewards import named_function, reward_terms


def test_words_in_a_name_choose_the_reward():
    assert reward_terms({"score/pickscore.py:compute": 1.0, "score/hpsv3.py:compute": 0.5}) == [
        {"name": "pickscore"},
        {"name": "my_rewards:compute", "weight": 0.5},
    ]


def test_a_function_has_a_path_and_a_weight():
    assert named_function(("a", {"path": "score/x.py", "weight": 2})) == ("score/x.py:a", 2)
    assert named_function(("a", {})) == (":a", 1.0)
    for function, message in (
        (3, r"a=3 must be a section"),
        ({"weight": "x"}, r"a\.weight='x' must be a number"),
    ):
        with pytest.raises(ConfigError, match=rf"^reward\.reward_functions\.{message}"):
            named_function(("a", function))
