import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from flowcorr.instruments.terminal import printing_on, show_table

HEADER = ("preset", *(f"column {index}" for index in range(12)))
ROWS = [
    (f"decoupled_geo_rs_token_tis_{name}", *(f"{10 * row + index}.{name}e-{index}" for index in range(12)))
    for row, name in enumerate(("41", "77"))
]


def printed(width, header, rows, **options):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, no_color=True, highlight=False)
    show_table(console, header, rows, **options)
    return re.sub(r"\x1b\[[\d;]*m", "", console.file.getvalue())


@pytest.mark.parametrize("width", [20, 60, 80, 100, 140, 300])
def test_every_name_and_every_digit_can_be_read_back(width):
    text = printed(width, HEADER, ROWS, title="gaps")
    words = re.split(r"\s+", text.replace("column ", "column_"))
    assert [cell for row in ROWS for cell in row if words.count(cell) != 1] == []
    assert [cell for row in ROWS for cell in row] == [
        word for word in words if "e-" in word or word.startswith("decoupled")
    ]
    assert text.startswith("gaps\n")
    assert "…" not in text


@pytest.mark.parametrize("width", [60, 80, 100, 140, 300])
def test_lines_fit_the_terminal(width):
    assert max(map(len, printed(width, HEADER, ROWS).splitlines())) <= width


def test_a_narrow_terminal_names_the_column_of_each_number():
    assert printed(40, ("step", "mean", "|delta| 99%", "note"), [("3", "1.0e-4", "7.0e-4", "-")]) == (
        "step    mean  |delta| 99%  note\n3     1.0e-4       7.0e-4     -\n"
    )
    assert printed(28, ("step", "mean", "|delta| 99%", "note"), [("3", "1.0e-4", "7.0e-4", "-")]) == (
        "3\n  mean 1.0e-4\n  |delta| 99% 7.0e-4\n"
    )


def test_sentences_are_wrapped_and_not_cut():
    found = "the velocities differ by more than rounding explains, at every step of the window"
    rows = [(Text("FAIL"), "weights", "0.31", found), (Text("PASS"), "latents", "", "equal")]
    for width in (30, 60, 80, 200):
        text = printed(width, ("", "check", "number", "found"), rows, words=2, prose=True)
        assert re.sub(r"\s+", " ", found) in re.sub(r"\s+", " ", text)
        assert "FAIL  weights" in text


@settings(max_examples=30)
@given(
    st.lists(st.tuples(*[st.from_regex(r"[a-z0-9.]{1,30}", fullmatch=True)] * 4), min_size=1, max_size=4),
    st.integers(min_value=10, max_value=160),
)
def test_no_cell_is_lost_at_any_width(rows, width):
    text = printed(width, ("a", "b", "c", "d"), rows)
    for row in rows:
        assert all(cell in text for cell in row)


def test_without_a_terminal_there_is_a_width():
    with printing_on(Console(file=io.StringIO(), force_terminal=False, width=20)) as console:
        assert console.width == 140
    terminal = Console(file=io.StringIO(), force_terminal=True, width=20)
    with printing_on(terminal) as console:
        assert console is terminal


def test_without_a_terminal_lines_end_without_blanks():
    pipe = Console(file=io.StringIO(), force_terminal=False)
    rows = [("a", "a long sentence"), ("b", "short")]
    with printing_on(pipe) as console:
        show_table(console, ("name", "found"), rows, prose=True)
        console.print(Padding("indented", (0, 0, 0, 2)))
    assert pipe.file.getvalue() == "name  found\na     a long sentence\nb     short\n  indented\n"
