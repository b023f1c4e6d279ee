"""The doctor: do the rollout engine and the actor agree, and if not, which part is to blame?"""

from flowcorr.instruments.doctor.examination import (
    diagnose,
    examine,
    examine_before_start,
    examines_before_start,
)
from flowcorr.instruments.doctor.findings import DoctorReport, Finding, StepNoise

__all__ = [
    "DoctorReport",
    "Finding",
    "StepNoise",
    "diagnose",
    "examine",
    "examine_before_start",
    "examines_before_start",
]
