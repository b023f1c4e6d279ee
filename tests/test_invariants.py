"""Runs that must agree, on the embedded model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flowcorr import distributed
from flowcorr.algorithm import (
    apply_bypass_mode_to_diffusion_batch,
    apply_rollout_correction_to_diffusion_batch,
)
from flowcorr.config.schema import LoraConfig
from flowcorr.correction import OFF, RolloutCorrectionConfig
from flowcorr.losses import LOSSES as ALL_LOSSES
from flowcorr.records import ActorBatch
from tests.algorithm.batches import band_state
from tests.conftest import SMALL, small_config, start_run
from tests.rollouts import columns
from tests.tolerances import LATENTS, LOG_PROBS

LOSSES = ("flow_grpo", "grpo_guard", "flow_dppo", "importance_cap")
BAND = (0.93, 1.07)


def bypass(loss, scope, denominator):
    mode, level = ("token_k1", "token") if scope == "step" else ("seq_mean_k1", "sequence")
    weights = {"loss_type": "reinforce", "rollout_is": level} if loss == "reinforce" else {}
    return RolloutCorrectionConfig(
        bypass_mode=True,
        bypass_scope=scope,
        rollout_rs=mode,
        rollout_rs_threshold=BAND,
        rollout_rs_denominator=denominator,
        **weights,
    )


def decoupled(denominator):
    return RolloutCorrectionConfig(
        rollout_is="token",
        rollout_is_batch_normalize=True,
        rollout_rs="token_k1,step_z",
        rollout_rs_threshold=[BAND, 6.0],
        rollout_rs_denominator=denominator,
    )


# Name -> loss and correction; in each, some terms are rejected.
CASES = {f"bypass {loss} step kept": (loss, bypass(loss, "step", "kept")) for loss in (*LOSSES, "reinforce")}
CASES |= {
    f"bypass {loss} trajectory {denominator}": (loss, bypass(loss, "trajectory", denominator))
    for loss, denominator in zip((*LOSSES, "reinforce"), ("kept", "kept", "all", "kept", "all"), strict=True)
}
CASES["bypass flow_grpo step all"] = ("flow_grpo", bypass("flow_grpo", "step", "all"))
CASES |= {
    f"decoupled {loss} {denominator}": (loss, decoupled(denominator))
    for loss, denominator in zip(LOSSES, ("all", "kept", "all", "kept"), strict=True)
}
CASES["bypass flow_grpo step, clip by step"] = ("flow_grpo", bypass("flow_grpo", "step", "kept"))
CASES["decoupled flow_grpo auto bands"] = (
    "flow_grpo",
    RolloutCorrectionConfig(
        rollout_rs="token_k1,step_z,seq_mean_k2", rollout_rs_threshold=[BAND, "auto", "auto"]
    ),
)
# What earlier training steps measured, for the cases with bands in bypass mode: centre and spread of each step.
KNOWN = {
    "token_k1": (0.0, 6e-3),
    "step_z": (0.0, 6e-3),
    "seq_mean_k1": (0.0, 4e-3),
    "seq_max_k2": (0.08, 5e-3),
}
CASES["bypass flow_grpo step auto bands"] = (
    "flow_grpo",
    RolloutCorrectionConfig(bypass_mode=True, rollout_rs="token_k1,step_z", rollout_rs_threshold="auto"),
)
CASES["bypass flow_grpo trajectory auto bands"] = (
    "flow_grpo",
    RolloutCorrectionConfig(
        bypass_mode=True,
        bypass_scope="trajectory",
        rollout_rs="seq_mean_k1,seq_max_k2",
        rollout_rs_threshold="auto",
    ),
)
OF_ALL_SAMPLES = {"actor/loss", "actor/lr", "actor/grad_norm", "actor/updates", "actor/skipped_updates"}
SOME_CASES = (
    "bypass flow_grpo step auto bands",
    "bypass grpo_guard step kept",
    "bypass reinforce trajectory all",
    "decoupled flow_grpo all",
)


def configure(case, **actor):
    loss, correction = CASES[case]
    settings = {"clip_ratio": 0.02, "importance_cap": 1.01, "kl_threshold": 1e-4, "mini_batches": 1}
    settings |= {"loss_mode": "flow_grpo" if loss == "reinforce" else loss, "grad_clip": 1e9}
    if case.endswith("clip by step"):
        settings |= {"clip_ratio": (0.02, 0.03)}
    return small_config(
        model={"lora": LoraConfig(rank=4)},
        sampling={**SMALL["sampling"], "sde_window_range": (0, 2)},
        actor={**settings, **actor},
        algorithm={"rollout_correction": correction},
    )


def drifted_batch():
    """A batch of which rollout, old and current policy disagree by far more than rounding."""
    run = start_run(configure("bypass flow_grpo step kept"))
    run.stir()
    rollout = run.sample()
    draw = torch.Generator().manual_seed(4)
    shape = rollout.log_probs.shape
    shift, learned = 0.05 * torch.randn(2, *shape, generator=draw)
    moved = (
        0.02
        * torch.randn(rollout.window.means.shape, generator=draw)
        * rollout.window.stds[..., None, None, None]
    )
    return ActorBatch(
        rollout=replace(
            rollout,
            log_probs=rollout.log_probs + shift,
            window=replace(rollout.window, means=rollout.window.means + moved),
            images=None,
            conditioning={name: rows.double() for name, rows in rollout.conditioning.items()},
        ),
        advantages=torch.linspace(-1.5, 1.2, 8),
        old_log_probs=rollout.log_probs + 0.4 * learned,
        old_means=rollout.window.means - moved,
    )


def with_even_rewards(batch):
    """The batch with advantages of 0 for the first group, all that one of two ranks has, and for a sample more."""
    return replace(batch, advantages=batch.advantages * (torch.arange(8) > 4))


def one_update(case, batch, **actor):
    """Gradient and metrics of one update, the transformer computing in float64.

    Then each sample's log-prob is the same float32 whatever batch it is scored in, and only the sums differ.
    """
    config = configure(case, **actor)
    run = start_run(config)
    run.stir()
    run.actor.weights.transformer.double()
    correction = config.algorithm.rollout_correction
    bands = run.actor.optimizer.bands
    if correction.bypass_mode:
        if correction.needs_batch:
            bands.restore(band_state(KNOWN, config.sampling.num_inference_steps))
        metrics = run.update(apply_bypass_mode_to_diffusion_batch(batch), training_step=1)
    else:
        batch, corrected = apply_rollout_correction_to_diffusion_batch(
            batch, correction, actor_config=config.actor, num_steps=config.sampling.num_inference_steps
        )
        metrics = corrected.merge(run.update(batch, training_step=1))
    measured = {
        f"{name} {step}": value
        for name, column in bands.state().items()
        for step, value in enumerate(column.flatten().tolist())
    }
    return run.gradient(), metrics.across_ranks().compute() | measured


def assert_same_update(got, expected):
    (gradient, metrics), (expected_gradient, expected_metrics) = got, expected
    assert max(value.abs().max() for value in expected_gradient.values()) > 1e-4
    for name, value in expected_gradient.items():
        torch.testing.assert_close(gradient[name], value, rtol=1e-5, atol=1e-9, msg=name)
    assert metrics == pytest.approx(expected_metrics, rel=1e-6, abs=1e-9)


@pytest.fixture(scope="module")
def batch():
    return drifted_batch()


@pytest.fixture(scope="module")
def whole(batch):
    """Case -> gradient and metrics of all eight samples at once."""
    return {case: one_update(case, batch) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_some_terms_are_rejected_and_some_kept(whole, case):
    _, metrics = whole[case]
    assert 0.05 < metrics["rollout_corr/rollout_rs_masked_fraction"] < 0.95


def slow_except(*chosen):
    """All cases; two ranks and the chosen ones already see each loss, each scope and each denominator."""
    return [case if case in chosen else pytest.param(case, marks=pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize("case", slow_except(*SOME_CASES))
def test_one_by_one_and_unfolded_is_all_at_once(batch, whole, case):
    assert_same_update(one_update(case, batch, micro_batch_size=1, fold_steps=False), whole[case])


@pytest.mark.parametrize(("size", "fold"), [(8, False), (1, True), (3, True), (3, False)])
@pytest.mark.parametrize("case", slow_except("bypass grpo_guard step kept"))
def test_other_micro_batches_change_neither_gradient_nor_metrics(batch, whole, case, size, fold):
    assert_same_update(one_update(case, batch, micro_batch_size=size, fold_steps=fold), whole[case])


@pytest.mark.parametrize("case", slow_except(*SOME_CASES))
def test_samples_without_a_gradient_count_as_if_they_were_learned_from(batch, monkeypatch, case):
    """In bypass mode they are measured as well; in decoupled mode ratios are those of the other samples."""
    gradient, metrics = one_update(case, with_even_rewards(batch), micro_batch_size=3)
    for name, loss in ALL_LOSSES.items():
        monkeypatch.setitem(ALL_LOSSES, name, replace(loss, scaled_by_advantage=False))
    expected_gradient, expected = one_update(case, with_even_rewards(batch), micro_batch_size=3)
    assert metrics["actor/zero_advantage_fraction"] == 5 / 8
    if case.startswith("decoupled"):
        assert metrics["actor/ppo_kl"] != pytest.approx(expected["actor/ppo_kl"], rel=1e-3)
        for name in set(metrics) - OF_ALL_SAMPLES:
            if name.startswith("actor/"):
                del metrics[name], expected[name]
    assert_same_update((gradient, metrics), (expected_gradient, expected))


def test_two_ranks_are_one(batch, whole, two_ranks):
    results = two_ranks.call(updates_of_this_rank, batch)
    for case in CASES:
        for result in results:
            assert_same_update(result[case], whole[case])
    for case in SOME_CASES:
        expected = one_update(case, with_even_rewards(batch))
        for result in results:
            assert_same_update(result["even rewards", case], expected)


def updates_of_this_rank(batch):
    def mine(whole):
        return whole.select(whole.rollout.group_ids % distributed.world_size() == distributed.rank())

    results = {case: one_update(case, mine(batch)) for case in CASES}
    even = with_even_rewards(batch)
    return results | {("even rewards", case): one_update(case, mine(even)) for case in SOME_CASES}


# The behaviour policy's own log-probs ---------------------------------------------------------------------

EXACT = {"sampling": {**SMALL["sampling"], "sde_window_range": (1, 3)}}


def own_run(dtype="float32", **sections):
    """A run whose actor makes the very calls that its engine made: one window, one batch, one dtype."""
    model = {"dtype": dtype, "lora": LoraConfig(rank=4)}
    actor = {"fold_steps": False, "mini_batches": 1, **sections.pop("actor", {})}
    rollout = {**SMALL["rollout"], "dtype": dtype, **sections.pop("rollout", {})}
    run = start_run(small_config(**{**EXACT, "model": model, "actor": actor, "rollout": rollout, **sections}))
    run.stir()
    return run


@pytest.mark.parametrize(
    ("dtype", "scale", "sde_type"),
    [
        ("float32", 1.0, "sde"),
        ("float32", 2.5, "cps"),
        ("float32", 1.0, "dance_sde"),
        ("bfloat16", 1.0, "sde"),
        ("bfloat16", 2.5, "cps"),
    ],
)
def test_recomputed_log_probs_are_the_rollouts_own(dtype, scale, sde_type):
    sampling = {**EXACT["sampling"], "sde_type": sde_type, "noise_level": 0.6, "guidance_scale": scale}
    run = own_run(dtype, sampling=sampling)
    rollout = run.sample()
    scores = run.actor.log_probs(rollout, with_means=True)
    assert torch.equal(scores.log_probs, rollout.log_probs)
    assert torch.equal(scores.means, rollout.window.means)


# Modes ----------------------------------------------------------------------------------------------------

MODES = {
    "off": OFF,
    "decoupled_token_is": RolloutCorrectionConfig.from_preset("decoupled_token_is"),
    "decoupled_seq_is_rs": RolloutCorrectionConfig.from_preset("decoupled_seq_is_rs"),
    "bypass_ppo_clip_geo_rs": RolloutCorrectionConfig.from_preset("bypass_ppo_clip_geo_rs"),
    "bypass in trajectories": RolloutCorrectionConfig(bypass_mode=True, bypass_scope="trajectory"),
    "disabled": RolloutCorrectionConfig.from_preset("disabled"),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_all_modes_are_one_where_rollout_and_training_agree(loss):
    results, rollout = {}, None
    for mode, correction in MODES.items():
        run = own_run(actor={"loss_mode": loss}, algorithm={"rollout_correction": correction})
        rollout = run.sample() if rollout is None else rollout
        batch = ActorBatch(rollout=rollout, advantages=torch.linspace(-1.5, 1.2, 8))
        if correction.mode == "bypass":
            batch = apply_bypass_mode_to_diffusion_batch(batch)
        else:
            scores = run.actor.log_probs(rollout, with_means=True)
            batch = replace(batch, old_log_probs=scores.log_probs, old_means=scores.means)
            batch, _ = apply_rollout_correction_to_diffusion_batch(batch, correction)
        before = run.actor.weights.snapshot().tensors
        run.update(batch, training_step=1)
        results[mode] = run.actor.weights.snapshot().tensors
        assert any(not torch.equal(value, before[name]) for name, value in results[mode].items())
    for mode, tensors in results.items():
        for name, value in tensors.items():
            assert torch.equal(value, results["off"][name]), (mode, name)


# Batches of the engine ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("window_per", ["group", "sample"])
def test_one_batch_of_the_engine_is_many(size, window_per):
    sampling = {**SMALL["sampling"], "window_per": window_per}
    together = start_run(small_config(sampling=sampling)).sample()
    apart = start_run(
        small_config(sampling=sampling, rollout={**SMALL["rollout"], "batch_size": size})
    ).sample()
    for name in ("step_indices", "timesteps", "sigmas", "sigmas_next", "group_ids", "policy_versions"):
        assert torch.equal(columns(apart)[name], columns(together)[name]), name
    noise = [
        (part.next_latents - part.means) / part.stds[..., None, None, None]
        for part in (apart.window, together.window)
    ]
    torch.testing.assert_close(*noise, rtol=0, atol=1e-4)
    for name in ("latents", "next_latents", "means"):
        torch.testing.assert_close(columns(apart)[name], columns(together)[name], **LATENTS, msg=name)
    torch.testing.assert_close(apart.log_probs, together.log_probs, **LOG_PROBS)


def test_a_group_is_the_same_whatever_others_are_sampled_beside_it():
    run = start_run(small_config())
    both = run.sample()
    rows = {name: values[1:] for name, values in run.conditioning.items()}
    alone = run.engine.sample(rows, [1], training_step=1, with_means=True)
    assert torch.equal(alone.window.step_indices, both.window.step_indices[4:])
    torch.testing.assert_close(alone.window.latents, both.window.latents[4:], **LATENTS)
