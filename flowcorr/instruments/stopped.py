"""The screen of a training run that a fault has stopped: the part, its evidence, and the ways to go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowcorr.errors import RolloutFault
from flowcorr.instruments.outcome import Fact, Report
from flowcorr.trainer import checkpoint
from flowcorr.trainer.fault import FOLDER
from flowcorr.trainer.run_folder import CHECKPOINTS, metrics_of, resume_command

_REPLAYED = "rollout_corr/replay/window"
_DECODED = "rollout_corr/replay/decode"  # in every training step
_OF_MANY_STEPS = ("rollout_corr/replay/", "rollout_corr/residual/")  # faults that may have begun earlier


def stopped_run(fault: RolloutFault, folder: Path) -> Report:
    """The report of a stopped run.

    Args:
        fault: that stopped it.
        folder: of the run.
    """
    saved = checkpoint.steps(folder / CHECKPOINTS)
    state = f"the state after step {saved[-1]} is saved" if saved else "no state was saved"
    facts = [
        Fact(
            name="saved",
            value=saved[-1] if saved else None,
            text=f"{state}; evidence: {folder / FOLDER}",
        ),
        *_since(fault, folder, metrics_of(folder), saved),
        Fact(
            name="resume", value=resume_command(folder), text=f"once it is mended: {resume_command(folder)}"
        ),
        Fact(
            name="go_on",
            value="trainer.on_fault=warn",
            text="to train on it all the same, add trainer.on_fault=warn",
        ),
    ]
    return Report(
        title=str(folder),
        verdict=f"stopped at training step {fault.step}, which is not kept: only a fault explains what it measured",
        facts=facts,
        findings=fault.findings,
    )


def _since(
    fault: RolloutFault, folder: Path, records: Sequence[Mapping[str, Any]], saved: Sequence[int]
) -> list[Fact]:
    """Name the last replay without the fault, where only replays see it, and the newest checkpoint of that time."""
    metrics = [str(finding.numbers.get("metric", "")) for finding in fault.findings]
    if not all(metric.startswith(_OF_MANY_STEPS) and metric != _DECODED for metric in metrics):
        return []
    steps = [record["step"] for record in records if record.get(_REPLAYED) is not None]
    before = max((step for step in steps if step < fault.step), default=0)
    if before == fault.step - 1:
        return []
    text = f"the last replay before it was at step {before}, and later steps may have learned the fault"
    older = [step for step in saved if step <= before]
    if older:
        newest = checkpoint.folder_of(folder / CHECKPOINTS, older[-1])
        text += f"; {newest} is from before them: to resume there, move the later ones away"
    return [Fact(name="last_replay", value=before, text=text)]
