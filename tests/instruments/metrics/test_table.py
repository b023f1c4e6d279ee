"""The table of metrics."""

import pytest

from flowcorr.instruments.metrics.table import METRICS, RULES, find_metric, progress_labels


def test_every_health_rule_has_its_metric():
    for rule in RULES:
        assert find_metric(rule.metric).rule is rule


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("rollout_corr/step_12/kl", "rollout_corr/step_<i>/kl"),
        ("rollout_corr/rollout_rs_seq_mean_k1_mean", "rollout_corr/rollout_rs_<mode>_mean"),
        ("rollout_corr/rollout_rs_token_k1_seq_mean", "rollout_corr/rollout_rs_<mode>_seq_mean"),
        (
            "rollout_corr/rollout_rs_seq_sum_k1_seq_fraction_high",
            "rollout_corr/rollout_rs_<mode>_seq_fraction_high",
        ),
        ("actor/rollout_corr/kl", "actor/rollout_corr/<name>"),
        ("rollout_corr/kl", "rollout_corr/kl"),
    ],
)
def test_placeholders_stand_for_names(name, row):
    assert find_metric(name).name == row


def test_a_name_that_nothing_logs_has_no_row():
    assert find_metric("rolout_corr/kl") is None


def test_the_labels_of_a_training_step():
    assert list(progress_labels(METRICS).values()) == ["reward", "exact match", "clipped"]


def test_every_row_has_a_sentence():
    for metric in METRICS:
        assert metric.meaning.endswith("."), metric.name
