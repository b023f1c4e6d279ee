"""The policy as it is served: the trained adapter on the unquantized base."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from flowcorr import lora
from flowcorr.actor import DiffusionActor
from flowcorr.config.schema import Config
from flowcorr.devices import empty_cache
from flowcorr.errors import BackendError
from flowcorr.models import load_family


class ServedBase:
    """The unquantized transformer of a run that trains on a quantized one.

    It waits in main memory and is on the device only while it samples.

    Args:
        config: the run's configuration.
        actor: its adapter is served.
    """

    def __init__(self, config: Config, actor: DiffusionActor) -> None:
        self._actor = actor
        family = load_family(replace(config.model, quantization="none"), "cpu", text_encoders=False)
        self._transformer: Any = family.transformer
        lora.add_adapter(self._transformer, family, config.model.lora, seed=config.trainer.seed)
        self._transformer.requires_grad_(False)

    @contextlib.contextmanager
    def on_device(self) -> Iterator[Any]:
        """The transformer on the actor's device, with the actor's adapter as it is now.

        Raises:
            BackendError: the device has no memory left.
        """
        served, actor = self._transformer, self._actor
        unknown = served.load_state_dict(actor.weights.snapshot().tensors, strict=False).unexpected_keys
        assert not unknown, "the adapter was added to both transformers alike"
        try:
            yield served.to(actor.device)
        except torch.OutOfMemoryError as error:
            size = (
                sum(parameter.numel() * parameter.element_size() for parameter in served.parameters()) / 1e9
            )
            reason = str(error).partition(". ")[0]
            raise BackendError(
                f"out of GPU memory in an evaluation on the unquantized base, which takes {size:.1f} GB beside the "
                f"quantized one ({reason}): set trainer.eval_on=trained, or rollout.batch_size to fewer images"
            ) from error
        finally:
            served.to("cpu")
            empty_cache(actor.device)
