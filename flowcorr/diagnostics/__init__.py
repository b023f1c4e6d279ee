"""Looking at runs and stacks: what agrees, what drifts, what is broken."""

from flowcorr.diagnostics.doctor import diagnose, examine, examine_before_start
from flowcorr.diagnostics.report import DoctorReport, Finding, StepNoise

__all__ = ["DoctorReport", "Finding", "StepNoise", "diagnose", "examine", "examine_before_start"]
