"""Every answer of a batch arrives, whichever of the executor's two threads comes first."""

import pickle
import queue
import re
import threading
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch

pytestmark = [pytest.mark.vllm_omni, pytest.mark.filterwarnings("ignore")]

SECONDS = 60  # a limit for what takes milliseconds, so that a fault fails the test and does not hang it
ORDERS = ("after the entry", "while it is unpacked", "before the entry")
"""When a batch's output arrives, as seen from the entry that says how to split it."""


class Messages(queue.Queue):
    """vllm-omni's message queue, within this process."""

    def dequeue(self, timeout):
        try:
            return pickle.loads(self.get(timeout=timeout))
        except queue.Empty:
            raise TimeoutError from None


def running(executor_class, worker, messages, stopped):
    """An executor whose threads share what the real ones share; `worker(request)` stands for the worker process.

    Only vllm-omni's private attributes show its race between threads: its constructor would start the processes.
    """
    executor = object.__new__(executor_class)
    executor.od_config = SimpleNamespace(step_execution=False, parallel_config=None)
    vars(executor).update(
        _closed=False, _is_failed=False, _rpc_id_counter=0, _rpc_id_lock=threading.Lock(),
        _rpc_futures={}, _output_futures={}, _completed_outputs={}, _batch_split_map={},
        _dropped_output_ids=OrderedDict(), _futures_lock=threading.RLock(), _pump_stop=stopped,
        _result_mq=messages, _sync_result_buffer=queue.Queue(), _broadcast_mq=SimpleNamespace(enqueue=worker),
    )  # fmt: skip
    return executor


def futures_of_a_batch(executor_class, monkeypatch, order, *, broken=False):
    """Let both threads handle a batch of two requests in the given order; the futures of its answers."""
    from vllm_omni.diffusion.data import AsyncDiffusionOutput, AsyncOutputKind, DiffusionOutput
    from vllm_omni.diffusion.executor import multiproc_executor
    from vllm_omni.diffusion.ipc import pack_diffusion_output_shm
    from vllm_omni.diffusion.worker.utils import BatchRunnerOutput, RunnerOutput

    messages, stopped = Messages(), threading.Event()
    outputs = [
        RunnerOutput(
            request_id=name, step_index=None, finished=True,
            result=DiffusionOutput(output={"payload": {"image": torch.full((300_000,), value)}}),
        )
        for name, value in (("a", 1.0), ("b", 2.0))
    ]  # fmt: skip
    batch = BatchRunnerOutput.from_list(outputs)
    pack_diffusion_output_shm(batch)
    ready = AsyncDiffusionOutput(kind=AsyncOutputKind.OUTPUT_READY, async_output_id="batch", output=batch)
    unpacking, may_unpack, pumped = threading.Event(), threading.Event(), threading.Event()
    unpack = multiproc_executor.unpack_diffusion_output_shm

    def unpack_on_demand(output):
        unpacking.set()
        assert may_unpack.wait(SECONDS)
        unpack(output)
        if broken:
            raise OSError("the shared memory is gone")

    class Ordered(executor_class):
        def collective_rpc(self, method, **options):
            answer = super().collective_rpc(method, **options)
            if order != "after the entry":
                messages.put(pickle.dumps(ready))
                assert unpacking.wait(SECONDS)
            if order == "before the entry":
                may_unpack.set()
                assert pumped.wait(SECONDS)
            return answer

        def _finish_output(self, async_output_id, result, exc):
            super()._finish_output(async_output_id, result, exc)
            if async_output_id == "batch":
                pumped.set()

    def worker(request):
        done = AsyncDiffusionOutput(
            kind=AsyncOutputKind.COMPUTE_DONE, rpc_id=request["rpc_id"], async_output_id="batch"
        )
        messages.put(pickle.dumps(done))

    monkeypatch.setattr(multiproc_executor, "unpack_diffusion_output_shm", unpack_on_demand)
    executor = running(Ordered, worker, messages, stopped)
    pump = threading.Thread(target=executor._result_pump, args=(messages,), daemon=True)
    pump.start()
    requests = [SimpleNamespace(request_id=name) for name in ("a", "b")]
    found = executor.execute_batch(SimpleNamespace(scheduled_new_reqs=requests))
    may_unpack.set()
    if order == "after the entry":
        messages.put(pickle.dumps(ready))
    stopped.set()
    pump.join(SECONDS)
    assert not pump.is_alive()
    return [executor.wait_output_ready(runner.async_output_id) for runner in found.runner_outputs]


@pytest.mark.parametrize("order", ORDERS)
def test_every_answer_of_a_batch_arrives(monkeypatch, order):
    from flowcorr.rollout.vllm_omni.executor import LosslessExecutor

    futures = futures_of_a_batch(LosslessExecutor, monkeypatch, order)
    images = [future.result(timeout=0).output["payload"]["image"] for future in futures]
    assert [float(image.mean()) for image in images] == [1.0, 2.0]


def test_an_output_that_cannot_be_read_is_an_error_of_its_requests(monkeypatch):
    from flowcorr.rollout.vllm_omni.executor import LosslessExecutor

    futures = futures_of_a_batch(LosslessExecutor, monkeypatch, "while it is unpacked", broken=True)
    assert [future.result(timeout=0).error for future in futures] == ["the shared memory is gone"] * 2


def test_vllm_omnis_own_executor_loses_a_batch_that_is_unpacked_too_late(monkeypatch):
    """The fault that `LosslessExecutor` mends: without it here, flowcorr needs that class no more."""
    from vllm_omni.diffusion.executor.multiproc_executor import MultiprocDiffusionExecutor

    found = {
        order: [
            future.done() for future in futures_of_a_batch(MultiprocDiffusionExecutor, monkeypatch, order)
        ]
        for order in ORDERS
    }
    assert found == {
        "after the entry": [True, True],
        "while it is unpacked": [False, False],
        "before the entry": [True, True],
    }


def test_the_executor_follows_the_version_and_its_methods(caplog):
    from flowcorr.rollout.vllm_omni.executor import default_backend

    lossless = "flowcorr.rollout.vllm_omni.executor.LosslessExecutor"
    caplog.clear()  # of what importing vllm-omni says
    assert default_backend() == lossless
    assert caplog.messages == []
    found = {version: default_backend(version) for version in ("0.28.0", "0.30.0", "0.32.0rc1", "0.32.0")}
    assert found == {"0.28.0": "mp", "0.30.0": lossless, "0.32.0rc1": lossless, "0.32.0": "mp"}
    warned = [re.findall(r"[\d.]{6}\w*", text.partition(":")[0]) for text in caplog.messages]
    assert warned == [[version, "0.30.0", "0.32.0rc1"] for version in ("0.28.0", "0.32.0")]

    class Other:
        def _finish_output(self):
            pass

    assert default_backend("0.30.0", Other) == "mp"
    assert "_deliver_batch_split" in caplog.text


def test_an_engine_without_an_executor_of_the_users_own_has_the_lossless_one(stack):
    from flowcorr.rollout.vllm_omni.executor import LosslessExecutor

    # vllm-omni has no public way from an engine to its executor.
    engine = stack.engine.client._omni.engine.stage_pools[0].clients[0]._engine
    assert type(engine.executor) is LosslessExecutor
