"""The sections of prompts and rewards."""

import math

import pytest

from flowcorr.config import DataConfig, RewardConfig, RewardTerm, load
from flowcorr.errors import ConfigError
from flowcorr.rewards import REWARDS


@pytest.mark.parametrize(
    ("override", "named"),
    [
        (
            "reward.terms=[{name: ocr, normalize: batch}]",
            r"normalize='batch' .* none, group, global",
        ),
        ("reward.gold=[{name: ocr, weight: 2}]", r"^reward\.gold\[ocr\] .*weight .*normalize"),
        ("reward.gold=[{name: ocr, normalize: group}]", r"^reward\.gold\[ocr\] .*weight .*normalize"),
        ("reward.gold=[ocr]", r"^reward\.gold\[0\]='ocr' "),
    ],
    ids=str,
)
def test_bad_recipes_are_refused(bare, override, named):
    with pytest.raises(ConfigError, match=named):
        load(bare, [override])


OCR, OTHER = RewardTerm(name="ocr", weight=0.0), RewardTerm(name="b", weight=0.0)


@pytest.mark.parametrize(
    ("section", "keys", "named"),
    [
        (RewardTerm, {"name": "ocr", "weight": math.nan}, r"reward\.terms\[ocr\]\.weight=nan "),
        (RewardConfig, {"terms": ()}, r"reward\.terms=\[\] "),
        (RewardConfig, {"terms": (OCR, OTHER)}, r"reward\.terms\[\]\.weight=0 .*\(ocr, b\)"),
        *(
            (DataConfig, {"heldout_fraction": share}, rf"data\.heldout_fraction={share} .*\(0, 1\)")
            for share in (0.0, 1.0, -0.1, 1.5, math.nan)
        ),
    ],
)
def test_values_that_leave_nothing_to_learn_from(section, keys, named):
    with pytest.raises(ConfigError, match=f"^{named}"):
        section(**keys)


def test_a_term_of_weight_zero_may_stand_beside_others():
    RewardConfig(terms=(OCR, RewardTerm(name="b")))


def test_schema_names_every_reward():
    assert all(f"`{name}`" in RewardTerm.__doc__ for name in REWARDS)
