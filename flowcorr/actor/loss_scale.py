"""Loss scaling: float16 gradients underflow unless the loss is multiplied by a large factor first."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

START, GROWTH, PATIENCE = 2.0**16, 2.0, 2000  # torch.amp.GradScaler's


class LossScale:
    """The factor on the loss; gradients are divided by it before they are used.

    It is halved when a gradient overflows and doubled after `PATIENCE` good ones, as in `torch.amp.GradScaler`, which
    would need one more read from the device. The gradient of all ranks decides, so all ranks have one scale.

    Attributes:
        value: the factor; 1 without scaling.
    """

    def __init__(self, *, scales: bool) -> None:
        self._scales = scales
        self._good = 0
        self.value = START if scales else 1.0

    def observe(self, *, finite: bool) -> None:
        """Adapt the factor to a gradient of all ranks."""
        if not self._scales:
            return
        self._good = self._good + 1 if finite else 0
        if not finite:
            self.value /= GROWTH
        elif self._good == PATIENCE:
            self._good = 0
            self.value *= GROWTH

    def state(self) -> dict[str, Tensor]:
        """Its state, for a checkpoint."""
        return {"loss_scale": torch.tensor([self.value, float(self._good)])} if self._scales else {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Put back the tensors of `state`; a run that did not scale has none."""
        if self._scales and "loss_scale" in state:
            self.value, good = state["loss_scale"].tolist()
            self._good = int(good)
