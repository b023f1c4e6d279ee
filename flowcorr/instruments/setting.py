"""Loss, correction and schedule of a run, which corrections and losses read beside its terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from flowcorr.algorithm import MeasuredBands
from flowcorr.config.schema import ActorConfig, Config
from flowcorr.correction import RolloutCorrectionConfig
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
