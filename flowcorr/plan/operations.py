"""Operations that a device launched, by kind and size, and the time that they take on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from flowcorr.plan.devices import Gpu, Utilisation

Kind = Literal[
    "matmul",
    "attention",
    "attention_backward",
    "masked_attention",
    "masked_attention_backward",
    "memory",
]


class Operation(NamedTuple):
    """One operation.

    Attributes:
        kind: the kind of work, which says what share of the GPU's peak it reaches.
        half: whether it computes in bfloat16 or float16.
        flops: floating point operations; 0 of the kind `memory`.
        moved: bytes read and written.
    """

    kind: Kind
    half: bool
    flops: float
    moved: float

    def seconds(self, gpu: Gpu, utilisation: Utilisation) -> float:
        """The time on a GPU; arithmetic or memory limits it."""
        seconds = self.moved / (gpu.bandwidth * utilisation.bandwidth)
        if self.kind == "memory":
            return seconds
        peak = gpu.half if self.half else gpu.float32
        return max(seconds, self.flops / (peak * getattr(utilisation, self.kind)))


Operations = Mapping[Operation, float]
"""How often each operation runs."""


def busy_seconds(operations: Operations, gpu: Gpu, utilisation: Utilisation) -> float:
    """Seconds that a GPU computes these operations one after the other, without the host's time to launch them."""
    return sum(count * operation.seconds(gpu, utilisation) for operation, count in operations.items())
