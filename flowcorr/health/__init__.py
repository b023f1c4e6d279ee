"""Metrics with the range in which a run is healthy, and rules over many steps."""

from flowcorr.health.metric import Drawn, Metric
from flowcorr.health.rule import Rule, Units

__all__ = ["Drawn", "Metric", "Rule", "Units"]
