"""vllm-omni's plugin entry point, which registers flowcorr's pipelines beside the built-in ones."""

from __future__ import annotations

from flowcorr.models import FAMILIES
from flowcorr.processes import inherit_mark


def register() -> None:
    """Register the pipelines, and mark shared memory; vllm-omni calls this in each of its processes."""
    from vllm_omni.diffusion.registry import register_diffusion_model

    inherit_mark()
    for family in FAMILIES.values():
        if family.vllm_omni is not None:
            name = family.vllm_omni.pipeline
            register_diffusion_model(name, f"{__package__}.pipelines", name)
