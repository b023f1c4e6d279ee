"""The evidence of a training step that was stopped, for whoever mends the engine."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

from flowcorr import distributed, dumps
from flowcorr.config.schema import ActorConfig
from flowcorr.errors import RolloutFault
from flowcorr.trainer import checkpoint
from flowcorr.trainer.events import EventLog
from flowcorr.trainer.log_probs import save_terms

logger = logging.getLogger(__name__)

FOLDER, _METRICS = "fault", "metrics.json"  # in the run's folder


def keep_evidence(run_dir: Path, fault: RolloutFault, actor: ActorConfig, events: EventLog) -> None:
    """Record a fault, and write everything that its training step had measured, and log-probs; every rank has to call.

    A failure is a warning, since the fault itself is to be told.

    Args:
        run_dir: the folder of the run.
        fault: that stopped it.
        actor: the keys of the loss.
        events: the log of the run.
    """
    events("fault", causes=[finding.cause for finding in fault.findings])
    folder = run_dir / FOLDER
    metrics = {name: value if math.isfinite(value) else None for name, value in fault.metrics.items()}
    record = {"step": fault.step, "findings": list(map(str, fault.findings)), "metrics": metrics}
    try:
        save_terms(folder / dumps.FOLDER, fault.step, fault.terms, actor)
        if distributed.is_main():
            checkpoint.write_text(folder / _METRICS, json.dumps(record, indent=2) + "\n")
    except Exception as error:
        logger.warning("the evidence of the fault could not be written to %s: %s", folder, error)
