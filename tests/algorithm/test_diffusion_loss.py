import math
from dataclasses import replace

import pytest
import torch

from flowcorr import losses
from flowcorr.algorithm import diffusion_loss
from flowcorr.config.schema import ActorConfig
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.errors import BatchError, ConfigError
from flowcorr.records import BatchStep, PolicyStep

SHAPE = (2, 3)
ACTOR = ActorConfig(clip_ratio=0.05)


def steps(delta=((0.02, -0.01), (0.3, 0.01), (-0.04, 0.03)), seed=0):
    """A policy and the data it is scored on, `[b, T]`; the policy is `delta` above the rollout."""
    delta = torch.tensor(delta)
    shape = delta.shape
    draw = torch.Generator().manual_seed(seed)

    def random(*sizes):
        return torch.randn(*sizes, generator=draw)

    rollout = -1.0 + 0.1 * random(*shape)
    mean = random(*shape, *SHAPE)
    policy = PolicyStep(
        log_prob=(rollout + delta).requires_grad_(),
        mean=mean.requires_grad_(),
        std=torch.full(shape, 0.5),
        step=torch.full(shape, 0.1),
    )
    batch = BatchStep(
        old_log_prob=rollout,
        rollout_log_prob=rollout,
        advantage=random(shape[0], 1).expand(shape),
        step_index=torch.arange(shape[1]).expand(shape),
        old_mean=mean.detach() + 0.05 * random(*mean.shape),
        rollout_mean=mean.detach() + 0.05 * random(*mean.shape),
    )
    return policy, batch


def gradient(output, policy):
    return torch.autograd.grad(output.loss_sum, policy.log_prob, retain_graph=True)[0]


def test_without_a_correction_it_is_the_loss():
    policy, batch = steps()
    output = diffusion_loss(policy, batch, ACTOR)
    expected = losses.flow_grpo(
        policy.log_prob, batch.old_log_prob, batch.advantage, clip_ratio=0.05, adv_clip_max=5.0
    )
    assert output.loss_sum == expected.loss_sum
    assert output.metrics.compute() == expected.metrics.compute()


def test_decoupled_weights_and_mask_are_used_and_nothing_is_corrected_twice():
    policy, batch = steps()
    keep = torch.tensor([[True, True], [False, False], [True, False]])
    batch = replace(batch, weight=torch.full((3, 2), 0.5), keep=keep)
    config = RolloutCorrectionConfig(rollout_is="token")
    output = diffusion_loss(policy, batch, ACTOR, config)
    expected = losses.flow_grpo(
        policy.log_prob, batch.old_log_prob, batch.advantage, clip_ratio=0.05, adv_clip_max=5.0,
        weight=batch.weight, keep=keep,
    )  # fmt: skip
    assert output.loss_sum == expected.loss_sum
    assert (output.count_kept, output.count_all) == (3, 6)
    assert output.correction_metrics.compute() == {}


def test_bypass_by_steps_rejects_each_term_on_its_own():
    policy, batch = steps()
    config = RolloutCorrectionConfig(bypass_mode=True, rollout_rs="seq_mean_k1", rollout_rs_threshold=1.2)
    output = diffusion_loss(policy.per_term(), batch.per_term(), ACTOR, config)
    keep = torch.tensor([[True, True], [False, True], [True, True]])
    expected = losses.flow_grpo(
        policy.log_prob, batch.old_log_prob, batch.advantage, clip_ratio=0.05, adv_clip_max=5.0, keep=keep
    )
    torch.testing.assert_close(output.loss_sum, expected.loss_sum)
    assert output.count_kept == 5
    assert gradient(output, policy)[1, 0] == 0
    assert {name.partition("/")[0] for name in output.metrics.compute()} == {"actor"}
    metrics = output.correction_metrics.compute()
    assert {name.partition("/")[0] for name in metrics} == {"rollout_corr"}
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 6)
    assert metrics["rollout_corr/kl"] == pytest.approx(-0.31 / 6, abs=1e-6)


def test_bypass_by_trajectories_rejects_whole_windows():
    policy, batch = steps()
    config = RolloutCorrectionConfig(
        bypass_mode=True, bypass_scope="trajectory", rollout_rs="seq_sum_k1", rollout_rs_threshold=1.2
    )
    output = diffusion_loss(policy, batch, ACTOR, config)
    assert output.count_kept == 4
    assert output.count_all == 6
    assert not gradient(output, policy)[1].any()
    assert gradient(output, policy)[0].any()


def test_ppo_clip_in_bypass_measures_weights_and_applies_none():
    policy, batch = steps()
    plain = RolloutCorrectionConfig(bypass_mode=True)
    weighed = RolloutCorrectionConfig(bypass_mode=True, rollout_is="token")
    output = diffusion_loss(policy.per_term(), batch.per_term(), ACTOR, weighed)
    assert output.loss_sum == diffusion_loss(policy.per_term(), batch.per_term(), ACTOR, plain).loss_sum
    assert output.correction_metrics.compute()["rollout_corr/rollout_is_max"] == pytest.approx(
        math.exp(0.3), rel=1e-4
    )


@pytest.mark.parametrize("scope", ["step", "trajectory"])
def test_reinforce_weighs_by_the_drift(scope):
    policy, batch = steps()
    level = "token" if scope == "step" else "sequence"
    config = RolloutCorrectionConfig(
        bypass_mode=True, bypass_scope=scope, loss_type="reinforce", rollout_is=level,
        rollout_is_threshold=1.25,
    )  # fmt: skip
    pair = (policy, batch) if scope == "trajectory" else (policy.per_term(), batch.per_term())
    output = diffusion_loss(*pair, ACTOR, config)
    delta = (policy.log_prob - batch.rollout_log_prob).detach()
    if scope == "trajectory":
        delta = delta.sum(1, keepdim=True).expand(3, 2)
    weight = delta.exp().clamp(max=1.25)
    torch.testing.assert_close(gradient(output, policy), -weight * batch.advantage)


@pytest.mark.parametrize("scope", ["step", "trajectory"])
def test_grpo_guard_in_bypass_compares_with_the_rollouts_means(scope):
    policy, batch = steps()
    batch = replace(batch, old_mean=batch.rollout_mean)  # as bypass mode hands it on
    actor = ActorConfig(loss_mode="grpo_guard", clip_ratio=0.05)
    config = RolloutCorrectionConfig(bypass_mode=True, bypass_scope=scope)
    pair = (policy, batch) if scope == "trajectory" else (policy.per_term(), batch.per_term())
    output = diffusion_loss(*pair, actor, config)
    expected = losses.grpo_guard(
        policy.log_prob, batch.old_log_prob, batch.advantage, mean=policy.mean, old_mean=batch.rollout_mean,
        std=policy.std, step=policy.step, clip_ratio=0.05, adv_clip_max=5.0,
    )  # fmt: skip
    torch.testing.assert_close(output.loss_sum, expected.loss_sum)
    exact = (policy.mean - batch.rollout_mean).square().mean((2, 3)).mean() / (2 * 0.25)
    metrics = output.correction_metrics.compute()
    assert metrics["rollout_corr/exact_kl"] == pytest.approx(exact.item(), rel=1e-4)
    assert "rollout_corr/clip_noise_fraction" in metrics


@pytest.mark.parametrize("loss_mode", ["grpo_guard", "flow_dppo"])
def test_a_loss_without_its_means_is_an_error(loss_mode):
    policy, batch = steps()
    with pytest.raises(BatchError, match="old_mean is missing"):
        diffusion_loss(policy, replace(batch, old_mean=None), ActorConfig(loss_mode=loss_mode))


def test_shapes_that_differ_are_an_error():
    policy, batch = steps()
    config = RolloutCorrectionConfig(bypass_mode=True, bypass_scope="trajectory")
    with pytest.raises(BatchError, match="nothing is broadcast"):
        diffusion_loss(policy, replace(batch, rollout_log_prob=batch.rollout_log_prob[:, :1]), ACTOR, config)


def test_the_correction_carries_no_gradient():
    policy, batch = steps()
    config = RolloutCorrectionConfig(
        bypass_mode=True, loss_type="reinforce", rollout_is="token", rollout_is_threshold=5.0
    )
    output = diffusion_loss(policy.per_term(), batch.per_term(), ACTOR, config)
    weight = (policy.log_prob - batch.rollout_log_prob).detach().exp()
    torch.testing.assert_close(gradient(output, policy), -weight * batch.advantage)


def test_reference_kl_is_added_over_kept_terms():
    policy, batch = steps()
    keep = torch.tensor([[True, False], [True, True], [False, True]])
    batch = replace(batch, reference_mean=policy.mean.detach() + 0.2, keep=keep)
    actor = replace(ACTOR, kl_coef=3.0)
    output = diffusion_loss(policy, batch, actor)
    plain = diffusion_loss(policy, batch, ACTOR)
    each = 0.2**2 / (2 * 0.25)
    assert (output.loss_sum - plain.loss_sum).item() == pytest.approx(3.0 * 4 * each, rel=1e-4)
    assert output.metrics.compute()["actor/kl_loss"] == pytest.approx(each, rel=1e-5)
    pulled = torch.autograd.grad(output.loss_sum, policy.mean)[0]
    assert not pulled[~keep].any()
    torch.testing.assert_close(pulled[keep], torch.full((4, *SHAPE), -3.0 * 0.2 / 0.25 / 6))


@pytest.mark.parametrize("bypass", [False, True])
def test_a_loss_of_ones_own_by_import_path(tmp_path, monkeypatch, bypass):
    (tmp_path / "my_losses.py").write_text(
        "from flowcorr.metrics import Metrics, mean\n"
        "from flowcorr.records import LossOutput\n"
        "def squared(policy, batch, settings):\n"
        "    keep = batch.keep if batch.keep is not None else policy.log_prob == policy.log_prob\n"
        "    loss = ((policy.log_prob - batch.old_log_prob) ** 2 * keep).sum()\n"
        "    return LossOutput(loss_sum=loss, count_all=keep.new_tensor(keep.numel(), dtype=int),\n"
        "        count_kept=keep.sum(), metrics=Metrics.from_stats({'actor/mine': mean(loss, keep.sum())}))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    policy, batch = steps()
    config = RolloutCorrectionConfig(bypass_mode=True, rollout_rs="token_k1", rollout_rs_threshold=1.2)
    output = diffusion_loss(
        policy.per_term(),
        batch.per_term(),
        ActorConfig(loss_mode="my_losses:squared"),
        config if bypass else None,
    )
    squares = [0.02**2, 0.01**2, 0.01**2, 0.04**2, 0.03**2] + ([] if bypass else [0.3**2])
    assert output.loss_sum.item() == pytest.approx(sum(squares), rel=1e-4)
    assert output.metrics.compute()["actor/mine"] == pytest.approx(sum(squares) / len(squares), rel=1e-4)
    assert output.count_kept == len(squares)


def test_an_unknown_loss_is_an_error():
    with pytest.raises(ConfigError, match=r"actor\.loss_mode='flow_grp' is unknown.*flow_grpo"):
        diffusion_loss(*steps(), ActorConfig(loss_mode="flow_grp"))
