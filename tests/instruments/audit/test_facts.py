"""The numbers of a gap, and the words that follow from them."""

from dataclasses import replace

import pytest
from instruments.gaps import D, normal_gap

from flowcorr.config import Config
from flowcorr.health.setting import Setting
from flowcorr.instruments.audit.explained import Beyond
from flowcorr.instruments.audit.facts import NEGLIGIBLE_NATS, Facts
from flowcorr.instruments.gap_table import Gap

SETTING = Setting.of(Config())


def facts_of(r, **actor):
    setting = replace(SETTING, actor=replace(SETTING.actor, **actor))
    return Facts.of(Gap.of(normal_gap(r), setting))


def test_numbers_are_those_of_the_gap():
    facts = facts_of(0.02)
    assert facts.r == pytest.approx(0.02)
    assert (facts.num_steps, facts.num_elements, set(facts.clip_by_step)) == (2, D, {0, 1})
    assert facts.clip_needed == max(facts.clip_by_step.values()) > 0
    assert Facts.of(Gap.of(replace(normal_gap(0.02), num_elements=None), SETTING)) is None


def test_a_window_of_one_ratio_needs_one_range():
    needed = facts_of(0.02, ratio_level="trajectory_sum").clip_by_step
    assert needed[0] == needed[1]


def test_headroom_is_judged_step_by_step():
    needed = facts_of(0.02).clip_by_step
    above, below = ([factor * needed[0], factor * needed[1]] for factor in (1.1, 0.9))
    assert facts_of(0.02, clip_ratio=above).has_headroom
    assert not facts_of(0.02, clip_ratio=[above[0], below[1]]).has_headroom
    assert not replace(facts_of(0.02, clip_ratio=above), older_weights=True).has_headroom


def test_a_gap_beyond_its_precision_is_unexplained_unless_it_is_negligible_or_of_older_weights():
    beyond = Beyond(step_index=0, r=0.02, limit=0.01, precision="float32", like_staleness=False)
    far = replace(facts_of(0.02), beyond=beyond)
    assert far.unexplained
    assert not replace(far, beyond=None).unexplained
    assert not replace(far, joint_nats=NEGLIGIBLE_NATS).unexplained
    assert not replace(far, stale_nats=far.joint_nats).unexplained
    unless_stale = replace(far, beyond=replace(beyond, like_staleness=True))
    assert (unless_stale.unexplained, unless_stale.if_newest) == (False, True)
    assert replace(unless_stale, older_weights=False).unexplained


@pytest.mark.parametrize(("share", "told"), [(0.0, False), (0.01, True), (0.05, True), (0.06, False)])
def test_more_than_a_few_outliers_are_the_distribution(share, told):
    facts = replace(facts_of(0.02), outliers=share)
    assert facts.has_outliers == told
    assert not replace(facts, joint_nats=NEGLIGIBLE_NATS).has_outliers
