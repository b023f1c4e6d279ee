"""The sections of prompts and rewards."""

import math

import pytest

from flowcorr.config import DataConfig, RewardConfig, RewardTerm, load
from flowcorr.errors import ConfigError
from flowcorr.rewards import REWARDS


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "reward.terms=[{name: ocr, normalize: batch}]",
            r"normalize='batch' is unknown; choose from none, group, global",
        ),
        ("reward.gold=[{name: ocr, weight: 2}]", r"reward.gold\[ocr\] has a weight or normalize"),
        ("reward.gold=[{name: ocr, normalize: group}]", r"reward.gold\[ocr\] has a weight or normalize"),
        ("reward.gold=[ocr]", r"reward.gold\[0\]='ocr' must be a section"),
    ],
    ids=str,
)
def test_bad_recipes_are_refused(bare, override, message):
    with pytest.raises(ConfigError, match=message):
        load(bare, [override])


def test_rewards_that_cannot_be_summed():
    with pytest.raises(ConfigError, match=r"reward\.terms\[ocr\]\.weight=nan must be a finite number"):
        RewardTerm(name="ocr", weight=math.nan)
    with pytest.raises(ConfigError, match=r"reward\.terms=\[\] scores nothing; give at least one"):
        RewardConfig(terms=())
    with pytest.raises(
        ConfigError, match=r"^reward\.terms\[\]\.weight=0 of all terms \(ocr, b\) trains on nothing; give one"
    ):
        RewardConfig(terms=(RewardTerm(name="ocr", weight=0.0), RewardTerm(name="b", weight=0.0)))
    RewardConfig(terms=(RewardTerm(name="ocr", weight=0.0), RewardTerm(name="b")))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_some_prompts_are_held_out_and_some_are_not(share):
    with pytest.raises(ConfigError, match=rf"data\.heldout_fraction={share} is out of range"):
        DataConfig(heldout_fraction=share)


def test_schema_names_every_reward():
    assert all(f"`{name}`" in RewardTerm.__doc__ for name in REWARDS)
