"""The table of known faults: names, sizes, and which runs can have them."""

import re

import pytest

from flowcorr.errors import ConfigError
from tests.conftest import small_config
from tests.planted.table import FAULTS, parse_fault

GUIDED = {"sampling": {"guidance_scale": 4.0}}


def test_every_fault_has_a_name_and_words():
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) >= 60
    assert all(re.fullmatch("[a-z0-9_]+", name) for name in names)
    assert all(fault.stands_for and not fault.stands_for.endswith(".") for fault in FAULTS)
    assert all(fault.size is None or fault.size > 0 for fault in FAULTS)


@pytest.mark.parametrize(
    ("text", "size"), [("noise_large", 0.2), ("noise_large=0.02", 0.02), ("unseeded", 0.0)]
)
def test_a_name_may_come_with_a_size(text, size):
    fault, found = parse_fault(text, small_config())
    assert (fault.name, found) == (text.partition("=")[0], size)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("noise_larg", r"noise_large\?\); .* latents_nan,"),
        ("noise_large=much", r" 0\.2$"),
        ("noise_large=-1", r" 0\.2$"),
        ("unseeded=2", "no size"),
        ("guidance_off", r"\(no guidance\)"),
    ],
)
def test_what_cannot_be_planted_is_refused(text, named):
    with pytest.raises(ConfigError, match=rf"^--fault[= ]'?{text}.*{named}"):
        parse_fault(text, small_config())


def test_some_faults_need_a_key():
    plain, guided = (
        {fault.name for fault in FAULTS if fault.applies(small_config(**sections))}
        for sections in ({}, GUIDED)
    )
    assert guided - plain == {name for name in guided if name.startswith(("guidance_", "negative_"))} - {
        "guidance_off_after"
    }
