"""Runs on one page: `write_report` makes a single HTML file without scripts, which loads nothing from anywhere.

On request its charts lie beside it as PNG files, for where a page cannot go.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import median

import flowcorr
from flowcorr.config import Config
from flowcorr.diagnostics.health import HealthFinding, examine_run
from flowcorr.diagnostics.report_charts import Chart, ChartSection, chart_sections, colours
from flowcorr.diagnostics.report_png import save_charts
from flowcorr.diagnostics.run_data import Group, Run, differences, group_by_seed, read_run
from flowcorr.diagnostics.svg import COLOURS
from flowcorr.errors import ConfigError
from flowcorr.trackers import IMAGES_FOLDER
from flowcorr.trainer.run_folder import resume_command
from flowcorr.trainer.timing import PHASES

MAX_GRIDS = 4
_HEADLINES = ("eval/reward", "eval/exact_match", "reward/mean")

_STYLE = """
:root { color-scheme: light; --ink: #1c2430; --soft: #5b6675; --line: #dde2e8; --card: #fff; }
* { box-sizing: border-box; }
body { margin: 0; background: #f5f6f8; color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 20px 16px 60px; }
h1 { font-size: 24px; margin: 8px 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 10px; }
h3 { font-size: 14px; margin: 0; }
section > h3 { margin: 20px 0 8px; }
p { margin: 4px 0 10px; max-width: 75ch; }
.soft, figcaption { color: var(--soft); font-size: 13px; }
.grid { display: grid; gap: 14px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 350px), 1fr)); }
.card, .finding { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; }
.card { margin: 0; min-width: 0; }
.finding { margin: 0; border-left: 5px solid #15915b; overflow-wrap: anywhere; }
.finding.serious { border-left-color: #c0392b; }
.finding.warning { border-left-color: #dc9410; }
.finding.note { border-left-color: #7b8794; }
.finding p { margin: 2px 0; }
svg { display: block; width: 100%; height: auto; margin: 6px 0 2px; }
svg text { font: 11px system-ui, sans-serif; fill: #5b6675; }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 6px 12px; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
td:first-child { min-width: 10em; }
td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 5px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 13px; margin: 6px 0; }
.bar { display: flex; height: 22px; border-radius: 4px; overflow: hidden; margin: 6px 0; }
.images { display: grid; gap: 14px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 480px), 1fr)); }
.images .full { grid-column: 1 / -1; }
.scroll { overflow-x: auto; }
.images img { display: block; width: 100%; height: auto; margin-top: 6px; }
.images .full img { min-width: 900px; }
code { font-size: 13px; overflow-wrap: anywhere; }
"""


def write_report(folders: Sequence[Path], out: Path, *, charts: Path | None = None) -> Path:
    """Write the page of one or more runs; those that differ by seed only are drawn as one, with a band.

    Args:
        folders: the runs' folders.
        out: the file; its folder is made.
        charts: a folder that gets every chart as PNG, or None for none.

    Raises:
        ConfigError: a folder holds no run, or a file cannot be written.
        MissingExtraError: charts are asked for, and what draws them is not installed.
    """
    different = {folder.resolve(): folder for folder in folders}
    groups = group_by_seed([read_run(folder) for folder in different.values()])
    sections = chart_sections(groups)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(report_page(groups, sections), encoding="utf-8")
        if charts is not None:
            keys = [(group.label, colour) for group, colour in zip(groups, colours(groups), strict=True)]
            save_charts(sections, keys, charts)
    except OSError as error:
        raise ConfigError(
            f"--out {out} cannot be written ({error.strerror or error}); name another file"
        ) from error
    return out


def report_page(groups: Sequence[Group], sections: Sequence[ChartSection]) -> str:
    """The page as HTML text."""
    title = " · ".join(group.label for group in groups)
    parts = [
        _summary(groups),
        _health(groups),
        *(_charts(groups, section) for section in sections),
        _timing(groups),
        _images(groups),
        _differences(groups),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)} – flowcorr report</title><style>{_STYLE}</style></head>\n<body><main>"
        f"<h1>{escape(title)}</h1><p class='soft'>flowcorr report {escape(flowcorr.__version__)} · "
        f"{_plural(sum(len(group.runs) for group in groups), 'run')}, "
        f"{_plural(len(groups), 'configuration')}</p>\n"
        + "\n".join(filter(None, parts))
        + "</main></body></html>\n"
    )


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


# Summary and health --------------------------------------------------------------------------------------------


def _summary(groups: Sequence[Group]) -> str:
    metrics = [name for name in _HEADLINES if any(group.band(name) for group in groups)]
    head = "".join(f"<th>{escape(name)}</th>" for name in metrics)
    rows = []
    for group, colour in zip(groups, colours(groups), strict=True):
        cells = "".join(f'<td class="number">{_change(group, metric)}</td>' for metric in metrics)
        last = sorted({run.last_step for run in group.runs})
        steps = f"{last[0]}–{last[-1]}" if len(last) > 1 else f"{last[0]}"
        rows.append(
            f"<tr><td>{_key(colour)}{escape(group.label)}</td><td>{escape(_treatment(group.config))}</td>"
            f'<td class="number">{steps}</td>{cells}</tr>'
        )
    table = f"<tr><th>runs</th><th>correction</th><th>steps</th>{head}</tr>{''.join(rows)}"
    note = "First to last value; with several seeds their mean, and in brackets the smallest and largest last one."
    if any(len({run.last_step for run in group.runs}) > 1 for group in groups):
        note += " Last values are of the seeds that got furthest."
    return _section("Summary", f'<div class="wide"><table>{table}</table></div><p class="soft">{note}</p>')


def _change(group: Group, metric: str) -> str:
    band = group.band(metric)
    if not band:
        return "–"
    first, (_, mean, low, high) = band[0][1], band[-1]
    spread = f" ({low:.3g} to {high:.3g})" if len(group.runs) > 1 else ""
    return f"{first:.3g} → {mean:.3g}{spread}"


def _treatment(config: Config) -> str:
    correction = config.algorithm.rollout_correction
    if correction is None:
        return "off"
    return correction.label


def _health(groups: Sequence[Group]) -> str:
    healthy: dict[bool, list[str]] = {}
    cards: list[str] = []
    for group in groups:
        for run in group.runs:
            findings = examine_run(run.records, group.units)
            steps = len(run.series("timing/step"))
            cards += [_unfinished(run)] if run.ending else []
            cards += [_finding(run, finding, steps) for finding in findings]
            if not steps and not run.failed:
                text = "No training step was logged, so there is nothing to judge."
                cards.append(f'<div class="finding note"><b>note</b> · {escape(run.name)}<p>{text}</p></div>')
            elif not findings and not run.failed:
                healthy.setdefault(group.config.algorithm.rollout_correction is None, []).append(run.name)
    for blind, names in healthy.items():
        text = (
            f"No rule was broken{'; without rollout_correction, the gap was not measured' if blind else ''}."
        )
        cards.insert(
            0, f'<div class="finding"><b>healthy</b> · {escape(", ".join(names))}<p>{text}</p></div>'
        )
    return _section("Health", f'<div class="grid">{"".join(cards)}</div>')


def _unfinished(run: Run) -> str:
    level = "serious" if run.failed else "note"
    where = f"last logged step {run.last_step} of {run.config.trainer.total_steps}"
    command = f"<code>{escape(resume_command(run.folder))}</code>"
    return (
        f'<div class="finding {level}"><b>{level}</b> · {escape(run.name)}'
        f'<p>The run {escape(run.ending)} <span class="soft">({where})</span></p>'
        f'<p class="soft">If it is not running, continue it with {command}</p></div>'
    )


def _finding(run: Run, finding: HealthFinding, steps: int) -> str:
    where = f"worst at step {finding.step}; on {finding.num_steps} of {_plural(steps, 'step')}"
    return (
        f'<div class="finding {finding.level}"><b>{finding.level}</b> · {escape(run.name)}'
        f'<p>{_sentence(finding.message)} <span class="soft">({escape(where)})</span></p>'
        f'<p>{_sentence(finding.advice)}</p><p class="soft"><code>{escape(finding.metric)}</code></p></div>'
    )


def _sentence(text: str) -> str:
    """The text as HTML, with what stands between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(f"{text[0].upper()}{text[1:]}."))


def _charts(groups: Sequence[Group], section: ChartSection) -> str:
    intro = f"<p class='soft'>{escape(section.text)}</p>" if section.text else ""
    legend = _legend(groups) if section.by_colour else ""
    cards = "".join(map(_card, section.charts))
    return _section(section.title, intro, legend, f'<div class="grid">{cards}</div>' if cards else "")


def _card(chart: Chart) -> str:
    metric = f"<br><code>{escape(chart.metric)}</code>" if chart.metric else ""
    return (
        f'<figure class="card"><h3>{escape(chart.title)}</h3>{chart.svg}'
        f"<figcaption>{escape(chart.caption)}{metric}</figcaption></figure>"
    )


# Timing, images, configuration ---------------------------------------------------------------------------------


def _timing(groups: Sequence[Group]) -> str:
    cards = [card for card in map(_timing_card, groups) if card]
    return _section("Where the time goes", f'<div class="grid">{"".join(cards)}</div>') if cards else ""


def _timing_card(group: Group) -> str:
    whole = _median(group, "timing/step")
    if not whole:
        return ""
    seconds = {phase: _median(group, f"timing/{phase}") for phase in PHASES}
    seconds["other"] = max(0.0, whole - sum(seconds.values()))
    total = sum(seconds.values())
    colours = dict(zip(seconds, COLOURS, strict=False))
    bar = "".join(
        f'<span style="width:{100 * value / total:.2f}%;background:{colours[phase]}"></span>'
        for phase, value in seconds.items()
    )
    legend = "".join(
        f"<span>{_key(colours[phase])}{phase} {value:.2g} s ({value / total:.0%})</span>"
        for phase, value in seconds.items()
        if value / total >= 0.005
    )
    return (
        f'<div class="card"><h3>{escape(group.label)}</h3><div class="bar">{bar}</div>'
        f'<div class="legend">{legend}</div><div class="soft">median step {whole:.3g} s</div></div>'
    )


def _median(group: Group, metric: str) -> float:
    values = [value for run in group.runs for _, value in run.series(metric)]
    return median(values) if values else 0.0


def _images(groups: Sequence[Group]) -> str:
    parts = []
    for group in groups:
        run = group.runs[0]
        figures = _figures(run)
        if figures:
            parts.append(f"<h3>{escape(run.name)}</h3>" + f'<div class="images">{"".join(figures)}</div>')
    seeds = max(len(group.runs) for group in groups) > 1
    note = "<p class='soft'>Of runs that differ by seed only, the first one's.</p>" if seeds else ""
    return _section("Images", note, *parts) if parts else ""


def _figures(run: Run) -> list[str]:
    folder = run.folder / IMAGES_FOLDER
    figures = []
    pair = folder / "before_after.png"
    if pair.is_file():
        figures.append(_figure(pair, "held out, before and after", full=True))
    else:
        figures += [_figure(path, f"held out, {path.stem[5:]}") for path in sorted(folder.glob("eval_*.png"))]
    figures += [
        _figure(path, _rollout_caption(path)) for path in _spread(sorted(folder.glob("rollout_*.png")))
    ]
    return figures


def _spread(paths: Sequence[Path]) -> list[Path]:
    """The first, the last and some between."""
    if len(paths) <= MAX_GRIDS:
        return list(paths)
    return [paths[round(i * (len(paths) - 1) / (MAX_GRIDS - 1))] for i in range(MAX_GRIDS)]


def _rollout_caption(path: Path) -> str:
    match = re.match(r"rollout_(\d+)", path.stem)
    return f"rollouts at step {int(match[1])}" if match else path.stem


def _figure(path: Path, caption: str, *, full: bool = False) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return (
        f'<figure class="card{" full" if full else ""}"><h3>{escape(caption)}</h3><div class="scroll">'
        f'<img alt="{escape(caption)}" src="data:image/png;base64,{data}"></div></figure>'
    )


def _differences(groups: Sequence[Group]) -> str:
    if len(groups) < 2:
        return ""
    head = "".join(
        f"<th>{_key(colour)}{escape(group.label)}</th>"
        for group, colour in zip(groups, colours(groups), strict=True)
    )
    rows = "".join(
        f"<tr><td><code>{escape(key)}</code></td>{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>"
        for key, values in differences(groups).items()
    )
    return _section(
        "Configuration: what differs",
        f'<div class="wide"><table><tr><th>key</th>{head}</tr>{rows}</table></div>',
    )


# Small things --------------------------------------------------------------------------------------------------


def _key(colour: str) -> str:
    return f'<span class="key" style="background:{colour}"></span>'


def _legend(groups: Sequence[Group]) -> str:
    if len(groups) < 2:
        return ""
    entries = "".join(
        f"<span>{_key(colour)}{escape(group.label)}</span>"
        for group, colour in zip(groups, colours(groups), strict=True)
    )
    return f'<div class="legend">{entries}</div>'


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
