"""Advantages that another trainer dumped."""

from types import SimpleNamespace

import pytest
import torch

import flowcorr
from flowcorr import dumps
from flowcorr.advantages import group_advantages
from flowcorr.instruments.doctor.checks.advantages import check_captured_advantages


def advantages_of(files):
    return check_captured_advantages(SimpleNamespace(terms=files))


def dumped(folder, advantages):
    for step, values in enumerate(advantages):
        rollout = torch.zeros(len(values), 2)
        flowcorr.dump(folder, step, rollout_log_probs=rollout, advantages=values)
    return dumps.files(folder)


def test_advantages(tmp_path):
    draw = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    centred = draw - draw.mean(1, keepdim=True)
    assert advantages_of(dumped(tmp_path / "a", centred)).level == "healthy"
    found = advantages_of(dumped(tmp_path / "b", centred + 1))
    assert (found.cause, found.level) == ("advantages_not_centred", "serious")


def test_a_part_of_the_groups_cannot_tell(tmp_path):
    found = advantages_of(dumped(tmp_path, torch.tensor([[1.0, -1.0, 1.0, 0.5]])))
    assert (found.level, found.cause) == ("note", "")
    assert advantages_of({}).level == "note"


def test_advantages_of_0_are_told_from_none(tmp_path):
    zeros, none = advantages_of(dumped(tmp_path, torch.zeros(2, 4))), advantages_of({})
    assert zeros.level == none.level == "note"
    assert "all dumped advantages are 0" in zeros.sentence
    assert zeros.remedy != none.remedy


GROUPS = torch.arange(24) // 6


def of_rewards(folder, advantages_of_rewards, *, rewards_told=lambda rewards: rewards, groups=GROUPS):
    """The finding on four steps of four groups of six, with rewards that differ by prompt."""
    generator = torch.Generator().manual_seed(5)
    for step in range(4):
        rewards = torch.randn(24, generator=generator) + 2 * torch.randn(4, generator=generator)[GROUPS]
        flowcorr.dump(
            folder,
            step,
            rollout_log_probs=torch.zeros(24, 2),
            advantages=advantages_of_rewards(rewards),
            rewards=rewards_told(rewards),
            group_ids=groups,
        )
    return advantages_of(dumps.files(folder))


def test_advantages_that_fall_where_rewards_rise(tmp_path):
    assert of_rewards(tmp_path / "a", lambda rewards: group_advantages(rewards, GROUPS)).level == "healthy"
    found = of_rewards(tmp_path / "b", lambda rewards: -group_advantages(rewards, GROUPS))
    assert (found.cause, found.level) == ("advantages_reversed", "serious")
    assert (
        of_rewards(tmp_path / "c", lambda rewards: -group_advantages(rewards, GROUPS), groups=None).level
        == "healthy"
    )


def test_advantages_of_other_samples_and_of_a_reward_beside_the_one_that_was_told(tmp_path):
    found = of_rewards(tmp_path / "a", lambda rewards: group_advantages(rewards, GROUPS).roll(1))
    assert (found.cause, found.level) == ("", "warning")
    noise = torch.randn(24, generator=torch.Generator().manual_seed(6))
    found = of_rewards(
        tmp_path / "b", lambda rewards: group_advantages(rewards + noise, GROUPS)
    )  # of two rewards, one of which was told
    assert found.level == "healthy"
    found = of_rewards(tmp_path / "c", lambda rewards: group_advantages(rewards.clamp(max=0), GROUPS))
    assert found.level == "healthy"


def test_advantages_that_are_centred_over_the_batch_alone(tmp_path):
    found = of_rewards(tmp_path, lambda rewards: rewards - rewards.mean())
    assert (found.cause, found.level) == ("", "warning")


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_few_pairs_is_not_judged(tmp_path, seed):
    drawn = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
    advantages = drawn[0] - drawn[0].mean()
    flowcorr.dump(
        tmp_path,
        0,
        rollout_log_probs=torch.zeros(4, 2),
        advantages=advantages,
        rewards=drawn[1],
        group_ids=torch.zeros(4),
    )
    assert advantages_of(dumps.files(tmp_path)).level == "healthy"
