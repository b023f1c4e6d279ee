"""A linear layer with a LoRA adapter, arXiv:2106.09685."""

from __future__ import annotations

import torch
from peft.tuners.lora import Linear
from torch import Tensor
from torch.nn import functional


class LoraLinear(Linear):
    """peft's layer for one adapter, computing in the dtype of its input, as a rollout engine does.

    The adapter's matrices, their gradients and their updates keep their own dtype; peft would multiply in that one.
    Scaling and adding are part of the second product, so the output is written once and not three times.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        base = self.base_layer(inputs)
        if self.disable_adapters:
            return base
        (adapter,) = self.active_adapters
        down, up = (factor[adapter].weight.to(inputs.dtype) for factor in (self.lora_A, self.lora_B))
        inner = functional.linear(inputs, down)
        adapted = torch.addmm(base.flatten(0, -2), inner.flatten(0, -2), up.t(), alpha=self.scaling[adapter])
        return adapted.view(base.shape)
