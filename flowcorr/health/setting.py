"""Loss, correction and schedule of a run, which corrections, losses and rules read beside its terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from flowcorr.algorithm import MeasuredBands
from flowcorr.config.schema import ActorConfig, Config
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.losses import resolve_loss
from flowcorr.rollout.precision import trainer_quantization


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A run's loss, correction and schedule.

    Attributes:
        actor: its loss, and the clip range of it.
        correction: its correction.
        num_steps: steps of the schedule.
        window_size: SDE steps a sample, `T`.
        window_end: one more than the last step index that the SDE window can reach.
        densities: whether log-probs are densities.
        staleness: training steps that the weights which sample may lag behind.
        quantization: of the trainer's weights, where the engine's are not quantized; else `none`.
    """

    actor: ActorConfig
    correction: RolloutCorrectionConfig
    num_steps: int
    window_size: int
    window_end: int
    densities: bool = True
    staleness: int = 0
    quantization: str = "none"

    @classmethod
    def of(cls, config: Config) -> Self:
        """The setting of a configuration."""
        sampling = config.sampling
        return cls(
            actor=config.actor,
            correction=config.algorithm.rollout_correction,
            num_steps=sampling.num_inference_steps,
            window_size=sampling.sde_window_size,
            window_end=sampling.sde_window_range[1],
            densities=not sampling.cps_unscaled,
            staleness=config.rollout.max_weight_age,
            quantization=trainer_quantization(config),
        )

    def bands(self) -> MeasuredBands:
        """Bands of `auto` thresholds that have measured nothing yet."""
        return MeasuredBands(self.actor, num_steps=self.num_steps, window_size=self.window_size)


def num_terms(config: Config) -> int:
    """Number of SDE steps in a training step's measurement of the gap: `B T`, or the first update's in bypass mode."""
    samples = config.rollout.prompts_per_step * config.rollout.learned_per_prompt
    terms = samples * config.sampling.sde_window_size
    in_bypass = config.algorithm.rollout_correction.mode in ("bypass", "auto")
    return terms // config.actor.mini_batches if in_bypass else terms


def clip_key(actor: ActorConfig) -> str:
    """The key that bounds the ratio, with its value; empty if the loss has none."""
    limit = resolve_loss(actor).limit
    return "" if limit is None else f"actor.{limit.key}={clip_text(getattr(actor, limit.key))}"


def clip_text(clip_ratio: float | Sequence[float]) -> str:
    """A clip range in words: one number, or a list by step index."""
    if isinstance(clip_ratio, Sequence):
        return "[" + ", ".join(f"{value:g}" for value in clip_ratio) + "]"
    return f"{clip_ratio:g}"


def limit_at(limit: float | Sequence[float], step_index: int) -> float:
    """A clip range at one step of the schedule."""
    return limit[step_index] if isinstance(limit, Sequence) else limit
