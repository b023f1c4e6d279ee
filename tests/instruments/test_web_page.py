import html
import re

import pytest

from flowcorr.health.finding import Finding
from flowcorr.instruments.outcome import Report
from flowcorr.instruments.web_page import framed, sentence, web_page

KEYS = "actor:\n  clip_ratio: 0.01\n"
REPORT = Report(
    title='<b>"a run"</b>',
    verdict="it learned",
    findings=[Finding(level="note", cause="clip", sentence="a & b; c", keys=KEYS)],
)


def test_texts_are_escaped_and_keys_stand_as_a_command_too():
    page = web_page(REPORT)
    assert "<b>" not in page
    assert "A &amp; b; c." in page
    assert "actor.clip_ratio=0.01" in page


def test_a_frame_holds_the_page_and_no_other_quotes():
    (held,) = re.findall(
        r'^<iframe title="[^"<>]*" style="[^"]*" srcdoc="([^"<>]*)"></iframe>$', framed(REPORT)
    )
    assert html.unescape(held) == web_page(REPORT)
    assert REPORT._repr_html_() == framed(REPORT)


def test_a_sentence_begins_with_a_capital_and_ends_once():
    assert [sentence(text) for text in ("a b", "a b.", "done.", "")] == ["A b.", "A b.", "Done.", "."]


@pytest.mark.parametrize(
    "name", ["runs/a/metrics.jsonl:", "actor.loss_mode=mine:loss", "loss_mode", "a.yaml"]
)
def test_a_sentence_leaves_a_name_as_it_is(name):
    assert sentence(f"{name} is read") == f"{name} is read."


def test_a_report_is_one_line_where_no_page_is_shown():
    assert repr(REPORT) == '<Report of <b>"a run"</b>: it learned>'
