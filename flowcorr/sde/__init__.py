"""Stochastic sampling of flow-matching models: transitions, their log-probabilities, windows and noise."""

from flowcorr.sde.log_prob import centred_log_prob, kl, log_prob, noise_variance, step_kl, with_gradient_of
from flowcorr.sde.noise import generator, initial_noise, sample_noise, seed_globals, stable_seed, step_noise
from flowcorr.sde.transition import (
    TRANSITIONS,
    SdeType,
    Transition,
    added_noise,
    sample,
    transition,
)
from flowcorr.sde.window import check_schedule, check_window, draw_windows

__all__ = [
    "TRANSITIONS",
    "SdeType",
    "Transition",
    "added_noise",
    "centred_log_prob",
    "check_schedule",
    "check_window",
    "draw_windows",
    "generator",
    "initial_noise",
    "kl",
    "log_prob",
    "noise_variance",
    "sample",
    "sample_noise",
    "seed_globals",
    "stable_seed",
    "step_kl",
    "step_noise",
    "transition",
    "with_gradient_of",
]
