import pytest

from flowcorr.instruments.thinning import (
    MAX_POINTS,
    MAX_ROWS,
    rows_text,
    spread_out,
    steps_a_point,
    stride_text,
)


@pytest.mark.parametrize(
    ("count", "stride"),
    [(1, 1), (MAX_POINTS, 1), (MAX_POINTS + 1, 2), (2 * MAX_POINTS, 2), (2 * MAX_POINTS + 1, 3)],
)
def test_no_curve_has_more_points_than_a_chart_can_show(count, stride):
    assert steps_a_point(count) == stride


def test_what_was_averaged_or_left_out_is_said():
    assert (stride_text(1), stride_text(3)) == ("", "means over 3 steps")
    assert (rows_text([1, 2], [1, 2]), rows_text([1], [1, 2])) == ("", "1 of 2 steps")


def test_steps_are_spread_from_the_first_to_the_last():
    assert spread_out([3, 5, 9]) == [3, 5, 9]
    shown = spread_out(range(900))
    assert (len(shown), shown[0], shown[-1]) == (MAX_ROWS, 0, 899)
    assert len(set(shown)) == MAX_ROWS
