"""Equalities that a returned rollout fulfils in every precision, and each fault that breaks one."""

import math
from dataclasses import replace

import pytest
import torch

from flowcorr.questions.compared import Compared
from flowcorr.sde.log_prob import HALF_LOG_TWO_PI

PRECISIONS = {
    "float32": {},
    "fp8": {"rollout": {"emulate": "fp8"}},
    "bfloat16 under guidance": {
        "model": {"dtype": "bfloat16"},
        "rollout": {"dtype": "bfloat16"},
        "sampling": {"guidance_scale": 4.0},
    },
}


def errors(run, rollout):
    """By the names of the numbers: the largest error, or the number of samples."""
    compared = Compared(rollout=rollout, actor=run.actor, training_step=1)
    return {
        "log_probs": compared.log_prob_errors.max().item(),
        "stds": compared.std_errors.max().item(),
        "broken": compared.broken_trajectories.sum().item(),
        "coarse": compared.coarse_latents.sum().item(),
    }


def window(rollout, **changes):
    return replace(rollout, window=replace(rollout.window, **changes))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ["sde", "cps", "dance_sde"])
@pytest.mark.parametrize("same", [False, True])
def test_a_healthy_rollout_breaks_none(make_run, precision, kind, same):
    sections = {name: dict(values) for name, values in PRECISIONS[precision].items()}
    sections["sampling"] = {**sections.get("sampling", {}), "sde_type": kind, "noise_level": 0.6}
    sections["sampling"]["cps_unscaled"] = kind == "cps" and same
    sections["rollout"] = {**sections.get("rollout", {}), "same_initial_noise": same}
    run = make_run(**sections)
    run.stir()
    found = errors(run, run.sample())
    assert found.pop("log_probs") <= 2e-6
    assert found == {"stds": pytest.approx(0, abs=1e-6), "broken": 0, "coarse": 0}


def rounded(tensor, dtype):
    return tensor.to(dtype).float()


@pytest.fixture
def rollout(make_run):
    run = make_run(**PRECISIONS["bfloat16 under guidance"])
    return run, run.sample()


@pytest.mark.parametrize("size", [1e-3, -3e-5])
def test_log_probs_that_are_off(rollout, size):
    run, true = rollout
    assert errors(run, replace(true, log_probs=true.log_probs + size))["log_probs"] == pytest.approx(
        abs(size), rel=0.05
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda noise: 1.01 * noise,
        lambda noise: rounded(noise, torch.bfloat16),
        lambda noise: noise.roll(1, 0),
    ],
)
def test_other_noise_is_seen_in_bfloat16(rollout, change):
    run, _ = rollout
    draw = run.engine.step_noise
    run.engine.step_noise = lambda *ids, **seeds: change(draw(*ids, **seeds))
    assert errors(run, run.sample())["log_probs"] > 1e-5


def test_log_probs_of_another_sample(rollout):
    run, true = rollout
    assert errors(run, replace(true, log_probs=true.log_probs.roll(1, 0)))["log_probs"] > 1e-3


def test_another_std(rollout):
    run, true = rollout
    assert errors(run, window(true, stds=1.01 * true.window.stds))["stds"] == pytest.approx(0.01, rel=0.01)


def test_stds_of_the_steps_that_were_taken_are_in_the_log_probs(rollout):
    run, true = rollout
    stds = true.window.stds
    noise = Compared(rollout=true, actor=run.actor, training_step=1).noise
    squares = noise.square().flatten(2).mean(2) / 2
    larger = -squares - (1.01 * stds).log() - HALF_LOG_TWO_PI
    assert errors(run, replace(true, log_probs=larger))["log_probs"] == pytest.approx(
        math.log(1.01), rel=0.01
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["latents", "next_latents", "final"])
def test_rounded_latents(rollout, name, dtype):
    run, true = rollout
    if name == "final":
        changed = replace(true, final_latents=rounded(true.final_latents, dtype))
    else:
        changed = window(true, **{name: rounded(getattr(true.window, name), dtype)})
    assert errors(run, changed)["coarse"] == true.num_samples


@pytest.mark.parametrize("name", ["latents", "next_latents"])
def test_clamped_latents(rollout, name):
    run, true = rollout
    changed = window(true, **{name: getattr(true.window, name).clamp(-2, 2)})
    assert errors(run, changed)["coarse"] > 0


def test_latents_that_do_not_fit_together(make_run):
    run = make_run(sampling={"num_inference_steps": 2, "sde_window_range": (0, 1), "sde_window_size": 1})
    true = run.sample()
    larger = window(true, latents=1.02 * true.window.latents)
    assert errors(run, larger)["broken"] == true.num_samples
    run = make_run(sampling={"num_inference_steps": 4, "sde_window_range": (1, 3), "sde_window_size": 2})
    true = run.sample()
    assert true.window.step_indices.tolist() == [[1, 2]] * true.num_samples
    exchanged = true.window.next_latents.clone()
    exchanged[[0, 1]] = exchanged[[1, 0]]
    assert errors(run, window(true, next_latents=exchanged))["broken"] == 2


def test_the_last_step_ends_at_the_final_latents(make_run):
    run = make_run(sampling={"num_inference_steps": 3, "sde_window_range": (2, 3), "sde_window_size": 1})
    true = run.sample()
    assert errors(run, true)["broken"] == 0
    assert errors(run, replace(true, final_latents=true.final_latents + 0.01))["broken"] == true.num_samples


def test_an_index_beyond_the_schedule_is_another_window_and_no_error(make_run):
    run = make_run()
    rollout = run.sample()
    beyond = window(
        rollout, step_indices=rollout.window.step_indices + run.config.sampling.num_inference_steps
    )
    compared = Compared(rollout=beyond, actor=run.actor, training_step=1)
    assert bool(compared.other_windows.all())
    assert bool(compared.sigma_errors.isfinite().all())
