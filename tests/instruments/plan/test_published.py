"""`flowcorr plan` against published measurements, and the table that shows them."""

import pytest

from tests.instruments.plan.published import FITTED, HELD_OUT, MEMORY, PAGE, ROWS, TIME, rewritten, summary


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=f"{place}") for place, row in enumerate(ROWS, 1) if not row.outside]
)
def test_a_published_number_is_planned_within_its_factor(row):
    factor = MEMORY if row.unit == "GB" else TIME
    assert 1 / factor < row.factor < factor, row.setting


def test_held_out_rows_are_planned_no_worse_than_fitted_ones():
    for rows in (FITTED, HELD_OUT):
        middle, _ = summary(rows)
        assert 0.9 < middle < 1.1
    assert len(HELD_OUT) == len(ROWS) // 3


def test_the_page_shows_these_rows():
    page = PAGE.read_text(encoding="utf-8")
    assert rewritten(page) == page, "write it anew: python -m tests.instruments.plan.published"
