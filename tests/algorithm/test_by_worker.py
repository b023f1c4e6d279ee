"""The gap of each rollout worker, by hand."""

from dataclasses import replace

import pytest
import torch

from flowcorr import distributed
from flowcorr.algorithm.by_worker import by_worker
from flowcorr.algorithm.terms import batch_terms
from flowcorr.metrics import Metrics
from tests.algorithm.batches import make_batch

NUM_STEPS = 2
DELTA = torch.tensor([[0.1, -0.1], [0.3, -0.3], [0.2, 0.0], [0.0, 0.0]])


def terms_by(workers):
    batch = make_batch(DELTA)
    ids = None if workers is None else torch.tensor(workers)
    return batch_terms(replace(batch, rollout=replace(batch.rollout, worker_ids=ids)))


def test_each_worker_has_the_gap_of_its_samples():
    terms = terms_by([0, 2, 0, 2])
    whole = Metrics(by_worker([terms], 4, NUM_STEPS)).compute()
    assert whole["rollout_corr/worker_0/logprob_abs_diff"] == pytest.approx(0.1, rel=1e-5)
    assert whole["rollout_corr/worker_2/logprob_abs_diff"] == pytest.approx(0.15, rel=1e-5)
    assert not {name for name in whole if "worker_1" in name or "worker_3" in name}
    # All are steps 0 and 1, whose mean gaps are .15 and .1.
    assert whole["rollout_corr/worker_0/relative_gap"] == pytest.approx(0.4 / 0.5, rel=1e-5)
    assert whole["rollout_corr/worker_2/relative_gap"] == pytest.approx(0.6 / 0.5, rel=1e-5)
    assert whole["rollout_corr/worker_2/k3_kl"] == pytest.approx((0.049859 + 0.040818) / 4, rel=1e-4)
    steps = terms.per_term()
    parts = Metrics(by_worker([steps.select(slice(3)), steps.select(slice(3, None))], 4, NUM_STEPS)).compute()
    assert parts == pytest.approx(whole)


@pytest.mark.parametrize(("workers", "count"), [(None, 4), ([0, 0, 0, 0], 1)])
def test_of_one_engine_nothing_is_measured(workers, count):
    assert Metrics(by_worker([terms_by(workers)], count, NUM_STEPS)).compute() == {}


def test_a_rank_whose_groups_were_all_dropped_measures_nothing():
    assert (
        Metrics(by_worker([terms_by([0, 2, 0, 2]).per_term().select(slice(0))], 4, NUM_STEPS)).compute() == {}
    )


SPLITS = {
    "a worker each": ([0, 2], [1, 3]),
    "both workers": ([0, 1], [2, 3]),
    "one rank has none": ([0, 1, 2, 3], []),
}


def test_ranks_that_hold_one_worker_each_compare_it_with_all(two_ranks):
    whole = Metrics(by_worker([terms_by([0, 2, 0, 2])], 4, NUM_STEPS)).compute()
    assert whole["rollout_corr/worker_2/relative_gap"] == pytest.approx(1.2, rel=1e-5)
    for found in two_ranks.call(of_this_rank):
        for split, values in found.items():
            assert values == pytest.approx(whole, rel=1e-9), split


def of_this_rank():
    terms = terms_by([0, 2, 0, 2])
    parts = {
        split: [terms.select(torch.tensor(rows[distributed.rank()]).long())] for split, rows in SPLITS.items()
    }
    return {
        split: Metrics(by_worker(part, 4, NUM_STEPS)).across_ranks().compute()
        for split, part in parts.items()
    }
