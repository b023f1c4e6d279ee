"""Full fine-tuning with weights, gradients and optimizer state spread over the ranks: FSDP2, `fully_shard`.

A sharded tensor is a `DTensor`, of which each rank holds its part. Arithmetic between tensors of one layout needs no
other rank, while a forward pass needs them all, and so does making a tensor whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from flowcorr import distributed
from flowcorr.errors import BatchError

Result = TypeVar("Result")


def shard(transformer: nn.Module) -> None:
    """Spread the weights over all ranks, each block of the transformer by itself, and what is left together.

    A block is whole only while it computes. So is what is left, unlike FSDP's default: else a forward pass without
    gradients would leave it whole, and the next one would not see the weights that were loaded in between.
    """
    first = next(transformer.parameters())
    mesh = init_device_mesh(first.device.type, (distributed.world_size(),))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.promote_types(first.dtype, torch.float32))
    blocks = [
        block for child in transformer.children() if isinstance(child, nn.ModuleList) for block in child
    ]
    for module in (*blocks, transformer):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


def all_done(passes: Iterable[Callable[[], Result]]) -> list[Result]:
    """What each of some passes returns, where latents that diverge end none of them early.

    Each rank has to make as many forward passes through sharded weights as the others, which would wait for it.

    Raises:
        BatchError: the first that one of them raised, after the last.
    """
    results, errors = [], []
    for one in passes:
        try:
            results.append(one())
        except BatchError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results


def whole(tensor: Tensor) -> Tensor:
    """A tensor with the parts of all ranks; each of them has to ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def laid_out_as(like: Tensor, tensor: Tensor) -> Tensor:
    """`tensor` on the device of `like`, and sharded if that is; each rank brings the same whole tensor."""
    tensor = tensor.to(like.device)
    if isinstance(tensor, DTensor) or not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def collected(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors in the main rank's memory, one after the other so that no device holds two of them.

    What is not sharded is handed back as it is, and on every rank.
    """
    result = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            result[name] = tensor
            continue
        full = tensor.full_tensor()
        if distributed.is_main():
            result[name] = full.cpu()
    return result
