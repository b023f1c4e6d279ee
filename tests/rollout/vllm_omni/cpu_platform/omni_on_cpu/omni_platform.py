import psutil
import torch
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

from omni_on_cpu.vllm_platform import NativeCpuPlatform


class OmniCpuPlatform(OmniPlatform, NativeCpuPlatform):
    """What the diffusion engine asks of a platform, answered for a CPU."""

    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_default_stage_config_path(cls):
        return "vllm_omni/deploy"

    @classmethod
    def get_diffusion_attn_backend_cls(cls, selected_backend, head_size, allow_trtllm_default=False):
        return "omni_on_cpu.attention.CpuSDPABackend"

    @classmethod
    def get_diffusion_worker_cls(cls):
        return "omni_on_cpu.worker.CpuDiffusionWorker"

    @classmethod
    def supports_torch_inductor(cls):
        return False

    @classmethod
    def get_torch_device(cls, local_rank=None):
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls):
        return 1

    @classmethod
    def get_device_version(cls):
        return None

    @classmethod
    def synchronize(cls):
        return None

    @classmethod
    def empty_cache(cls):
        return None

    @classmethod
    def get_free_memory(cls, device=None):
        return psutil.virtual_memory().available

    @classmethod
    def get_device_memory(cls, device=None):
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    # vLLM's platform would look these up in torch.cpu, which has none of them.

    @classmethod
    def reset_peak_memory_stats(cls, device=None):
        return None

    @classmethod
    def max_memory_allocated(cls, device=None):
        return 0

    @classmethod
    def max_memory_reserved(cls, device=None):
        return 0
