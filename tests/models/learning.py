"""What sampling and training with any model family must hold: `connected` is what `tiny_pipelines.connect` returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_pipelines import flow_grpo_log_prob, stir

from flowcorr.models import Guidance, ModelFamily
from flowcorr.models.adapter_files import DIFFUSERS_FILE, PEFT_CONFIG, PEFT_FILE
from flowcorr.records import ActorBatch
from tests.models.families import Case
from tests.tolerances import LOG_PROBS, MEANS


def assert_log_probs_are_those_of_a_loop(connected: tuple[Any, ...], case: Case, guidance: Guidance) -> None:
    """Compare two images of each prompt, three SDE steps each, with log-densities around the pipeline's velocities.

    Args:
        connected: family, actor, engine and the conditioning of the case's prompts.
        case: the family.
        guidance: of the configuration that was connected.
    """
    family, actor, engine, conditioning = connected
    stir(actor)
    rollout = engine.sample(conditioning, [0, 1], training_step=1, with_means=True)
    torch.testing.assert_close(actor.log_probs(rollout).log_probs, rollout.log_probs, **LOG_PROBS)
    assert rollout.window.latents.shape[:2] == (4, 3)
    for sample in range(4):
        steps, latents = rollout.window.step_indices[sample].tolist(), rollout.window.latents[sample].split(1)
        along = dict(zip(steps, latents, strict=True))
        call = case.call(family.pipeline, case.prompts[sample // 2], guidance, case.noise(1), 5, along=along)
        for t, index in enumerate(steps):
            following = rollout.window.next_latents[sample, t : t + 1]
            sigmas = call.sigmas[index : index + 2]
            expected = flow_grpo_log_prob(along[index], following, call.velocities[index], *sigmas, 0.7)
            assert rollout.log_probs[sample, t].item() == pytest.approx(
                expected.item(), abs=LOG_PROBS["atol"]
            )


def assert_an_adapter_is_learned_and_loads(
    connected: tuple[Any, ...],
    fresh: ModelFamily,
    inputs: tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], Guidance],
    folder: Path,
    size: tuple[int, ...],
) -> None:
    """One update, and the saved adapter gives a fresh pipeline the same velocities.

    Args:
        connected: family, actor, engine and conditioning.
        fresh: the family anew, without an adapter.
        inputs: latents, timesteps, conditioning and guidance, at which velocities are compared.
        folder: where the adapter is saved.
        size: height and width of the images, after the frames of videos.
    """
    family, actor, engine, conditioning = connected
    rollout = engine.sample(conditioning, [0, 1], training_step=1, with_means=True)
    assert rollout.images.shape == (4, *size, 3)
    scores = actor.log_probs(rollout, with_means=True)
    batch = ActorBatch(
        rollout=rollout,
        advantages=torch.tensor([1.0, -1.0, 0.5, -0.5]),
        old_log_probs=scores.log_probs,
        old_means=scores.means,
    )
    metrics = actor.update(
        batch, actor.config.algorithm.rollout_correction, training_step=1
    ).metrics.compute()
    assert actor.weights.version == 1
    assert metrics["actor/grad_norm"] > 0
    stir(actor)
    actor.weights.save(folder)
    assert {file.name for file in folder.iterdir()} == {DIFFUSERS_FILE, PEFT_FILE, PEFT_CONFIG}

    load_adapter(fresh.pipeline, folder)
    with torch.no_grad():
        expected = family.velocity(family.transformer, *inputs)
        torch.testing.assert_close(fresh.velocity(fresh.transformer, *inputs), expected, **MEANS)
        fresh.transformer.disable_adapters()
        assert (fresh.velocity(fresh.transformer, *inputs) - expected).abs().max() > 1e-2


def load_adapter(pipeline: Any, folder: Path | str) -> None:
    """Load a saved adapter as the model card does."""
    if hasattr(pipeline, "load_lora_weights"):
        pipeline.load_lora_weights(folder)
    else:
        pipeline.transformer.load_lora_adapter(folder, use_safetensors=True)


def in_bfloat16(sections: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Both stacks in bfloat16, with the same batches, one step at a time, so that they round alike."""
    sections["model"]["dtype"] = sections["rollout"]["dtype"] = "bfloat16"
    sections["actor"]["fold_steps"] = False
    return sections


def assert_both_stacks_round_alike(connected: tuple[Any, ...]) -> None:
    _, actor, engine, conditioning = connected
    assert conditioning["prompt_embeds"].dtype == torch.bfloat16
    rollout = engine.sample(conditioning, [0, 1], training_step=1, with_means=False)
    assert rollout.window.latents.dtype == torch.float32
    assert torch.equal(actor.log_probs(rollout).log_probs, rollout.log_probs)
