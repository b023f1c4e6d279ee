import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcorr.advantages import advantage_stats, group_advantages
from flowcorr.errors import BatchError, ConfigError


def test_group_std_against_hand_computed_numbers():
    rewards = torch.tensor([1.0, 3.0, 0.0, 0.0, 3.0])
    groups = torch.tensor([7, 7, -2, -2, -2])
    # Group 7: mean 2, unbiased std sqrt(2). Group -2: mean 1, unbiased std sqrt(3).
    expected = [-1 / math.sqrt(2), 1 / math.sqrt(2), -1 / math.sqrt(3), -1 / math.sqrt(3), 2 / math.sqrt(3)]
    assert group_advantages(rewards, groups, eps=0.0).tolist() == pytest.approx(expected, rel=1e-6)


def test_global_std_and_none():
    rewards, groups = torch.tensor([1.0, 3.0, 0.0, 4.0]), torch.tensor([0, 0, 1, 1])
    assert group_advantages(rewards, groups, std="none").tolist() == [-1.0, 1.0, -2.0, 2.0]
    scale = rewards.double().std().item() + 1e-4
    expected = [value / scale for value in (-1.0, 1.0, -2.0, 2.0)]
    assert group_advantages(rewards, groups, std="global").tolist() == pytest.approx(expected, rel=1e-6)


@settings(max_examples=50)
@given(
    reward=st.floats(-1e6, 1e6, width=32),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    std=st.sampled_from(["group", "global", "none"]),
)
def test_equal_rewards_give_exactly_zero(reward, sizes, std):
    groups = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    rewards = torch.full(groups.shape, reward)
    assert group_advantages(rewards, groups, std=std, eps=1e-12).tolist() == [0.0] * len(groups)


def test_a_group_of_equal_rewards_beside_others_gives_exactly_zero():
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.0, 1.0, 5.0], dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 1, 1, 2])
    for std in ("group", "global", "none"):
        advantages = group_advantages(rewards, groups, std=std, eps=0.0)
        assert advantages[[0, 1, 2, 5]].tolist() == [0.0] * 4
        assert advantages[3] < 0 < advantages[4]


@settings(max_examples=50)
@given(
    rewards=st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=16),
    std=st.sampled_from(["group", "global", "none"]),
    data=st.data(),
)
def test_order_and_names_of_groups_do_not_matter(rewards, std, data):
    groups = data.draw(st.lists(st.integers(0, 3), min_size=len(rewards), max_size=len(rewards)))
    order = data.draw(st.permutations(range(len(rewards))))
    rewards, groups, order = torch.tensor(rewards), torch.tensor(groups), torch.tensor(order)
    plain = group_advantages(rewards, groups, std=std)
    renamed = group_advantages(rewards, 1000 - 17 * groups, std=std)
    shuffled = group_advantages(rewards[order], groups[order], std=std)
    assert torch.isfinite(plain).all()
    torch.testing.assert_close(renamed, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(shuffled, plain[order], rtol=1e-5, atol=1e-5)
    for group in groups.unique():
        assert plain[groups == group].double().mean().item() == pytest.approx(0.0, abs=1e-4)


def test_rewards_far_from_zero_keep_their_differences():
    rewards = torch.tensor([1e6, 1e6 + 1.0], dtype=torch.float64)
    assert group_advantages(rewards, torch.zeros(2, dtype=torch.int64), std="none").tolist() == [-0.5, 0.5]


@pytest.mark.parametrize(
    ("given_dtype", "expected"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
        (torch.int64, torch.float32),
    ],
)
def test_dtype(given_dtype, expected):
    rewards = torch.tensor([0, 1], dtype=given_dtype)
    assert group_advantages(rewards, torch.zeros(2, dtype=torch.int64)).dtype == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("function", [group_advantages, advantage_stats])
def test_a_non_finite_reward_names_its_sample(value, function):
    rewards = torch.tensor([0.0, 1.0, value, 2.0, value])
    with pytest.raises(BatchError, match=rf"reward of sample 2 is {value}.*2 of 5.*drop_group"):
        function(rewards, torch.zeros(5, dtype=torch.int64))


def test_bad_shapes_and_choices():
    with pytest.raises(BatchError, match=r"group_ids has shape \[1\]; it must be \[3\]"):
        group_advantages(torch.zeros(3), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(BatchError, match=r"rewards has shape \[3, 1\]"):
        group_advantages(torch.zeros(3, 1), torch.zeros(3, 1, dtype=torch.int64))
    with pytest.raises(
        ConfigError, match=r"algorithm\.advantage_std='batch'.*choose from group, global, none"
    ):
        group_advantages(torch.zeros(3), torch.zeros(3, dtype=torch.int64), std="batch")


def test_groups_that_teach_nothing_are_counted():
    rewards = torch.tensor([0.1, 0.1, 0.0, 1.0, 5.0, 2.0, 2.0])
    groups = torch.tensor([0, 0, 1, 1, 2, 3, 3])
    assert advantage_stats(rewards, groups).compute() == {"reward/zero_std_group_fraction": 0.75}
