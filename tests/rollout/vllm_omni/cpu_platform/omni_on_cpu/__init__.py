"""vllm-omni's engine on a CPU, with torch's own operations alone: test material, too slow for anything else.

Plugins outrank the built-in platforms, so both entry points stand back where there is an accelerator.
"""


def vllm_platform() -> str | None:
    return _where_nothing_else_runs("omni_on_cpu.vllm_platform.NativeCpuPlatform")


def omni_platform() -> str | None:
    return _where_nothing_else_runs("omni_on_cpu.omni_platform.OmniCpuPlatform")


def _where_nothing_else_runs(platform: str) -> str | None:
    import torch

    return None if torch.accelerator.is_available() else platform
