"""Methods of vllm-omni's workers that the trainer calls: load new weights, in three ways, and name the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from vllm.lora.request import LoRARequest
from vllm_omni.diffusion.attention.layer import Attention
from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension

IN_MEMORY = "/flowcorr/in-memory"  # vllm-omni wants an absolute path, even where nothing is read from it


def lora_request(adapter_id: int, path: str = IN_MEMORY) -> LoRARequest:
    """What names an adapter to vllm-omni, once `RolloutWorker.flowcorr_adapter` has loaded it."""
    return LoRARequest(lora_name=f"flowcorr-{adapter_id}", lora_int_id=adapter_id, lora_path=path)


class RolloutWorker(CustomPipelineWorkerExtension):
    """Methods added to vllm-omni's worker. Each returns a result, so that a missing answer is an error."""

    model_runner: Any
    lora_manager: Any

    def flowcorr_adapter(
        self,
        adapter_id: int,
        path: str | None,
        tensors: Mapping[str, Tensor] | None,
        config: Mapping[str, Any],
    ) -> dict[str, int]:
        """Load an adapter from `path`, or from `tensors` where that is None, and bind it to its layers.

        Returns:
            The number of layers that it is bound to; vllm-omni raises where a tensor finds no layer.
        """
        if path is None:
            self.model_runner.pipeline.adapters[adapter_id] = (dict(tensors or {}), dict(config))
        request = lora_request(adapter_id, path or IN_MEMORY)
        self.lora_manager.add_adapter(request)
        self.lora_manager.set_active_adapter(request)
        return {"layers": len(self.lora_manager._registered_adapters[adapter_id].loras)}

    def flowcorr_transformer(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Load some of the transformer's weights under diffusers' names.

        Returns:
            The number of tensors that were taken in.
        """
        named = ((f"transformer.{name}", tensor) for name, tensor in tensors.items())
        self.model_runner.pipeline.load_weights(named)
        return {"tensors": len(tensors)}

    def flowcorr_facts(self) -> dict[str, str]:
        """The attention backends that vllm-omni chose for the transformer, and its dtype."""
        transformer = self.model_runner.pipeline.transformer
        backends = {
            layer.attn_backend.get_name()
            for layer in transformer.modules()
            if isinstance(layer, Attention) and layer.attn_backend is not None
        }
        dtype = str(self.model_runner.pipeline.od_config.dtype).removeprefix("torch.")
        return {"attention": ", ".join(sorted(backends)) or "its own", "dtype": dtype}
