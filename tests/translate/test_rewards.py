"""Reward functions of other trainers."""

import pytest

from flowcorr.errors import ConfigError
from flowcorr.translate import rewards
from flowcorr.translate.rewards import Reward, note, number, terms


def test_a_reward_that_flowcorr_has_keeps_its_unit():
    given = [
        Reward(name="pick", known=rewards.PICKSCORE),
        Reward(name="jpeg", known=rewards.JPEG, weight=0.5),
        Reward(name="text", known=rewards.OCR, weight=2.0),
        Reward(name="judge", known=rewards.JUDGED_OCR, options={"model": "a/b"}),
    ]
    assert terms(given) == [
        {"name": "pickscore"},
        {"name": "jpeg_compressibility", "weight": 0.001},
        {"name": "ocr", "weight": 2.0, "options": {"exact_weight": 0.0, "detect": True}},
        {
            "name": "vlm_judge",
            "options": {"base_url": rewards.JUDGE_URL, "mode": "transcribe", "model": "a/b"},
        },
    ]
    assert note(given).startswith("kB / 500 there, kB here; ocr divides the edit distance by the longer text")
    assert f"serve the model of vlm_judge at {rewards.JUDGE_URL}" in note(given)


def test_another_reward_becomes_a_function_that_the_user_writes():
    given = [
        Reward(name="ocr-server", known=None, options={"server_url": "http://a:1"}, without=["x.required"])
    ]
    assert terms(given, normalize="group") == [
        {"name": "my_rewards:ocr_server", "options": {"server_url": "http://a:1"}, "normalize": "group"}
    ]
    assert note(given) == "write my_rewards:NAME yourself, see examples/custom_reward.py; without x.required"


def test_a_weight_is_a_number():
    assert number("a", 2) == 2.0
    for value in ("x", True, None):
        with pytest.raises(ConfigError, match=rf"^a={value!r} .* number$"):
            number("a", value)
