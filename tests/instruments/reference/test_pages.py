"""The tables of the pages are those of the code."""

import pytest

from flowcorr.instruments.reference.pages import PAGES, rewritten


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_pages_are_up_to_date(page):
    text = page.read_text(encoding="utf-8")
    assert "<!-- table: " in text
    assert rewritten(text) == text, "run: python -m flowcorr.instruments.reference.pages"


def test_a_stale_table_is_rewritten():
    assert "decoupled_seq_is" in rewritten("# Page\n<!-- table: presets -->\nold\n<!-- end -->\n")
