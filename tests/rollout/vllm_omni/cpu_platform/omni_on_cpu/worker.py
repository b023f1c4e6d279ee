from vllm_omni.diffusion.data import AsyncDiffusionOutput, AsyncOutputKind
from vllm_omni.diffusion.ipc import pack_diffusion_output_shm
from vllm_omni.diffusion.worker import diffusion_worker


class CpuDiffusionWorker(diffusion_worker.DiffusionWorker):
    pass


def _async_output_loop(self):
    """The original waits on an event of `torch.accelerator`, which a CPU has not.

    vllm-omni has no public place for another loop, so this one uses the worker's own queue and counters.
    """
    while (item := self._async_output_queue.get()) is not None:
        output, output_id, _ = item
        error = None
        try:
            pack_diffusion_output_shm(output)
        except Exception as failure:
            output, error = None, str(failure)
        message = AsyncDiffusionOutput(
            kind=AsyncOutputKind.OUTPUT_READY, async_output_id=output_id, output=output, error=error
        )
        self._enqueue_result(message)
        with self._async_output_done:
            self._async_output_pending -= 1
            self._async_output_done.notify_all()


diffusion_worker.WorkerProc._async_output_loop = _async_output_loop
