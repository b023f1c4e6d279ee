"""vllm-omni's executor without the race that loses batches. Only vllm-omni and `options` import this module.

`MultiprocDiffusionExecutor` of vllm-omni 0.30.0, 0.31.0rc1 and 0.32.0rc1 has two threads that handle the answer to a
batch, and a dictionary in which each looks for the other's entry:

1. The worker reports that it has computed batch 7, then sends the output.
2. `_result_pump` looks up `_batch_split_map[7]`, which says how to split the output by request. There is no entry yet,
   so the pump unpacks the output without holding the lock.
3. Meanwhile `execute_batch` looks for output 7 in `_completed_outputs`, finds none, and stores `_batch_split_map[7]`.
4. The pump has unpacked the output, and `_finish_output` stores it in `_completed_outputs[7]`.

Neither entry is read again, so the requests of batch 7 wait until a timeout. Unpacking takes longer for larger
answers: on an idle machine batches of 8 answers with 2,000 floats are rarely lost, with 300,000 floats almost always.

Source: https://github.com/vllm-project/vllm-omni/blob/v0.30.0/vllm_omni/diffusion/executor/multiproc_executor.py.
Pull request 6023 of vllm-omni handles an output that is stored before step 3, not one that is being unpacked.
`tests/benchmarks/lost_batches.py` counts the lost batches with and without this module.
"""

from __future__ import annotations

import logging
from importlib.metadata import version as installed_version
from typing import Any

from packaging.version import Version
from vllm_omni.diffusion.executor.multiproc_executor import MultiprocDiffusionExecutor

logger = logging.getLogger(__name__)

TESTED = Version("0.30.0"), Version("0.32.0rc1")
FIRST_FAULTY, LAST_FAULTY = TESTED[0], TESTED[-1]
REQUIRED_METHODS = ("_finish_output", "_deliver_batch_split")


class LosslessExecutor(MultiprocDiffusionExecutor):
    """A `MultiprocDiffusionExecutor` that splits every output by request, in any order of its threads."""

    def _finish_output(self, async_output_id: str, result: Any, exc: BaseException | None) -> None:
        """Split the output if `execute_batch` stored the batch's entry while the output was being unpacked.

        The caller holds `_futures_lock`, under which `execute_batch` looks for the output and stores the entry.
        """
        requests = self._batch_split_map.pop(async_output_id, None)
        if requests is None:
            super()._finish_output(async_output_id, result, exc)
        else:
            self._deliver_batch_split(requests, result, None if exc is None else str(exc))


def default_backend(version: str | None = None, executor: type = MultiprocDiffusionExecutor) -> str:
    """The value of `distributed_executor_backend` that starts worker processes and loses no batches.

    Args:
        version: the version of vllm-omni; None is the installed one.
        executor: vllm-omni's own executor of that version.
    """
    installed = Version(installed_version("vllm-omni") if version is None else version)
    if installed not in TESTED:
        logger.warning(
            "vllm-omni %s is installed, but flowcorr was tested with vllm-omni %s: log-probs, weight sync and answers "
            "may differ; run flowcorr doctor, or pip install vllm-omni==%s",
            installed,
            " and ".join(map(str, TESTED)),
            TESTED[0],
        )
    if not FIRST_FAULTY <= installed <= LAST_FAULTY:
        return "mp"
    missing = [name for name in REQUIRED_METHODS if not hasattr(executor, name)]
    if missing:
        logger.warning(
            "vllm-omni %s may lose answers, and a run then ends after rollout.timeout: its executor lacks %s, which "
            "flowcorr's remedy for vllm-omni %s needs",
            installed,
            ", ".join(missing),
            FIRST_FAULTY,
        )
        return "mp"
    return f"{LosslessExecutor.__module__}.{LosslessExecutor.__qualname__}"
