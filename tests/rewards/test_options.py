"""Checks of rewards' options."""

import math

import pytest

from flowcorr.errors import ConfigError
from flowcorr.rewards.options import (
    check_choice,
    check_clip_options,
    check_positive,
    check_text,
    check_whole,
    is_number,
)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "1", None])
def test_whole_numbers(value):
    check_whole("ocr", "size", 1, 1)
    with pytest.raises(ConfigError, match="^reward ocr: size=.* 1$"):
        check_whole("ocr", "size", value, 1)


@pytest.mark.parametrize("value", [0, -0.5, math.nan, math.inf, True, "1"])
def test_positive_numbers(value):
    check_positive("ocr", "scale", 0.5)
    with pytest.raises(ConfigError, match="^reward ocr: scale=.* 0$"):
        check_positive("ocr", "scale", value)


@pytest.mark.parametrize("value", [5, None, ["a"]])
def test_texts(value):
    check_text("ocr", "path", "a")
    with pytest.raises(ConfigError, match="^reward ocr: path="):
        check_text("ocr", "path", value)


def test_choices_name_the_nearest():
    check_choice("ocr", "mode", "words", ["words", "letters"])
    with pytest.raises(ConfigError, match=r"^reward ocr: mode='word' .*words\?"):
        check_choice("ocr", "mode", "word", ["words", "letters"])


def test_true_is_no_number():
    assert [is_number(value) for value in (1, 0.5, True, math.nan, "1")] == [True, True, False, False, False]


@pytest.mark.parametrize("check", [check_positive, lambda *given: check_whole(*given, 1)])
def test_a_text_in_place_of_a_number_is_not_shown(check):
    with pytest.raises(ConfigError, match="^reward mine: batch_size=<str> "):
        check("mine", "batch_size", "a key in the wrong place")


@pytest.mark.parametrize(
    ("dtype", "batch_size", "named"), [("float8", 4, "dtype='float8'"), ("float32", 0, "batch_size=0")]
)
def test_options_that_rewards_on_clip_share(dtype, batch_size, named):
    check_clip_options("mine", "bfloat16", 4)
    with pytest.raises(ConfigError, match=f"^reward mine: {named} "):
        check_clip_options("mine", dtype, batch_size)
