"""The centre of the clip range: what is measured, when it is used, and that it undoes a constant drift."""

import math
from dataclasses import replace

import pytest
import torch

from flowcorr.algorithm import (
    ClipCenter,
    apply_bypass_mode_to_diffusion_batch,
    centers_clip,
    diffusion_loss,
)
from flowcorr.algorithm.clip_center import DECAY, centered, drift_by_step
from flowcorr.config.schema import ActorConfig
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.records import ActorBatch, BatchStep, PolicyStep

BYPASS = {"rollout_correction": RolloutCorrectionConfig.preset("bypass_ppo_clip")}
SHIFT = torch.tensor([0.02, -0.03, 0.05, 0.0])  # by step index, far beyond the clip range of 1e-3
CLIPPED = ("flow_grpo", "grpo_guard")


def drift(log_ratio, step_index, keep=None, num_steps=4):
    log_ratio = torch.tensor(log_ratio)
    keep = torch.ones_like(log_ratio, dtype=torch.bool) if keep is None else torch.tensor(keep)
    return drift_by_step(log_ratio, keep, torch.tensor(step_index), num_steps)


# The estimate --------------------------------------------------------------------------------------------


def test_nothing_known_is_no_centre():
    center = ClipCenter.unknown(3, torch.device("cpu"))
    assert center.at(torch.tensor([[0, 2]])).tolist() == [[0.0, 0.0]]
    assert center.metrics().compute() == {}
    assert center.older().at(torch.tensor([1])).tolist() == [0.0]


def test_means_by_step_of_the_kept_and_finite():
    sums = drift(
        [[0.1, 0.3], [0.2, math.nan], [9.0, 0.5]], [[0, 1], [0, 1], [0, 2]], [[True] * 2, [True] * 2, [False, True]]
    )  # fmt: skip
    torch.testing.assert_close(sums, torch.tensor([[0.3, 0.3, 0.5, 0.0], [2.0, 1.0, 1.0, 0.0]]).double())
    center = ClipCenter(sums=sums)
    centers = center.at(torch.tensor([[0, 1], [2, 3]]))
    torch.testing.assert_close(centers, torch.tensor([[0.15, 0.3], [0.5, 0.0]]))
    assert center.metrics().compute() == {
        "actor/clip_center_step_0": pytest.approx(0.15),
        "actor/clip_center_step_1": pytest.approx(0.3),
        "actor/clip_center_step_2": pytest.approx(0.5),
    }


def test_a_training_step_counts_less_with_each_that_follows():
    center = ClipCenter.unknown(1, torch.device("cpu"))
    for value, count in ((1.0, 4), (2.0, 2), (4.0, 1)):
        center = center.older().plus(drift([value] * count, [0] * count, num_steps=1))
    weights = [4 * DECAY**2, 2 * DECAY, 1.0]
    expected = (weights[0] * 1.0 + weights[1] * 2.0 + weights[2] * 4.0) / sum(weights)
    assert center.at(torch.tensor([0])).item() == pytest.approx(expected, rel=1e-6)


def test_the_order_of_terms_changes_no_sum():
    draw = torch.Generator().manual_seed(0)
    log_ratio, index = torch.randn(64, 2, generator=draw), torch.randint(4, (64, 2), generator=draw)
    everything = torch.ones(64, 2, dtype=torch.bool)
    whole = drift_by_step(log_ratio, everything, index, 4)
    parts = [
        drift_by_step(log_ratio[rows], everything[rows], index[rows], 4) for rows in torch.arange(64).split(7)
    ]
    torch.testing.assert_close(torch.stack(parts).sum(0), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_elements", [512, 65536])
def test_the_centre_of_a_gap_is_its_exact_kl(num_elements):
    """Log-ratios drawn as the model of `RolloutCorrectionConfig` has them: mean -r^2/2, std r / sqrt(D)."""
    draw, r = torch.Generator().manual_seed(0), 0.05
    noise = torch.randn(4000, 1, generator=draw, dtype=torch.float64)
    log_ratio = -(r**2) / 2 + r / math.sqrt(num_elements) * noise
    index = torch.zeros(4000, 1, dtype=torch.int64)
    sums = drift_by_step(log_ratio, torch.ones_like(index, dtype=torch.bool), index, 1)
    error = r / math.sqrt(num_elements * 4000)
    assert ClipCenter(sums=sums).at(index[0]).item() == pytest.approx(-(r**2) / 2, abs=4 * error)
    assert centered(log_ratio, index).mean().item() == pytest.approx(0.0, abs=1e-9)
    off = [(value.expm1().abs() > 1e-3).double().mean() for value in (log_ratio, centered(log_ratio, index))]
    if num_elements == 65536:
        assert off[0] > 0.85 > 1e-3 > off[1]  # the mean, -1.25e-3, is what lies outside; the noise is 2e-4


@pytest.mark.parametrize(
    ("loss_mode", "correction", "centers"),
    [
        ("flow_grpo", RolloutCorrectionConfig(bypass_mode=True), True),
        ("grpo_guard", RolloutCorrectionConfig(bypass_mode=True), True),
        ("mine:loss", RolloutCorrectionConfig(bypass_mode=True), True),
        ("flow_dppo", RolloutCorrectionConfig(bypass_mode=True), False),
        ("importance_cap", RolloutCorrectionConfig(bypass_mode=True), False),
        ("flow_grpo", RolloutCorrectionConfig(bypass_mode=True, loss_type="reinforce"), False),
        ("flow_grpo", RolloutCorrectionConfig(), False),
        ("flow_grpo", RolloutCorrectionConfig(bypass_mode="auto"), False),
        ("flow_grpo", None, False),
    ],
)
def test_where_the_clip_is_centred(make_config, loss_mode, correction, centers):
    sections = {"algorithm": {"rollout_correction": correction}}
    config = make_config(actor={"loss_mode": loss_mode, "clip_center": "drift"}, **sections)
    assert centers_clip(config) == centers
    assert not centers_clip(make_config(actor={"loss_mode": loss_mode}, **sections))


# The loss ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_mode", CLIPPED)
def test_the_loss_tells_the_drift_that_would_centre_it(loss_mode):
    draw = torch.Generator().manual_seed(0)
    shape, size = (6, 2), (6, 2, 3, 3)
    rollout, delta = -1 + 0.1 * torch.randn(shape, generator=draw), 0.02 * torch.randn(shape, generator=draw)
    mean = torch.randn(size, generator=draw)
    policy = PolicyStep(
        log_prob=(rollout + delta).requires_grad_(),
        mean=mean.requires_grad_(),
        std=torch.tensor([0.5, 0.3]).expand(shape),
        step=torch.full(shape, 0.1),
    )
    other = mean.detach() + 0.05 * torch.randn(size, generator=draw)
    index = torch.tensor([0, 1]).expand(shape)
    batch = BatchStep(
        old_log_prob=rollout, rollout_log_prob=rollout, advantage=torch.ones(shape), step_index=index,
        old_mean=other, rollout_mean=other, clip_center=torch.zeros(shape),
    )  # fmt: skip
    correction = RolloutCorrectionConfig(
        bypass_mode=True, bypass_scope="trajectory", rollout_rs="token_k1", rollout_rs_threshold=1.02
    )
    actor = ActorConfig(loss_mode=loss_mode, clip_ratio=1e-3)

    def loss(step):
        return diffusion_loss(policy, step, actor, correction, num_steps=4)

    measured = loss(batch).drift
    kept = (delta.abs() <= math.log(1.02)).double()
    assert 0 < kept.sum() < 12
    assert measured[1].tolist() == [*kept.sum(0).tolist(), 0.0, 0.0]
    exponent = delta.double()
    if loss_mode == "grpo_guard":
        bias = (mean.detach() - other).square().mean((2, 3)) / (2 * policy.std.square())
        exponent = exponent + bias
    torch.testing.assert_close(measured[0, :2], (kept * exponent).sum(0), rtol=1e-4, atol=1e-6)

    center = ClipCenter(sums=measured).at(index)
    after = loss(replace(batch, clip_center=center))
    torch.testing.assert_close(after.drift, measured)  # what is measured does not depend on the centre
    # Kept terms have mean 0 at each step in what is exponentiated, less a factor `s` a step.
    rest = torch.where(kept.bool(), exponent - center, 0.0).sum(0)
    torch.testing.assert_close(rest, torch.zeros(2).double(), rtol=0, atol=1e-6)
    scale = policy.std if loss_mode == "grpo_guard" else torch.ones(shape)
    ratio = ((exponent - center) * scale).exp()[kept.bool()]
    values = after.metrics.compute()
    assert values["actor/ratio_mean"] == pytest.approx(ratio.mean().item(), rel=1e-6)
    noise = (((exponent - center) * scale).expm1().abs() > 1e-3).double().mean().item()
    assert values["rollout_corr/clip_noise_fraction"] == pytest.approx(noise)
    assert diffusion_loss(policy, replace(batch, clip_center=None), actor, correction).drift is None


# The actor -----------------------------------------------------------------------------------------------


def shifted(batch, shift=SHIFT):
    """The batch in bypass mode, its rollout log-probs off by a constant at each step of the schedule."""
    rollout = batch.rollout
    log_probs = rollout.log_probs - shift[rollout.step_indices]
    batch = ActorBatch(rollout=replace(rollout, log_probs=log_probs), advantages=batch.advantages)
    return apply_bypass_mode_to_diffusion_batch(batch)


def start(make_run, center="drift", **actor):
    run = make_run(
        actor={"mini_batches": 1, "grad_clip": 1e9, "clip_center": center, **actor}, algorithm=BYPASS
    )
    run.stir()
    return run


def centers_of(step_indices):
    """The centres that `shifted` is to be measured with, where these steps were seen."""
    return {index: pytest.approx(SHIFT[index].item(), abs=5e-6) for index in step_indices.unique().tolist()}


def centers(metrics):
    prefix = "actor/clip_center_step_"
    return {
        int(name.removeprefix(prefix)): value
        for name, value in metrics.compute().items()
        if name.startswith(prefix)
    }


@pytest.mark.parametrize("loss_mode", CLIPPED)
def test_a_centred_ratio_does_not_see_a_constant_drift(make_run, loss_mode):
    """Measured on a batch without advantages, which moves no weight, a constant drift leaves no trace."""
    gradients, cut = {}, {}
    for name, center, shift in (
        ("plain", "none", 0 * SHIFT),
        ("centred", "drift", SHIFT),
        ("off centre", "none", SHIFT),
    ):
        run = start(make_run, center, loss_mode=loss_mode)
        batch = run.batch()
        nothing = replace(batch, advantages=torch.zeros(8))
        measured = run.actor.update(shifted(nothing, shift), training_step=1)
        if center == "drift":
            assert centers(measured) == centers_of(batch.rollout.step_indices)
        metrics = run.actor.update(shifted(batch, shift), training_step=2).compute()
        gradients[name], cut[name] = run.gradient(), metrics["actor/pg_clipfrac"]
    assert cut["plain"] == cut["centred"] == 0
    assert cut["off centre"] > 0.5
    different = 0
    for name, expected in gradients["plain"].items():
        largest = expected.abs().max().item()
        torch.testing.assert_close(gradients["centred"][name], expected, rtol=1e-3, atol=1e-4 * largest)
        different += (gradients["off centre"][name] - expected).abs().max().item() > 0.1 * largest > 0
    assert different > 0


def test_the_first_mini_batch_centres_those_that_follow(make_run):
    run = start(make_run, mini_batches=2, lr=1e-9)
    batch = run.batch()
    first_part = next(run.actor._mini_batches(batch, 1, 0)).rollout
    first, later = first_part.step_indices, ~torch.isin(batch.rollout.group_ids, first_part.group_ids)
    # The second group is off by 1 more, which must not be measured.
    batch = shifted(batch)
    log_probs = torch.where(later[:, None], batch.old_log_probs - 1.0, batch.old_log_probs)
    batch = apply_bypass_mode_to_diffusion_batch(
        replace(batch, rollout=replace(batch.rollout, log_probs=log_probs))
    )
    metrics = run.actor.update(batch, training_step=1)
    assert centers(metrics) == centers_of(first)
    values = metrics.compute()
    second = batch.rollout.step_indices[later]
    known = torch.isin(second, first).double()
    assert known.sum() > 0
    total = SHIFT[first].sum() + (1.0 + (1 - known) * SHIFT[second]).sum()
    assert values["actor/ppo_kl"] == pytest.approx(-total.item() / 16, abs=1e-5)


def test_the_terms_of_a_skipped_update_are_measured_too(make_run):
    run = start(make_run, mini_batches=2)
    batch = shifted(run.batch())
    parameter = next(iter(run.actor.parameters.values()))
    handle = parameter.register_hook(lambda gradient: gradient * math.nan)
    metrics = run.actor.update(batch, training_step=1)
    handle.remove()
    assert metrics.compute()["actor/skipped_updates"] == 2
    assert run.actor.clip_center.sums[1].sum().item() == 16
    assert centers(metrics) == centers_of(batch.rollout.step_indices)


def test_an_update_that_fails_forgets_what_it_measured(make_run, monkeypatch):
    run = start(make_run)
    batch = shifted(run.batch())
    run.actor.update(batch, training_step=1)
    known = run.actor.clip_center.sums.clone()
    monkeypatch.setattr(run.actor, "_average", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.actor.update(batch, training_step=2)
    assert torch.equal(run.actor.clip_center.sums, known)


@pytest.mark.parametrize(("loss_mode", "size", "fold"), [("flow_grpo", 1, True), ("grpo_guard", 3, False)])
def test_micro_batches_change_no_centre(make_run, loss_mode, size, fold):
    results = []
    for options in ({}, {"micro_batch_size": size, "fold_steps": fold}):
        run = start(make_run, loss_mode=loss_mode, epochs=2, clip_ratio=0.05, **options)
        batch = run.batch()
        rollout = batch.rollout
        run.actor.transformer.double()  # so that a sample's log-prob does not depend on its batch
        conditioning = {name: rows.double() for name, rows in rollout.conditioning.items()}
        batch = shifted(replace(batch, rollout=replace(rollout, conditioning=conditioning)))
        metrics = [run.actor.update(batch, training_step=step).compute() for step in (1, 2)]
        results.append((run.actor.clip_center.sums, metrics))
    (sums, metrics), (other_sums, other_metrics) = results
    torch.testing.assert_close(other_sums, sums, rtol=1e-5, atol=1e-9)
    for got, expected in zip(other_metrics, metrics, strict=True):
        assert got == pytest.approx(expected, rel=1e-4, abs=1e-7)


def test_without_centring_nothing_is_measured(make_run):
    run = start(make_run, "none")
    metrics = run.actor.update(shifted(run.batch()), training_step=1)
    assert run.actor.clip_center is None
    assert centers(metrics) == {}
