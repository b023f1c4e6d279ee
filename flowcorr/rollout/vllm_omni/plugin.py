"""vllm-omni's plugin entry point, which registers flowcorr's pipelines beside the built-in ones."""

from __future__ import annotations

from flowcorr.processes import inherit_mark

PIPELINES = {
    "sd3": "FlowcorrSD3Pipeline",
    "qwen_image": "FlowcorrQwenImagePipeline",
    "flux": "FlowcorrFluxPipeline",
    "flux2_klein": "FlowcorrFlux2KleinPipeline",
    "z_image": "FlowcorrZImagePipeline",
}
"""Model family -> its class in `pipelines`, registered in vllm-omni under the same name."""


def register() -> None:
    """Register the pipelines, and mark shared memory; vllm-omni calls this in each of its processes."""
    from vllm_omni.diffusion.registry import register_diffusion_model

    inherit_mark()
    for name in PIPELINES.values():
        register_diffusion_model(name, f"{__package__}.pipelines", name)
