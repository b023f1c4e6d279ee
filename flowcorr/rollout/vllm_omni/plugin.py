"""vllm-omni's entry point: makes our pipelines known, under names of their own, beside the built-in ones."""

from __future__ import annotations

PIPELINES = {
    "sd3": "FlowcorrSD3Pipeline",
    "qwen_image": "FlowcorrQwenImagePipeline",
    "flux": "FlowcorrFluxPipeline",
    "flux2_klein": "FlowcorrFlux2KleinPipeline",
    "z_image": "FlowcorrZImagePipeline",
}
"""Model family -> its class in `pipelines`, which is also the name that vllm-omni knows it by."""


def register() -> None:
    """Called by vllm-omni in each of its processes."""
    from vllm_omni.diffusion.registry import register_diffusion_model

    for name in PIPELINES.values():
        register_diffusion_model(name, f"{__package__}.pipelines", name)
