"""Held-out evaluation: the ODE sampler from fixed noise, scored by the run's reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flowcorr import sde
from flowcorr.actor import DiffusionActor
from flowcorr.errors import BackendError
from flowcorr.models.prompt_cache import PromptCache
from flowcorr.records import Prompt
from flowcorr.rewards import Reward, score_batch
from flowcorr.rollout import sample_ode

BATCH_SIZE = 64
_NOISE_SEED = 20_240_501


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation:
    """Scores and images of one evaluation; `metrics` are named `eval/...`."""

    metrics: dict[str, float]
    images: np.ndarray


@torch.no_grad()
def evaluate(
    actor: DiffusionActor, cache: PromptCache, prompts: Sequence[Prompt], reward: Reward, *, num_inference_steps: int
) -> Evaluation:
    """Sample one image a held-out prompt and score it.

    The noise depends on a prompt's place alone, so that evaluations of all runs and steps are paired.
    A sample that the reward fails on ends the run, whatever `reward.on_error` says of training.
    """
    sampling = actor.config.sampling
    shape = actor.family.latent_shape(sampling.height, sampling.width)
    schedule = actor.family.schedule(num_inference_steps, shape)
    images = []
    with actor.averaged():
        for begin in range(0, len(prompts), BATCH_SIZE):
            texts = [prompt.text for prompt in prompts[begin : begin + BATCH_SIZE]]
            conditioning = cache(texts)
            places = list(range(begin, begin + len(texts)))
            noise = sde.initial_noise(shape, places, [0] * len(texts), seed=_NOISE_SEED, training_step=0)

            def velocity(latents: Tensor, timesteps: Tensor, rows: dict[str, Tensor] = conditioning) -> Tensor:
                return actor.family.velocity(actor.transformer, latents, timesteps, rows, actor.guidance)

            final = sample_ode(velocity, noise.to(actor.device), schedule)
            images.append(actor.family.decode(final).cpu().numpy())
    drawn = np.concatenate(images)
    output, failed = score_batch(reward, drawn, list(prompts))
    if failed.any():
        raise BackendError(f"the reward failed on {failed.sum()} held-out samples")
    scores = {"eval/reward": output.scores} | {f"eval/{name}": values for name, values in output.extra.items()}
    metrics = {name: float(values.mean()) for name, values in scores.items()}
    metrics["eval/reward_std"] = float(output.scores.std(ddof=1)) if len(prompts) > 1 else 0.0
    return Evaluation(metrics=metrics, images=drawn)
