"""The table of metrics."""

import pytest

from flowcorr import config
from flowcorr.errors import ConfigError
from flowcorr.health import Metric, Rule
from flowcorr.health.table import METRICS, RULES, find_metric, progress_labels, rows_of


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


CLIPPED = Metric(
    name="actor/pg_clipfrac", rule=Rule(name="far", what="clipped terms", high=0.3, advice="lower actor.lr")
)
WORSE = Metric(
    name="rollout_corr/rollout_is_eff_sample_size",
    meaning="Mine.",
    rule=Rule(name="mine", low=0.9, advice="wait"),
)
OF_A_STEP = Metric(
    name="rollout_corr/step_1/kl", rule=Rule(name="later", what="the KL", high=1.0, advice="wait")
)
NEW = Metric(name="own/faces", rule=Rule(name="crowd", what="faces", high=3.0, advice="ask for fewer"))
WORDLESS = Metric(name="own/faces", meaning="Faces.", rule=Rule(name="crowd", high=3.0))


def rows_with(*names):
    keys = ",".join(f"{__name__}:{name}" for name in names)
    return rows_of(config.load("tiny_ocr_lora", [f"trainer.metrics=[{keys}]"]))


def test_a_range_for_a_metric_of_every_run_leaves_the_rest_of_its_row():
    rows = rows_with("CLIPPED", "WORSE", "OF_A_STEP")
    base, own = find_metric("actor/pg_clipfrac"), next(row for row in rows if row.name == "actor/pg_clipfrac")
    assert (own.meaning, own.unit, own.chart, own.label) == (base.meaning, base.unit, base.chart, base.label)
    assert (own.rule.name, own.rule.high, own.rule.metric) == ("far", 0.3, own.name)
    assert [row.name for row in rows[: len(METRICS)]] == [row.name for row in METRICS]
    assert progress_labels(rows) == progress_labels(METRICS)
    worse = next(row for row in rows if row.name == WORSE.name)
    assert (worse.meaning, worse.rule.name, worse.rule.advice) == ("Mine.", "mine", "wait")
    assert (worse.rule.what, worse.rule.low) == (find_metric(WORSE.name).rule.what, 0.9)
    step = next(row for row in rows if row.name == OF_A_STEP.name)
    assert step.meaning == find_metric("rollout_corr/step_1/kl").meaning


@pytest.mark.parametrize(("name", "lacking"), [("NEW", "meaning"), ("WORDLESS", r"rule\.what, rule\.advice")])
def test_a_new_metric_needs_its_words(name, lacking):
    with pytest.raises(ConfigError, match=rf"trainer\.metrics='.*{name}': 'own/faces' .* {lacking};"):
        rows_with(name)
