"""What an extension fills in, read from docstrings and signatures."""

import pytest

from flowcorr.instruments.reference.interfaces import INTERFACES, find_interface, rows_of


@pytest.mark.parametrize("name", INTERFACES)
def test_every_row_has_a_meaning(name):
    rows = list(rows_of(name))
    assert rows
    assert all(meaning for _, meaning, _ in rows)


@pytest.mark.parametrize(
    ("name", "row", "default"),
    [
        ("compute_rollout_correction_and_rejection_mask", "target_log_prob", ""),
        ("compute_rollout_correction_and_rejection_mask", "rollout_is_threshold", "2.0"),
        ("Loss", "objective", ""),
        ("Loss", "log_ratio", "plain_log_ratio"),
        ("Mode", "bounds", ""),
        ("Engine", "extra", "None"),
        ("RolloutEngine", "history", ""),
        ("RolloutEngine", "sample()", ""),
        ("ModelFamily", "name", ""),
        ("ModelFamily", "guidance_key", "'guidance_scale'"),
        ("ModelFamily", "predict()", ""),
        ("Reward", "extras", ""),
    ],
)
def test_a_row_shows_what_is_required_and_what_has_a_default(name, row, default):
    assert [
        found for found, _, found_default in rows_of(find_interface(name)) if found_default == default
    ].count(row) == 1


def test_what_an_instance_holds_is_not_stated_by_a_family():
    assert not {"pipeline", "dtype", "text_offloaded"} & {
        row for row, _, _ in rows_of("flowcorr.models.base.ModelFamily")
    }
