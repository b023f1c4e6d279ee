"""A question of what an engine returned has one limit and one remedy, which the health rules and the doctor share."""

import pytest

from flowcorr.instruments.metrics.rule import Units
from flowcorr.instruments.metrics.table import RULES
from flowcorr.rollout import questions

OF_RULES = {
    "windows": questions.WINDOWS,
    "coarse_latents": questions.LATENTS,
    "trajectories": questions.TRAJECTORIES,
    "std_error": questions.STDS,
    "seeded_noise": questions.STEP_NOISE,
    "replay_before": questions.BEFORE,
    "replay_between": questions.BETWEEN,
    "replay_after": questions.AFTER,
    "replay_reward": questions.REWARD,
}


@pytest.mark.parametrize("name", OF_RULES)
def test_a_rule_has_the_limit_and_the_remedy_of_its_question(name):
    (rule,) = [rule for rule in RULES if rule.name == name]
    question = OF_RULES[name]
    assert rule.limits(Units())[1] == question.limit
    assert question.remedy in rule.advice
