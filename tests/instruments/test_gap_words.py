import math
from dataclasses import replace

import pytest
import torch

from flowcorr.config import load
from flowcorr.correction import OFF, compute_rollout_correction_and_rejection_mask
from flowcorr.correction import RolloutCorrectionConfig as Correction
from flowcorr.instruments.gap_words import action, gap, joint_nats, measurement, percent, treatment

DISABLED = Correction.from_preset("disabled")
BYPASS = Correction.from_preset("bypass_ppo_clip")
WEIGHTS = Correction.from_preset("decoupled_token_is")
BAND = Correction.from_preset("decoupled_geo_rs")
SIZE = {"rollout/num_elements": 512.0}
EQUAL = {"rollout_corr/kl": 0.0, "rollout_corr/k3_kl": 0.0}
STEPS = [
    SIZE | {"rollout_corr/exact_kl": kl, "rollout_corr/clip_noise_fraction": outside}
    for kl, outside in ((1e-4, 0.02), (3e-4, 0.04))
]


def run_of(correction, *overrides):
    config = load("tiny_ocr_lora", overrides)
    return replace(config, algorithm=replace(config.algorithm, rollout_correction=correction))


@pytest.mark.parametrize(
    ("correction", "text"),
    [
        (OFF, "rollout gap not measured"),
        (DISABLED, "rollout gap measured only"),
        (Correction(), "rollout gap measured only"),
        (BYPASS, "rollout gap bypass_ppo_clip"),
        (Correction(bypass_mode="auto"), "rollout gap auto"),
        (Correction(rollout_is="token"), "rollout gap decoupled"),
        (Correction(rollout_token_veto_threshold=1e-4), "rollout gap decoupled"),
    ],
)
def test_measuring_and_not_measuring_have_unlike_names(correction, text):
    assert treatment(correction) == text


@pytest.mark.parametrize("correction", [OFF, DISABLED, BYPASS])
def test_a_correction_that_does_nothing_has_no_action(correction):
    values = {"rollout_corr/rollout_rs_masked_fraction": 0.0, "rollout_corr/rollout_is_min": 0.9}
    assert action(correction, values) == ""


def of_band(rejected, largest):
    mode = "rollout_corr/rollout_rs_seq_mean_k1"
    return {
        "rollout_corr/rollout_rs_masked_fraction": rejected,
        f"{mode}_max": largest,
        f"{mode}_min": -largest,
    }


def test_rejection_says_its_share_or_that_it_cannot_act():
    assert action(BAND, of_band(0.031, 2e-3)) == "rejected 3.1 %"
    assert action(BAND, of_band(0.0, 5e-4)) == "rejected 0 %"
    assert action(BAND, of_band(0.0, 5e-5)) == "rejection idle"  # the band of 1e-3 is 20 times as wide
    vetoed = replace(BAND, rollout_token_veto_threshold=0.1, log_ratio_scale="sum")
    assert action(vetoed, of_band(0.0, 5e-5)) == "rejected 0 %"


def test_weights_say_their_range_or_that_they_are_all_one():
    values = {"rollout_corr/rollout_is_min": 0.98, "rollout_corr/rollout_is_max": 1.021}
    assert action(WEIGHTS, values) == "weights 0.98 to 1.02"
    values = {"rollout_corr/rollout_is_min": 1 - 1e-5, "rollout_corr/rollout_is_max": 1 + 2e-5}
    assert action(WEIGHTS, values) == "weights idle"


def test_in_bypass_mode_the_loss_says_what_it_rejected():
    correction = Correction.from_preset("bypass_ppo_clip_geo_rs")
    values = of_band(0.0, 2e-3) | {"actor/rollout_corr/rollout_rs_masked_fraction": 0.25}
    assert action(correction, values) == "rejected 25 %"


@pytest.mark.parametrize(
    ("correction", "steps", "parts"),
    [
        (DISABLED, STEPS, ["gap 0.2 joint nats; 3 % of ratios outside", "PPO clipped none of that"]),
        (BYPASS, STEPS, ["gap 0.2 joint nats; 3 %", "PPO clipped as if the policy had learned it"]),
        (Correction(bypass_mode="auto"), STEPS, ["where a step was in bypass mode"]),
        (Correction.from_preset("bypass_pg_is"), STEPS, ["before any update"]),
        (DISABLED, [SIZE | EQUAL], ["gap 0: engine and trainer give equal"]),
        (OFF, STEPS, ["gap not measured", "preset=disabled measures it"]),
        (DISABLED, [{"reward/mean": 1.0}], ["gap not measured"]),
    ],
)
def test_the_last_sentence_says_what_was_measured(correction, steps, parts):
    sentence = measurement(run_of(correction), steps)
    assert [part for part in parts if part not in sentence] == []


def test_log_probs_without_their_scale_are_no_run_that_measures_nothing():
    run = load("tiny_ocr_lora", ["sampling.sde_type=cps", "sampling.cps_unscaled=true"])
    assert run.algorithm.rollout_correction.preset == "disabled"
    sentence = measurement(run, [SIZE | EQUAL | {"rollout_corr/k3_kl": 1e-7}])
    assert "sampling.cps_unscaled=true" in sentence
    assert "preset=disabled" not in sentence


def test_a_run_without_a_step_measured_nothing():
    assert measurement(run_of(DISABLED), []) == ""


@pytest.mark.parametrize("nats", [1e-3, 0.1, 1.0, 30.0])
def test_the_gap_without_step_means_is_that_of_exact_kls(nats):
    """Policies that are equally far apart at every step: `delta` is normal with mean `-m` and variance `2 m / D`."""
    samples, window, size = 20_000, 2, 512
    kl = nats / window / size
    noise = torch.randn(samples, window, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    delta = -kl + math.sqrt(2 * kl / size) * noise
    found = compute_rollout_correction_and_rejection_mask(delta, torch.zeros_like(delta))
    values = found.metrics.compute() | SIZE
    run = load("tiny_ocr_lora")
    assert run.sampling.sde_window_size == window
    error = 4 * math.sqrt(1 / samples)  # of a mean square, relative
    assert joint_nats(run, values) == pytest.approx(
        nats, rel=error + 2 * kl
    )  # k3 is a mean square to `delta / 3`
    assert joint_nats(run, values | {"rollout_corr/exact_kl": kl}) == pytest.approx(nats)
    assert (
        joint_nats(load("tiny_ocr_lora", ["sampling.sde_type=cps", "sampling.cps_unscaled=true"]), values)
        is None
    )


def test_steps_of_unlike_gaps_are_estimated_apart():
    """Their pooled mean square would tell 30 % more."""
    run, size, kls = load("tiny_ocr_lora"), 512, {0: 1e-3, 7: 2e-2}
    values = {"rollout/num_elements": float(size), "rollout_corr/kl": 0.0, "rollout_corr/k3_kl": 0.0}
    for index, kl in kls.items():
        values[f"rollout_corr/step_{index}/kl"] = kl
        values[f"rollout_corr/step_{index}/k3_kl"] = kl**2 / 2 + kl / size
    assert joint_nats(run, values) == pytest.approx(size * sum(kls.values()))


@pytest.mark.parametrize(
    ("share", "text"), [(1.0, "100 %"), (0.996, "100 %"), (0.5, "50 %"), (0.031, "3.1 %"), (0.0, "0 %")]
)
def test_a_share_has_no_exponent(share, text):
    assert percent(share) == text


def test_the_nats_of_a_large_latent_have_no_exponent():
    assert [gap(nats) for nats in (2.84, 1234.5)] == ["gap 2.8 joint nats", "gap 1234 joint nats"]
