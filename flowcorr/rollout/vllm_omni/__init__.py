"""Sampling with vllm-omni, in processes of its own: the trainer's half and the engine's half.

`engine` and `client` run in the trainer, `pipelines` and `worker` in vllm-omni's worker processes, and
`request` is what travels between them.
"""

from flowcorr.rollout.vllm_omni.engine import VllmOmniEngine

__all__ = ["VllmOmniEngine"]
