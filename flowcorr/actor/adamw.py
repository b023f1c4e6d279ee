"""AdamW on the trained weights, torch's or bitsandbytes' with moments in 8 bits, and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flowcorr.config.schema import ActorConfig
from flowcorr.distributed import fsdp
from flowcorr.errors import MissingExtraError

BLOCK = 256
"""Elements of a moment that share a scale in bitsandbytes."""
SMALLEST = 4096
"""Fewest elements of a weight, or of its shard, for moments in 8 bits; smaller ones keep 32 bits."""


class AdamW:
    """torch's AdamW; a weight's moments have its dtype.

    Args:
        parameters: the trained weights by name.
        actor: the learning rate and the other keys.

    Attributes:
        inner: the library's optimizer.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], actor: ActorConfig) -> None:
        self.parameters = parameters
        self.inner = torch.optim.AdamW(parameters.values(), **_settings(actor))

    def zero_grad(self) -> None:
        """Free the gradients."""
        self.inner.zero_grad(set_to_none=True)

    def step(self, learning_rate: float) -> None:
        """Take an optimizer step."""
        _step(self.inner, learning_rate)

    def state(self) -> dict[str, Tensor]:
        """The moments and step counts, named `<parameter>.<moment>`."""
        names = list(self.parameters)
        return {
            f"{names[index]}.{key}": value
            for index, entry in self.inner.state_dict()["state"].items()
            for key, value in entry.items()
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Put back the tensors of `state`."""
        entries: dict[int, dict[str, Any]] = {}
        places = {name: index for index, name in enumerate(self.parameters)}
        for key, value in state.items():
            name, moment = key.rsplit(".", 1)
            if moment != "step":
                value = fsdp.shard_like(self.parameters[name], value)
            entries.setdefault(places[name], {})[moment] = value.clone()
        groups = self.inner.state_dict()["param_groups"]
        self.inner.load_state_dict({"state": entries, "param_groups": groups})


class AdamW8bit:
    """AdamW of bitsandbytes: an element of a moment takes 8 bits, and a block has a float32 scale; arXiv:2110.02861.

    Each rank quantizes its own shards of sharded weights. Small weights, and small shards, keep moments in 32 bits.

    Args:
        parameters: the trained weights by name.
        actor: the learning rate and the other keys.

    Attributes:
        inner: the library's optimizer.

    Raises:
        MissingExtraError: bitsandbytes is not installed.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], actor: ActorConfig) -> None:
        try:
            from bitsandbytes import functional, optim
        except ImportError as error:
            raise MissingExtraError(
                "actor.optimizer=adamw_8bit", "bitsandbytes", "adam8bit", error
            ) from error
        self.parameters, self._functional = parameters, functional
        with torch.no_grad():  # otherwise a shard would not be a leaf
            shards = {name: fsdp.local_shard(parameter) for name, parameter in parameters.items()}
        # Of a weight with fewer rows than there are ranks, the last ranks hold nothing.
        self._shards = {name: shard for name, shard in shards.items() if shard.numel()}
        self.inner = optim.AdamW8bit(self._shards.values(), min_8bit_size=SMALLEST, **_settings(actor))

    def zero_grad(self) -> None:
        """Free the gradients."""
        for weight in (*self.parameters.values(), *self._shards.values()):
            weight.grad = None

    def step(self, learning_rate: float) -> None:
        """Take an optimizer step."""
        for name, shard in self._shards.items():
            parameter = self.parameters[name]
            shard.data = fsdp.local_shard(parameter.data)  # which FSDP may have replaced
            gradient = parameter.grad
            shard.grad = None if gradient is None else fsdp.local_shard(gradient)
        _step(self.inner, learning_rate)

    def state(self) -> dict[str, Tensor]:
        """The moments in float32 and the step counts, with the names and shapes of torch's `AdamW`.

        They come to host memory one after the other, since a GPU may have no room for all of them. Of sharded weights
        the main rank gets whole moments; every rank has to call.
        """
        if not self.inner.state:
            return {}
        tensors: dict[str, Tensor] = {}
        num_steps = max(entry["step"] for entry in self.inner.state.values())
        for name, parameter in self.parameters.items():
            tensors[f"{name}.step"] = torch.tensor(float(num_steps))
            for moment, number in _MOMENTS.items():
                whole = fsdp.as_shard_of(parameter, self._values(name, number))
                gathered = fsdp.gathered({f"{name}.{moment}": whole})
                tensors |= {key: value.cpu() for key, value in gathered.items()}
        return tensors

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Put back the tensors of `state`, quantized by the blocks of this rank's shards.

        With the shards that `state` was made from, these are the same values.
        """
        self.inner.state.clear()
        (group,) = self.inner.param_groups
        for place, (name, shard) in enumerate(self._shards.items()):
            if f"{name}.step" not in state:
                continue
            self.inner.init_state(group, shard, 0, place)
            entry = self.inner.state[shard]
            entry["step"] = int(state[f"{name}.step"])
            for moment, number in _MOMENTS.items():
                whole = fsdp.shard_like(self.parameters[name], state[f"{name}.{moment}"])
                values = fsdp.local_shard(whole).float()
                if entry[f"state{number}"].dtype == torch.uint8:
                    values, scales = _quantized(values, entry[f"qmap{number}"])
                    entry[f"absmax{number}"].copy_(scales)
                entry[f"state{number}"].copy_(values)

    def _values(self, name: str, number: int) -> Tensor:
        """A moment of this rank's shard of a weight, in float32."""
        if name not in self._shards:
            return fsdp.local_shard(self.parameters[name].detach()).float()  # it is empty
        entry = self.inner.state[self._shards[name]]
        values = entry[f"state{number}"]
        if values.dtype != torch.uint8:
            return values
        code = entry[f"qmap{number}"].clone()
        if code[0] < 0:
            # The lowest code is -.993. As -1 it lets `load_state` find the scale of a block whose largest element is
            # negative, and that element is 0.7 % off in the checkpoint.
            code[0] = -1
        absmax = entry[f"absmax{number}"]
        return self._functional.dequantize_blockwise(values, absmax=absmax, code=code, blocksize=BLOCK)


OPTIMIZERS: Mapping[str, type[AdamW] | type[AdamW8bit]] = {"adamw": AdamW, "adamw_8bit": AdamW8bit}
"""The values of `actor.optimizer`."""
_MOMENTS = {"exp_avg": 1, "exp_avg_sq": 2}
"""The moments by torch's names, with their numbers in bitsandbytes."""


def scheduled_lr(actor: ActorConfig, update: int, num_updates: int) -> float:
    """The learning rate of an update: a linear warm-up, then `lr_schedule` down to `lr_min_ratio` of it.

    Args:
        actor: the keys.
        update: number of optimizer updates before this one.
        num_updates: number of updates of the whole run.
    """
    if update < actor.warmup_steps:
        return actor.lr * (update + 1) / actor.warmup_steps
    progress = min(1.0, (update - actor.warmup_steps) / max(num_updates - actor.warmup_steps, 1))
    falls = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return actor.lr * (actor.lr_min_ratio + (1 - actor.lr_min_ratio) * falls[actor.lr_schedule])


def _quantized(values: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest codes of `values`, and the scale of each block.

    The kernel of bitsandbytes for CPUs is a table of finite resolution, and does not always find the nearest one.
    """
    blocks = nn.functional.pad(values.flatten(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    relative = blocks / torch.where(scales > 0, scales, 1.0)[:, None]
    nearest = torch.bucketize(relative, (code[1:] + code[:-1]) / 2, out_int32=True)
    return nearest.flatten()[: values.numel()].view_as(values).to(torch.uint8), scales


def _settings(actor: ActorConfig) -> dict[str, Any]:
    return {"lr": actor.lr, "betas": actor.betas, "eps": actor.eps, "weight_decay": actor.weight_decay}


def _step(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
