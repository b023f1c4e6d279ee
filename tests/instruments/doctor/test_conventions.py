"""Conventions of log-probs, told from the noise of captured steps."""

import dataclasses

import pytest
import torch
from tiny_pipelines import FLUX_SIZE, build_tiny_flux

from flowcorr import ReplaySamples
from flowcorr.config import ModelConfig
from flowcorr.instruments.doctor.conventions import CONVENTIONS
from flowcorr.instruments.doctor.legs import Legs
from flowcorr.instruments.doctor.stack import Stack
from flowcorr.models import load_family


@pytest.mark.parametrize("convention", CONVENTIONS, ids=lambda convention: convention.name)
def test_conventions_of_log_probs_are_told(convention, stack_of):
    window = Legs(stack_of()).window
    claimed = convention.of(window.square, window.std, window.step, window.noise[0, 0].numel())
    given = torch.cat([claimed, claimed]).float()
    found = Legs(stack_of(log_probs=given))
    assert (found.convention, found.agrees) == (convention, True)


def test_sums_over_the_channels_of_packed_latents_are_told(tmp_path):
    family = load_family(ModelConfig(path=str(build_tiny_flux(tmp_path))))
    draw = torch.Generator().manual_seed(3)
    before, after = (torch.randn(2, 1, 24, 16, generator=draw) for _ in range(2))
    samples = ReplaySamples(
        prompts=["cat", "dog"],
        initial_noise=before[:, 0],
        images=torch.zeros(2, *FLUX_SIZE, 3),
        guidance_scale=3.5,
        sigmas=[1.0, 0.6, 0.0],
        noise_level=0.7,
        latents=before,
        next_latents=after,
        step_indices=[0],
        max_sequence_length=8,
        log_probs=torch.zeros(2, 1),
    )
    window = Legs(Stack(family, samples)).window
    by_channel = 16 * CONVENTIONS[0].of(window.square, window.std, window.step, 24 * 16)
    found = Legs(Stack(family, dataclasses.replace(samples, log_probs=by_channel.float()))).convention
    assert found is not None
    assert found.times == 16
