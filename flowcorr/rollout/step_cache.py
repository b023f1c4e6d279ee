"""Feature caching on Euler steps: the ratio covers the steps of SDE windows, so only these have to be exact.

diffusers' first-block cache compares what the first block adds with what it added in the last step that was computed in
full. Where the two differ by less than a threshold, the other blocks are left out, and what they added then is added
again. Its hooks sit on the blocks only during a run of Euler steps. So no state crosses a window or reaches another
batch, and windows, the actor and evaluations see a transformer without hooks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from diffusers.hooks import FirstBlockCacheConfig, HookRegistry, ModelHook
from diffusers.models.cache_utils import CacheMixin
from torch import Tensor, nn

from flowcorr.errors import ConfigError
from flowcorr.models import ModelFamily
from flowcorr.models.base import repeated_blocks
from flowcorr.rollout.sampler import BeforeStep

_TEXT_HOOK = "flowcorr_text"


@contextlib.contextmanager
def around_windows(cache: Callable[[], AbstractContextManager[None]]) -> Iterator[BeforeStep]:
    """A `before_step` for the sampler that opens `cache` for each run of Euler steps, and closes it before a window."""
    with contextlib.ExitStack() as opened:
        is_open = False

        def before_step(stochastic: bool) -> None:
            nonlocal is_open
            if stochastic:
                opened.close()
            elif not is_open:
                opened.enter_context(cache())
            is_open = not stochastic

        yield before_step


@contextlib.contextmanager
def first_block_cache(transformer: nn.Module, threshold: float) -> Iterator[None]:
    """Put diffusers' first-block cache on the blocks of `transformer`, and take it off again with its state.

    Args:
        transformer: of diffusers, whose blocks can be cached.
        threshold: see `rollout.cache_threshold`.
    """
    blocks: Any = _Blocks(transformer)
    last = HookRegistry.check_if_exists_or_initialize(blocks.last)
    if getattr(blocks.last, "context_pre_only", False):
        last.register_hook(_TextStates(), _TEXT_HOOK)
    try:
        blocks.enable_cache(FirstBlockCacheConfig(threshold=threshold))
        with blocks.cache_context("velocity"):  # one for both halves of a guided batch
            yield
    finally:
        blocks.disable_cache()
        last.remove_hook(_TEXT_HOOK, recurse=False)


def check_cached(family: ModelFamily) -> None:
    """Raise `ConfigError` if diffusers cannot cache the transformer of a model family."""
    error = None
    if family.blocks_can_be_cached:
        try:
            with first_block_cache(family.transformer, threshold=1.0):
                return
        except ValueError as unknown:
            error = unknown
    raise ConfigError(
        f"rollout.cache='first_block' cannot cache the transformer of {family.name}, as diffusers does not hook its "
        "blocks; set rollout.cache: none"
    ) from error


class _Blocks(nn.Module, CacheMixin):
    """The blocks of a transformer behind diffusers' cache methods, which some transformers lack, such as SD3's."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        for name, child in transformer.named_children():
            if isinstance(child, nn.ModuleList):
                self.add_module(name, child)

    @property
    def last(self) -> nn.Module:
        return repeated_blocks(self)[-1]


class _TextStates(ModelHook):
    """SD3's last block returns no text states, which nothing reads; but the cache subtracts them."""

    def new_forward(self, module: nn.Module, *args: Any, **inputs: Any) -> tuple[Tensor, Tensor]:
        _, hidden_states = self.fn_ref.original_forward(*args, **inputs)
        return inputs["encoder_hidden_states"], hidden_states
