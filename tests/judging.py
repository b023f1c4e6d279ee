"""The rules on single steps."""

from flowcorr.health.rules import HealthMonitor


def examine_step(metrics, units):
    """The findings of one training step, whatever the patience of their rules."""
    return [broken.finding for broken in HealthMonitor(units).judge(metrics)]
