"""The untrained parts of the embedded model: a Stable Diffusion 3 pipeline of 1.6 million parameters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from flowcorr.words import ALPHABET

if TYPE_CHECKING:
    from diffusers import StableDiffusion3Pipeline
    from transformers import CLIPTextModelWithProjection, CLIPTokenizer, T5EncoderModel

MAX_TOKENS = 8  # begin, up to six characters, end
_TEXT_WIDTH = 32
_JOINT_WIDTH = 2 * _TEXT_WIDTH
_BOS, _EOS = "<|startoftext|>", "<|endoftext|>"


def build_pipeline(seed: int) -> StableDiffusion3Pipeline:
    """An untrained pipeline in float32 on the CPU; the caller's random state is left as it was.

    The text encoders stay as they are drawn here. Their random embeddings tell every character at every
    position apart, which is all that spelling needs, and a frozen encoder keeps the conditioning exact.
    """
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )
    from transformers import ByT5Tokenizer

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # the libraries' initialisers take no generator
        vae = AutoencoderKL(
            block_out_channels=(16, 32, 32),
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
            layers_per_block=1,
            norm_num_groups=8,
            latent_channels=4,
            mid_block_add_attention=False,
            use_quant_conv=False,
            use_post_quant_conv=False,
            sample_size=64,
        )
        transformer = SD3Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=4,
            num_attention_heads=4,
            attention_head_dim=24,
            joint_attention_dim=_JOINT_WIDTH,
            pooled_projection_dim=_JOINT_WIDTH,
            caption_projection_dim=96,
            pos_embed_max_size=16,
            qk_norm="rms_norm",
        )
        return StableDiffusion3Pipeline(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(),
            vae=vae,
            text_encoder=_text_encoder(),
            tokenizer=character_tokenizer(),
            text_encoder_2=_text_encoder(),
            tokenizer_2=character_tokenizer(),
            text_encoder_3=_zero_t5(),
            tokenizer_3=ByT5Tokenizer(),
        )


def character_tokenizer() -> CLIPTokenizer:
    """A CLIP tokenizer without merges: one token a letter; what is no letter becomes the end token."""
    from transformers import CLIPTokenizer

    letters = [*ALPHABET, *(f"{letter}</w>" for letter in ALPHABET)]
    vocabulary = {token: index for index, token in enumerate([_BOS, _EOS, *letters])}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=MAX_TOKENS)


def _text_encoder() -> CLIPTextModelWithProjection:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    encoder = CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=2 + 2 * len(ALPHABET),
            hidden_size=_TEXT_WIDTH,
            intermediate_size=2 * _TEXT_WIDTH,
            projection_dim=_TEXT_WIDTH,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=MAX_TOKENS,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
    )
    # Stable Diffusion 3 reads the last but one hidden state, which in one layer is the embedding itself: it
    # needs unit scale. The projection makes the pooled vector, which carries the whole word.
    for embedding in (module for module in encoder.modules() if isinstance(module, torch.nn.Embedding)):
        torch.nn.init.normal_(embedding.weight)
    for linear in (module for module in encoder.modules() if isinstance(module, torch.nn.Linear)):
        torch.nn.init.normal_(linear.weight, std=1 / math.sqrt(linear.in_features))
    return encoder.eval().requires_grad_(False)


def _zero_t5() -> T5EncoderModel:
    """A T5 that answers zeros: plain `from_pretrained` insists on one, and zeros stand for "no T5" in SD3."""
    from transformers import T5Config, T5EncoderModel

    encoder = T5EncoderModel(
        T5Config(vocab_size=384, d_model=_JOINT_WIDTH, d_kv=16, d_ff=64, num_layers=1, num_heads=2)
    )
    torch.nn.init.zeros_(encoder.encoder.final_layer_norm.weight)
    return encoder.eval().requires_grad_(False)
