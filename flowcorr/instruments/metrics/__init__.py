"""The metrics of a run, a row each; rows of one's own are named by `trainer.metrics`."""

from flowcorr.instruments.metrics.metric import Drawn, Metric
from flowcorr.instruments.metrics.rule import Rule, Units

__all__ = ["Drawn", "Metric", "Rule", "Units"]
