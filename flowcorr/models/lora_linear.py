"""A linear layer with a LoRA adapter, arXiv:2106.09685."""

from __future__ import annotations

from peft.tuners.lora import Linear
from torch import Tensor
from torch.nn import functional


class LoraLinear(Linear):
    """peft's layer for one adapter, computing in the dtype of its input, as a rollout engine does.

    The adapter's matrices, their gradients and their updates keep their own dtype; peft would multiply in that one.
    Scaling and adding are part of the second product, so the output is written once and not three times.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.flatten(0, -2)
        outputs = self.base_layer(rows)
        if not self.disable_adapters:
            (adapter,) = self.active_adapters
            down, up = self.lora_A[adapter].weight, self.lora_B[adapter].weight
            inner = functional.linear(rows, down.to(rows.dtype))
            outputs.addmm_(inner, up.to(outputs.dtype).t(), alpha=self.scaling[adapter])
        return outputs.view(*inputs.shape[:-1], -1)
