"""The trained weights (an adapter's, or all of the transformer's), their average, and their files."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowcorr import distributed, lora
from flowcorr.config.schema import Config
from flowcorr.distributed import fsdp
from flowcorr.errors import BatchError
from flowcorr.models import DTYPES, ModelFamily
from flowcorr.models.adapter_files import write_adapter
from flowcorr.models.base import repeated_blocks
from flowcorr.models.quantized import whole_copy
from flowcorr.rollout.base import (
    Weights,
    actor_dtype,
    needs_base,
    shards_weights,
    shares_weights,
    trains_shards,
)

FILE_PATTERN = "diffusion_pytorch_model{suffix}.safetensors"  # as `from_pretrained` looks for them


class TrainedWeights:
    """The trained parameters of a pipeline's transformer.

    Args:
        family: the loaded pipeline; its transformer gets the adapter, or is sharded over the ranks.
        config: the run's configuration.

    Attributes:
        parameters: by name.
        version: optimizer updates that made them.
        average: the exponential moving average in float32 or better; None without `actor.ema`.
        untrained: the transformer before training. If an engine in this process cannot share the trained one, it is a
            copy in host memory without quantized layers, until the engine takes it (then None).
        reference: the transformer before training, for `actor.kl_coef`: a copy, or the transformer itself if its
            adapter can be switched off.
        sharded: whether each rank holds a shard of the transformer, so that a forward pass needs all ranks.
        trains_shards: whether `parameters` are shards; an adapter stays whole.
    """

    def __init__(self, family: ModelFamily, config: Config) -> None:
        self._base = config.model.path
        self.transformer: Any = family.transformer
        self._adapted = config.model.lora.rank > 0
        self._decay = config.actor.ema
        self._shared = shares_weights(config)
        self.untrained = self.reference = self.transformer
        if config.rollout.placement == "local" and needs_base(config):
            self.untrained = whole_copy(self.transformer)
        if config.actor.kl_coef and not self._adapted:
            self.reference = copy.deepcopy(self.transformer)
        if self._adapted:
            lora.add_adapter(self.transformer, family, config.model.lora, seed=config.trainer.seed)
        else:
            self.transformer.requires_grad_(True)
        self._architecture = self.transformer.to_json_string()  # FSDP renames the class
        self.sharded, self.trains_shards = shards_weights(config), trains_shards(config)
        if self.sharded:
            family.dtype = DTYPES[actor_dtype(config)]
            device = distributed.local_device(config.trainer.device)
            for model in dict.fromkeys((self.transformer, self.reference)):
                fsdp.shard(model, repeated_blocks(model), device, family.dtype)
        self.parameters = {
            name: parameter
            for name, parameter in self.transformer.named_parameters()
            if parameter.requires_grad
        }
        self.version = 0
        self.average = None if self._decay is None else _in_float32(self.snapshot().tensors)

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    # In memory -------------------------------------------------------------------------------------------

    def snapshot(self) -> Weights:
        """A copy of the weights; each rank copies its shards."""
        tensors = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        return Weights(version=self.version, tensors=tensors)

    def for_engine(self) -> Weights:
        """The weights for an engine's `sync`: a copy, or the version alone if the engine shares them."""
        return Weights(version=self.version, tensors={}) if self._shared else self.snapshot()

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite the weights.

        Raises:
            BatchError: names or shapes differ.
        """
        if tensors.keys() != self.parameters.keys():
            odd = sorted(tensors.keys() ^ self.parameters.keys())
            raise BatchError(
                f"the weights belong to another adapter or model: {len(odd)} names differ, as {odd[0]}"
            )
        for name, parameter in self.parameters.items():
            if parameter.shape != tensors[name].shape:
                raise BatchError(
                    f"the weights belong to another adapter or model: {name} has shape "
                    f"{list(tensors[name].shape)} instead of {list(parameter.shape)}"
                )
            parameter.copy_(fsdp.shard_like(parameter, tensors[name]))

    @contextlib.contextmanager
    def swapped(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Use other weights for a while; the present ones come back bit for bit, after an exception too."""
        current = self.snapshot().tensors
        try:
            self.load(tensors)
            yield
        finally:
            self.load(current)

    def like_parameters(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by parameter name, each on its parameter's device and sharded as that is."""
        return {name: fsdp.shard_like(self.parameters[name], tensor) for name, tensor in tensors.items()}

    # The average -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def update_average(self) -> None:
        """Move the average towards the weights, after an optimizer update."""
        if self._decay is None or self.average is None:
            return
        for name, parameter in self.parameters.items():
            average = self.average[name]
            average.lerp_(parameter.to(average.dtype), 1 - self._decay)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Use the average of the weights, if one is kept."""
        with contextlib.nullcontext() if self.average is None else self.swapped(self.average):
            yield

    # For others ------------------------------------------------------------------------------------------

    def merged(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """See `lora.merged_weights`."""
        return lora.merged_weights(self.transformer, tensors)

    def exported(self) -> dict[str, Tensor]:
        """The tensors that `save` writes, averaged if there is an average, on the CPU.

        Trained shards are gathered on the main rank, for which every rank has to call.
        """
        with self.averaged():
            state = lora.adapter_state(self.transformer) if self._adapted else self.transformer.state_dict()
            return {name: value.to("cpu", copy=True) for name, value in fsdp.gathered(state).items()}

    def save(self, folder: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Write the trained weights for a diffusers pipeline.

        An adapter goes to files that diffusers and peft read, see `models.adapter_files.write_adapter`. Without an
        adapter the whole transformer goes to `transformer/`, which `from_pretrained` reads.

        Args:
            folder: the files' folder.
            tensors: from `exported`; None exports now.
        """
        tensors = self.exported() if tensors is None else tensors
        if self._adapted:
            of_base = {"base_model_name_or_path": self._base}
            metadata = lora.adapter_metadata(self.transformer) | of_base
            write_adapter(str(folder), tensors, metadata)
            return
        from huggingface_hub import save_torch_state_dict

        (folder / "transformer").mkdir(parents=True, exist_ok=True)
        (folder / "transformer" / self.transformer.config_name).write_text(self._architecture)
        save_torch_state_dict(dict(tensors), folder / "transformer", filename_pattern=FILE_PATTERN)


def _in_float32(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert to float32 or better: an average in bfloat16 would not move by thousandths."""
    return {
        name: tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for name, tensor in tensors.items()
    }
