"""Gradients of the embedded model's training step, under engines that differ from the trainer in known ways."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowcorr import config
from flowcorr.advantages import group_advantages
from flowcorr.algorithm import (
    apply_rollout_correction_to_diffusion_batch,
    diffusion_loss,
    drift_squares,
)
from flowcorr.algorithm.terms import batch_terms
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.data import PromptStream, load_prompts
from flowcorr.records import ActorBatch, Rollout, Scores
from flowcorr.rollout import InProcessEngine, Weights
from flowcorr.trainer import TrainingRun, train_step
from flowcorr.trainer.setup import build_run

RECIPE = "tiny_ocr_lora"
IN_TURN = ("rollout.batch_size=null", "reward.placement=local", "rollout.emulate=fp8")
TRAINED, LAG = 8, 4
"""Training steps behind the policy of all gradients, and by how many of them the stale engine is behind."""
OFFSET = 0.03
"""What the engine with an offset adds to each element of the velocity, whose own root mean square is about 1."""
WINDOWS = {
    "two": (),
    # Every step but the last, whose std is 7e-4.
    "all": ("sampling.sde_window_size=9", "sampling.sde_window_range=[0, 9]"),
}
NOISES = {"shared": "true", "own": "false"}
SETTINGS = tuple(f"{window}/{noise}" for window in WINDOWS for noise in NOISES)
EXACT = "exact"
GAPS = ("fp8", "int4", "stale", "half_adapter", "offset")
CORRECTIONS = {
    "none": RolloutCorrectionConfig(),
    "weights": RolloutCorrectionConfig.from_preset("decoupled_token_is", log_ratio_scale="sum"),
    "rejection": RolloutCorrectionConfig.from_preset("decoupled_geo_rs"),
    "centering": RolloutCorrectionConfig(score_centering=True),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Policy:
    """The trained adapter, and that of `LAG` training steps before."""

    trained: dict[str, Tensor]
    older: dict[str, Tensor]


def learned_policy(path: Path, overrides: Sequence[str] = ()) -> Policy:
    """The policy of all gradients, which is trained once and kept in `path`."""
    if not path.exists():
        run, _ = build_run(config.load(RECIPE, [*IN_TURN, "rollout.emulate=none", *overrides]))
        run.engine.sync(run.actor.weights.for_engine())
        kept = {}
        for step in range(1, TRAINED + 1):
            train_step(run, step, lambda phase: None)
            if step in (TRAINED - LAG, TRAINED):
                kept |= {
                    f"{step}/{name}": value for name, value in run.actor.weights.snapshot().tensors.items()
                }
        run.close()
        save_file(kept, path)
    stored = load_file(path)

    def at(step: int) -> dict[str, Tensor]:
        begin = f"{step}/"
        return {name.removeprefix(begin): value for name, value in stored.items() if name.startswith(begin)}

    return Policy(trained=at(TRAINED), older=at(TRAINED - LAG))


class Setting:
    """One window and one kind of initial noise, with the trainer and all engines.

    Args:
        name: of `SETTINGS`.
        policy: whose gradients are measured.
        overrides: of the recipe.
    """

    def __init__(self, name: str, policy: Policy, overrides: Sequence[str] = ()) -> None:
        window, noise = name.split("/")
        keys = (*IN_TURN, *WINDOWS[window], f"rollout.same_initial_noise={NOISES[noise]}", *overrides)
        self.run, _ = build_run(config.load(RECIPE, keys))
        self.run.actor.weights.load(policy.trained)
        self.engines = {kind: _engine(kind, self.run, policy) for kind in (EXACT, *GAPS)}

    def gradients(self, batch: int) -> tuple[Tensor, list[float]]:
        """Gradients from one batch of prompts with the same noise for every engine, and the drift of each gap.

        Returns:
            `[1 + len(GAPS) * len(CORRECTIONS), P]` float32: of samples of the policy itself, and then of each gap with
            each correction; and by gap the squared drift of the score as a share of the squared signal.
        """
        config = self.run.config
        stream = PromptStream(load_prompts(config.data).train, seed=config.trainer.seed)
        for _ in range(TRAINED + batch + 1):  # the policy learned from the first
            prompts = stream.next(config.rollout.prompts_per_step)
        conditioning = self.run.cache(prompts)
        rows, drifts = [], []
        for kind, engine in self.engines.items():
            rollout = engine.sample(
                conditioning, range(len(prompts)), training_step=TRAINED + 1 + batch, with_means=True
            )
            each = [prompt for prompt in prompts for _ in range(config.rollout.n)]
            assert rollout.images is not None, "engines return them"
            rewards = torch.as_tensor(self.run.reward(rollout.images.numpy(), each).scores)
            advantages = group_advantages(
                rewards, rollout.group_ids, std=config.algorithm.advantage_std
            ).float()
            scores = self.run.actor.score(rollout)
            wanted = {"none": CORRECTIONS["none"]} if kind == EXACT else CORRECTIONS
            rows += [self._gradient(rollout, advantages, scores, one) for one in wanted.values()]
            if kind != EXACT:
                drifts.append(_drift(rollout, advantages, scores))
        return torch.stack(rows), drifts

    def _gradient(
        self, rollout: Rollout, advantages: Tensor, scores: Scores, correction: RolloutCorrectionConfig
    ) -> Tensor:
        """`[P]`, of the corrected loss at the first update, by the trainer's own functions."""
        config, old = self.run.config, scores.detach()
        batch = ActorBatch(
            rollout=rollout, advantages=advantages, old_log_probs=old.log_probs, old_means=old.means
        )
        batch, _ = apply_rollout_correction_to_diffusion_batch(batch, correction, actor_config=config.actor)
        terms = batch_terms(batch, scores, centres=correction.score_centering)
        loss = diffusion_loss(terms, config.actor, correction)
        parameters = list(self.run.actor.weights.parameters.values())
        gradients = torch.autograd.grad(loss.mean(), parameters, retain_graph=True)
        return torch.cat([gradient.flatten() for gradient in gradients])


def _engine(kind: str, run: TrainingRun, policy: Policy) -> InProcessEngine:
    """An engine with weights of its own, which differ from the policy's as `kind` says."""
    family, plain = run.actor.family, run.config
    own = copy.copy(family)
    own.pipeline = copy.copy(family.pipeline)
    engine = InProcessEngine(
        own,
        replace(plain.rollout, emulate=kind if kind in ("fp8", "int4") else "none"),
        plain.sampling,
        seed=plain.trainer.seed,
        merge=run.actor.weights.merged,
        base=type(family.transformer).from_config(family.transformer.config).eval(),
        shares=False,
    )
    tensors = policy.older if kind == "stale" else policy.trained
    if kind == "half_adapter":
        tensors = {name: value / 2 if "lora_B" in name else value for name, value in tensors.items()}
    engine.sync(Weights(version=0, tensors=tensors))
    if kind == "offset":
        with torch.no_grad():
            engine.transformer.proj_out.bias.add_(OFFSET)
    return engine


def _drift(rollout: Rollout, advantages: Tensor, scores: Scores) -> float:
    window, old = rollout.window, scores.detach()
    assert window.means is not None
    assert old.means is not None
    drift, signal = drift_squares(
        advantages,
        rollout.group_ids,
        window.step_indices,
        next_latents=window.next_latents,
        means=old.means,
        rollout_means=window.means,
        stds=old.stds,
    )
    return float(drift.sum() / signal.sum())
