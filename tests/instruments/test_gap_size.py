"""The KL from log-ratios alone, against draws of policies that are known."""

import math

import pytest
import torch

from flowcorr.config import load
from flowcorr.health.setting import num_terms
from flowcorr.instruments.gap_size import estimated_kl, moments_disagree

DRAWS = 300
BYPASS = "algorithm.rollout_correction.preset=bypass_ppo_clip"


def normal(*shape, seed=58):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def estimates(delta, size):
    """Of each row of `delta`, a training step's terms."""
    return torch.tensor(
        [
            estimated_kl(float(row.mean()), float(row.square().mean()), len(row), size)
            for row in delta.unbind()
        ],
        dtype=torch.float64,
    )


@pytest.mark.parametrize("size", [64, 512, 65536, 1_000_000])
@pytest.mark.parametrize("r", [3e-4, 3e-3, 0.03, 0.3])
@pytest.mark.parametrize("count", [2, 24, 96])
def test_of_a_gap_of_one_size_the_estimate_is_its_kl(size, r, count):
    """From gaps whose mean is 1e-3 of its noise to gaps whose spread is."""
    kl = r**2 / 2
    found = estimates(-kl + r / math.sqrt(size) * normal(DRAWS, count), size) / kl
    error = math.sqrt(2 / count / DRAWS)
    assert found.mean() == pytest.approx(1, abs=5 * error + (0.15 if count < 8 else 0.01))
    assert found.std() < 1.3 * math.sqrt(2 / count)


@pytest.mark.parametrize("size", [512, 65536])
@pytest.mark.parametrize("base", [1e-3, 0.01])
def test_a_few_terms_of_a_large_gap_count_by_their_number(size, base):
    """The variance of one in 32 terms would be 30 to 4000 times the mean KL."""
    r = torch.where(torch.arange(96) % 32 == 0, 0.5, base).double()
    found = estimates(-(r**2) / 2 + r / math.sqrt(size) * normal(DRAWS, 96), size)
    assert found.mean() == pytest.approx(float((r**2).mean()) / 2, rel=0.05)


@pytest.mark.parametrize("shift", [-1e-2, -1e-3, 1e-3])
@pytest.mark.parametrize("size", [512, 65536])
def test_a_shift_that_all_terms_share_is_the_kl(size, shift):
    """Of densities, the mean is the KL; the spread does not see what all samples share."""
    delta = shift + 1e-3 / math.sqrt(size) * normal(DRAWS, 24)
    assert estimates(delta, size).mean() == pytest.approx(abs(shift), rel=0.02)
    assert moments_disagree(float(delta[0].mean()), float(delta[0].square().mean()), 24, size)


@pytest.mark.parametrize("count", [8, 24, 96])
@pytest.mark.parametrize("r", [1e-3, 0.03, 1.0])
def test_chance_is_no_disagreement(count, r):
    delta = -(r**2) / 2 + r / 64 * normal(2 * DRAWS, count, seed=60)
    found = [moments_disagree(float(row.mean()), float(row.square().mean()), count, 4096) for row in delta]
    assert sum(found) <= 1


def test_log_probs_of_half_precision_lose_no_gap_beyond_their_rounding():
    log_prob = 1 + 0.02 * normal(DRAWS, 96, seed=59)
    trainer = log_prob - 0.06**2 / 2 + 0.06 / 256 * normal(DRAWS, 96)
    delta = trainer.bfloat16().double() - log_prob.bfloat16().double()
    assert estimates(delta, 65536).mean() == pytest.approx(0.06**2 / 2, rel=0.05)


def test_equal_log_probs_have_no_kl():
    assert estimated_kl(0.0, 0.0, 24, 512) == 0


def test_in_bypass_mode_the_terms_of_the_first_update_are_counted():
    config, bypass = (load("tiny_ocr_lora", ["actor.mini_batches=2", *more]) for more in ([], [BYPASS]))
    terms = config.rollout.prompts_per_step * config.rollout.n * config.sampling.sde_window_size
    assert (num_terms(config), num_terms(bypass)) == (terms, terms // 2)


def test_the_terms_of_what_is_learned_from_are_counted():
    config = load("tiny_ocr_lora", ["rollout.n=24", "rollout.n_learned=12"])
    assert num_terms(config) == num_terms(load("tiny_ocr_lora", ["rollout.n=12"]))
