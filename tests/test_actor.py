import copy
import logging
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowcorr.actor import DiffusionActor
from flowcorr.actor.folding import warn_if_folding_is_slower
from flowcorr.actor.update import deal_groups, scheduled_lr
from flowcorr.config import ModelConfig
from flowcorr.config.schema import ActorConfig, LoraConfig
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.errors import BatchError
from flowcorr.losses import LOSSES
from flowcorr.models import load_family
from flowcorr.records import ActorBatch
from tests.tolerances import GRADIENTS, LOG_PROBS, MEANS

FULL = {"lora": LoraConfig(rank=0), "path": "tiny_ocr", "max_sequence_length": 8}


def assert_same(first, second, **tolerance):
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(
            value, second[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


def weights(run):
    return run.actor.weights.snapshot().tensors


def updated(make_run, batch_of=None, **sections):
    """Gradient and metrics of one update on an on-policy batch after some training."""
    run = make_run(**sections)
    run.stir()
    batch = run.batch() if batch_of is None else batch_of(run)
    metrics = run.update(batch, training_step=1).compute()
    return run, metrics


@pytest.mark.parametrize(
    ("rollout", "rank", "kl_coef", "kept"),
    [
        ({}, 4, 0.1, False),
        ({"dtype": "bfloat16"}, 4, 0.0, True),
        ({"staleness": 1}, 4, 0.0, True),
        ({"name": "vllm_omni", "dtype": "bfloat16", "staleness": 1}, 4, 0.1, False),
        ({"name": "vllm_omni"}, 0, 0.1, True),
        ({"name": "vllm_omni"}, 0, 0.0, False),
    ],
)
def test_the_untrained_transformer_is_kept_only_where_it_is_needed(make_config, rollout, rank, kl_coef, kept):
    config = make_config(
        model={**FULL, "lora": LoraConfig(rank=rank)}, rollout=rollout, actor={"kl_coef": kl_coef}
    )
    actor = DiffusionActor(load_family(ModelConfig(path="tiny_ocr", max_sequence_length=8)), config)
    assert (actor.weights.untrained is not actor.weights.transformer) == kept


# Scoring -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sde_type", ["sde", "cps", "dance_sde"])
@pytest.mark.parametrize("fold", [True, False])
def test_the_actor_scores_as_the_engine_did(make_run, sde_type, fold):
    run = make_run(sampling={"sde_type": sde_type, "noise_level": 0.5}, actor={"fold_steps": fold})
    run.stir()
    rollout = run.sample()
    scores = run.actor.log_probs(rollout, with_means=True)
    # An error of the mean counts in units of the std, which is 0.001 at the last step of cps.
    error = MEANS["atol"] / (rollout.stds * rollout.num_elements**0.5)
    assert ((scores.log_probs - rollout.log_probs).abs() <= LOG_PROBS["atol"] + error).all()
    torch.testing.assert_close(scores.means, rollout.means, **MEANS)
    policy = run.actor.score(rollout)
    torch.testing.assert_close(policy.std, rollout.stds)
    assert torch.equal(policy.step, rollout.sigmas - rollout.sigmas_next)
    assert policy.log_prob.requires_grad
    assert not scores.log_probs.requires_grad
    assert run.actor.log_probs(rollout).means is None


def test_the_unscaled_cps_log_prob_is_replayed(make_run):
    run = make_run(sampling={"sde_type": "cps", "noise_level": 0.5, "cps_unscaled": True})
    rollout = run.sample()
    torch.testing.assert_close(
        run.actor.log_probs(rollout).log_probs, rollout.log_probs, rtol=1e-4, atol=1e-7
    )
    assert (rollout.log_probs < 0).all()


@pytest.mark.parametrize("size", [1, 3])
def test_micro_batches_change_no_log_prob(make_run, size):
    run = make_run(actor={"micro_batch_size": size})
    rollout = run.sample()
    torch.testing.assert_close(run.actor.log_probs(rollout).log_probs, rollout.log_probs, **LOG_PROBS)


def test_the_timesteps_of_the_rollout_are_replayed(make_run):
    run = make_run()
    rollout = run.sample()
    rounded = replace(rollout, timesteps=rollout.timesteps + 5.0)
    difference = run.actor.log_probs(rounded).log_probs - run.actor.log_probs(rollout).log_probs
    assert difference.abs().max() > 1e-5


def test_autocast_rounds_and_stays_close(make_run):
    run, plain = make_run(actor={"autocast": True}), make_run()
    rollout = plain.sample()
    gap = run.actor.log_probs(rollout).log_probs - plain.actor.log_probs(rollout).log_probs
    assert gap.dtype == torch.float32
    assert 1e-7 < gap.abs().max() < 1e-2
    assert run.update(plain.batch(rollout), training_step=1).compute()["actor/updates"] == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_compiled_transformer_computes_the_same(make_run):
    compiled, metrics = updated(make_run, actor={"compile": True})
    plain, expected = updated(make_run)
    assert_same(compiled.gradient(), plain.gradient(), **GRADIENTS)
    assert metrics["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-3)


@pytest.mark.parametrize(("cost", "warned"), [(lambda rows: rows**2, True), (lambda rows: rows + 8, False)])
def test_folding_that_is_slower_is_warned_of(make_run, caplog, cost, warned):
    run = make_run()
    seconds = []
    run.actor.weights.transformer.register_forward_hook(lambda *call: seconds.append(cost(len(call[2][0]))))
    before = weights(run)
    warn_if_folding_is_slower(run.actor.scorer, run.sample(), clock=lambda: sum(seconds))
    assert ("actor.fold_steps=True is slower here: 8 samples take 256 s" in caplog.text) is warned
    assert_same(weights(run), before, rtol=0, atol=0)


# Updates -------------------------------------------------------------------------------------------------


def test_an_update_raises_the_likelihood_of_good_samples(make_run):
    run = make_run(actor={"lr": 1e-3})
    batch = run.batch()
    batch = replace(batch, advantages=torch.where(torch.arange(8) % 2 == 0, 1.0, -1.0))
    metrics = run.update(batch, training_step=1).compute()
    gain = run.actor.log_probs(batch.rollout).log_probs - batch.old_log_probs
    assert gain[::2].mean() > gain[1::2].mean()
    assert metrics["actor/updates"] == 1
    assert metrics["actor/ratio_mean"] == pytest.approx(1.0, abs=1e-6)


def test_the_gradient_of_the_first_update_is_reinforce_over_the_count(make_run):
    run = make_run()
    run.stir()
    batch = run.batch()
    run.update(batch, training_step=1)
    got = run.gradient()
    other = make_run()
    other.stir()
    (-(batch.advantages[:, None] * other.actor.score(batch.rollout).log_prob).sum() / 16).backward()
    assert_same(got, other.gradient(), **GRADIENTS)


def test_the_gradient_is_clipped_and_its_norm_logged_before(make_run):
    run, metrics = updated(make_run, actor={"grad_clip": 1e-4})
    norm = torch.stack([value.norm() for value in run.gradient().values()]).norm().item()
    assert norm == pytest.approx(1e-4, rel=1e-2)
    _, loose = updated(make_run)
    assert metrics["actor/grad_norm"] == pytest.approx(loose["actor/grad_norm"], rel=1e-6)
    assert metrics["actor/grad_norm"] > 1e-3


def test_epochs_and_mini_batches_count_the_updates(make_run):
    run, metrics = updated(make_run, actor={"epochs": 3, "mini_batches": 2})
    assert metrics["actor/updates"] == 6
    assert metrics["actor/skipped_updates"] == 0
    assert run.actor.weights.version == 1 + 6


def test_mini_batches_hold_whole_groups_in_an_order_of_their_own(make_run):
    run = make_run(rollout={"prompts_per_step": 2, "n": 2}, actor={"mini_batches": 8})
    batch = run.batch()
    orders = set()
    for step in range(12):
        parts = [part.rollout.group_ids.tolist() for part in run.actor.optimizer.mini_batches(batch, step, 0)]
        assert sorted(parts) == [[0, 0], [1, 1]]
        again = [part.rollout.group_ids.tolist() for part in run.actor.optimizer.mini_batches(batch, step, 0)]
        assert parts == again
        orders.add(parts[0][0])
    assert orders == {0, 1}


@given(
    groups=st.integers(1, 40),
    parts=st.integers(1, 9),
    ranks=st.integers(1, 8),
    training_step=st.integers(0, 99),
)
def test_groups_are_dealt_evenly_whatever_the_ranks(groups, parts, ranks, training_step):
    key = {"seed": 1, "training_step": training_step, "epoch": 0}
    dealt = deal_groups(torch.arange(groups), parts, **key)
    for begin in range(0, groups, parts):
        block = dealt[begin : begin + parts].tolist()
        assert len(set(block)) == len(block)
        assert set(block) <= set(range(parts))
    for share in torch.arange(groups).tensor_split(ranks):
        counts = dealt[share].bincount(minlength=parts)
        assert counts.max() - counts.min() <= 2
        assert torch.equal(
            deal_groups(share.repeat_interleave(2), parts, **key), dealt[share].repeat_interleave(2)
        )


def test_each_group_comes_to_each_mini_batch_equally_often():
    dealt = torch.stack(
        [
            deal_groups(torch.arange(7), 3, seed=0, training_step=step, epoch=epoch)
            for step in range(300)
            for epoch in range(2)
        ]
    )
    share = torch.nn.functional.one_hot(dealt, 3).double().mean(0)
    assert (share - 1 / 3).abs().max() < 0.1


def test_the_learning_rate_warms_up(make_run):
    run = make_run(actor={"warmup_steps": 4, "lr": 1e-3})
    batch = run.batch()
    rates = [run.update(batch, training_step=step).compute()["actor/lr"] for step in range(6)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3])
    assert run.actor.optimizer.adamw.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("linear", [0.5, 1, 1, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", [0.5, 1, 1, 0.2 + 0.4 * (1 + 2**-0.5), 0.6, 0.2 + 0.4 * (1 - 2**-0.5), 0.2]),
    ],
)
def test_the_learning_rate_falls_to_a_share(schedule, rates):
    actor = ActorConfig(lr=1.0, warmup_steps=2, lr_schedule=schedule, lr_min_ratio=0.2)
    assert [scheduled_lr(actor, update, 6) for update in range(7)] == pytest.approx(rates)


def test_the_learning_rate_ends_with_the_run(make_run):
    run = make_run(actor={"lr": 1e-3, "lr_schedule": "linear"}, trainer={"total_steps": 2})
    batch = run.batch()
    updates = run.actor.config.actor.mini_batches
    rates = [run.update(batch, training_step=step).compute()["actor/lr"] for step in range(2)]
    steps = [[1e-3 * (1 - (step * updates + i) / (2 * updates)) for i in range(updates)] for step in range(2)]
    assert rates == pytest.approx([sum(rates) / updates for rates in steps])


def test_gradient_checkpointing_changes_no_gradient(make_run):
    checkpointed, _ = updated(make_run, actor={"gradient_checkpointing": True})
    plain, _ = updated(make_run)
    assert checkpointed.actor.weights.transformer.gradient_checkpointing
    assert_same(checkpointed.gradient(), plain.gradient(), **GRADIENTS)


def test_guidance_reaches_the_gradient(make_run):
    run, metrics = updated(make_run, sampling={"guidance_scale": 2.0})
    assert metrics["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["actor/grad_norm"] > 0


@pytest.mark.parametrize(("rank", "weighting"), [(4, "exact"), (0, "flow_grpo")])
def test_the_reference_is_the_untrained_model(make_run, rank, weighting):
    sections = {
        "model": {**FULL, "lora": LoraConfig(rank=rank)},
        "actor": {"kl_coef": 0.5, "kl_weighting": weighting, "mini_batches": 1, "grad_clip": 1e9},
    }
    run = make_run(**sections)
    run.stir(0.01)
    batch = replace(run.batch(), advantages=torch.zeros(8))
    metrics = run.update(batch, training_step=1).compute()
    got = run.gradient()

    other = make_run(**sections)
    other.stir(0.01)
    untrained = make_run().actor.log_probs(batch.rollout, with_means=True).means
    policy = other.actor.score(batch.rollout)
    kl = (policy.mean - untrained).square().mean((2, 3, 4)) / (2 * policy.std**2)
    if weighting == "flow_grpo":
        kl = kl * policy.step
    (0.5 * kl.mean()).backward()
    assert_same(got, other.gradient(), **GRADIENTS)
    assert metrics["actor/kl_loss"] == pytest.approx(kl.mean().item(), rel=1e-4)
    assert metrics["actor/kl_loss"] > 0


# What is left out ----------------------------------------------------------------------------------------


def spoiled(batch, row, value=math.nan):
    latents = batch.rollout.latents.clone()
    latents[row] = value
    return replace(batch, rollout=replace(batch.rollout, latents=latents))


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
    assert "this update is skipped" in caplog.text


@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_skips_the_update(make_run, caplog, factor):
    run = make_run(actor={"mini_batches": 2})
    batch = run.batch()
    before = weights(run)
    parameter = next(iter(run.actor.weights.parameters.values()))
    handle = parameter.register_hook(lambda gradient: gradient * factor)
    with caplog.at_level(logging.WARNING):
        metrics = run.update(batch, training_step=1).compute()
    assert "the gradient is not finite" in caplog.text
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


def test_all_rejected_means_no_update(make_run, caplog):
    run = make_run(actor={"weight_decay": 0.1})
    before = weights(run)
    batch = replace(run.batch(), keep=torch.zeros(8, 2, dtype=torch.bool))
    metrics = run.update(batch, training_step=1).compute()
    assert "every term was rejected" in caplog.text
    assert_same(weights(run), before, rtol=0, atol=0)
    assert (metrics["actor/updates"], metrics["actor/skipped_updates"]) == (0, 1)
    assert not run.actor.optimizer.state()


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
    correction = RolloutCorrectionConfig.preset("bypass_ppo_clip")
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


# Samples of advantage 0 ----------------------------------------------------------------------------------


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
    run = make_run(**sections)
    batch = of_even_group(run)
    found, places = scored(run), []
    record = (lambda part, policy: places.extend(part.places.flatten().tolist())) if recorded else None
    run.update(batch, training_step=1, record=record)
    assert found == passes
    assert not recorded or sorted(places) == list(range(16))


def test_micro_batches_that_stay_as_they_were_give_the_same_bits(make_run, monkeypatch):
    found = []
    for skips in (True, False):
        monkeypatch.setitem(LOSSES, "flow_grpo", replace(LOSSES["flow_grpo"], scaled_by_advantage=skips))
        run, _ = updated(make_run, of_even_group, actor={"micro_batch_size": 4})
        found.append((run.gradient(), weights(run)))
    assert_same(found[0][0], found[1][0], rtol=0, atol=0)
    assert_same(found[0][1], found[1][1], rtol=0, atol=0)


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


# Weights -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:model.lora.dtype=bfloat16")
def test_an_average_of_bfloat16_weights_moves_by_thousandths(make_run):
    run = make_run(actor={"ema": 0.999}, model={"lora": LoraConfig(rank=4, dtype="bfloat16")})
    run.stir()
    run.actor.weights.average = {name: value.float() for name, value in weights(run).items()}
    before = {name: value.clone() for name, value in run.actor.weights.average.items()}
    with torch.no_grad():
        for parameter in run.actor.weights.parameters.values():
            parameter.mul_(1.0625)
    run.actor.weights.update_average()
    after = weights(run)
    expected = {name: value + 0.001 * (after[name].float() - value) for name, value in before.items()}
    assert_same(run.actor.weights.average, expected, rtol=2e-7, atol=0)
    assert any((run.actor.weights.average[name] != value).any() for name, value in before.items())
    with run.actor.weights.averaged():
        assert {value.dtype for value in weights(run).values()} == {torch.bfloat16}


def test_the_average_follows_the_weights(make_run):
    run = make_run(actor={"ema": 0.75, "lr": 1e-2})
    before = weights(run)
    run.update(run.batch(), training_step=1)
    after = weights(run)
    assert_same(run.actor.weights.average, {name: 0.75 * before[name] + 0.25 * after[name] for name in after})
    with run.actor.weights.averaged():
        assert_same(weights(run), run.actor.weights.average, rtol=0, atol=0)
    assert_same(weights(run), after, rtol=0, atol=0)


def test_the_average_is_left_when_an_evaluation_fails(make_run):
    run = make_run(actor={"ema": 0.75, "lr": 1e-2})
    run.update(run.batch(), training_step=1)
    after = weights(run)
    with pytest.raises(KeyError), run.actor.weights.averaged():
        raise KeyError
    assert_same(weights(run), after, rtol=0, atol=0)


def test_full_fine_tuning_moves_every_weight(make_run, tmp_path):
    run = make_run(model=FULL)
    names = {name for name, _ in run.family.transformer.named_parameters()}
    assert run.actor.weights.parameters.keys() == names
    before = weights(run)
    run.update(run.batch(), training_step=1)
    moved = {name for name, value in weights(run).items() if not torch.equal(value, before[name])}
    # The last block's text stream ends in the block: its query and what follows it have no effect.
    assert len(moved) > 0.9 * len(names)
    assert_same(dict(run.actor.weights.merged({})), dict(run.family.transformer.state_dict()), rtol=0, atol=0)

    run.actor.weights.save(tmp_path)
    loaded = type(run.family.transformer).from_pretrained(tmp_path / "transformer")
    assert_same(dict(loaded.state_dict()), dict(run.family.transformer.state_dict()), rtol=0, atol=0)


def test_a_saved_adapter_holds_the_average(make_run, tmp_path):
    run = make_run(model={**FULL, "lora": LoraConfig(rank=4, alpha=2.0)}, actor={"ema": 0.5, "lr": 1e-2})
    run.update(run.batch(), training_step=1)
    run.actor.weights.save(tmp_path)
    other = load_family(ModelConfig(path="tiny_ocr", max_sequence_length=8))
    other.pipeline.load_lora_weights(str(tmp_path))
    rollout = run.sample()
    inputs = (rollout.latents[:, 0], rollout.timesteps[:, 0], rollout.conditioning, run.actor.guidance)
    with torch.no_grad():
        got = other.velocity(other.transformer, *inputs)
        current = run.family.velocity(run.actor.weights.transformer, *inputs)
        with run.actor.weights.averaged():
            expected = run.family.velocity(run.actor.weights.transformer, *inputs)
    torch.testing.assert_close(got, expected, **MEANS)
    assert (got - current).abs().max() > 1e-4


def test_snapshots_are_copies_and_can_be_put_back(make_run):
    run = make_run()
    start = run.actor.weights.snapshot()
    kept = copy.deepcopy(dict(start.tensors))
    run.update(run.batch(), training_step=1)
    assert_same(dict(start.tensors), kept, rtol=0, atol=0)
    assert (start.version, run.actor.weights.snapshot().version) == (0, 1)
    run.actor.weights.load(start.tensors)
    assert_same(weights(run), kept, rtol=0, atol=0)


def test_weights_of_another_adapter_are_an_error(make_run):
    run = make_run()
    tensors = dict(run.actor.weights.snapshot().tensors)
    name = next(iter(tensors))
    with pytest.raises(BatchError, match=r"1 names differ, as nonsense"):
        run.actor.weights.load({**tensors, "nonsense": tensors[name]})
    with pytest.raises(BatchError, match=r"has shape \[3\] instead of"):
        run.actor.weights.load({**tensors, name: torch.zeros(3)})


def test_the_optimizer_continues_from_its_state(make_run):
    run = make_run()
    batch = run.batch()
    run.update(batch, training_step=1)
    other = make_run()
    other.actor.weights.load(run.actor.weights.snapshot().tensors)
    other.actor.optimizer.load_state(run.actor.optimizer.state())
    run.update(batch, training_step=2)
    other.update(batch, training_step=2)
    assert_same(weights(other), weights(run), rtol=0, atol=0)
