"""Weights sharded over the ranks, and their gradients and optimizer state if they are trained: FSDP2, `fully_shard`.

Each rank holds a shard of every tensor, as a `DTensor`; an adapter stays whole on each rank. Arithmetic between
tensors of one layout needs no other rank; a forward pass and gathering a tensor need all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from flowcorr import distributed


def shard(
    transformer: nn.Module, blocks: Sequence[nn.Module], device: torch.device, compute_dtype: torch.dtype
) -> None:
    """Shard the weights over all ranks: each of the transformer's blocks by itself, then its other weights together.

    Where weights are frozen, the trained ones are an adapter's, which stay whole.

    A transformer in host memory goes to the device in these parts, so no device holds more than its shards and one of
    the parts. A block is gathered only while it computes. So are the other weights, unlike FSDP's default: after a
    forward pass without gradients they would stay gathered, and the next pass would not see weights that were loaded
    in between.

    Args:
        transformer: on the device, or in host memory.
        blocks: its blocks.
        device: where the shards go.
        compute_dtype: of gathered weights, and so of the transformer's arithmetic; its inputs have to have it.
            Gradients are reduced in float32 or better.
    """
    dtype = next(transformer.parameters()).dtype
    mesh = init_device_mesh(device.type, (distributed.world_size(),))
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == dtype else compute_dtype,
        reduce_dtype=torch.promote_types(dtype, torch.float32),
        # Timesteps and positions keep the precision that they have in a transformer of this dtype.
        cast_forward_inputs=False,
    )
    parameters = list(transformer.parameters())
    trained = {parameter for parameter in parameters if parameter.requires_grad}
    whole = trained if len(trained) < len(parameters) else set()
    for module in (*blocks, transformer):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True, ignored_params=whole)
    for parameter in whole:
        parameter.data = parameter.data.to(device)


def full_tensor(tensor: Tensor) -> Tensor:
    """A tensor gathered from its shards; every rank has to call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_like(like: Tensor, tensor: Tensor) -> Tensor:
    """`tensor` on the device of `like`, and sharded if that is; each rank brings the same whole tensor."""
    tensor = tensor.to(like.device)
    if isinstance(tensor, DTensor) or not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def as_shard_of(like: Tensor, shard: Tensor) -> Tensor:
    """This rank's `shard` as a tensor that is sharded as `like` is; the reverse of `local_shard`."""
    if not isinstance(like, DTensor):
        return shard
    return DTensor.from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def gathered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors in the main rank's memory, gathered one after the other so that no device holds two of them.

    Tensors that are not sharded come back as they are, on every rank.
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
