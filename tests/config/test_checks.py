"""Checks that sections share."""

import math

import pytest

from flowcorr.config import load_mapping
from flowcorr.config.checks import above, at_least, at_most, not_blank, within
from flowcorr.errors import ConfigError


def test_bounds_of_numbers():
    at_least("a.b", 1, 1)
    above("a.b", 1.5, 1)
    at_most("a.b", 1, 1)
    within("a.b", 1, 1, 1)
    for bad in (0, 2):
        with pytest.raises(ConfigError, match=rf"^a\.b={bad} is out of range; it must be at"):
            within("a.b", bad, 1, 1)
    for check, bad in (
        (at_most, 1.5),
        (at_most, math.nan),
        (at_least, 0.5),
        (above, 1),
        (at_least, math.inf),
        (above, math.nan),
    ):
        with pytest.raises(ConfigError, match=rf"^a\.b={bad} is out of range; it must be "):
            check("a.b", bad, 1)


def test_a_blank_name_is_refused():
    not_blank("a.b", "x")
    with pytest.raises(ConfigError, match=r"^a\.b=' ' is blank; name a file or folder$"):
        not_blank("a.b", " ")


@pytest.mark.parametrize(
    ("section", "keys", "message"),
    [
        ("rollout", {"num_workers": 0}, r"rollout\.num_workers=0 is out of range; it must be at least 1"),
        ("reward", {"num_workers": 0}, r"reward\.num_workers=0 is out of range"),
        ("rollout", {"timeout": 0}, r"rollout\.timeout=0\.0 is out of range; it must be above 0"),
        ("reward", {"timeout": -1}, r"reward\.timeout=-1\.0 is out of range"),
        ("rollout", {"worker_resources": {"num_gpus": "1"}}, r"worker_resources\.num_gpus='1' must be a number"),
        ("rollout", {"worker_resources": {"num_gpus": True}}, r"worker_resources\.num_gpus=True must be a number"),
        ("reward", {"worker_resources": {"rack": -1}}, r"reward\.worker_resources\.rack=-1 is out of range"),
    ],
)  # fmt: skip
def test_workers_that_cannot_be(section, keys, message):
    with pytest.raises(ConfigError, match=message):
        load_mapping({section: keys})
