"""The rollout workers of a run: host, process and gap of each."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from flowcorr.instruments.outcome import Column, Table
from flowcorr.trainer.events import EVENTS_FILE, read_events

_ANY = re.compile(r"rollout_corr/worker_([0-9]{1,4})/(logprob_abs_diff|relative_gap)")


def worker_table(
    name: str, records: Sequence[Mapping[str, Any]], places: Mapping[int, str], number: int = 0
) -> Table:
    """A row for each worker of a run: its host and process, and its mean gap.

    Args:
        name: of the run.
        records: its metrics.
        places: where each worker ran.
        number: of the run, among others.
    """
    gaps: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        for metric, value in record.items():
            if (match := _ANY.fullmatch(metric)) and value is not None:
                gaps[int(match[1])][match[2]].append(value)
    return Table(
        name=f"workers_{number}",
        title=f"Rollout workers of {name}",
        note="mean |Δ log p| of what each worker sampled, and compared with all workers' at the same steps",
        columns=[
            Column(name="worker", words=True),
            Column(name="where", words=True),
            Column(name="gap"),
            Column(name="relative_gap", heading="relative"),
        ],
        rows=[
            (
                worker,
                places.get(worker, "not known"),
                *(
                    fmean(values) if (values := by_metric[key]) else None
                    for key in ("logprob_abs_diff", "relative_gap")
                ),
            )
            for worker, by_metric in sorted(gaps.items())
        ],
    )


def places_of(folder: Path) -> dict[int, str]:
    """By worker of a run, its host, process and GPUs in words, from its events; empty if none tells them."""
    path = folder / EVENTS_FILE
    if not path.is_file():
        return {}
    places_by_worker: dict[int, str] = {}
    for event in read_events(path):
        match event:
            case {"kind": "workers", "places": [*places]}:
                places_by_worker = {number: _in_words(place) for number, place in enumerate(places)}
            case {"kind": "worker_restarted", "worker": str(name)} if name.startswith("rollout worker "):
                number = name.removeprefix("rollout worker ")
                if number.isdecimal() and len(number) < 5:
                    places_by_worker[int(number)] = _in_words(event)
    return places_by_worker


def _in_words(place: Any) -> str:
    if not isinstance(place, Mapping):
        return ""
    gpus = place.get("gpus")
    parts = [f"host {place['host']}" if "host" in place else "", f"process {place.get('pid', 'unknown')}"]
    if isinstance(gpus, Sequence) and not isinstance(gpus, str) and gpus:
        parts.append(f"GPU {', '.join(map(str, gpus))}")
    return ", ".join(filter(None, parts))
