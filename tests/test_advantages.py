import itertools
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcorr.advantages import (
    drop_small_groups,
    group_advantages,
    most_varied,
    recentre,
    rejection_stats,
    selection_stats,
)
from flowcorr.errors import BatchError, ConfigError
from flowcorr.metrics import Metrics


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


def test_the_global_std_is_that_of_the_rewards_themselves():
    """Groups of unlike means spread the rewards wider than the differences within the groups."""
    rewards, groups = torch.tensor([1.0, 3.0, 10.0, 14.0]), torch.tensor([0, 0, 1, 1])
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


def test_groups_are_summed_in_the_order_of_their_samples():
    draw = torch.Generator().manual_seed(0)
    rewards = torch.randn(500, dtype=torch.float64, generator=draw).exp()
    groups = torch.randint(0, 3, (500,), generator=draw)
    expected = torch.empty_like(rewards)
    for group in range(3):
        here = groups == group
        total = 0.0
        for reward in rewards[here].tolist():
            total += reward
        expected[here] = rewards[here] - total / int(here.sum())
    assert torch.equal(group_advantages(rewards, groups, std="none"), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_they_are_the_cpus_to_the_last_bit():
    draw = torch.Generator().manual_seed(0)
    rewards = torch.randn(4096, dtype=torch.float64, generator=draw).exp()
    groups = torch.randint(0, 5, (4096,), generator=draw)
    keep = torch.rand(4096, 2, generator=draw) < 0.7
    expected = group_advantages(rewards, groups)
    found = group_advantages(rewards.cuda(), groups.cuda())
    assert torch.equal(found.cpu(), expected)
    recentred = recentre(found, groups.cuda(), keep.cuda())
    assert torch.equal(recentred.cpu(), recentre(expected, groups, keep))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e200])
def test_a_non_finite_reward_names_its_sample(value):
    rewards = torch.tensor([0.0, 1.0, value, 2.0, value], dtype=torch.float64)
    with pytest.raises(BatchError, match=rf"sample 2 is {re.escape(str(value))} \(2 of 5 .*drop_group"):
        group_advantages(rewards, torch.zeros(5, dtype=torch.int64))


def test_an_unknown_scale_is_refused():
    with pytest.raises(ConfigError, match=r"algorithm\.advantage_std='batch' .* group, global, none"):
        group_advantages(torch.zeros(3), torch.zeros(3, dtype=torch.int64), std="batch")


# After rejection ------------------------------------------------------------------------------------------


@st.composite
def rejected_batches(draw):
    """Advantages of whole groups, their groups, and which terms are kept."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    samples, steps = sum(sizes), draw(st.integers(1, 3))
    rewards = draw(st.lists(st.floats(-10, 10, width=32), min_size=samples, max_size=samples))
    keep = draw(st.lists(st.booleans(), min_size=samples * steps, max_size=samples * steps))
    groups = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    groups = groups[torch.tensor(draw(st.permutations(range(samples))))] * 17 - 5
    advantages = group_advantages(torch.tensor(rewards), groups)
    return advantages, groups, torch.tensor(keep).view(samples, steps)


def kept_mean(advantages, keep):
    terms = advantages.double().unsqueeze(1).expand_as(keep)[keep]
    return terms.mean().item()


def test_recentring_against_hand_computed_numbers():
    groups = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    advantages = torch.tensor([-1.0, 0.5, 0.5, -2.0, 2.0, -3.0, 3.0])
    keep = torch.tensor([[1, 0], [1, 1], [0, 0], [1, 1], [1, 1], [0, 0], [0, 1]]).bool()
    # Group 0 keeps -1 once and .5 twice: mean 0. Group 1 is whole. Group 2 keeps one term of 3.
    expected = [-1.0, 0.5, 0.5, -2.0, 2.0, -6.0, 0.0]
    assert recentre(advantages, groups, keep).tolist() == expected
    keep[1, 1] = False  # now -1 and .5, mean -.25
    assert recentre(advantages, groups, keep).tolist()[:2] == [-0.75, 0.75]
    assert drop_small_groups(keep, groups).any(1).tolist() == [True, True, False, True, True, False, False]
    # Group 0 is partly kept, group 1 whole; group 2 is partly kept, and then dropped.
    before, after = (
        Metrics(rejection_stats(mask, groups)).compute() for mask in (keep, drop_small_groups(keep, groups))
    )
    assert list(before.values()) == [0.0, pytest.approx(2 / 3)]
    assert list(after.values()) == [pytest.approx(1 / 3), pytest.approx(1 / 3)]


@settings(max_examples=200)
@given(rejected_batches())
def test_the_mean_advantage_of_the_kept_terms_of_a_group_is_zero(batch):
    advantages, groups, keep = batch
    recentred = recentre(advantages, groups, keep)
    for group in groups.unique():
        here = groups == group
        kept = keep[here]
        if kept.all() or not kept.any():
            assert torch.equal(recentred[here], advantages[here])
        else:
            assert kept_mean(recentred[here], kept) == pytest.approx(0.0, abs=1e-6)
            differences = advantages[here].double() - recentred[here].double()
            assert (differences.max() - differences.min()).item() == pytest.approx(0.0, abs=1e-5)


@settings(max_examples=100)
@given(rejected_batches())
def test_with_everything_kept_nothing_changes(batch):
    advantages, groups, keep = batch
    everything = torch.ones_like(keep)
    recentred = recentre(advantages, groups, everything)
    assert recentred.dtype == advantages.dtype
    assert torch.equal(recentred, advantages)
    sizes = (groups.unsqueeze(1) == groups).sum(1)
    assert torch.equal(drop_small_groups(everything, groups), (sizes >= 2).unsqueeze(1).expand_as(everything))


@settings(max_examples=100)
@given(rejected_batches())
def test_dropped_are_the_groups_with_fewer_than_two_members_left(batch):
    advantages, groups, keep = batch
    dropped = drop_small_groups(keep, groups)
    for group in groups.unique():
        here = groups == group
        members = int(keep[here].any(1).sum())
        assert torch.equal(dropped[here], keep[here] if members >= 2 else torch.zeros_like(keep[here]))
    fraction = Metrics(rejection_stats(dropped, groups)).compute()["rollout_corr/dropped_group_fraction"]
    assert fraction == sum(not dropped[groups == group].any() for group in groups.unique()) / len(
        groups.unique()
    )


REWARDS, GROUPS, KEEP = torch.tensor([1.0, 2.0]), torch.tensor([0, 0]), torch.ones(2, 1).bool()


@pytest.mark.parametrize(
    ("function", "arguments", "named"),
    [
        (group_advantages, (torch.zeros(3), GROUPS), r"group_ids .*\[2\].*\[3\]"),
        (group_advantages, (torch.zeros(2, 1), GROUPS), r"rewards .*\[2, 1\].*\[B\]"),
        (recentre, (REWARDS, GROUPS, KEEP[:, 0]), r"keep .*\[2\].*\[B, T\]"),
        (recentre, (torch.zeros(3), GROUPS, KEEP), r"advantages .*\[3\].*\[2\]"),
        (drop_small_groups, (torch.ones(3, 1).bool(), GROUPS), r"group_ids .*\[2\].*\[3\]"),
        (group_advantages, ([1.0, 2.0], GROUPS), r"rewards .* list; .*\[B\]"),
        (group_advantages, (REWARDS, [0, 0]), r"group_ids .* list; .*\[2\]"),
        (recentre, (REWARDS, GROUPS, [[True], [False]]), r"keep .* list; .*\[B, T\]"),
        (rejection_stats, ([[True], [False]], GROUPS), r"keep .* list; .*\[B, T\]"),
    ],
)
def test_wrong_shapes_and_lists_are_named(function, arguments, named):
    with pytest.raises(BatchError, match=f"^{named}"):
        function(*arguments)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_other_subset_varies_more(data):
    rewards = torch.tensor(
        data.draw(st.lists(st.integers(0, 5), min_size=2, max_size=8)), dtype=torch.float64
    )
    count = data.draw(st.integers(1, len(rewards)))
    chosen = most_varied(rewards, torch.zeros(len(rewards), dtype=torch.long), count)
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert len(chosen) == count
    largest = max(
        float(rewards[list(subset)].var(correction=0))
        for subset in itertools.combinations(range(len(rewards)), count)
    )
    assert float(rewards[chosen].var(correction=0)) == pytest.approx(largest, abs=1e-12)


@pytest.mark.parametrize(
    ("rewards", "count", "expected"),
    [
        ([0, 1, 2, 3, 4, 5], 4, [0, 1, 4, 5]),
        ([5, 0, 3, 1, 4, 2], 4, [0, 1, 3, 4]),  # in any order
        ([0, 1, 2, 3, 4], 3, [0, 3, 4]),  # two splits vary alike: that with more of the highest
        ([0, 0, 0, 0, 0, 9], 3, [0, 4, 5]),  # one stands out: any two beside it vary alike
        ([0, 0, 0, 1, 1, 1], 4, [0, 1, 4, 5]),  # as many of each
        ([1, 10, 10, 10, 10, 10], 3, [0, 4, 5]),
        ([2, 2, 2, 2], 2, [0, 3]),
        ([3, 1], 5, [0, 1]),
    ],
)
def test_the_extremes_of_a_group_are_chosen(rewards, count, expected):
    values = torch.tensor(rewards, dtype=torch.float64)
    assert most_varied(values, torch.zeros(len(rewards), dtype=torch.long), count).tolist() == expected


def test_each_group_has_its_own_extremes():
    rewards = torch.tensor([0.0, 100.0, 1.0, 105.0, 5.0, 101.0])
    assert most_varied(rewards, torch.tensor([3, 8, 3, 8, 3, 8]), 2).tolist() == [0, 1, 3, 4]
    nothing = most_varied(torch.zeros(0), torch.zeros(0, dtype=torch.long), 2)
    assert (nothing.tolist(), nothing.dtype) == ([], torch.int64)


def test_rounding_does_not_choose_between_splits_that_vary_alike():
    """`k` highest and `3 - k` lowest of these vary alike for k = 1 and 2, whatever a shift rounds away."""
    steps = torch.arange(5, dtype=torch.float64)
    groups = torch.zeros(5, dtype=torch.long)
    for shift in (0.0, 0.1, 1 / 3, 1e3 + 0.7, -1e6 / 7):
        assert most_varied(0.1 * steps + shift, groups, 3).tolist() == [0, 3, 4]


def test_the_chosen_are_a_group_of_their_own_and_the_metric_tells_how_far_it_lies_from_the_whole():
    """One of six succeeds. Among all it has (1 - 1/6) / s, and a failure -1/6 / s, with s^2 = 1/6."""
    rewards, groups = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0]), torch.zeros(6, dtype=torch.long)
    chosen = most_varied(rewards, groups, 2)
    assert chosen.tolist() == [0, 2]
    advantages = group_advantages(rewards[chosen], groups[chosen], eps=0.0)
    assert advantages.tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])
    std = math.sqrt(1 / 6) + 1e-4
    logged = Metrics(selection_stats(rewards, groups, chosen)).compute()
    assert logged == {"reward/learned_advantage": pytest.approx((5 / 6 - 1 / 6) / 2 / std, rel=1e-5)}
    plain = Metrics(selection_stats(rewards, groups, chosen, std="none")).compute()
    assert plain == {"reward/learned_advantage": pytest.approx(1 / 3)}


def test_what_all_samples_share_cancels_among_the_chosen():
    """With the mean of the whole group, a shared part of the scores is learned in proportion to the metric."""
    rewards = (
        torch.rand(4, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64).flatten() ** 8
    )
    groups = torch.arange(4).repeat_interleave(24)
    chosen = most_varied(rewards, groups, 12)
    among_chosen = group_advantages(rewards[chosen], groups[chosen])
    among_all = group_advantages(rewards, groups)[chosen]
    assert abs(float(among_chosen.mean())) < 1e-12
    logged = Metrics(selection_stats(rewards, groups, chosen)).compute()["reward/learned_advantage"]
    assert logged == pytest.approx(float(among_all.mean()))
    assert abs(logged) > 0.1


def test_a_reward_that_is_not_finite_cannot_be_ranked():
    with pytest.raises(BatchError, match=r"sample 1 is nan \(1 of 2 "):
        most_varied(torch.tensor([0.0, math.nan]), torch.tensor([0, 0]), 1)
