"""The doctor: do the rollout engine and the actor agree, and if not, which part is to blame?"""

from flowcorr.instruments.doctor.examination import (
    diagnose,
    examine,
    examine_before_start,
    examine_dump,
    examines_before_start,
)

__all__ = ["diagnose", "examine", "examine_before_start", "examine_dump", "examines_before_start"]
