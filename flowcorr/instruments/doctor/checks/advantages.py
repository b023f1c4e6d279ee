"""The check of the advantages that another trainer dumped."""

from __future__ import annotations

import torch

from flowcorr import dumps
from flowcorr.health.finding import Finding
from flowcorr.instruments.doctor.captured import Captured
from flowcorr.instruments.doctor.findings import failed, passed, skipped

CENTRED = 0.05  # mean of advantages, in their standard deviations: filtered samples shift it a little
ERRORS = 3.0  # standard errors of that mean, where the other samples of a group were not dumped


def check_captured_advantages(captured: Captured) -> Finding:
    steps = [dumps.load(path).advantages.double() for path in captured.terms.values()]
    values = torch.cat([torch.zeros(0, dtype=torch.float64), *steps])
    values = values[values.isfinite()]
    if not len(values):
        return skipped(
            "cannot tell: no step with advantages was dumped", "dump the step's terms beside its samples"
        )
    if not values.any():
        return skipped(
            "cannot tell: all dumped advantages are 0, so nothing is learned",
            "dump steps in which the images of a prompt have different rewards",
        )
    mean, spread = float(values.mean()), float(values.std(correction=0))
    above = float((values > 0).double().mean())
    evidence = f"mean {mean:.3g}, std {spread:.3g} of {len(values)}; {above:.0%} are above 0"
    if abs(mean) <= CENTRED * spread:
        return passed(f"centred; {evidence}")
    if abs(mean) <= ERRORS * spread / len(values) ** 0.5:
        return skipped(
            f"cannot tell: samples of some groups may be missing; {evidence}",
            "dump whole groups, and more steps",
        )
    return failed(
        f"advantages are not centred, so that the update pushes all samples one way; {evidence}",
        "subtract the mean reward of the group, after all rewards are final",
        cause="advantages_not_centred",
    )
