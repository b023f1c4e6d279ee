"""The scores that advantages are taken of: normalised terms, weighted and summed."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowcorr.advantages import group_advantages
from flowcorr.config import RewardTerm
from flowcorr.rewards import RewardOutput, training_scores


def sum_of(*columns):
    """An output of the terms a, b, ... and those columns; its own scores are never read here."""
    terms = {name: np.asarray(column, dtype=float) for name, column in zip("abc", columns, strict=False)}
    return RewardOutput(scores=np.full(len(columns[0]), np.nan), terms=terms)


def test_without_normalisation_the_scores_are_trained_on():
    output = RewardOutput(scores=np.array([1.0, 2.0]), terms={"a": np.array([7.0, 7.0])})
    scores = training_scores(output, [RewardTerm(name="a", weight=3)], torch.tensor([0, 0]))
    assert scores.tolist() == [1.0, 2.0]
    assert scores.dtype == torch.float64


def test_normalised_terms_by_hand():
    # a: groups (0, 2) and (10, 30) with unbiased std sqrt(2) and 10 sqrt(2); b: constant in the second group.
    output, groups = sum_of([0, 2, 10, 30], [5, 1, 4, 4]), torch.tensor([0, 0, 1, 1])
    terms = [
        RewardTerm(name="mine:a", weight=2, normalize="group"),
        RewardTerm(name="b", weight=-1, normalize="group"),
    ]
    half = 0.5**0.5
    expected = [-2 * half - half, 2 * half + half, -2 * half, 2 * half]
    np.testing.assert_allclose(training_scores(output, terms, groups), expected, rtol=2e-4)


def test_raw_and_normalised_terms_mix():
    output, groups = sum_of([0, 2, 10, 30], [5, 1, 4, 4]), torch.tensor([0, 0, 1, 1])
    terms = [RewardTerm(name="a", weight=0.1), RewardTerm(name="b", normalize="global")]
    std = np.std([5, 1, 4, 4], ddof=1)
    expected = [0 + 2 / std, 0.2 - 2 / std, 1, 3]
    np.testing.assert_allclose(training_scores(output, terms, groups), expected, rtol=2e-4)


@given(
    values=st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 20)),
        min_size=6,
        max_size=6,
        unique_by=lambda pair: pair[0],
    ),
    scale=st.sampled_from([1e-2, 1.0, 1e3]),
    shift=st.floats(-100, 100),
)
def test_normalised_terms_do_not_depend_on_units(values, scale, shift):
    first, second = np.array(values, dtype=float).T
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    terms = [RewardTerm(name=name, normalize="group") for name in "ab"]
    plain = training_scores(sum_of(first, second), terms, groups)
    moved = training_scores(sum_of(first * scale + shift, second), terms, groups)
    np.testing.assert_allclose(moved, plain, atol=2e-2)  # group_advantages adds 1e-4 to every std


def test_gdpo_is_group_normalisation_with_a_global_std():
    rng = np.random.default_rng(0)
    columns, groups = rng.normal(size=(2, 12)) * [[1], [50]], torch.arange(3).repeat_interleave(4)
    terms = [
        RewardTerm(name="a", weight=1, normalize="group"),
        RewardTerm(name="b", weight=0.5, normalize="group"),
    ]
    summed = np.zeros((3, 4))
    for column, weight in zip(columns.reshape(2, 3, 4), (1, 0.5), strict=True):
        spread = column.std(1, ddof=1, keepdims=True) + 1e-4
        summed += weight * (column - column.mean(1, keepdims=True)) / spread
    expected = ((summed - summed.mean()) / (summed.std(ddof=1) + 1e-4)).ravel()
    scores = training_scores(sum_of(*columns), terms, groups)
    np.testing.assert_allclose(group_advantages(scores, groups, std="global"), expected, atol=1e-9)


def test_terms_are_normalised_over_the_samples_that_they_score():
    output = sum_of([np.nan, np.nan, 10, 30], [5, 1, 4, 8])
    terms = [RewardTerm(name="a", normalize="global", tags=("x",)), RewardTerm(name="b", weight=0.5)]
    half = 0.5**0.5
    expected = [2.5, 0.5, 2 - half, 4 + half]
    scores = training_scores(output, terms, torch.tensor([0, 0, 1, 1]))
    np.testing.assert_allclose(scores, expected, rtol=1e-4)


def test_a_rank_whose_samples_all_failed_has_no_terms():
    nothing = RewardOutput(scores=np.zeros(0))
    terms = [RewardTerm(name="a", normalize="global"), RewardTerm(name="b")]
    assert training_scores(nothing, terms, torch.zeros(0, dtype=torch.int64)).tolist() == []
