"""Wan: videos from text, one language model as encoder, classifier-free guidance."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flowcorr.config.families import FAMILIES
from flowcorr.errors import ConfigError
from flowcorr.models.base import Guidance, InVllmOmni, ModelFamily, TextShapes
from flowcorr.models.frame_vae import decode_frames
from flowcorr.models.schedule import Schedule, own_schedule
from flowcorr.models.sizes import check_frame_count, check_size


class Wan(ModelFamily):
    """`WanPipeline`, text to video: Wan 2.1, and Wan 2.2 TI2V 5B; guidance is on above `guidance_scale` 1.

    `L` is `(channels, latent frames, rows, columns)`. TI2V's pipeline feeds its transformer a timestep a token, for
    videos that begin with a given image. Without one they are all equal, and so is the velocity at one timestep a
    sample, which is fed here.

    Published checkpoints have a UniPC scheduler. Its noise levels are kept, and its steps are replaced by Euler's.

    Raises:
        ConfigError: the model has a second transformer for low noise levels, as Wan 2.2 A14B has.
    """

    name = "wan"
    pipeline_class = FAMILIES["wan"].pipeline_class
    lora_targets = tuple(
        f"{attention}.{layer}"
        for attention in ("attn1", "attn2")
        for layer in ("to_q", "to_k", "to_v", "to_out.0")
    )
    makes_videos = FAMILIES["wan"].makes_videos
    vllm_omni = InVllmOmni(
        transformer="vllm_omni.diffusion.models.wan2_2.wan2_2_transformer:WanTransformer3DModel",
        vae="vllm_omni.diffusion.distributed.autoencoders.autoencoder_kl_wan:DistributedAutoencoderKLWan",
        layer_suffix=("to_out.0", "to_out"),
    )

    def __init__(self, pipeline: Any, **options: Any) -> None:
        if getattr(pipeline, "transformer_2", None) is not None:
            raise ConfigError(
                "the model has two transformers, one for high and one (transformer_2) for low noise levels, "
                "and flowcorr trains models with one, such as Wan-AI/Wan2.1-T2V-1.3B-Diffusers or "
                "Wan-AI/Wan2.2-TI2V-5B-Diffusers"
            )
        super().__init__(pipeline, **options)

    @property
    def frames_per_second(self) -> int:
        """16 for Wan 2.1, 24 for Wan 2.2 TI2V, told by its pipeline's `expand_timesteps`."""
        return 24 if self.pipeline.config.expand_timesteps else 16

    def _native(self, argument: str) -> int:
        """The default of an argument of the pipeline's call."""
        default: int = inspect.signature(type(self.pipeline).__call__).parameters[argument].default
        return default

    @classmethod
    def text_shapes(cls, configs: Mapping[str, Mapping[str, Any]], length: int) -> TextShapes:
        width = configs["transformer"]["text_dim"]
        return TextShapes(tokens={"text_encoder": length}, conditioning={"prompt_embeds": (length, width)})

    @classmethod
    def with_euler_steps(cls, scheduler: Any) -> Any:
        if type(scheduler).__name__ != "UniPCMultistepScheduler":
            return scheduler
        steps = scheduler.config.num_train_timesteps
        # Of the first order and without its corrector, UniPC's step is Euler's.
        return type(scheduler).from_config(
            scheduler.config, solver_order=1, disable_corrector=list(range(steps))
        )

    def latent_shape(self, height: int | None, width: int | None) -> tuple[int, ...]:
        factor = self.pipeline.vae_scale_factor_spatial
        height, width = height or self._native("height"), width or self._native("width")
        _, rows, _ = self.transformer.config.patch_size
        check_size(height, width, rows * factor)
        return (self.transformer.config.in_channels, height // factor, width // factor)

    def sample_shape(self, height: int | None, width: int | None, num_frames: int | None) -> tuple[int, ...]:
        factor, num_frames = self.pipeline.vae_scale_factor_temporal, num_frames or self._native("num_frames")
        check_frame_count(num_frames, factor)
        channels, rows, columns = self.latent_shape(height, width)
        return (channels, (num_frames - 1) // factor + 1, rows, columns)

    def image_tokens(self, latent_shape: tuple[int, ...]) -> int:
        return latent_shape[1] * super().image_tokens(latent_shape)

    def schedule(self, num_inference_steps: int, latent_shape: tuple[int, ...]) -> Schedule:
        if self.pipeline.scheduler.config.get("use_dynamic_shifting"):
            raise ConfigError(
                "the model's scheduler has use_dynamic_shifting=True in scheduler/scheduler_config.json, and Wan's "
                "pipeline gives it no shift; set it to false, and the shift in flow_shift, or in shift of "
                "FlowMatchEulerDiscreteScheduler"
            )
        return own_schedule(self.pipeline.scheduler, num_inference_steps)

    def predict(
        self,
        transformer: Callable[..., Any],
        latents: Tensor,
        timesteps: Tensor,
        conditioning: Mapping[str, Tensor],
        guidance: Guidance,
    ) -> Tensor:
        embeds = conditioning["prompt_embeds"]
        return transformer(
            hidden_states=latents.to(embeds.dtype),
            timestep=timesteps,
            encoder_hidden_states=embeds,
            return_dict=False,
        )[0].float()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        return decode_frames(self.pipeline.vae, latents)
