"""What an update leaves out: forwards and gradients that are not finite, rejected terms, samples of advantage 0."""

import logging
import math
from dataclasses import replace

import pytest
import torch

from flowcorr.actor.pass_bound import bound_passes
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.losses import LOSSES
from flowcorr.records import ActorBatch
from tests.actor.updates import assert_same, updated, weights
from tests.tolerances import GRADIENTS


def spoiled(batch, row, value=math.nan):
    latents = batch.rollout.window.latents.clone()
    latents[row] = value
    return replace(
        batch, rollout=replace(batch.rollout, window=replace(batch.rollout.window, latents=latents))
    )


@pytest.mark.parametrize(
    ("fold", "value", "kl_coef"), [(True, math.nan, 0.0), (True, math.inf, 0.1), (False, math.nan, 0.1)]
)
def test_a_forward_that_is_not_finite_drops_its_sample(make_run, fold, value, kl_coef):
    actor = {"fold_steps": fold, "kl_coef": kl_coef}
    others = torch.tensor([0, 1, 2, 4, 5, 6, 7])
    bad, metrics = updated(make_run, lambda run: run.in_float64(spoiled(run.batch(), 3, value)), actor=actor)
    rest, expected = updated(make_run, lambda run: run.in_float64(run.batch().select(others)), actor=actor)
    assert_same(bad.gradient(), rest.gradient(), rtol=1e-5, atol=1e-9)
    assert_same(weights(bad), weights(rest), rtol=1e-5, atol=1e-9)
    assert metrics.pop("actor/nonfinite_fraction") == pytest.approx(1 / 8)
    assert expected.pop("actor/nonfinite_fraction") == 0
    assert metrics == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["decoupled", "bypass", "recorded"])
def test_steps_apart_drop_a_sample_of_which_only_the_last_step_is_not_finite(make_run, kind):
    """As folded steps do, although its first step has had a backward pass by then."""
    algorithm = {"rollout_correction": BYPASS} if kind == "bypass" else {}
    found = {}
    for fold in (True, False):
        sections = {"trainer": {"dump_log_probs": kind == "recorded"}, "algorithm": algorithm}
        run = make_run(actor={"fold_steps": fold, "micro_batch_size": 3}, **sections)
        run.stir()
        batch = run.in_float64(spoiled(of_even_group(run), (torch.tensor([1, 6]), 1)))
        update = run.learn(batch)
        found[fold] = run.gradient(), update.metrics.compute(), seen_in(update)
    assert_same(found[False][0], found[True][0], **GRADIENTS)
    assert found[False][1] == pytest.approx(found[True][1], rel=1e-4, abs=1e-6)
    assert found[False][2].keys() == found[True][2].keys()
    assert all(math.isnan(value) == (place in (2, 3, 12, 13)) for place, value in found[False][2].items())


def seen_in(update):
    """The log-prob of each term that was scored, by its place in the batch."""
    scored = [part for part in update.parts if part.terms is not None]
    columns = [(part.places.flatten().tolist(), part.terms.log_prob.flatten().tolist()) for part in scored]
    return {place: value for column in columns for place, value in zip(*column, strict=True)}


def test_dropped_samples_do_not_depend_on_micro_batches(make_run):
    def spoil(run):
        return spoiled(spoiled(run.batch(), 3), 4)

    whole, metrics = updated(make_run, spoil)
    alone, expected = updated(make_run, spoil, actor={"micro_batch_size": 1})
    assert_same(whole.gradient(), alone.gradient(), **GRADIENTS)
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_without_any_finite_forward_nothing_is_learned(make_run, caplog):
    run, metrics = updated(make_run, lambda run: spoiled(run.batch(), slice(None)))
    assert (metrics["actor/updates"], metrics["actor/skipped_updates"]) == (0, 1)
    assert run.actor.weights.version == 1
    assert all(value.isfinite().all() for value in weights(run).values())
    assert "skipped" in caplog.text


@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_skips_the_update(make_run, caplog, factor):
    run = make_run(actor={"mini_batches": 2})
    batch = run.batch()
    before = weights(run)
    parameter = next(iter(run.actor.weights.parameters.values()))
    handle = parameter.register_hook(lambda gradient: gradient * factor)
    with caplog.at_level(logging.WARNING):
        metrics = run.update(batch, training_step=1).compute()
    assert ["gradient" in text for text in caplog.messages] == [True, True]
    assert_same(weights(run), before, rtol=0, atol=0)
    assert (metrics["actor/updates"], metrics["actor/skipped_updates"]) == (0, 2)
    assert "actor/grad_norm" not in metrics
    assert run.actor.weights.version == 0

    handle.remove()
    metrics = run.update(batch, training_step=2).compute()
    assert metrics["actor/updates"] == 2
    assert math.isfinite(metrics["actor/grad_norm"])


def test_one_skipped_update_leaves_the_other_and_its_metrics(make_run):
    run = make_run(actor={"mini_batches": 2})
    batch = run.batch()
    parameter = next(iter(run.actor.weights.parameters.values()))
    calls = []

    def spoil_first(gradient):
        calls.append(1)
        return gradient * (math.nan if len(calls) == 1 else 1.0)

    parameter.register_hook(spoil_first)
    metrics = run.update(batch, training_step=1).compute()
    assert (metrics["actor/updates"], metrics["actor/skipped_updates"]) == (1, 1)
    assert math.isfinite(metrics["actor/grad_norm"])
    assert run.actor.weights.version == 1


def test_a_skipped_update_leaves_the_average(make_run):
    run = make_run(actor={"ema": 0.5, "lr": 1e-2})
    run.update(run.batch(), training_step=1)
    before = {name: value.clone() for name, value in run.actor.weights.average.items()}
    assert any(not torch.equal(value, before[name]) for name, value in weights(run).items())
    run.update(replace(run.batch(), keep=torch.zeros(8, 2, dtype=torch.bool)), training_step=2)
    assert_same(run.actor.weights.average, before, rtol=0, atol=0)


def test_all_rejected_means_no_update(make_run, caplog):
    run = make_run(actor={"weight_decay": 0.1})
    before = weights(run)
    batch = replace(run.batch(), keep=torch.zeros(8, 2, dtype=torch.bool))
    metrics = run.update(batch, training_step=1).compute()
    assert ["rejected" in text for text in caplog.messages] == [True]
    assert_same(weights(run), before, rtol=0, atol=0)
    assert (metrics["actor/updates"], metrics["actor/skipped_updates"]) == (0, 1)
    assert not run.actor.optimizer.adamw.state()


@pytest.mark.parametrize("denominator", ["kept", "all"])
def test_rejected_terms_leave_the_sum_and_maybe_the_count(make_run, denominator):
    correction = RolloutCorrectionConfig(
        rollout_rs="token_k1", rollout_rs_threshold=2.0, rollout_rs_denominator=denominator
    )
    keep = torch.ones(8, 2, dtype=torch.bool)
    keep[[0, 5], :] = False
    rejected, _ = updated(
        make_run,
        lambda run: replace(run.batch(), keep=keep),
        algorithm={"rollout_correction": correction},
    )
    rest, _ = updated(make_run, lambda run: run.batch().select(torch.tensor([1, 2, 3, 4, 6, 7])))
    share = 1.0 if denominator == "kept" else 12 / 16
    expected = {name: value * share for name, value in rest.gradient().items()}
    assert_same(rejected.gradient(), expected, **GRADIENTS)


def test_legacy_names_come_beside_all_others_in_bypass(make_run):
    found = {}
    for legacy in (False, True):
        correction = RolloutCorrectionConfig.from_preset("bypass_ppo_clip", log_legacy_names=legacy)
        _, metrics = updated(make_run, algorithm={"rollout_correction": correction})
        found[legacy] = metrics
    assert "rollout_corr/kl" in found[False]
    assert found[False].items() <= found[True].items()
    added = found[True].keys() - found[False].keys()
    assert {"mismatch/mismatch_kl", "actor/mismatch/mismatch_kl"} <= added
    assert all("mismatch/" in name for name in added)


def test_bypass_logs_drift_of_the_first_mini_batch_and_of_all(make_run):
    correction = RolloutCorrectionConfig.from_preset("bypass_ppo_clip")
    run = make_run(actor={"mini_batches": 2, "lr": 1e-2}, algorithm={"rollout_correction": correction})
    rollout = run.sample()
    shift = torch.tensor([0.25, 0.5]).repeat_interleave(4)[:, None]
    batch = ActorBatch(
        rollout=replace(rollout, log_probs=rollout.log_probs + shift),
        advantages=torch.ones(8),
        old_log_probs=rollout.log_probs + shift,
    )
    first = next(run.actor.optimizer.mini_batches(batch, 1, 0)).rollout.group_ids[0].item()
    metrics = run.update(batch, training_step=1).compute()
    assert metrics["rollout_corr/kl"] == pytest.approx([0.25, 0.5][first], abs=1e-5)
    assert metrics["actor/rollout_corr/kl"] == pytest.approx(0.375, abs=0.05)
    assert metrics["actor/rollout_corr/kl"] != metrics["rollout_corr/kl"]


def of_even_group(run):
    """A batch whose first group has advantages of 0."""
    batch = run.batch()
    return replace(batch, advantages=batch.advantages * (batch.rollout.group_ids > 0))


def scored(run):
    """Filled with the number of images of each forward pass, and whether it has a gradient."""
    passes = []
    run.actor.weights.transformer.register_forward_hook(
        lambda *call: passes.append((len(call[2][0]) // 2, torch.is_grad_enabled()))
    )
    return passes


BYPASS = RolloutCorrectionConfig.from_preset("bypass_ppo_clip")


@pytest.mark.parametrize(
    ("sections", "recorded", "passes"),
    [
        ({}, False, [(4, True)]),
        ({}, True, [(4, True), (4, False)]),
        ({"algorithm": {"rollout_correction": BYPASS}}, False, [(4, True), (4, False)]),
        ({"actor": {"micro_batch_size": 3}}, False, [(3, True), (1, True)]),
        ({"actor": {"loss_mode": "flowcorr.losses.table:_flow_grpo"}}, False, [(8, True)]),
        ({"actor": {"kl_coef": 0.1}}, False, [(8, False), (8, True)]),
    ],
)
def test_nothing_is_computed_for_a_gradient_of_zero(make_run, sections, recorded, passes):
    """Unless the loss is not known to vanish, or something reads the scores."""
    run = make_run(trainer={"dump_log_probs": recorded}, rollout={"same_initial_noise": False}, **sections)
    batch = of_even_group(run)
    bound_passes(run.actor.scorer, batch.rollout)
    found = scored(run)
    update = run.learn(batch)
    assert found == passes
    assert not recorded or sorted(seen_in(update)) == list(range(16))


def test_micro_batches_that_stay_as_they_were_give_the_same_bits(make_run, monkeypatch):
    found = []
    for skips in (True, False):
        monkeypatch.setitem(LOSSES, "flow_grpo", replace(LOSSES["flow_grpo"], scaled_by_advantage=skips))
        run, _ = updated(make_run, of_even_group, actor={"micro_batch_size": 4})
        found.append((run.gradient(), weights(run)))
    assert_same(found[0][0], found[1][0], rtol=0, atol=0)
    assert_same(found[0][1], found[1][1], rtol=0, atol=0)


def test_rejected_samples_without_a_gradient_do_not_count_either(make_run, monkeypatch):
    keep = torch.ones(8, 2, dtype=torch.bool)
    keep[0], keep[5, 1] = False, False
    found = []
    for skips in (True, False):
        monkeypatch.setitem(LOSSES, "flow_grpo", replace(LOSSES["flow_grpo"], scaled_by_advantage=skips))
        run, _ = updated(make_run, lambda run: run.in_float64(replace(of_even_group(run), keep=keep)))
        found.append(run.gradient())
    assert_same(*found, rtol=1e-5, atol=1e-9)


def test_an_update_without_any_gradient_still_takes_its_step(make_run):
    """With the momentum of earlier updates, and with decay."""
    run = make_run(actor={"weight_decay": 0.1})
    run.stir()
    batch = run.batch()
    run.update(batch, training_step=1)
    before, found = weights(run), scored(run)
    metrics = run.update(replace(batch, advantages=torch.zeros(8)), training_step=2).compute()
    assert found == []
    assert (metrics["actor/updates"], metrics["actor/loss"], metrics["actor/grad_norm"]) == (1, 0, 0)
    assert metrics["actor/zero_advantage_fraction"] == 1
    assert all(not torch.equal(value, before[name]) for name, value in weights(run).items())
