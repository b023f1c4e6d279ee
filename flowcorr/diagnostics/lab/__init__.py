"""`flowcorr lab`: what other presets would have made of a run's own steps."""

from flowcorr.diagnostics.lab.compare import LabReport, parse_scales, replay_run

__all__ = ["LabReport", "parse_scales", "replay_run"]
