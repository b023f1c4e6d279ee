"""Questions of one's own: asked by training steps, judged by their own limit, and refused by name."""

import math
from dataclasses import replace

import pytest
import torch

from flowcorr.config.schema import Config
from flowcorr.errors import ConfigError
from flowcorr.health.table import rows_of
from flowcorr.metrics import Metrics
from flowcorr.questions.ask import ask
from flowcorr.questions.compared import Compared
from flowcorr.questions.question import Question, own_questions

WORDS = {"what": "largest latent", "limit": 9.0, "remedy": "make them smaller"}
LARGEST = Question(
    name="largest", **WORDS, number=lambda compared: compared.rollout.window.latents.abs().flatten(1).amax(1)
)
TAKEN = Question(
    name="loss", metric="actor/loss", **WORDS, number=lambda compared: compared.rollout.log_probs
)
WORDLESS = Question(name="wordless", what="", limit=1.0, remedy="", number=lambda compared: None)
NO_QUESTION = 3


def with_checks(settings: Config, *names: str) -> Config:
    paths = tuple(f"{__name__}:{name}" for name in names)
    return replace(settings, trainer=replace(settings.trainer, checks=paths))


def asked(run, number, rollout=None):
    rollout = run.sample() if rollout is None else rollout
    compared = Compared(rollout=rollout, actor=run.actor, training_step=1)
    question = replace(LARGEST, number=number)
    return Metrics(ask(compared, [question])).compute().get("rollout/largest")


def test_numbers_are_logged_by_their_largest_and_faults_by_their_share(make_run):
    run = make_run()
    rollout = run.sample()
    assert asked(run, LARGEST.number, rollout) == rollout.window.latents.abs().max()
    assert asked(run, lambda compared: torch.arange(8) < 2) == 0.25
    assert (
        asked(run, lambda compared: torch.eye(8, dtype=torch.bool)[:, :2]) == 0.25
    )  # in some step of a sample
    assert asked(run, lambda compared: torch.arange(8.0) * math.nan) == math.inf
    assert asked(run, lambda compared: None) is None


@pytest.mark.parametrize(("number", "what"), [(3.0, "float"), (torch.zeros(3), r"\[3\]")])
def test_a_number_without_a_row_for_each_sample_is_refused(make_run, number, what):
    with pytest.raises(ConfigError, match=rf"'largest'.*{what}.*8 samples"):
        asked(make_run(), lambda compared: number)


def test_a_question_of_ones_own_has_a_row_with_its_rule(make_config):
    row = next(row for row in rows_of(with_checks(make_config(), "LARGEST")) if row.name == "rollout/largest")
    assert (row.rule.name, row.rule.high, row.rule.advice) == ("largest", 9.0, "make them smaller")
    assert row.rule.metric == "rollout/largest"
    with pytest.raises(ConfigError, match="'actor/loss' is logged already"):
        rows_of(with_checks(make_config(), "TAKEN"))


@pytest.mark.parametrize(("name", "wrong"), [("WORDLESS", "no what, remedy"), ("NO_QUESTION", "type int")])
def test_another_object_is_no_question(make_config, name, wrong):
    with pytest.raises(ConfigError, match=rf"trainer.checks='{__name__}:{name}'.*{wrong}"):
        own_questions(with_checks(make_config(), name))
