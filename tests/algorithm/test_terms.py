"""The numbers of a batch's steps, before and after the actor scored them."""

from dataclasses import replace

import pytest
import torch

from flowcorr.algorithm.terms import batch_terms
from flowcorr.records import Scores
from flowcorr.sde import step_kl
from tests.algorithm.batches import make_batch


def scored(batch):
    means = (batch.rollout.window.means + 0.1).requires_grad_()
    stds = 2 * batch.rollout.window.stds
    return Scores(log_probs=batch.old_log_probs + 0.5, means=means, stds=stds)


def test_before_the_update_the_current_policy_is_the_old_one():
    batch = make_batch([[0.0, 0.1], [0.2, 0.3]])
    batch = replace(batch, old_means=batch.rollout.window.means + 0.2)
    terms = batch_terms(batch)
    assert torch.equal(terms.log_prob, batch.old_log_probs)
    assert torch.equal(terms.advantage, batch.advantages[:, None].expand(2, 2))
    assert torch.equal(terms.std, batch.rollout.window.stds)
    assert torch.equal(
        terms.old_rollout_kl, step_kl(batch.old_means, batch.rollout.window.means, batch.rollout.window.stds)
    )
    assert (terms.old_kl, terms.rollout_kl, terms.reference_kl) == (None, None, None)
    assert terms.num_elements == batch.rollout.num_elements


@pytest.mark.parametrize("centres", [False, True])
def test_the_kls_are_of_the_current_policy_and_carry_its_gradient_alone(centres):
    batch = make_batch([[0.0, 0.1], [0.2, 0.3]])
    batch = replace(batch, old_means=(batch.rollout.window.means + 0.2).requires_grad_())
    scores, reference = scored(batch), batch.rollout.window.means + 0.3
    terms = batch_terms(batch, scores, reference, centres=centres)
    assert torch.equal(terms.log_prob, scores.log_probs)
    assert torch.equal(terms.std, scores.stds)
    expected = {
        "old_kl": batch.old_means,
        "rollout_kl": batch.rollout.window.means,
        "reference_kl": reference,
    }
    for name, means in expected.items():
        torch.testing.assert_close(getattr(terms, name), step_kl(scores.means, means, scores.stds))
    torch.testing.assert_close(
        terms.old_rollout_kl, step_kl(batch.old_means, batch.rollout.window.means, scores.stds).detach()
    )
    assert terms.rollout_kl.requires_grad == centres  # else its graph would hold on to means
    (terms.old_kl + terms.rollout_kl + terms.reference_kl).sum().backward()
    assert scores.means.grad.any()
    assert batch.old_means.grad is None


def test_an_engine_that_returns_no_means_leaves_the_kls_open():
    batch = make_batch([[0.0, 0.1]])
    window = replace(batch.rollout.window, means=None, stds=None)
    batch = replace(batch, rollout=replace(batch.rollout, window=window), old_means=None)
    terms = batch_terms(batch)
    assert terms.std.isnan().all()
    assert terms.old_rollout_kl is None
    assert batch_terms(batch, scored(make_batch([[0.0, 0.1]]))).rollout_kl is None
