from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import PlatformEnum


class NativeCpuPlatform(CpuPlatform):
    """A CPU without vLLM's compiled operations: as an out-of-tree platform it gets the native ones."""

    _enum = PlatformEnum.OOT

    @classmethod
    def import_kernels(cls):
        return None
