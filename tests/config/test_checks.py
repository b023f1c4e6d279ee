"""Checks that sections share."""

import math

import pytest

from flowcorr.config import load_mapping
from flowcorr.config.checks import above, at_least, at_most, not_blank, within
from flowcorr.errors import ConfigError


def test_numbers_within_bounds_are_taken():
    at_least("a.b", 1, 1)
    above("a.b", 1.5, 1)
    at_most("a.b", 1, 1)
    within("a.b", 1, 1, 1)


@pytest.mark.parametrize(
    ("check", "value", "bounds", "allowed"),
    [
        (within, 0, (1, 1), "at least 1"),
        (within, 2, (1, 1), "at most 1"),
        (at_most, 1.5, (1,), "at most 1"),
        (at_most, math.nan, (1,), "at most 1"),
        (at_least, 0.5, (1,), "at least 1"),
        (at_least, math.inf, (1,), "finite and at least 1"),
        (above, 1, (1,), "above 1"),
        (above, math.nan, (1,), "finite and above 1"),
    ],
)
def test_numbers_beyond_bounds_are_named_with_the_bound(check, value, bounds, allowed):
    with pytest.raises(ConfigError, match=rf"^a\.b={value} .* {allowed}$"):
        check("a.b", value, *bounds)


def test_a_blank_name_is_refused():
    not_blank("a.b", "x")
    with pytest.raises(ConfigError, match=r"^a\.b=' ' "):
        not_blank("a.b", " ")


@pytest.mark.parametrize(
    ("section", "keys", "named"),
    [
        ("rollout", {"num_workers": 0}, r"rollout\.num_workers=0 .* 1$"),
        ("reward", {"num_workers": 0}, r"reward\.num_workers=0 "),
        ("rollout", {"timeout": 0}, r"rollout\.timeout=0\.0 .* 0$"),
        ("reward", {"timeout": -1}, r"reward\.timeout=-1\.0 "),
        ("rollout", {"worker_resources": {"num_gpus": "1"}}, r"rollout\.worker_resources\.num_gpus='1' "),
        ("rollout", {"worker_resources": {"num_gpus": True}}, r"worker_resources\.num_gpus=True "),
        ("reward", {"worker_resources": {"rack": -1}}, r"reward\.worker_resources\.rack=-1 "),
    ],
)  # fmt: skip
def test_workers_that_cannot_be(section, keys, named):
    with pytest.raises(ConfigError, match=named):
        load_mapping({section: keys})
