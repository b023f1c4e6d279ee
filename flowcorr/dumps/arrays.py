"""Values that a trainer hands over, as the tensors and numbers of a file."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowcorr.dumps import checks
from flowcorr.dumps.checks import Array
from flowcorr.errors import BatchError


def plain(name: str, value: Array | str) -> Any:
    """A number, nested lists of numbers, or a text."""
    return value if isinstance(value, str) else checks.as_tensor(name, value).tolist()


def numbered(group_ids: Array) -> Tensor:
    """The group of each sample as a number from 0 on; names are allowed."""
    try:
        names = group_ids.tolist() if isinstance(group_ids, Tensor) else group_ids
        return torch.as_tensor(np.unique(np.asarray(names), return_inverse=True)[1])
    except (TypeError, ValueError) as error:
        raise BatchError(
            f"group_ids cannot be told apart: {error}; give [B] numbers, or [B] names"
        ) from error


def numbers(name: str, values: Array) -> Tensor:
    """A tensor on the CPU: whole numbers as int64, others as float32, or float64 if given so."""
    tensor = checks.as_tensor(name, values)
    if checks.COLUMNS[name].whole:
        odd = tensor[tensor.frac() != 0] if tensor.is_floating_point() else tensor[:0]
        if len(odd):
            raise BatchError(f"{name} holds {odd[0].item():g}; it must hold whole numbers")
        return tensor.long()
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def fitted(name: str, values: Tensor, shape: torch.Size) -> Tensor:
    """`values` as `[B]` or `[B, T]`, as the field has it."""
    column = checks.COLUMNS[name]
    if column.per_sample:
        if values.dim() == 2 and values.shape[:1] == shape[:1]:
            first = values[:, :1]
            if bool(((values == first) | (values.isnan() & first.isnan())).all()):
                values = values[:, 0]
        expected = shape[:1]
    else:
        expected = shape
        if column.shared and values.shape == shape[1:]:
            values = values.expand(shape)
    if values.shape != expected:
        raise BatchError(
            f"{name} has shape {list(values.shape)}; with rollout_log_probs of shape {list(shape)} it must be "
            f"{list(expected)}" + (", one value a sample" if column.per_sample else "")
        )
    return values


def trained(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leave out the terms `[B, T]` that were not trained, where each sample trains steps of its own, as in DanceGRPO.

    These are NaN in the trainer's log-probs, and as many in each sample: values that are lost are not. Steps of the
    window that no sample trains stay, since another training step may score them.

    Args:
        tensors: as `fitted` returns them, by name.

    Returns:
        Tensors `[B, T']` of the trained terms with their `step_indices`, or the ones that were given.
    """
    rollout = tensors["rollout_log_probs"]
    scored = tensors.get("current_log_probs", tensors.get("old_log_probs", rollout))
    untrained = scored.isnan() & rollout.isfinite()
    counts = untrained.sum(1)
    left_out, window = int(counts[0]), rollout.shape[1]
    if not 0 < left_out < window or bool((counts != left_out).any() | (untrained == untrained[0]).all()):
        return tensors
    kept = (~untrained).nonzero()[:, 1].view(-1, window - left_out)
    places = torch.arange(window).expand(rollout.shape)
    by_term = {name for name in tensors if not checks.COLUMNS[name].per_sample}
    chosen = {name: tensors[name].gather(1, kept) for name in by_term}
    if not {"step_indices", "sigmas"} & by_term:
        chosen["step_indices"] = places.gather(1, kept)
    return tensors | chosen
