"""Looking at runs and stacks: what agrees, what drifts, what is broken."""

from flowcorr.diagnostics.doctor import (
    DoctorReport,
    Finding,
    StepNoise,
    diagnose,
    examine,
    examine_before_start,
    examines_before_start,
)

__all__ = [
    "DoctorReport",
    "Finding",
    "StepNoise",
    "diagnose",
    "examine",
    "examine_before_start",
    "examines_before_start",
]
