"""Methods that the trainer calls in vllm-omni's workers: they load weights, and say which ones a worker holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from vllm.lora.request import LoRARequest
from vllm_omni.diffusion.attention.layer import Attention
from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension

from flowcorr.rollout.vllm_omni.adapter import digest

IN_MEMORY = "/flowcorr/in-memory"  # vllm-omni requires an absolute path, even for an adapter in memory


def lora_request(adapter_id: int, path: str = IN_MEMORY) -> LoRARequest:
    """The request by which vllm-omni selects an adapter that `RolloutWorker.flowcorr_adapter` has loaded."""
    return LoRARequest(lora_name=f"flowcorr-{adapter_id}", lora_int_id=adapter_id, lora_path=path)


class RolloutWorker(CustomPipelineWorkerExtension):
    """Methods added to vllm-omni's worker. Each returns a result, so that a missing answer counts as an error."""

    model_runner: Any
    lora_manager: Any

    def flowcorr_adapter(
        self,
        adapter_id: int,
        path: str | None,
        tensors: Mapping[str, Tensor] | None,
        config: Mapping[str, Any],
    ) -> dict[str, int]:
        """Load an adapter from `path`, or from `tensors` if `path` is None, and activate it.

        Returns:
            The number of layers with an adapter; vllm-omni raises if a tensor belongs to no layer.
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
            The number of loaded tensors.
        """
        named = ((f"transformer.{name}", tensor) for name, tensor in tensors.items())
        self.model_runner.pipeline.load_weights(named)
        return {"tensors": len(tensors)}

    def flowcorr_held_adapter(self) -> dict[str, list[int]]:
        """Digests of the adapter that the layers use now, see `adapter.differing`; empty if it is off."""
        held: dict[str, list[int]] = {}
        for layer, module in self.lora_manager._lora_modules.items():
            parent, _, own = layer.removeprefix("transformer.").rpartition(".")
            active = module._diffusion_lora_active_slices
            parts = (
                self.lora_manager._get_packed_sublayer_suffixes(own, len(active)) if len(active) > 1 else None
            )
            for place, name in enumerate(parts or [own] * len(active)):
                for side, stacked in (("lora_A", module.lora_a_stacked), ("lora_B", module.lora_b_stacked)):
                    if active[place]:
                        held.setdefault(f"{parent}.{name}.{side}", []).append(digest(stacked[place][0, 0]))
        return held

    def flowcorr_held_transformer(self) -> dict[str, int]:
        """The digest of all parameters of the transformer, in the engine's dtype."""
        dtype = self.model_runner.pipeline.od_config.dtype
        parameters = self.model_runner.pipeline.transformer.parameters()
        return {"digest": sum(digest(parameter.to(dtype)) for parameter in parameters)}

    def flowcorr_facts(self) -> dict[str, str]:
        """The transformer's attention backends, as vllm-omni chose them, and its dtype."""
        transformer = self.model_runner.pipeline.transformer
        backends = {
            layer.attn_backend.get_name()
            for layer in transformer.modules()
            if isinstance(layer, Attention) and layer.attn_backend is not None
        }
        dtype = str(self.model_runner.pipeline.od_config.dtype).removeprefix("torch.")
        return {"attention": ", ".join(sorted(backends)) or "its own", "dtype": dtype}
