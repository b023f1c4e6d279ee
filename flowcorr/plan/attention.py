"""Which of CUDA's operators computes attention, as `model.attention` chooses it, on the fake device."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from flowcorr.errors import ConfigError, unknown_choice

Operator = Literal["torch", "flash", "efficient", "math"]
SAYS: dict[Operator, str] = {
    "torch": "flash attention, or memory-efficient attention where text is masked or weights are in float32",
    "flash": "flash attention, or a kernel of its speed, where text is masked too",
    "efficient": "memory-efficient attention",
    "math": "matrix products that store all scores",
}
_aten = torch.ops.aten


def operator_of(backend: str | None) -> Operator:
    """The operator that a backend of diffusers amounts to; None is diffusers' own choice, which leaves it to torch.

    Raises:
        ConfigError: diffusers knows no such backend.
    """
    from diffusers.models.attention_dispatch import AttentionBackendName

    if backend is None:
        return "torch"
    known = [name.value for name in AttentionBackendName]
    if backend not in known:
        raise ConfigError(unknown_choice("model.attention", backend, known))
    others: dict[str, Operator] = {
        "native": "torch",
        "_native_math": "math",
        "_native_efficient": "efficient",
        "xformers": "efficient",
    }
    return others.get(backend, "flash")


def attention(
    operator: Operator,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention`, computed by the given operator."""
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    settings: dict[str, Any] = {"scale": scale}
    if operator == "torch":
        is_fast = attn_mask is None and query.dtype in (torch.bfloat16, torch.float16)
        operator = "flash" if is_fast else "efficient"
    if operator == "flash":
        # Kernels for a mask leave out what it hides, or read it beside the scores.
        return _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, **settings)[
            0
        ]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            hidden = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = hidden.masked_fill(attn_mask.logical_not(), float("-inf"))
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    if operator == "math":
        return _aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, **settings
        )[0]
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, **settings
    )[0]
