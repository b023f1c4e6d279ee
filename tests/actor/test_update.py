from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowcorr import distributed
from flowcorr.actor.update import deal_groups
from flowcorr.algorithm import apply_bypass_mode_to_diffusion_batch, drift_squares
from flowcorr.algorithm.noise_floor import noise_counts
from flowcorr.config.schema import LoraConfig
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.sde import centred_log_prob
from tests.actor.updates import assert_same, updated
from tests.algorithm.batches import band_state
from tests.conftest import small_config, start_run
from tests.tolerances import GRADIENTS


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
    (-(batch.advantages[:, None] * other.actor.score(batch.rollout).log_probs).sum() / 16).backward()
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
    run = make_run(rollout={"prompts_per_step": 2, "n": 2}, actor={"mini_batches": 2})
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
    assert run.actor.optimizer.adamw.inner.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_learning_rate_ends_with_the_run(make_run, epochs):
    actor = {"lr": 1e-3, "lr_schedule": "linear", "epochs": epochs}
    run = make_run(actor=actor, trainer={"total_steps": 2})
    batch = run.batch()
    updates = epochs * run.actor.config.actor.mini_batches
    rates = [run.update(batch, training_step=step).compute()["actor/lr"] for step in range(2)]
    steps = [[1e-3 * (1 - (step * updates + i) / (2 * updates)) for i in range(updates)] for step in range(2)]
    assert rates == pytest.approx([sum(rates) / updates for rates in steps])


@pytest.mark.parametrize(("rank", "weighting"), [(4, "exact"), (0, "flow_grpo")])
def test_the_reference_is_the_untrained_model(make_run, rank, weighting):
    sections = {
        "model": {"lora": LoraConfig(rank=rank)},
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
    scores = other.actor.score(batch.rollout)
    kl = (scores.means - untrained).square().mean((2, 3, 4)) / (2 * scores.stds**2)
    if weighting == "flow_grpo":
        kl = kl * batch.rollout.window.step_sizes
    (0.5 * kl.mean()).backward()
    assert_same(got, other.gradient(), **GRADIENTS)
    assert metrics["actor/kl_loss"] == pytest.approx(kl.mean().item(), rel=1e-4)
    assert metrics["actor/kl_loss"] > 0


def rejecting(batch):
    """The batch without half of the first group, so that two ranks with a group each keep unlike numbers of terms."""
    keep = torch.ones(8, 2, dtype=torch.bool)
    keep[:2] = False
    return replace(batch, keep=keep)


def update_of_this_rank(rollout):
    run = start_run(small_config(actor={"mini_batches": 1}))
    batch = run.in_float64(rejecting(run.batch(rollout)))
    mine = batch.rollout.group_ids % distributed.world_size() == distributed.rank()
    run.update(batch.select(mine))
    return run.gradient()


def test_ranks_divide_by_the_terms_of_all(two_ranks):
    rollout = start_run(small_config()).sample()
    expected = update_of_this_rank(rollout)
    for found in two_ranks.call(update_of_this_rank, rollout):
        assert_same(found, expected, rtol=1e-5, atol=1e-9)


def test_a_further_epoch_does_not_count_the_terms_of_a_skipped_update_again(make_run):
    run = make_run(actor={"epochs": 2})
    rollout = run.sample()
    shifted = replace(rollout, log_probs=rollout.log_probs + 1)
    batch = apply_bypass_mode_to_diffusion_batch(replace(run.batch(rollout), rollout=shifted))
    correction = RolloutCorrectionConfig(
        bypass_mode=True, rollout_rs="token_k1", rollout_rs_threshold=(0.999, 1.001)
    )
    metrics = run.actor.update(batch, correction, training_step=1).metrics
    assert metrics.compute()["actor/skipped_updates"] == 2
    assert noise_counts(metrics).sum() == rollout.log_probs.numel()


@pytest.mark.parametrize(("faulty", "stepped"), [(8, True), (9, False)])
def test_an_update_of_which_most_would_be_rejected_is_not_taken(make_run, caplog, faulty, stepped):
    """The median of the terms is then the fault's own, so nothing tells which of them are right."""
    correction = RolloutCorrectionConfig.bypass_ppo_clip_auto_rs()
    run = make_run(algorithm={"rollout_correction": correction})
    batch = run.batch()
    shift = (torch.arange(16) < faulty).view(8, 2) * 0.5
    rollout = replace(batch.rollout, log_probs=batch.rollout.log_probs - shift)
    batch = apply_bypass_mode_to_diffusion_batch(replace(batch, rollout=rollout, old_log_probs=None))
    run.actor.optimizer.bands.restore(band_state({"token_k1": (0.0, 1e-3)}, 4))
    metrics = run.update(batch, training_step=1).compute()
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == faulty / 16
    assert metrics["actor/updates"] == stepped
    assert metrics["actor/mostly_rejected_updates"] == (not stepped)
    assert ("56 %" in caplog.text) == (not stepped)


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("bypass", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_centred_gradient_is_that_at_the_rollouts_means(make_run, fold, bypass, dtype):
    centred = RolloutCorrectionConfig(bypass_mode=bypass, score_centering=True)
    sections = {"actor": {"fold_steps": fold, "clip_ratio": 0.5}, "model": {"dtype": dtype}}
    got = {}
    for name, correction in (("centred", centred), ("plain", replace(centred, score_centering=False))):
        run, other = (
            make_run(**sections, rollout={"emulate": "int4"}, algorithm={"rollout_correction": correction})
            for _ in range(2)
        )
        run.stir()
        other.stir()
        batch = run.batch()
        if bypass:
            batch = apply_bypass_mode_to_diffusion_batch(batch)
        run.update(batch, training_step=1)
        got[name] = _flat(run.gradient())

        scores, window = other.actor.score(batch.rollout), batch.rollout.window
        ratio, log_prob = (scores.log_probs - batch.old_log_probs).exp().detach(), scores.log_probs
        if correction.score_centering:
            log_prob = centred_log_prob(log_prob, scores.means, window.means, window.stds)
        (-(batch.advantages[:, None] * ratio * log_prob).sum() / 16).backward()
        tolerance = 1e-3 if dtype == "float32" else 0.03
        assert (got[name] - _flat(other.gradient())).norm() < tolerance * got[name].norm()
    assert (got["centred"] - got["plain"]).norm() > 0.05 * got["plain"].norm()  # int4's means are elsewhere


@pytest.mark.parametrize("bypass", [True, False])
def test_the_drift_of_the_score_does_not_depend_on_how_terms_are_scored(make_run, bypass):
    """And it is that of the batch's means: windows differ by sample, so that nothing cancels."""
    correction = RolloutCorrectionConfig(bypass_mode=bypass)
    found = []
    for actor in (
        {},
        {"micro_batch_size": 3, "fold_steps": False},
        {"micro_batch_size": 1, "mini_batches": 2},
    ):
        run = make_run(
            rollout={"emulate": "int4"},
            actor={"mini_batches": 1, **actor},
            algorithm={"rollout_correction": correction},
        )
        run.stir()
        batch = run.batch()
        means, window, groups = batch.old_means, batch.rollout.window, batch.rollout.group_ids
        if bypass:
            batch = apply_bypass_mode_to_diffusion_batch(batch)
        metrics = run.update(batch, training_step=1).compute()
        found.append(metrics["rollout_corr/score_drift"])
        expected = drift_squares(
            batch.advantages,
            groups,
            window.step_indices,
            next_latents=window.next_latents,
            means=means,
            rollout_means=window.means,
            stds=window.stds,
        )
        if actor.get("mini_batches") == 2:  # the second is scored after an update
            first = next(run.actor.optimizer.mini_batches(batch, 1, 0)).rollout.group_ids
            expected = [square[torch.isin(groups, first)] for square in expected]
        assert found[-1] == pytest.approx((expected[0].sum() / expected[1].sum()).item(), rel=1e-4)
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert found[0] > 0


def _flat(gradient):
    return torch.cat([value.flatten().float() for value in gradient.values()])
