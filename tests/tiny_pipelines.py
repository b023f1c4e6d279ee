"""Builders of tiny pipelines with random weights, of the very classes that the large models use.

Import it as `tiny_pipelines` (pytest puts `tests/` on the path). Every builder draws from `seed` alone, writes a
folder that `from_pretrained` reads, and returns it.

As a script it builds one and prints the overrides that fit a recipe to it:

    flowcorr train qwen_image_ocr_lora_rollout_corr $(python tests/tiny_pipelines.py qwen_image /tmp/tiny_qwen)
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.prompts import check_told_apart, prompts_of

TEXT_WIDTH = 32
SENSITIVE = 8.0
ATTENTION = ("to_q", "to_k", "to_v", "to_out", "to_add_out", "add_q", "add_k", "add_v")
SD3_SIZE = (32, 32)
SD35_SIZE = (32, 32)
QWEN_SIZE = (32, 48)
QWEN_EDIT_SIZE = (64, 96)
FLUX_SIZE = (16, 24)
FLUX2_KLEIN_SIZE = (16, 24)
Z_IMAGE_SIZE = (16, 24)
OVIS_IMAGE_SIZE = (16, 24)
LONGCAT_IMAGE_SIZE = (16, 24)
WAN_SIZE = (32, 48)
WAN_FRAMES = 9
QWEN_TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
)
QWEN_EDIT_TEMPLATE = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. Generate a new image "
    "that meets the user's requirements while maintaining consistency with the original input where appropriate."
    "<|im_end|>\n<|im_start|>user\n"
)
OVIS_TEMPLATE = (
    "<|im_start|>user\nDescribe the image by detailing the color, quantity, text, shape, size, texture, "
    "spatial relationships of the objects and background"
)


def builder(make: Callable[..., Any]) -> Callable[..., Path]:
    """Let a function that makes a pipeline of random weights write it instead: `(path, dtype, seed, **options)`."""

    @functools.wraps(make)
    def build(path, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> Path:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return _save(make(**options), path, dtype)

    return build


def build_tiny_sd3(path, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """The embedded architecture, untrained; native size 64 x 64, prompts of up to six letters."""
    return _save(_sd3_pipeline(seed), path, dtype)


def build_tiny_sd35(path, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """Two of its blocks with what Stable Diffusion 3.5 Medium adds: normalised queries, and a second attention."""
    from diffusers import SD3Transformer2DModel

    pipeline = _sd3_pipeline(seed)
    config = {
        **pipeline.transformer.config,
        "num_layers": 2,
        "qk_norm": "rms_norm",
        "dual_attention_layers": (0,),
    }
    del config["_use_default_values"]  # it names keys for which diffusers would take its defaults
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline.register_modules(transformer=SD3Transformer2DModel.from_config(config))
    return _save(pipeline, path, dtype)


@builder
def build_tiny_qwen_image():
    """Qwen-Image: 16-channel patches of a 4-channel VAE that shrinks by 4; the real scheduler's shift."""
    from diffusers import QwenImagePipeline

    parts = _qwen_parts(depth=2)
    tokenizer = qwen_tokenizer()
    return QwenImagePipeline(**parts, text_encoder=_qwen_text_encoder(len(tokenizer)), tokenizer=tokenizer)


@builder
def build_tiny_qwen_image_edit(*, name: str = "QwenImageEditPipeline"):
    """Qwen-Image-Edit, whose reference images have a megapixel: a VAE that shrinks by 16 leaves few tokens of them."""
    import diffusers
    import pytest
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    pytest.importorskip("torchvision")  # which the processor needs
    # The newest checkpoints of the other pipeline tell reference tokens a timestep of 0.
    parts = _qwen_parts(depth=4, zero_cond_t=name.endswith("PlusPipeline"))
    tokenizer = qwen_tokenizer(QWEN_EDIT_TEMPLATE, 64)
    marks = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    start, end, image, video = tokenizer.convert_tokens_to_ids(marks)
    places = {
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "image_token_id": image,
        "video_token_id": video,
    }
    processor = Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(size={"shortest_edge": 3136, "longest_edge": 12845056}),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(),
    )
    return getattr(diffusers, name)(
        **parts,
        text_encoder=_qwen_text_encoder(len(tokenizer), **places),
        tokenizer=tokenizer,
        processor=processor,
    )


def build_tiny_qwen_image_edit_plus(path, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """The same with several reference images."""
    return build_tiny_qwen_image_edit(path, dtype, seed, name="QwenImageEditPlusPipeline")


@builder
def build_tiny_flux(*, guidance_embeds: bool = True):
    """FLUX.1: 16-channel patches of a 4-channel VAE that shrinks by 2; dev's shift and distilled guidance."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(4, 6, 6),
    )
    return FluxPipeline(
        transformer=transformer,
        vae=_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
        text_encoder=_clip_text_encoder(),
        tokenizer=clip_tokenizer(),
        text_encoder_2=_t5_encoder(),
        tokenizer_2=t5_tokenizer(),
    )


def build_tiny_flux_kontext(path, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """FLUX.1 Kontext: the tiny FLUX.1 as the pipeline that takes a reference image."""
    from diffusers import FluxKontextPipeline, FluxPipeline

    from flowcorr.models import quiet_loaders

    with quiet_loaders():
        flux = FluxPipeline.from_pretrained(build_tiny_flux(path, dtype, seed), torch_dtype=dtype)
        return _save(FluxKontextPipeline(**flux.components), path, dtype)


@builder
def build_tiny_flux2_klein(*, is_distilled: bool = False):
    """FLUX.2 klein: 16-channel patches of a 4-channel VAE that shrinks by 2; text of the real layers, 9, 18 and 27."""
    from diffusers import (
        AutoencoderKLFlux2,
        FlowMatchEulerDiscreteScheduler,
        Flux2KleinPipeline,
        Flux2Transformer2DModel,
    )

    transformer = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=3 * TEXT_WIDTH,
        timestep_guidance_channels=32,
        guidance_embeds=False,
        axes_dims_rope=(4, 4, 4, 4),
    )
    vae = AutoencoderKLFlux2(**_VAE)
    vae.bn.running_mean.normal_(std=0.3)
    vae.bn.running_var.uniform_(0.5, 2.0)
    tokenizer = qwen_tokenizer()
    return Flux2KleinPipeline(
        transformer=transformer,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
        text_encoder=_qwen3("Qwen3ForCausalLM", len(tokenizer), num_layers=27),
        tokenizer=tokenizer,
        is_distilled=is_distilled,
    )


@builder
def build_tiny_z_image():
    """Z-Image: patches of a 4-channel VAE that shrinks by 2; the real scheduler's constant shift."""
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel

    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=48,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=3,
        n_kv_heads=3,
        cap_feat_dim=TEXT_WIDTH,
        axes_dims=[4, 6, 6],
        axes_lens=[256, 64, 64],
    )
    for padding in (transformer.x_pad_token, transformer.cap_pad_token):
        torch.nn.init.normal_(padding)
    tokenizer = qwen_tokenizer()
    return ZImagePipeline(
        transformer=transformer,
        vae=_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        text_encoder=_qwen3("Qwen3Model", len(tokenizer), num_layers=2),
        tokenizer=tokenizer,
    )


@builder
def build_tiny_ovis_image():
    """Ovis-Image: 16-channel patches of a 4-channel VAE that shrinks by 2; a dynamic shift."""
    from diffusers import FlowMatchEulerDiscreteScheduler, OvisImagePipeline, OvisImageTransformer2DModel

    transformer = OvisImageTransformer2DModel(
        patch_size=1,
        in_channels=16,
        out_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
    tokenizer = qwen_tokenizer(OVIS_TEMPLATE, 28)
    return OvisImagePipeline(
        transformer=transformer,
        vae=_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
        text_encoder=_qwen3("Qwen3Model", len(tokenizer), num_layers=2),
        tokenizer=tokenizer,
    )


@builder
def build_tiny_longcat_image():
    """LongCat-Image, the family that `examples/new_model.py` adds; its pipeline draws noise of 16 channels."""
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        LongCatImagePipeline,
        LongCatImageTransformer2DModel,
    )

    transformer = LongCatImageTransformer2DModel(
        patch_size=1,
        in_channels=64,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
    tokenizer = qwen_tokenizer()
    return LongCatImagePipeline(
        transformer=transformer,
        vae=_vae(latent_channels=16),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
        text_encoder=_qwen_text_encoder(len(tokenizer)),
        tokenizer=tokenizer,
        text_processor=tokenizer,  # it would rewrite prompts
    )


@builder
def build_tiny_wan():
    """Wan 2.1: 16-channel latents of a VAE that shrinks by 8, and by 4 in time; the real scheduler, UniPC."""
    return _wan_pipeline(channels=16)


@builder
def build_tiny_wan22_ti2v():
    """Wan 2.2 TI2V: a timestep a token, and a VAE of patches of 2 x 2 pixels that shrinks by 16."""
    patches = {
        "patch_size": 2,
        "in_channels": 12,
        "out_channels": 12,
        "scale_factor_spatial": 16,
        "is_residual": True,
    }
    return _wan_pipeline(channels=48, expand_timesteps=True, **patches)


def make_sensitive(path, factor: float = SENSITIVE) -> Path:
    """The pipeline at `path` with larger attention weights: without references its velocities change by a fifth."""
    from safetensors.torch import load_file, save_file

    (file,) = (Path(path) / "transformer").glob("*.safetensors")
    state = {
        name: factor * value
        if value.dim() == 2 and "block" in name and any(map(name.count, ATTENTION))
        else value
        for name, value in load_file(file).items()
    }
    save_file(state, file, metadata={"format": "pt"})
    return Path(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiny:
    """A tiny pipeline.

    Attributes:
        build: writes it, see the head of this file.
        size: height and width of its images.
        frames: frames of its videos; None if it makes images.
        guidance: keys of `sampling` that turn its guidance on.
        engine: keys of `rollout.engine` that it needs with vllm-omni.
        images: reference images of each prompt.
        tokens: a `model.max_sequence_length` with which it tells short prompts apart: some families' templates count.
    """

    build: Callable[..., Path]
    size: tuple[int, int]
    frames: int | None = None
    guidance: dict[str, float] = field(default_factory=lambda: {"guidance_scale": 3.0})
    engine: dict[str, str] = field(default_factory=dict)
    images: int = 0
    tokens: int = 8


FAMILIES = {
    "sd3": Tiny(build=build_tiny_sd3, size=SD3_SIZE),
    "qwen_image": Tiny(build=build_tiny_qwen_image, size=QWEN_SIZE, guidance={"true_cfg_scale": 3.0}),
    "qwen_image_edit": Tiny(
        build=build_tiny_qwen_image_edit,
        size=QWEN_EDIT_SIZE,
        guidance={"true_cfg_scale": 3.0},
        images=1,
        tokens=32,
    ),
    "qwen_image_edit_plus": Tiny(
        build=build_tiny_qwen_image_edit_plus,
        size=QWEN_EDIT_SIZE,
        guidance={"true_cfg_scale": 3.0},
        images=2,
        tokens=32,
    ),
    "flux": Tiny(build=build_tiny_flux, size=FLUX_SIZE),
    "flux_kontext": Tiny(build=build_tiny_flux_kontext, size=FLUX_SIZE, images=1),
    "flux2_klein": Tiny(build=build_tiny_flux2_klein, size=FLUX2_KLEIN_SIZE, tokens=32),
    "z_image": Tiny(build=build_tiny_z_image, size=Z_IMAGE_SIZE, tokens=32),
    "ovis_image": Tiny(build=build_tiny_ovis_image, size=OVIS_IMAGE_SIZE, engine={"weight_sync": "merged"}),
    "wan": Tiny(build=build_tiny_wan, size=WAN_SIZE, frames=WAN_FRAMES),
}
"""The tiny pipeline of each family of `flowcorr.config.families.FAMILIES`; tests of all families run on these."""
PIPELINES = {
    **FAMILIES,
    "sd35": Tiny(build=build_tiny_sd35, size=SD35_SIZE),
    "wan22_ti2v": Tiny(build=build_tiny_wan22_ti2v, size=(64, 96), frames=WAN_FRAMES),
}
"""Every tiny pipeline, by the beginning of its recipes' names."""


def of_recipe(recipe: str) -> Tiny:
    """The tiny pipeline that fits a recipe for a large model."""
    return PIPELINES[max((name for name in PIPELINES if recipe.startswith(f"{name}_")), key=len)]


def qwen_tokenizer(template: str = QWEN_TEMPLATE, num_tokens: int = 34):
    """A byte-level tokenizer trained on a template, which it cuts into as many tokens as the real one does.

    It has Qwen3's chat template, as far as one message of a user goes.
    """
    from transformers import Qwen2Tokenizer

    tokenizer = Qwen2Tokenizer().train_new_from_iterator(
        [template] * 2, vocab_size=600, new_special_tokens=["<|im_start|>", "<|im_end|>"], show_progress=False
    )
    assert len(tokenizer(template).input_ids) == num_tokens
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    )
    return tokenizer


def clip_tokenizer():
    """A CLIP tokenizer without merges: one token a letter."""
    from transformers import CLIPTokenizer

    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    return CLIPTokenizer(
        vocab={token: index for index, token in enumerate(tokens)}, merges=[], model_max_length=16
    )


def t5_tokenizer():
    """A T5 tokenizer with one token a letter."""
    from transformers import T5Tokenizer

    letters = "▁abcdefghijklmnopqrstuvwxyz"
    specials = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    return T5Tokenizer(vocab=[*specials, *((letter, -2.0) for letter in letters)], extra_ids=0)


def _qwen_parts(depth: int, *, zero_cond_t: bool = False) -> dict:
    """Transformer, VAE that shrinks by `2 ** depth`, and scheduler of Qwen-Image."""
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImageTransformer2DModel,
    )

    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(4, 6, 6),
        zero_cond_t=zero_cond_t,
    )
    vae = AutoencoderKLQwenImage(
        base_dim=8 if depth == 2 else 2,  # as fast on a megapixel
        z_dim=4,
        dim_mult=[1, *[2] * depth],
        num_res_blocks=1,
        temperal_downsample=[False] + [True] * (depth - 1),
        latents_mean=[-0.7, 0.2, 0.4, -0.1],
        latents_std=[2.8, 1.9, 2.3, 1.4],
    )
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        max_image_seq_len=8192,
        shift_terminal=0.02,
    )
    return {"transformer": transformer, "vae": vae, "scheduler": scheduler}


def _qwen_text_encoder(vocab_size: int, **places: int):
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": vocab_size,
            "hidden_size": TEXT_WIDTH,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "rope_parameters": {"mrope_section": [2, 3, 3], "rope_type": "default", "rope_theta": 1e6},
            "bos_token_id": None,
            "eos_token_id": None,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": TEXT_WIDTH,
        },
        **places,
    )
    return _with_unit_scale(Qwen2_5_VLForConditionalGeneration(config))


def _qwen3(class_name: str, vocab_size: int, *, num_layers: int):
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=TEXT_WIDTH,
        intermediate_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        bos_token_id=None,
        eos_token_id=None,
    )
    return _with_unit_scale(getattr(transformers, class_name)(config))


def _clip_text_encoder():
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=54,
        hidden_size=TEXT_WIDTH,
        intermediate_size=32,
        projection_dim=TEXT_WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return _with_unit_scale(CLIPTextModel(config))


def _t5_encoder():
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=len(t5_tokenizer()), d_model=TEXT_WIDTH, d_kv=8, d_ff=32, num_layers=1, num_heads=2
    )
    return T5EncoderModel(config)


_VAE = {
    "block_out_channels": (8, 8),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "latent_channels": 4,
    "mid_block_add_attention": False,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


def _vae(**changes):
    from diffusers import AutoencoderKL

    return AutoencoderKL(**_VAE | changes, scaling_factor=0.3611, shift_factor=0.1159)


def _wan_pipeline(*, channels: int, expand_timesteps: bool = False, **vae):
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    tokenizer = t5_tokenizer()
    statistics = {
        "latents_mean": torch.linspace(-0.5, 0.5, channels).tolist(),
        "latents_std": torch.linspace(1.5, 3.0, channels).tolist(),
    }
    text = UMT5Config(
        vocab_size=len(tokenizer), d_model=TEXT_WIDTH, d_kv=8, d_ff=32, num_layers=1, num_heads=2
    )
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=_with_unit_scale(UMT5EncoderModel(text)),
        transformer=WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=channels,
            out_channels=channels,
            text_dim=TEXT_WIDTH,
            freq_dim=32,
            ffn_dim=32,
            num_layers=2,
            rope_max_seq_len=128,
        ),
        vae=AutoencoderKLWan(
            base_dim=4,
            z_dim=channels,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            **statistics,
            **vae,
        ),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        expand_timesteps=expand_timesteps,
    )


def _with_unit_scale(encoder: torch.nn.Module) -> torch.nn.Module:
    """Random embeddings of unit scale: at the initialisers' 0.02 all prompts would look alike."""
    for module in encoder.modules():
        if isinstance(module, torch.nn.Embedding):
            torch.nn.init.normal_(module.weight)
    return encoder


def _sd3_pipeline(seed: int):
    sys.path.append(str(Path(__file__).parents[1] / "examples/tiny_ocr"))
    from build_pipeline import build_pipeline

    pipeline = build_pipeline(seed)
    pipeline.vae.register_to_config(shift_factor=0.0609)
    return pipeline


def _save(pipeline, path, dtype: torch.dtype) -> Path:
    from flowcorr.models import quiet_loaders

    for component in pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            torch.nn.Module.to(component, dtype)
    with quiet_loaders():
        pipeline.save_pretrained(path)
    return Path(path)


def connect(config, prompts):
    """Family, actor, engine and conditioning of prompts or their texts, connected as the trainer does."""
    from flowcorr.actor import DiffusionActor
    from flowcorr.trainer.setup import load_model

    family = load_model(config)
    actor = DiffusionActor(family, config)
    engine = engine_beside(actor)
    if isinstance(prompts[0], str):
        prompts = prompts_of(prompts)
    check_told_apart(family, prompts, actor.guidance)
    return family, actor, engine, family.encode(prompts, actor.guidance)


def engine_beside(actor):
    """The engine in process of an actor, connected as the trainer does."""
    from flowcorr.rollout import in_process

    weights = actor.weights
    engine = in_process.build(
        actor.config, actor.family, merge=weights.merged, base=weights.untrained, probe=None
    )
    engine.sync(weights.snapshot())
    return engine


def stir(actor, scale: float = 0.05, seed: int = 0) -> None:
    """Move the trained weights, as training would."""
    draw = torch.Generator().manual_seed(seed)
    for parameter in actor.weights.parameters.values():
        parameter.data += scale * torch.randn(parameter.shape, generator=draw).to(parameter)


def flow_grpo_log_prob(latents, following, velocity, sigma, sigma_next, noise_level):
    """Mean log-density of `following` `[B, ...]` in float64, by Flow-GRPO's equation 9."""
    latents, following, velocity = latents.double(), following.double(), velocity.double()
    step = sigma - sigma_next
    c = noise_level * (sigma / (1 - (sigma if sigma < 0.999 else sigma_next))) ** 0.5
    drift = velocity + c**2 / (2 * sigma) * (latents + (1 - sigma) * velocity)
    density = torch.distributions.Normal(latents - drift * step, c * step**0.5)
    return density.log_prob(following).flatten(1).mean(1)


def overrides(path, size: tuple[int, int], dtype: str, frames: int | None = None) -> list[str]:
    """What makes a recipe for a large model one for the tiny model at `path`, three steps long."""
    height, width = size
    return [
        f"model.path={path}",
        f"model.dtype={dtype}",
        f"rollout.dtype={dtype}",
        "model.max_sequence_length=128",
        f"sampling.height={height}",
        f"sampling.width={width}",
        f"sampling.num_frames={'null' if frames is None else frames}",
        "rollout.prompts_per_step=2",
        "rollout.n=4",
        "trainer.device=cpu",
        "trainer.total_steps=3",
        "trainer.eval_every=0",
        # Nothing can be read on images of noise, and equal rewards teach nothing.
        'reward.terms=[{"name":"jpeg_incompressibility"}]',
        "reward.placement=auto",
        "reward.num_workers=1",
    ]


def main() -> None:
    """Build the pipeline that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", choices=PIPELINES)
    parser.add_argument("folder", type=Path)
    # Not the recipes' bfloat16, whose matrix instructions not every virtual machine lets through.
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    tiny = PIPELINES[arguments.family]
    folder = tiny.build(arguments.folder, getattr(torch, arguments.dtype))
    print(*overrides(folder, tiny.size, arguments.dtype, tiny.frames))


if __name__ == "__main__":
    main()
