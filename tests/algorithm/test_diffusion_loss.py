import math
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from flowcorr import losses
from flowcorr.algorithm import diffusion_loss
from flowcorr.config.schema import ActorConfig
from flowcorr.correction import OFF, RolloutCorrectionConfig
from flowcorr.errors import BatchError
from flowcorr.metrics import Metrics
from flowcorr.records import LossOutput, Terms
from flowcorr.sde import step_kl

SHAPE = (2, 3)
ACTOR = ActorConfig(clip_ratio=0.05)


def window(delta=((0.02, -0.01), (0.3, 0.01), (-0.04, 0.03)), seed=0):
    """The terms `[b, T]` of a policy that is `delta` above the rollout, and its means."""
    delta = torch.tensor(delta)
    shape = delta.shape
    draw = torch.Generator().manual_seed(seed)

    def random(*sizes):
        return torch.randn(*sizes, generator=draw)

    rollout = -1.0 + 0.1 * random(*shape)
    mean = random(*shape, *SHAPE).requires_grad_()
    std = torch.full(shape, 0.5)
    terms = Terms(
        log_prob=(rollout + delta).requires_grad_(),
        old_log_prob=rollout,
        rollout_log_prob=rollout,
        advantage=random(shape[0], 1).expand(shape),
        std=std,
        step=torch.full(shape, 0.1),
        step_index=torch.arange(shape[1]).expand(shape),
        old_kl=step_kl(mean, mean.detach() + 0.05 * random(*mean.shape), std),
        rollout_kl=step_kl(mean.detach(), mean.detach() + 0.05 * random(*mean.shape), std),
    )
    return terms, mean


def steps():
    return window()[0]


def gradient(output, terms):
    return torch.autograd.grad(output.loss_sum, terms.log_prob, retain_graph=True)[0]


def test_without_a_correction_it_is_the_loss():
    terms = steps()
    output = diffusion_loss(terms, ACTOR)
    expected = losses.flow_grpo(
        terms.log_prob, terms.old_log_prob, terms.advantage, clip_ratio=0.05, adv_clip_max=5.0
    )
    assert output.loss_sum == expected.loss_sum
    assert output.metrics.compute() == expected.metrics.compute()


def test_decoupled_weights_and_mask_are_used_and_nothing_is_corrected_twice():
    terms = steps()
    keep = torch.tensor([[True, True], [False, False], [True, False]])
    terms = replace(terms, weight=torch.full((3, 2), 0.5), keep=keep)
    config = RolloutCorrectionConfig(rollout_is="token")
    output = diffusion_loss(terms, ACTOR, config)
    expected = losses.flow_grpo(
        terms.log_prob, terms.old_log_prob, terms.advantage, clip_ratio=0.05, adv_clip_max=5.0,
        weight=terms.weight, keep=keep,
    )  # fmt: skip
    assert output.loss_sum == expected.loss_sum
    assert (output.count_kept, output.count_all) == (3, 6)
    assert output.correction_metrics.compute() == {}


def test_bypass_by_steps_rejects_each_term_on_its_own():
    terms = steps()
    config = RolloutCorrectionConfig(bypass_mode=True, rollout_rs="seq_mean_k1", rollout_rs_threshold=1.2)
    output = diffusion_loss(terms.per_term(), ACTOR, config)
    keep = torch.tensor([[True, True], [False, True], [True, True]])
    expected = losses.flow_grpo(
        terms.log_prob, terms.old_log_prob, terms.advantage, clip_ratio=0.05, adv_clip_max=5.0, keep=keep
    )
    torch.testing.assert_close(output.loss_sum, expected.loss_sum)
    assert output.count_kept == 5
    assert gradient(output, terms)[1, 0] == 0
    assert {name.partition("/")[0] for name in output.metrics.compute()} == {"actor"}
    metrics = output.correction_metrics.compute()
    assert {name.partition("/")[0] for name in metrics} == {"rollout_corr"}
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 6)
    assert metrics["rollout_corr/kl"] == pytest.approx(-0.31 / 6, abs=1e-6)


def test_bypass_by_steps_judges_the_steps_of_a_window_alone():
    terms = steps()
    config = RolloutCorrectionConfig(bypass_mode=True, rollout_rs="seq_mean_k1", rollout_rs_threshold=1.2)
    whole, alone = (diffusion_loss(one, ACTOR, config) for one in (terms, terms.per_term()))
    assert whole.loss_sum == alone.loss_sum
    assert (whole.count_kept, whole.count_all) == (alone.count_kept, alone.count_all) == (5, 6)


def test_bypass_by_trajectories_rejects_whole_windows():
    terms = steps()
    config = RolloutCorrectionConfig(
        bypass_mode=True, bypass_scope="trajectory", rollout_rs="seq_sum_k1", rollout_rs_threshold=1.2
    )
    output = diffusion_loss(terms, ACTOR, config)
    assert output.count_kept == 4
    assert output.count_all == 6
    assert not gradient(output, terms)[1].any()
    assert gradient(output, terms)[0].any()


def test_ppo_clip_in_bypass_measures_weights_and_applies_none():
    terms = steps()
    plain = RolloutCorrectionConfig(bypass_mode=True)
    weighed = RolloutCorrectionConfig(bypass_mode=True, rollout_is="token")
    output = diffusion_loss(terms.per_term(), ACTOR, weighed)
    assert output.loss_sum == diffusion_loss(terms.per_term(), ACTOR, plain).loss_sum
    assert output.correction_metrics.compute()["rollout_corr/rollout_is_max"] == pytest.approx(
        math.exp(0.3), rel=1e-4
    )


@pytest.mark.parametrize("scope", ["step", "trajectory"])
def test_reinforce_weighs_by_the_drift(scope):
    terms = steps()
    level = "token" if scope == "step" else "sequence"
    config = RolloutCorrectionConfig(
        bypass_mode=True, bypass_scope=scope, loss_type="reinforce", rollout_is=level,
        rollout_is_threshold=1.25,
    )  # fmt: skip
    output = diffusion_loss(terms if scope == "trajectory" else terms.per_term(), ACTOR, config)
    delta = (terms.log_prob - terms.rollout_log_prob).detach()
    if scope == "trajectory":
        delta = delta.sum(1, keepdim=True).expand(3, 2)
    weight = delta.exp().clamp(max=1.25)
    torch.testing.assert_close(gradient(output, terms), -weight * terms.advantage)


@pytest.mark.parametrize("scope", ["step", "trajectory"])
def test_grpo_guard_in_bypass_compares_with_the_rollouts_means(scope):
    terms = steps()
    terms = replace(terms, old_kl=terms.rollout_kl)  # as bypass mode hands it on
    actor = ActorConfig(loss_mode="grpo_guard", clip_ratio=0.05)
    config = RolloutCorrectionConfig(bypass_mode=True, bypass_scope=scope)
    output = diffusion_loss(terms if scope == "trajectory" else terms.per_term(), actor, config)
    expected = losses.grpo_guard(
        terms.log_prob, terms.old_log_prob, terms.advantage, kl=terms.rollout_kl,
        std=terms.std, step=terms.step, clip_ratio=0.05, adv_clip_max=5.0,
    )  # fmt: skip
    torch.testing.assert_close(output.loss_sum, expected.loss_sum)
    exact = terms.rollout_kl.mean()
    metrics = output.correction_metrics.compute()
    assert metrics["rollout_corr/exact_kl"] == pytest.approx(exact.item(), rel=1e-4)
    assert "rollout_corr/clip_noise_fraction" in metrics


@pytest.mark.parametrize("loss_mode", ["grpo_guard", "flow_dppo"])
def test_a_loss_without_its_means_is_an_error(loss_mode):
    terms = steps()
    with pytest.raises(BatchError, match=r"^kl .*sde\.step_kl"):
        diffusion_loss(replace(terms, old_kl=None), ActorConfig(loss_mode=loss_mode))


@pytest.mark.parametrize(("weighting", "factor"), [("exact", 1.0), ("flow_grpo", 0.1)])
def test_reference_kl_is_added_over_kept_terms(weighting, factor):
    terms, mean = window()
    keep = torch.tensor([[True, False], [True, True], [False, True]])
    kl = step_kl(mean, mean.detach() + 0.2, terms.std)
    terms = replace(terms, reference_kl=kl, keep=keep)
    output = diffusion_loss(terms, replace(ACTOR, kl_coef=3.0, kl_weighting=weighting))
    plain = diffusion_loss(terms, ACTOR)
    each = factor * 0.2**2 / (2 * 0.25)
    assert (output.loss_sum - plain.loss_sum).item() == pytest.approx(3.0 * 4 * each, rel=1e-4)
    assert output.metrics.compute()["actor/kl_loss"] == pytest.approx(each, rel=1e-5)
    pulled = torch.autograd.grad(output.loss_sum, mean)[0]
    assert not pulled[~keep].any()
    torch.testing.assert_close(pulled[keep], torch.full((4, *SHAPE), -3.0 * factor * 0.2 / 0.25 / 6))


def test_a_reference_mean_that_is_not_finite_stays_out_of_the_loss():
    terms, mean = window()
    reference = mean.detach() + 0.2
    reference[0, 1, 0, 0] = math.nan
    terms = replace(terms, reference_kl=step_kl(mean, reference, terms.std))
    output = diffusion_loss(terms, replace(ACTOR, kl_coef=3.0))
    assert output.metrics.compute()["actor/kl_loss"] == pytest.approx(0.2**2 / (2 * 0.25), rel=1e-5)
    pulled = torch.autograd.grad(output.loss_sum, mean)[0]
    assert pulled.isfinite().all()
    assert not pulled[0, 1].any()


@pytest.mark.parametrize("bypass", [False, True])
def test_a_loss_of_ones_own_by_import_path(tmp_path, monkeypatch, bypass):
    (tmp_path / "my_losses.py").write_text(
        "from flowcorr.metrics import Metrics, mean\n"
        "from flowcorr.records import LossOutput\n"
        "def squared(terms, settings):\n"
        "    keep = terms.keep if terms.keep is not None else terms.log_prob == terms.log_prob\n"
        "    loss = ((terms.log_prob - terms.old_log_prob) ** 2 * keep).sum()\n"
        "    return LossOutput(loss_sum=loss, count_all=keep.new_tensor(keep.numel(), dtype=int),\n"
        "        count_kept=keep.sum(), metrics=Metrics({'actor/mine': mean(loss, keep.sum())}))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    terms = steps()
    config = RolloutCorrectionConfig(bypass_mode=True, rollout_rs="token_k1", rollout_rs_threshold=1.2)
    output = diffusion_loss(
        terms.per_term(),
        ActorConfig(loss_mode="my_losses:squared"),
        config if bypass else OFF,
    )
    squares = [0.02**2, 0.01**2, 0.01**2, 0.04**2, 0.03**2] + ([] if bypass else [0.3**2])
    assert output.loss_sum.item() == pytest.approx(sum(squares), rel=1e-4)
    assert output.metrics.compute()["actor/mine"] == pytest.approx(sum(squares) / len(squares), rel=1e-4)
    assert output.count_kept == len(squares)


def counted(terms, loss, metrics=None):
    count = torch.tensor(terms.log_prob.numel())
    metrics = Metrics() if metrics is None else metrics
    return LossOutput(loss_sum=loss, count_all=count, count_kept=count, metrics=metrics)


@pytest.mark.parametrize(
    ("own", "problem"),
    [
        (lambda terms, settings: terms.log_prob.mean(), "a Tensor; return a flowcorr.records.LossOutput"),
        (lambda terms, settings: None, "a NoneType; return"),
        (lambda terms, settings: counted(terms, terms.log_prob.sum(), {"actor/mine": 1.0}), "a dict"),
        (lambda terms, settings: counted(terms, terms.log_prob), r"a loss_sum of shape \[6\]; sum it"),
        (
            lambda terms, settings: counted(terms, terms.log_prob.detach().sum()),
            "a loss_sum without a gradient",
        ),
        (lambda terms, settings: counted(terms, 0.0), "a loss_sum of type float"),
        (
            lambda terms, settings: replace(
                counted(terms, terms.log_prob.sum()), count_kept=terms.log_prob.isfinite()
            ),
            r"a count_kept of shape \[6\]",
        ),
    ],
    ids=["mean", "none", "metrics", "vector", "detached", "float", "mask"],
)
def test_what_a_loss_of_ones_own_has_to_return(monkeypatch, own, problem):
    module = ModuleType("my_losses")
    module.own = own
    monkeypatch.setitem(sys.modules, "my_losses", module)
    with pytest.raises(BatchError, match=rf"^actor\.loss_mode='my_losses:own' returned {problem}"):
        diffusion_loss(steps().per_term(), ActorConfig(loss_mode="my_losses:own"))


def test_a_loss_of_ones_own_that_keeps_no_term_may_be_a_plain_zero(monkeypatch):
    module = ModuleType("my_losses")
    nothing = torch.zeros(())
    module.own = lambda terms, settings: LossOutput(
        loss_sum=nothing, count_all=nothing, count_kept=nothing, metrics=Metrics()
    )
    monkeypatch.setitem(sys.modules, "my_losses", module)
    assert diffusion_loss(steps().per_term(), ActorConfig(loss_mode="my_losses:own")).loss_sum == 0
