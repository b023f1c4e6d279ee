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
