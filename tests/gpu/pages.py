"""The pages of GPUs, each with the tables of the record beside it: `python -m tests.gpu.pages` writes them.

A record is the `first_hour.jsonl` of a run, under the name of its page: `h200.jsonl` for `h200.md`.
"""

from pathlib import Path

from tests.gpu.hour.record import read_outcomes, tables

PAGES = sorted(file.with_suffix(".md") for file in Path(__file__).parent.glob("*.jsonl"))
BEGIN, END = "<!-- record -->\n", "<!-- end of record -->"


def rewritten(page: Path) -> str:
    """The page with the tables of its record."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}{tables(read_outcomes(page.with_suffix('.jsonl')))}{END}{rest.partition(END)[2]}"


def measured(page: str, part: str, what: str) -> float:
    """A number of a page's record: `measured("h200", "step_flux", "recompute")` are seconds."""
    rows = read_outcomes(Path(__file__).with_name(f"{page}.jsonl"))[part].rows
    value = next(row.value for row in rows if row.what == what)
    assert isinstance(value, int | float)
    return value


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(rewritten(page), encoding="utf-8")
