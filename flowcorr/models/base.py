"""The interface of a model family: inputs, guidance, latents and sigmas, without any algorithm."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowcorr.config.families import check_frames
from flowcorr.config.schema import SamplingConfig
from flowcorr.devices import empty_cache
from flowcorr.errors import ConfigError
from flowcorr.models.answers import check_conditioning, check_finite, check_negative, check_velocity
from flowcorr.models.cuts import CutReport
from flowcorr.models.negatives import negative_prompts, with_negative
from flowcorr.models.schedule import Schedule
from flowcorr.records import Prompt
from flowcorr.records.spellings import unread_images

Conditioning = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Guidance:
    """Guidance of a run, as `sampling` states it, or of one of its prompts."""

    guidance_scale: float = 1.0
    true_cfg_scale: float = 1.0
    negative_prompt: str = ""

    @classmethod
    def of(cls, sampling: SamplingConfig) -> Guidance:
        """The guidance that `sampling` states."""
        return cls(
            guidance_scale=sampling.guidance_scale,
            true_cfg_scale=sampling.true_cfg_scale,
            negative_prompt=sampling.negative_prompt,
        )

    def of_prompt(self, prompt: Prompt) -> Guidance:
        """The guidance of one prompt, which may have a negative prompt of its own."""
        if prompt.negative_prompt is None:
            return self
        return replace(self, negative_prompt=prompt.negative_prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextShapes:
    """Sizes of one prompt's text.

    Attributes:
        tokens: number of tokens that each text encoder reads, by the component's name.
        conditioning: shape of each conditioning tensor without the negative prompt's; a name that ends in `mask` is
            bool. Conditioning with a mask is cut to the longest prompt of a run.
        template_tokens: tokens that the pipeline adds to each prompt and keeps.
        encodes_to_longest: whether the encoder reads prompts padded to the longest one, and not to the limit.
    """

    tokens: Mapping[str, int]
    conditioning: Mapping[str, tuple[int, ...]]
    template_tokens: int = 0
    encodes_to_longest: bool = False

    @property
    def is_cut_to_longest(self) -> bool:
        """Whether the conditioning is as long as the longest prompt, and not as long as the limit."""
        return any(name.endswith("mask") for name in self.conditioning)


def _call(transformer: Callable[..., Any], **inputs: Any) -> Any:
    return transformer(**inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class InVllmOmni:
    """How vllm-omni computes a family.

    Attributes:
        transformer: its transformer there, as `package.module:Class`. It is built from the model's configuration.
        vae: its VAE there; a class of diffusers will do.
        call: calls that transformer with the inputs of its diffusers equivalent.
        adapted_layers: ends of the names of the layers that take an adapter there; None if all do.
        layer_suffix: where names of layers differ, their end in diffusers and their end in vllm-omni.
        quantizes: whether its transformer takes a quantization.
    """

    transformer: str
    vae: str = "vllm_omni.diffusion.distributed.autoencoders.autoencoder_kl:DistributedAutoencoderKL"
    call: Callable[..., Any] = _call
    adapted_layers: tuple[str, ...] | None = None
    layer_suffix: tuple[str, str] = ("", "")
    quantizes: bool = True

    def adapts(self, target: str) -> bool:
        """Whether the engine takes an adapter in all layers with this name."""
        return self.adapted_layers is None or f".{target}".endswith(
            tuple(f".{layer}" for layer in self.adapted_layers)
        )


def repeated_blocks(transformer: nn.Module) -> list[nn.Module]:
    """The transformer's blocks, which are alike: they are compiled, sharded and checkpointed one by one."""
    lists = [child for child in transformer.children() if isinstance(child, nn.ModuleList)]
    return [block for blocks in lists for block in blocks]


class ModelFamily(ABC):
    """A pipeline of one model family, with the few operations that sampling and training share.

    All facts about a family are attributes of its class; a family overrides defaults that do not fit. flowcorr's own
    families take facts that are needed before torch is imported from their row of `flowcorr.config.families`.

    Attributes:
        pipeline: the diffusers pipeline; `transformer` is trained, all other components are frozen. In an engine with
            processes of its own, where `velocity` and `decode` run, it has `vae` and a `transformer` with its `config`
            only, and `text_tokens` and `reference_size` have their defaults; see `flowcorr.models.in_engine`.
        dtype: dtype that the trained transformer computes with.
        text_offloaded: whether the text encoders wait in main memory, see `offload_text_encoders`.
        reference_size: height and width of the images that are drawn, as reference images are fitted to it; null for
            the native size.
        cuts: reports prompts that are longer than a text encoder reads.
        name: the value of `model.family`.
        pipeline_class: the pipeline's class in diffusers.
        lora_targets: ends of the names of the layers that get an adapter.
        guidance_key: the key of `sampling` that turns guidance on, one of
            `flowcorr.config.families.GUIDANCE_KEYS`.
        encodes_negative: whether guidance needs the encoded negative prompt.
        default_text_tokens: tokens of the long text encoder if `model.max_sequence_length` is null.
        makes_videos: whether its samples are videos, of one frame or more; see `records.Images`.
        num_references: the fewest and the most reference images that a prompt may have.
        vision_tokens: tokens of a square reference image in the text encoder; 0 if the encoder does not read images. If
            it does, it reads them with the negative prompt too, so that the negative embedding differs by prompt.
        vllm_omni: facts about the family in that engine; None if the engine lacks it.
    """

    name: ClassVar[str]
    pipeline_class: ClassVar[str]
    lora_targets: ClassVar[tuple[str, ...]]
    guidance_key: ClassVar[str] = "guidance_scale"
    encodes_negative: ClassVar[bool] = True
    default_text_tokens: ClassVar[int] = 512
    makes_videos: ClassVar[bool] = False
    num_references: ClassVar[tuple[int, int]] = (0, 0)
    vision_tokens: ClassVar[int] = 0
    vllm_omni: ClassVar[InVllmOmni | None] = None

    def __init__(
        self,
        pipeline: Any,
        *,
        dtype: torch.dtype,
        max_sequence_length: int | None = None,
        reference_size: tuple[int | None, int | None] = (None, None),
    ) -> None:
        self.pipeline = pipeline
        self.dtype = dtype
        self.reference_size = reference_size
        self.text_tokens = self.count_text_tokens(max_sequence_length)
        self.text_offloaded = False
        self.cuts = CutReport(self)

    @classmethod
    def count_text_tokens(cls, max_sequence_length: int | None) -> int:
        """Tokens of the long text encoder under this `model.max_sequence_length`."""
        return cls.default_text_tokens if max_sequence_length is None else max_sequence_length

    @classmethod
    def check_references(cls, prompts: Sequence[Prompt]) -> None:
        """Check that prompts have as many reference images as the family takes.

        Raises:
            ConfigError: one has too few or too many, or it seems to name some in a field that is not read.
        """
        fewest, most = cls.num_references
        for prompt in prompts:
            if most and (field := unread_images(prompt)) is not None:
                raise ConfigError(
                    f'{prompt.place or repr(prompt.text)} has no reference image, but the field "{field}", which is '
                    'not read; rename it to "image" or "images", or remove it to draw from the text alone'
                )
            if not fewest <= len(prompt.images) <= most:
                allowed = f"{fewest}" if fewest == most else f"{fewest} to {most}"
                raise ConfigError(
                    f"{prompt.place or repr(prompt.text)} has {len(prompt.images)} reference images, and a model of "
                    f"the family {cls.name} takes {allowed}; add or remove the field image or images, or set "
                    "model.path to another model"
                )

    @classmethod
    def text_shapes(cls, configs: Mapping[str, Mapping[str, Any]], length: int) -> TextShapes | None:
        """Sizes of one prompt's text, for `flowcorr plan`; None if they are not known without the model.

        Args:
            configs: the configuration of each component of the pipeline, by its name.
            length: tokens of the long text encoder.
        """
        return None

    @classmethod
    def needs_negative(cls, guidance: Guidance) -> bool:
        """Whether the prompts come with the encoded negative prompt."""
        return cls.encodes_negative and getattr(guidance, cls.guidance_key) > 1

    @classmethod
    def with_euler_steps(cls, scheduler: Any) -> Any:
        """The scheduler that takes Euler steps through the noise levels of the pipeline's; here, the pipeline's own."""
        return scheduler

    def reference_frame(self) -> tuple[int, int] | None:
        """Height and width that give reference images their proportions, by cutting; None if they keep their own."""
        return None

    @classmethod
    def place(cls) -> str:
        """The family's name; of a family of one's own, `package.module:Class`."""
        own = not cls.__module__.startswith("flowcorr.models.")
        return f"{cls.__module__}:{cls.__qualname__}" if own else cls.name

    def call_arguments(self, prompt: Prompt, guidance: Guidance) -> dict[str, Any]:
        """Arguments of the pipeline's own call for an equal image; size, steps and generator are added elsewhere.

        Overridden where the pipeline counts guidance differently, fits references to another size, or rewrites prompts.
        """
        scale = {self.guidance_key: getattr(guidance, self.guidance_key)}
        negative = {"negative_prompt": guidance.negative_prompt} if self.needs_negative(guidance) else {}
        return {"prompt": prompt.text, "max_sequence_length": self.text_tokens, **scale, **negative}

    @property
    def transformer(self) -> Any:
        return self.pipeline.transformer

    @property
    def distills_guidance(self) -> bool:
        """Whether `guidance_scale` is an input of the transformer, instead of a second forward pass."""
        return False

    def amplification(self, guidance: Guidance) -> float:
        """Factor by which guidance amplifies the rounding of two forward passes; 1 with a single pass."""
        return float(getattr(guidance, self.guidance_key)) if self.needs_negative(guidance) else 1.0

    @property
    def frames_per_second(self) -> int:
        """Frames per second at which the family's videos are shown."""
        return 16

    @abstractmethod
    def latent_shape(self, height: int | None, width: int | None) -> tuple[int, ...]:
        """The latent shape of one image, or of one latent frame, of `height` x `width` pixels (null: the native size).

        Raises:
            ConfigError: the size is no multiple of what the model works on.
        """

    def sample_shape(self, height: int | None, width: int | None, num_frames: int | None) -> tuple[int, ...]:
        """`L`, the latent shape of a sample of `num_frames` (null: the native number); see `latent_shape`.

        A family that makes videos overrides it.
        """
        check_frames(num_frames, self.name, makes_videos=self.makes_videos)
        return self.latent_shape(height, width)

    def image_tokens(self, latent_shape: tuple[int, ...]) -> int:
        """Tokens that the transformer reads a sample as: here, patches of 2 x 2 latents."""
        return (latent_shape[-2] // 2) * (latent_shape[-1] // 2)

    @abstractmethod
    def schedule(self, num_inference_steps: int, latent_shape: tuple[int, ...]) -> Schedule:
        """The sigma table, as the pipeline's own scheduler makes it."""

    def in_dtype(self, schedule: Schedule, dtype: torch.dtype) -> Schedule:
        """`schedule` with the timesteps that a transformer of `dtype` really computes with.

        It gives that transformer the same velocities as `schedule` does. An engine that samples with it leaves
        its rounding in `Rollout.timesteps`, where an actor of higher precision replays it. Here nothing is
        rounded; a family whose transformer casts its timesteps overrides this.
        """
        return schedule

    def guidance_in_dtype(self, guidance: Guidance, dtype: torch.dtype) -> Guidance:
        """`guidance` with the scale that a transformer of `dtype` really computes with.

        An actor of higher precision that scores with it replays what an engine of `dtype` was fed. Here nothing is
        rounded; a family whose transformer casts the scale overrides this.
        """
        return guidance

    def encode(self, prompts: Sequence[Prompt], guidance: Guidance) -> Conditioning:
        """See `checked_embed`; logs prompts and negative prompts that the text encoders do not read to the end."""
        if self.needs_negative(guidance):
            self.cuts.add(negative_prompts(prompts, guidance))
        self.cuts.add(prompts)
        return self.checked_embed(prompts, guidance)

    def checked_embed(self, prompts: Sequence[Prompt], guidance: Guidance) -> Conditioning:
        """Conditioning of prompts, see `embed`; each prompt may have a negative prompt of its own.

        Raises:
            ConfigError: `embed` returned another number of rows, numbers that are not finite, or nothing for the
                negative prompt of guidance.
        """
        needs_negative = self.needs_negative(guidance)
        places: dict[Guidance, list[int]] = {}
        for place, prompt in enumerate(prompts):
            places.setdefault(guidance.of_prompt(prompt) if needs_negative else guidance, []).append(place)
        parts = []
        for shared, own in places.items():
            asked = [prompts[place] for place in own]
            parts.append(self.embed(asked, shared))
            check_conditioning(parts[-1], self.place(), len(own))
            check_finite(self, asked, shared, parts[-1])
        scale = getattr(guidance, self.guidance_key)
        if scale > 1 and not self.distills_guidance:
            check_negative(parts[0], self.place(), f"{self.guidance_key}={scale:g}", self.encodes_negative)
        if len(parts) == 1:
            return parts[0]
        order = torch.tensor([place for own in places.values() for place in own]).argsort()
        return {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}

    @torch.no_grad()
    def embed(self, prompts: Sequence[Prompt], guidance: Guidance) -> Conditioning:
        """Conditioning `{name: [B, ...]}` of the prompts, and of the negative prompt if guidance is on.

        All prompts of a call share `guidance.negative_prompt`, which is encoded once. Their own rows do not depend on
        `guidance`. A family whose embeddings of a text depend on more than the text overrides this.
        """
        conditioning = self.embed_texts([prompt.text for prompt in prompts])
        if self.needs_negative(guidance):
            for name, row in self.embed_texts([guidance.negative_prompt]).items():
                conditioning[f"negative_{name}"] = row.expand(len(prompts), *row.shape[1:])
        return conditioning

    def embed_texts(self, texts: list[str]) -> Conditioning:
        """Conditioning `{name: [B, ...]}` of texts; `embed` calls it without gradients.

        Here the first embeddings that the pipeline's `encode_prompt` returns; a family with other tensors overrides
        this.
        """
        embeds, *_ = self.pipeline.encode_prompt(
            texts, do_classifier_free_guidance=False, max_sequence_length=self.text_tokens
        )
        return {"prompt_embeds": embeds}

    def tokenized_text(self, prompt: str) -> str:
        """The text that the tokenizers get for a prompt; a family with a chat template puts the prompt into it."""
        return prompt

    def free_text_encoders(self) -> None:
        """Release the text encoders' memory; `encode` cannot be called afterwards."""
        for name in self.text_encoders:
            setattr(self.pipeline, name, None)
        gc.collect()
        empty_cache(next(self.transformer.parameters()).device)

    def offload_text_encoders(self, device: torch.device | str) -> None:
        """Keep the text encoders in main memory; each layer is on `device` only while it computes.

        It is diffusers' group offloading, layer by layer. On a GPU the weights stay in pinned memory, and a stream of
        its own copies a layer's while the one before computes; without a stream its hooks would also copy every layer
        back, which took 24 times as long on an H200. Groups of blocks would need the names of each encoder's
        blocks: diffusers only looks for them among the encoder's own children.
        """
        from diffusers.hooks import apply_group_offloading

        onload = torch.device(device)
        for encoder in self.text_encoders.values():
            apply_group_offloading(
                encoder, onload_device=onload, offload_type="leaf_level", use_stream=onload.type == "cuda"
            )
        self.text_offloaded = True

    def move_text_encoders(self, device: torch.device) -> None:
        """Put the text encoders on a device: they wait in main memory, and `encode` needs them on the transformer's.

        Offloaded encoders stay in main memory, where `encode` finds their layers.
        """
        if not self.text_offloaded:
            for encoder in self.text_encoders.values():
                encoder.to(device)
        empty_cache(next(self.transformer.parameters()).device)

    @property
    def text_encoders(self) -> dict[str, Any]:
        """The text encoders that are loaded, by the component's name."""
        parts = self.pipeline.components
        return {
            name: part for name, part in parts.items() if name.startswith("text_encoder") and part is not None
        }

    def velocity(
        self,
        transformer: Callable[..., Any],
        latents: Tensor,
        timesteps: Tensor,
        conditioning: Mapping[str, Tensor],
        guidance: Guidance,
    ) -> Tensor:
        """Velocity `[B, *L]` float32 at `latents` `[B, *L]` and `timesteps` `[B]`, under guidance.

        Above a scale of 1, and where there is a negative prompt, both sides of guidance are one batch of `2 B`.

        Raises:
            ConfigError: `predict` or `guide` returned another shape.
        """
        scale = getattr(guidance, self.guidance_key)
        if scale <= 1 or not any(name.startswith("negative_") for name in conditioning):
            single = self.predict(transformer, latents, timesteps, conditioning, guidance)
            return check_velocity(single, latents, self.place(), "predict")
        both = with_negative(latents, timesteps, conditioning)
        halves = check_velocity(self.predict(transformer, *both, guidance), both[0], self.place(), "predict")
        negative, positive = halves.chunk(2)
        guided = self.guide(negative, positive, scale)
        return check_velocity(guided, latents, self.place(), "guide")

    @abstractmethod
    def predict(
        self,
        transformer: Callable[..., Any],
        latents: Tensor,
        timesteps: Tensor,
        conditioning: Mapping[str, Tensor],
        guidance: Guidance,
    ) -> Tensor:
        """Velocity `[B, *L]` float32 of one forward pass; `guidance` is for models that have it as an input."""

    def guide(self, negative: Tensor, positive: Tensor, scale: float) -> Tensor:
        """Velocity `[B, *L]` under guidance, from the velocities for the negative prompt and for the prompt.

        Classifier-free guidance, arXiv:2207.12598.
        """
        return negative + scale * (positive - negative)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Pixels `[B, 3, H, W]` or `[B, 3, F, H, W]` of final latents `[B, *L]`, -1 to 1, not clamped nor rounded.

        Here by a VAE that scales its latents by one number; a family with another VAE overrides this.
        """
        vae = self.pipeline.vae
        spatial = self.unpack(latents) / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
        return vae.decode(spatial.to(vae.dtype), return_dict=False)[0]

    @staticmethod
    def unpack(latents: Tensor) -> Tensor:
        """Latents `[B, *L]` in the shape of the VAE's; here they have it."""
        return latents
