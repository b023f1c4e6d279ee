"""vllm-omni's plugin entry point, which adds flowcorr's pipeline to the built-in ones."""

from __future__ import annotations

from flowcorr.processes import inherit_mark

PIPELINE = "FlowcorrPipeline"


def register() -> None:
    """Register the pipeline, and mark shared memory; vllm-omni calls this in each of its processes.

    The pipeline finds its model family by the name in its arguments, so that a family of the user's own needs no
    registration.
    """
    from vllm_omni.diffusion.registry import register_diffusion_model

    inherit_mark()
    register_diffusion_model(PIPELINE, f"{__package__}.pipeline", PIPELINE)
