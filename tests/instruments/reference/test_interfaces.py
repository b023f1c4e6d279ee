"""What an extension fills in, read from docstrings and signatures."""

import pytest

from flowcorr.instruments.reference.interfaces import INTERFACES


@pytest.mark.parametrize("name", INTERFACES)
def test_every_row_has_a_meaning(name):
    rows = list(INTERFACES[name]())
    assert rows
    assert all(meaning for _, meaning, _ in rows)


@pytest.mark.parametrize(
    ("name", "row", "default"),
    [
        ("call", "target_log_prob", ""),
        ("call", "rollout_is_threshold", "`2.0`"),
        ("loss", "objective", ""),
        ("loss", "log_ratio", "`plain_log_ratio`"),
        ("mode", "bounds", ""),
        ("engine", "extra", "`None`"),
        ("engine_methods", "history", ""),
        ("engine_methods", "sample()", ""),
        ("family", "name", ""),
        ("family", "guidance_key", "`'guidance_scale'`"),
        ("family", "decode()", ""),
        ("reward", "extras", ""),
    ],
)
def test_a_row_shows_what_is_required_and_what_has_a_default(name, row, default):
    assert [found for found, _, found_default in INTERFACES[name]() if found_default == default].count(
        row
    ) == 1


def test_what_an_instance_holds_is_not_stated_by_a_family():
    assert not {"pipeline", "dtype", "text_offloaded"} & {row for row, _, _ in INTERFACES["family"]()}
