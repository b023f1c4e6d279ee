"""Metrics of one's own, over the parts of a batch."""

from dataclasses import replace

import pytest

from flowcorr.algorithm.terms import batch_terms
from flowcorr.errors import ConfigError
from flowcorr.health import Metric
from flowcorr.health.table import rows_of
from flowcorr.metrics import Metrics, mean
from flowcorr.trainer.measurements import own_metrics

MEAN = Metric(
    name="own/mean",
    meaning="the mean log-prob.",
    measure=lambda terms: mean(terms.rollout_log_prob.sum(), terms.rollout_log_prob.numel()),
)
PLAIN = Metric(name="own/plain", meaning="three.", measure=lambda terms: 3.0)


def with_metrics(settings, name):
    return replace(settings, trainer=replace(settings.trainer, metrics=(f"{__name__}:{name}",)))


def test_a_metric_of_ones_own_merges_over_parts(make_run):
    run = make_run()
    batch = run.batch()
    parts = [batch_terms(batch.select(rows)) for rows in (slice(0, 2), slice(2, None))]
    rows = rows_of(with_metrics(run.config, "MEAN"))
    found = Metrics(*(own_metrics(rows, part) for part in parts)).compute()
    assert found == {"own/mean": pytest.approx(batch.rollout.log_probs.mean().item(), rel=1e-5)}


def test_a_measure_without_a_stat_is_refused(make_run):
    run = make_run()
    with pytest.raises(ConfigError, match="own/plain.*float"):
        own_metrics(rows_of(with_metrics(run.config, "PLAIN")), batch_terms(run.batch()))
