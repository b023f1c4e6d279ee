"""The half precision that numbers were stored in, as their values tell."""

from __future__ import annotations

import torch
from torch import Tensor

# The coarser first, as float16 holds most values of bfloat16. Eight times the largest rounding of each, relative, as
# velocities follow the latents, on the embedded model by up to 3 times their rounding.
_ROUNDING = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


def stored_in(values: Tensor) -> torch.dtype | None:
    """The half precision that represents all finite values exactly; None if neither does, or none is finite."""
    known = values[values.isfinite()]
    if not known.numel():
        return None
    return next((dtype for dtype in _ROUNDING if torch.equal(known.to(dtype).to(known.dtype), known)), None)


def rounding_of(values: Tensor, otherwise: float) -> float:
    """Relative rounding error of this precision, or `otherwise` if there is none."""
    dtype = stored_in(values)
    return otherwise if dtype is None else _ROUNDING[dtype]
