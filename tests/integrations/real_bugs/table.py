"""The table of others' bugs, of the runs in `results.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from integrations.real_bugs.bugs import Bug
from integrations.real_bugs.verdicts import RIGHT, SILENT, wilson

RESULTS = Path(__file__).parent / "results.jsonl"
_RAN = {
    "loop": "its loop, both commits",
    "reversed": "its loop, fix taken back",
    "function": "its function",
    "release": "its function, two releases",
    "ours": "our loop, as described",
}
_CLONES = {
    "Flow-Factory": "X-GenGroup/Flow-Factory",
    "verl-omni": "verl-project/verl-omni",
    "verl": "verl-project/verl",
    "miles_diffusion": "radixark/miles_diffusion",
    "DanceGRPO": "XueZeyue/DanceGRPO",
    "vllm-omni": "vllm-project/vllm-omni",
    "UniRL": "Tencent-Hunyuan/UniRL",
    "SGLang": "sgl-project/sglang",
    "Phased-Consistency-Model": "G-U-N/Phased-Consistency-Model",
    "Pref-GRPO": "CodeGoat24/Pref-GRPO",
    "diffusers": "huggingface/diffusers",
}
Results = Mapping[str, Mapping[bool, Mapping[str, Any]]]


def read_results(path: Path = RESULTS) -> Results:
    """The last record of each run, by bug and by whether its fix was in."""
    made: dict[str, dict[bool, Mapping[str, Any]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        made.setdefault(record["key"], {})[record["after"]] = record
    return made


def link(bug: Bug) -> str:
    """The fix, or the issue of an open one, as a link."""
    place = f"https://github.com/{_CLONES[bug.project]}"
    kind, _, number = bug.where.split(",")[0].partition(" ")
    path = {"pull": f"pull/{number}", "issue": f"issues/{number}"}.get(kind, f"commit/{bug.fix}")
    return f"[{bug.project} {number or bug.fix}]({place}/{path})"


def row(bug: Bug, runs: Mapping[bool, Mapping[str, Any]]) -> str:
    """One bug in a line of the table."""
    before, after = runs[False], runs[True]
    cells = (
        link(bug),
        bug.wrong,
        _RAN[before.get("ran", bug.run)],
        f"`{bug.name}`",
        said(before),
        before["outcome"],
        "silent" if after["outcome"] == SILENT else said(after),
    )
    return f"| {' | '.join(cells)} |"


def said(record: Mapping[str, Any]) -> str:
    """What each instrument said, the silent ones left out."""
    spoke = {name: causes for name, causes in record["said"].items() if causes}
    return (
        "; ".join(f"{name} {' '.join(f'`{cause}`' for cause in causes)}" for name, causes in spoke.items())
        or "-"
    )


def share(runs: Sequence[Mapping[str, Any]], outcomes: Sequence[str] = (RIGHT,)) -> str:
    """How many of some runs had one of these outcomes, with the interval of the share."""
    hits = sum(record["outcome"] in outcomes for record in runs)
    low, high = wilson(hits, len(runs))
    return f"{hits} of {len(runs)} ({low:.2f} to {high:.2f})"
