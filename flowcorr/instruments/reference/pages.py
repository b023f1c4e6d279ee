"""The generated tables of the pages: metrics, configuration keys, presets, causes, interfaces.

`python -m flowcorr.instruments.reference.pages` writes them between the markers `<!-- table: NAME -->` and
`<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from flowcorr.correction import PRESETS, RolloutCorrectionConfig
from flowcorr.instruments.doctor.checks import CAUSES
from flowcorr.instruments.metrics.metric import Metric
from flowcorr.instruments.metrics.table import SECTIONS
from flowcorr.instruments.reference.interfaces import INTERFACES, Row
from flowcorr.instruments.reference.keys import keys
from flowcorr.instruments.rules import Units, healthy_range

PACKAGE = Path(__file__).parents[2]
PAGES = (
    PACKAGE / "correction" / "README.md",
    PACKAGE / "instruments" / "README.md",
    PACKAGE.parent / "recipes" / "README.md",
    PACKAGE.parent / "examples" / "README.md",
)
_MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)


def rewritten(text: str) -> str:
    """A page with its tables made anew."""
    return _MARKED.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}", text)


def metrics_table() -> str:
    """All metrics by section, with their units and healthy ranges."""
    parts = []
    for section, metrics in SECTIONS.items():
        rows = [(f"`{metric.name}`", metric.meaning, metric.unit, healthy(metric)) for metric in metrics]
        parts.append(f"**{section}**\n\n{_table(('metric', 'meaning', 'unit', 'healthy'), rows)}")
    return "\n\n".join(parts)


def keys_table() -> str:
    """All configuration keys by section."""
    sections: dict[str, list[tuple[str, ...]]] = {}
    for key in keys():
        section, _, name = key.name.rpartition(".")
        row = (f"`{name}`", key.meaning, f"`{key.choices}`", f"`{key.default}`")
        sections.setdefault(section, []).append(row)
    header = ("key", "meaning", "values", "default")
    return "\n\n".join(f"**`{section}`**\n\n{_table(header, rows)}" for section, rows in sections.items())


def presets_table() -> str:
    """All presets with their aliases and keys."""
    rows = []
    for name, preset in PRESETS.items():
        config = RolloutCorrectionConfig.preset(name)
        aliases = ", ".join(f"`{alias}`" for alias in preset.aliases)
        rows.append((f"`{name}`", aliases, config.mode, preset.summary))
    return _table(("preset", "aliases", "mode", "what it does"), rows)


def causes_table() -> str:
    """All causes that `flowcorr doctor` names in a dump."""
    return _table(("`doctor` says", "what was wrong"), [(f"`{name}`", text) for name, text in CAUSES.items()])


def healthy(metric: Metric) -> str:
    """The healthy range of a metric, or nothing where no rule judges it by a number alone."""
    low, high = healthy_range(metric.name, Units())
    bounds = [f"≥ {low:.3g}"] * (low > -float("inf")) + [f"≤ {high:.3g}"] * (high < float("inf"))
    return ", ".join(bounds)


def interface_table(rows: Callable[[], Iterable[Row]]) -> str:
    """What a loop or an extension of the user's own fills in."""
    cells = [(f"`{name}`", meaning, default) for name, meaning, default in rows()]
    return _table(("name", "meaning", "default"), cells)


TABLES: Mapping[str, Callable[[], str]] = {
    "metrics": metrics_table,
    "keys": keys_table,
    "presets": presets_table,
    "causes": causes_table,
    **{name: partial(interface_table, rows) for name, rows in INTERFACES.items()},
}


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(rewritten(page.read_text(encoding="utf-8")), encoding="utf-8")
