"""The client of an engine: its errors say what the engine's log says."""

import asyncio
import multiprocessing
import os
import signal
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest

from flowcorr.errors import BackendError, MissingExtraError
from flowcorr.processes import CHILDREN_IGNORE, clear_shared_memory
from flowcorr.rollout.vllm_omni.client import OmniClient, import_vllm_omni


def test_without_vllm_omni_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm_omni", None)
    with pytest.raises(MissingExtraError, match=r"rollout\.name=vllm_omni.*flowcorr\[vllm-omni\]"):
        import_vllm_omni()


class StandIn:
    """Answers as vllm-omni does, but for the prompts `lost`, which get no answer, and `bad`, which fail."""

    async def generate(self, *, prompt, sampling_params_list):
        if prompt["prompt"] == "lost":
            await asyncio.Event().wait()
        if prompt["prompt"] == "bad":
            raise ValueError("no such prompt")
        yield "a part"
        yield (prompt["prompt"], sampling_params_list)

    async def collective_rpc(self, method, kwargs):
        if method == "lost":
            await asyncio.Event().wait()
        return [[{"method": method, **kwargs}]]

    async def check_health(self):
        pass

    def shutdown(self):
        pass


@pytest.fixture
def client(tmp_path, monkeypatch):
    monkeypatch.setattr(OmniClient, "_start", lambda *_: StandIn())
    client = OmniClient("model", {}, tmp_path / "engine.log", timeout=1e-3)
    yield client
    client.close()


def test_answers_come_in_the_order_of_the_requests(client):
    client.timeout = 60.0
    assert client.generate([({"prompt": name}, 7) for name in "abc"]) == [(name, [7]) for name in "abc"]
    assert client.rpc("load", path="x") == [{"method": "load", "path": "x"}]
    with pytest.raises(BackendError, match="request: ValueError: "):
        client.generate([({"prompt": name}, 7) for name in ("a", "bad", "lost")])


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (
            lambda client: client.generate([({"prompt": "a"}, 7), ({"prompt": "lost"}, 7)]),
            r" \d of 2 answers",
        ),
        (lambda client: client.rpc("lost"), "on lost: TimeoutError: "),
    ],
)
def test_an_answer_that_stays_away_is_an_error_at_the_timeout(client, call, named):
    with pytest.raises(BackendError, match=rf"{named}.* rollout\.timeout=0\.001 "):
        call(client)


def test_an_answer_that_comes_as_a_wait_for_it_ends_is_no_timeout(client, monkeypatch):
    class LateFuture(Future):
        def result(self, timeout=None):
            answer = super().result()
            if timeout is not None:
                raise TimeoutError
            return answer

    def run_late(coroutine, loop):
        late = LateFuture()
        start(coroutine, loop).add_done_callback(lambda done: late.set_result(done.result()))
        return late

    start, client.timeout = asyncio.run_coroutine_threadsafe, 60.0
    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "run_coroutine_threadsafe", run_late)
        assert client.rpc("load") == [{"method": "load"}]


def test_an_engine_whose_start_times_out_did_not_start(tmp_path, monkeypatch):
    async def create(model, options):
        raise TimeoutError("stage 0 gave no answer")

    monkeypatch.setattr("flowcorr.rollout.vllm_omni.client._create", create)
    with pytest.raises(BackendError, match="start: TimeoutError: stage 0 "):
        OmniClient("model", {}, tmp_path / "engine.log")


@pytest.mark.vllm_omni
@pytest.mark.filterwarnings("ignore")
def test_a_worker_that_fails_is_an_error(stack):
    with pytest.raises(BackendError, match=r"(?s)no_such_method.*its log:"):
        stack.engine.client.rpc("no_such_method")


@pytest.mark.vllm_omni
@pytest.mark.filterwarnings("ignore")
def test_an_engine_outlives_a_terminal_and_where_it_dies_that_is_an_error_and_it_can_be_closed(start):
    stack = start("sd3", backend="mp")
    assert stack.sample().num_samples == 8
    (worker,) = [child for child in multiprocessing.active_children() if _is_worker_of(stack, child)]
    for number in CHILDREN_IGNORE:
        os.kill(worker.pid, number)
    assert stack.sample().num_samples == 8
    for pid in (os.getpid(), worker.pid):
        names = _shared_memory_of(pid)
        assert {name.partition("flowcorr-")[0] for name in names} == {"", "sem."}
        clear_shared_memory()
        assert names == _shared_memory_of(pid)
    os.kill(worker.pid, signal.SIGKILL)
    for call in (stack.sample, stack.sync):
        with pytest.raises(BackendError, match=r"(?s)omni engine .*log:"):
            call()
    stack.engine.close()
    with pytest.raises(BackendError, match="is closed"):
        stack.sample()


def _shared_memory_of(pid):
    return {path.name for path in Path("/dev/shm").glob(f"*flowcorr-*-{pid}-*")}


def _is_worker_of(stack, child):
    # vllm-omni has no public way from an engine to its processes.
    executor = stack.engine.client._omni.engine.stage_pools[0].clients[0]._engine.executor
    return child.pid in {process.pid for process in executor._processes}


@pytest.mark.vllm_omni
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_the_engine_cannot_load_is_an_error(tmp_path):
    with pytest.raises(BackendError, match=r"not start: \w+: "):
        OmniClient(str(tmp_path), {"model_class_name": "FlowcorrPipeline"}, tmp_path / "engine.log")
