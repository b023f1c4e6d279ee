"""An executor of vllm-omni that loses answers, for tests of what flowcorr does then."""

from vllm_omni.diffusion.executor.multiproc_executor import MultiprocDiffusionExecutor


class LossyExecutor(MultiprocDiffusionExecutor):
    """Loses the answers to every other batch, from the second one on, where vllm-omni hands them out."""

    batches = 0

    def _deliver_batch_split(self, per_req_map, batch_output, error=None):
        self.batches += 1
        if self.batches % 2:
            super()._deliver_batch_split(per_req_map, batch_output, error)
