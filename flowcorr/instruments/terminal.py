"""Tables on the terminal: no name and no digit is ever cut, however narrow the terminal is."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

Cell = str | Text

_WIDTH = 140  # where there is no terminal to ask
_LEAST_PROSE = 40  # columns; sentences in less are hard to read
_GAP = 2
_NOTHING = ("", "-")


@contextmanager
def printing_on(console: Console | None) -> Iterator[Console]:
    """The console to print on; in a file or pipe, lines have a fixed width and no blanks at their ends."""
    console = console or Console(highlight=False)
    if console.is_terminal:
        yield console
        return
    padded = Console(file=io.StringIO(), width=_WIDTH, highlight=False)
    with padded.capture() as captured:
        yield padded
    console.out(re.sub(r" +$", "", captured.get(), flags=re.MULTILINE), highlight=False, end="")


def show_table(
    console: Console,
    header: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    title: str = "",
    words: int = 1,
    prose: bool = False,
    styles: Iterable[str | None] | None = None,
) -> None:
    """Print a table; on a narrow terminal, each row becomes a name with `column value` pairs below it.

    Args:
        console: where to print.
        header: a name for each column.
        rows: as many cells each.
        title: a line above the table.
        words: how many columns, from the first, hold names; they stand left, and numbers right.
        prose: whether the last column holds sentences, which are wrapped.
        styles: of each row.
    """
    cells = [[_text(cell) for cell in row] for row in rows]
    styles = [None] * len(cells) if styles is None else list(styles)
    if title:
        console.print(title, style="italic", markup=False)
    if _needed(header, cells, prose) <= console.width:
        console.print(_table(header, cells, styles, words, prose))
        return
    for row, style in zip(cells, styles, strict=True):
        for line in _stacked(header, row, words, prose, console.width):
            console.print(line, style=style, soft_wrap=isinstance(line, Text))


def _text(cell: Cell) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)


def _needed(header: Sequence[str], rows: Sequence[Sequence[Text]], prose: bool) -> int:
    """Columns of the terminal that the table needs."""
    widths = [
        max(cell_len(name), *(cell_len(line) for row in rows for line in row[place].plain.splitlines()), 0)
        for place, name in enumerate(header)
    ]
    if prose:
        widths[-1] = min(widths[-1], _LEAST_PROSE)
    return sum(widths) + _GAP * (len(widths) - 1)


def _table(
    header: Sequence[str],
    rows: Sequence[Sequence[Text]],
    styles: Sequence[str | None],
    words: int,
    prose: bool,
) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for place, name in enumerate(header):
        wraps = prose and place == len(header) - 1
        table.add_column(
            name, justify="left" if wraps or place < words else "right", no_wrap=not wraps, overflow="fold"
        )
    for row, style in zip(rows, styles, strict=True):
        table.add_row(*row, style=style)
    return table


def _stacked(
    header: Sequence[str], row: Sequence[Text], words: int, prose: bool, width: int
) -> Iterator[Text | Padding]:
    """A row as lines: its names, then pairs of column and value, then its sentences."""
    yield Text(" " * _GAP).join(cell for cell in row[:words] if cell.plain)
    last = len(header) - prose
    named = zip(header[words:last], row[words:last], strict=True)
    indent = line = " " * _GAP
    for pair in (f"{name} {cell.plain}" for name, cell in named if cell.plain not in _NOTHING):
        longer = f"{line}{pair}{indent}"
        if line != indent and cell_len(longer.rstrip()) > width:
            yield Text(line.rstrip())
            longer = f"{indent}{pair}{indent}"
        line = longer
    if line != indent:
        yield Text(line.rstrip())
    if prose and row[-1].plain:
        yield Padding(row[-1], (0, 0, 0, _GAP))
