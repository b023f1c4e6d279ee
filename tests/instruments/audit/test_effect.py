"""The effect of corrections on terms: coefficients against autograd, and what is judged and rejected."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from instruments.dumped_runs import D, terms_of
from instruments.foreign_dumps import draw_steps
from instruments.gaps import normal_gap

from flowcorr import config
from flowcorr.algorithm.apply import correct
from flowcorr.correction import OFF, RolloutCorrectionConfig, compute_rollout_correction_and_rejection_mask
from flowcorr.health.setting import Setting
from flowcorr.instruments.audit.effect import Steps, effect, obstacle, stack, steps_of
from flowcorr.instruments.steps import read_dumped
from flowcorr.losses import flow_dppo, flow_grpo, grpo_guard, reinforce
from flowcorr.records import Terms


def weights_of(terms, target, preset):
    correction = RolloutCorrectionConfig.from_preset(preset)
    return compute_rollout_correction_and_rejection_mask(
        target,
        terms.rollout_log_probs,
        num_elements=D,
        **correction.options,
    )


@pytest.mark.parametrize("preset", ["disabled", "decoupled_geo_rs_token_tis", "decoupled_token_icepop"])
@pytest.mark.parametrize("denominator", ["kept", "all"])
def test_coefficients_are_the_gradient_of_the_mean_loss(preset, denominator):
    terms = terms_of()
    settings_of_run = Setting.of(config.load("tiny_jpeg_lora"))
    correction = RolloutCorrectionConfig.from_preset(preset, rollout_rs_denominator=denominator)
    found = effect(stack({1: terms}, settings_of_run), correction)
    log_prob = terms.current_log_probs.clone().requires_grad_()
    expected = weights_of(terms, terms.old_log_probs, preset)
    loss = flow_grpo(
        log_prob,
        terms.old_log_probs,
        terms.advantages[:, None].expand(-1, 2),
        clip_ratio=settings_of_run.actor.clip_ratio,
        adv_clip_max=settings_of_run.actor.adv_clip_max,
        weight=expected.weights,
        keep=expected.keep,
    )
    loss.mean(denominator).backward()
    torch.testing.assert_close(found.coefficients, log_prob.grad, rtol=1e-6, atol=0)
    assert found.loss_sum / found.count == pytest.approx(loss.mean(denominator).item(), rel=1e-6)
    assert torch.equal(found.kept, expected.keep)


def test_coefficients_of_a_decoupled_term_by_hand():
    """`-w A ratio / n`, and 0 where the clip range is left upwards by a good term, or downwards by a bad one."""
    old = torch.zeros(4, 1, dtype=torch.float64)
    terms = replace(
        terms_of(4, 1),
        rollout_log_probs=torch.full_like(old, -0.5),
        old_log_probs=old,
        current_log_probs=torch.tensor([[0.1], [0.1], [-0.1], [0.01]], dtype=torch.float64),
        advantages=torch.tensor([1.0, -1.0, -2.0, 3.0], dtype=torch.float64),
    )
    settings_of_run = Setting.of(config.load("tiny_jpeg_lora", ["actor.clip_ratio=0.05"]))
    found = effect(stack({1: terms}, settings_of_run), RolloutCorrectionConfig.token_is())
    weight = math.exp(0.5)
    expected = [0, weight * math.exp(0.1) / 4, 0, -3 * weight * math.exp(0.01) / 4]
    assert found.coefficients.flatten().tolist() == pytest.approx(expected, rel=1e-6)


def test_coefficients_of_bypass():
    terms = terms_of()
    settings_of_run = Setting.of(config.load("tiny_jpeg_lora"))
    advantage = terms.advantages[:, None].expand(-1, 2)
    log_prob = terms.current_log_probs.clone().requires_grad_()
    clipped = flow_grpo(log_prob, terms.rollout_log_probs, advantage, clip_ratio=1e-3, adv_clip_max=5.0)
    clipped.mean().backward()
    found = effect(stack({1: terms}, settings_of_run), RolloutCorrectionConfig.bypass_ppo_clip())
    torch.testing.assert_close(found.coefficients, log_prob.grad)
    log_prob.grad = None
    expected = weights_of(terms, terms.current_log_probs, "bypass_pg_geo_rs_seq_tis")
    reinforce(
        log_prob, advantage, adv_clip_max=5.0, weight=expected.weights, keep=expected.keep
    ).mean().backward()
    found = effect(
        stack({1: terms}, settings_of_run), RolloutCorrectionConfig.from_preset("bypass_pg_geo_rs_seq_tis")
    )
    assert 0 < expected.keep.double().mean() < 1
    torch.testing.assert_close(found.coefficients, log_prob.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("loss_mode", ["grpo_guard", "flow_dppo"])
@pytest.mark.parametrize("bypass", [False, True])
def test_losses_and_rejection_read_the_dumped_kls(loss_mode, bypass):
    draw = torch.Generator().manual_seed(1)
    terms = terms_of(12, 2)
    stds = terms.stds[..., None]
    rollout_mean, old_mean, mean = (
        1e-3 * stds * torch.randn(12, 2, D, generator=draw, dtype=torch.float64) for _ in range(3)
    )

    def kl(one, other):
        return ((one - other).square() / (2 * stds.square())).mean(-1)

    terms = replace(
        terms,
        old_rollout_kl=kl(old_mean, rollout_mean),
        current_old_kl=kl(mean, old_mean),
        current_rollout_kl=kl(mean, rollout_mean),
    )
    settings_of_run = Setting.of(config.load("tiny_jpeg_lora", [f"actor.loss_mode={loss_mode}"]))
    bound = kl(mean if bypass else old_mean, rollout_mean).quantile(0.5).item()  # between two of the 24
    correction = RolloutCorrectionConfig(bypass_mode=bypass, rollout_rs="step_kl", rollout_rs_threshold=bound)
    found = effect(stack({1: terms}, settings_of_run), correction)
    assert torch.equal(found.kept, kl(mean if bypass else old_mean, rollout_mean) <= bound)
    log_prob = terms.current_log_probs.clone().requires_grad_()
    shared = {
        "kl": kl(mean, rollout_mean if bypass else old_mean),
        "keep": found.kept,
        "adv_clip_max": 5.0,
    }
    old = terms.rollout_log_probs if bypass else terms.old_log_probs
    advantage = terms.advantages[:, None].expand(-1, 2)
    if loss_mode == "grpo_guard":
        loss = grpo_guard(
            log_prob,
            old,
            advantage,
            std=terms.stds,
            step=terms.sigmas - terms.sigmas_next,
            clip_ratio=1e-3,
            **shared,
        )
    else:
        loss = flow_dppo(log_prob, old, advantage, kl_threshold=settings_of_run.actor.kl_threshold, **shared)
    loss.mean().backward()
    torch.testing.assert_close(found.coefficients, log_prob.grad, rtol=1e-9, atol=1e-15)


@settings(max_examples=25)
@given(st.integers(1, 9), st.integers(1, 3), st.integers(0, 10**6), st.booleans())
def test_no_correction_is_no_correction(samples, steps, seed, spoilt):
    terms = terms_of(samples, steps, seed=seed)
    if spoilt:
        terms.current_log_probs[0, 0] = math.nan
    settings_of_run = Setting.of(config.load("tiny_jpeg_lora"))
    found = effect(stack({1: terms}, settings_of_run), RolloutCorrectionConfig.disabled())
    expected = effect(stack({1: terms}, settings_of_run), OFF)
    assert torch.equal(found.coefficients, expected.coefficients)
    assert found.coefficients.isfinite().all()
    assert found.loss_sum == expected.loss_sum


@pytest.mark.parametrize(
    ("overrides", "terms", "preset", "reason"),
    [
        ([], {"bypass": True}, "decoupled_seq_is", "in bypass mode, old log-probs are the rollout's"),
        (["actor.loss_mode=grpo_guard"], {}, "disabled", "exact KLs between policies"),
        (["actor.loss_mode=grpo_guard"], {}, "pg_is", "contradicts algorithm.rollout_correction.loss_type"),
        (["actor.ratio_level=trajectory_sum"], {}, "bypass_ppo_clip", "needs the whole window in one loss"),
        (["actor.loss_mode=grpo_guard"], {"kls": True}, "disabled", ""),
        ([], {}, "bypass_ppo_clip", ""),
    ],
)
def test_why_terms_cannot_be_replayed(overrides, terms, preset, reason):
    settings_of_run = Setting.of(config.load("tiny_jpeg_lora", overrides))
    found = obstacle(
        stack({1: terms_of(**terms)}, settings_of_run), RolloutCorrectionConfig.from_preset(preset)
    )
    assert (reason in found) if reason else (found == "")


def test_bands_in_bypass_mode_are_those_of_the_steps_before():
    """A quarter of the samples is at fault in every step; the first steps only measure."""
    correction = RolloutCorrectionConfig.bypass_ppo_clip_auto_rs()
    settings_of_run = Setting.of(config.load("tiny_jpeg_lora"))
    draw = torch.Generator().manual_seed(0)
    steps, faulty = [], torch.arange(64) % 4 == 0
    for _ in range(5):
        terms = terms_of(64, 2)
        gap = 1e-4 * torch.randn(64, 2, generator=draw) + 0.1 * faulty[:, None]
        steps.append(replace(terms, rollout_log_probs=terms.current_log_probs - gap))
    expected = [torch.ones(64, 2, dtype=torch.bool)] * 3 + [~faulty[:, None].expand(-1, 2)] * 2
    found = effect(stack(dict(enumerate(steps)), settings_of_run), correction)
    assert torch.equal(found.kept, torch.cat(expected))
    bands = settings_of_run.bands()
    for step, keep in zip(steps, expected, strict=True):
        assert torch.equal(effect(stack({1: step}, settings_of_run), correction, bands).kept, keep)


def test_bands_are_measured_by_terms_that_were_scored_before_the_first_update():
    """The other half holds what its step learned, a hundred times the noise."""
    correction = RolloutCorrectionConfig.bypass_ppo_clip_auto_rs()
    settings_of_run = Setting.of(config.load("tiny_jpeg_lora"))
    draw = torch.Generator().manual_seed(0)
    first, found, expected = slice(0, 32), settings_of_run.bands(), settings_of_run.bands()
    for _ in range(4):
        terms = terms_of(64, 2)
        gap = 1e-4 * torch.randn(64, 2, generator=draw)
        gap[32:] *= 100
        before = (torch.arange(64) < 32).long()[:, None].expand(-1, 2)
        terms = replace(
            terms, bypass=True, rollout_log_probs=terms.current_log_probs - gap, before_update=before
        )
        steps = stack({1: terms}, settings_of_run, of_flowcorr=True)
        effect(steps, correction, found)
        effect(stack({1: rows_of(terms, first)}, settings_of_run), correction, expected)
    for mode, noise in found.noise.items():
        assert noise.spread[:2].isfinite().all()
        assert torch.equal(noise.spread[:2], expected.noise[mode].spread[:2])


def rows_of(terms, rows):
    """A part of the samples."""
    return replace(terms, **{name: value[rows] for name, value in terms.tensors().items()})


def test_steps_of_samples_with_windows_of_their_own_are_told_by_their_noise_levels(tmp_path):
    schedule = torch.tensor([1.0, 0.9, 0.7, 0.5])
    own = torch.stack([schedule[start : start + 2] for start in [0, 1, 2, 1] * 8])
    draw_steps(tmp_path, steps=2, without=("step_indices",), sigmas=own)
    run = read_dumped(tmp_path)
    (steps,) = steps_of(run)
    assert steps.terms.step_index[:3].tolist() == [[0, 1], [1, 2], [2, 3]]


def as_steps(terms, sizes=None):
    """Terms as training steps of the default loss, each sample a group of its own."""
    samples = len(terms.log_prob)
    setting = Setting.of(config.Config())
    return Steps(terms=terms, sizes=sizes or {1: samples}, setting=setting, group_ids=torch.arange(samples))


def test_terms_that_were_left_out_before_are_neither_judged_nor_rejected():
    judged = torch.ones(8, 2, dtype=torch.bool)
    judged[0], judged[1, 0] = False, False
    correction = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold=(1.5, 2.0))
    gap = normal_gap(0.03, samples=8)
    found = effect(as_steps(replace(gap, keep=judged)), correction)
    assert torch.equal(found.judged, judged)
    assert not found.kept.any()
    assert effect(as_steps(gap), OFF).kept.all()


@pytest.mark.parametrize("preset", ["bypass_ppo_clip_geo_rs", "bypass_pg_geo_rs", "decoupled_geo_rs"])
def test_bypass_judges_single_steps_unless_its_scope_is_the_trajectory(preset):
    gap = normal_gap(0.03)
    correction = RolloutCorrectionConfig.from_preset(preset)
    single = preset == "bypass_ppo_clip_geo_rs"
    expected, _ = correct(gap.per_term() if single else gap, correction)
    found = effect(as_steps(gap), correction)
    assert torch.equal(found.kept.flatten(), expected.keep.flatten())
    assert 0 < found.kept.double().mean() < 1


def test_a_correction_of_whole_steps_takes_them_one_by_one():
    both = Terms.concatenate([normal_gap(r, samples=64) for r in (0.01, 0.3)])
    correction = RolloutCorrectionConfig(
        rollout_is="token", rollout_is_threshold=2.0, rollout_is_batch_normalize=True
    )
    found = effect(as_steps(both, sizes={1: 64, 2: 64}), correction)
    for rows in (slice(0, 64), slice(64, 128)):
        assert float(found.weight[rows].mean()) == pytest.approx(1.0, rel=1e-6)


def test_groups_of_two_steps_are_not_confused():
    parts = [terms_of(8, seed=1), replace(terms_of(8, seed=2), group_ids=torch.tensor([10**12, 7] * 4))]
    groups = stack(dict(enumerate(parts)), Setting.of(config.load("tiny_jpeg_lora"))).group_ids
    assert groups.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, *[9, 8] * 4]
