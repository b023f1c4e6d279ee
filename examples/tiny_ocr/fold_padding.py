"""Attention in which one padding token stands for many equal ones.

A Stable Diffusion 3 pipeline without a T5 appends `max_sequence_length` zero tokens to the prompt. They have no
position, so they stay equal in every layer. Attention over `n` equal keys is attention over one of them with `log n`
added to its logit. So training with any number of padding tokens costs as much as with one, and the model learns to
ignore their number.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from diffusers import SD3Transformer2DModel
    from diffusers.models.attention_processor import Attention


@dataclass(slots=True)
class Padding:
    """How many padding tokens the last text token stands for; a float, at least 1."""

    tokens: float = 1.0


@contextlib.contextmanager
def fold_padding(transformer: SD3Transformer2DModel) -> Iterator[Padding]:
    """Within the block, the last text token of `transformer` counts as `Padding.tokens` of them."""
    padding = Padding()
    before = transformer.attn_processors
    transformer.set_attn_processor(FoldedPaddingProcessor(padding))
    try:
        yield padding
    finally:
        transformer.set_attn_processor(before)


class FoldedPaddingProcessor:
    """Joint attention over image and text tokens, as `JointAttnProcessor2_0`, with folded padding."""

    def __init__(self, padding: Padding) -> None:
        self._padding = padding

    def __call__(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend: `[B, image tokens, C]` and `[B, text tokens, C]` in, the same shapes out."""
        image = _heads(attn, hidden_states, (attn.to_q, attn.to_k, attn.to_v), (attn.norm_q, attn.norm_k))
        text = _heads(
            attn,
            encoder_hidden_states,
            (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj),
            (attn.norm_added_q, attn.norm_added_k),
        )
        query, key, value = (torch.cat(pair, dim=2) for pair in zip(image, text, strict=True))
        bias = query.new_zeros(key.shape[2])
        bias[-1] = math.log(self._padding.tokens)
        # SDPA wants a mask with a row for each query where it is not boolean.
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias.expand(query.shape[2], -1)
        )
        image_out, text_out = (
            mixed.transpose(1, 2)
            .flatten(2)
            .split([hidden_states.shape[1], encoder_hidden_states.shape[1]], dim=1)
        )
        return attn.to_out[0](image_out), text_out if attn.context_pre_only else attn.to_add_out(text_out)


def _heads(attn: Attention, tokens: torch.Tensor, projections: tuple, norms: tuple) -> list[torch.Tensor]:
    query, key, value = (p(tokens).unflatten(-1, (attn.heads, -1)).transpose(1, 2) for p in projections)
    return [norms[0](query), norms[1](key), value]
