"""A question of what an engine returned has one limit and one remedy, which the health rules and the doctor share."""

import pytest

from flowcorr.health.rule import Units
from flowcorr.health.table import RULES
from flowcorr.questions import question

OF_RULES = {
    "windows": question.WINDOWS,
    "coarse_latents": question.LATENTS,
    "trajectories": question.TRAJECTORIES,
    "std_error": question.STDS,
    "seeded_noise": question.STEP_NOISE,
    "replay_before": question.BEFORE,
    "replay_between": question.BETWEEN,
    "replay_after": question.AFTER,
    "replay_reward": question.REWARD,
}


@pytest.mark.parametrize("name", OF_RULES)
def test_a_rule_has_the_limit_and_the_remedy_of_its_question(name):
    (rule,) = [rule for rule in RULES if rule.name == name]
    asked = OF_RULES[name]
    assert rule.limits(Units())[1] == asked.limit
    assert asked.remedy in rule.advice
