"""Signals that child processes are kept from, and the shared memory of processes that were killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from flowcorr.processes import (
    CHILDREN_IGNORE,
    STOP_SIGNALS,
    StopRequest,
    clear_shared_memory,
    signal_mask,
)

LEAVING = """
import multiprocessing, os, sys
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from flowcorr.processes import mark_shared_memory

mark_shared_memory()
memory, lock = SharedMemory(create=True, size=100), multiprocessing.get_context("spawn").Lock()
print(resource_tracker._resource_tracker._pid, memory.name, lock._semlock.name, flush=True)
sys.stdin.read()
"""


def blocked():
    return signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_mask_holds_inside_its_block_alone():
    before = blocked()
    with signal_mask(signal.SIG_BLOCK, CHILDREN_IGNORE):
        assert blocked() == before | set(CHILDREN_IGNORE)
        with signal_mask(signal.SIG_UNBLOCK, STOP_SIGNALS):
            assert not blocked() & set(STOP_SIGNALS)
    assert blocked() == before


def test_child_processes_keep_the_mask_and_end_by_sigterm():
    """Also a parent's death ends them, by SIGTERM."""
    code = "import sys; print('ready', flush=True); sys.stdin.read()"
    with signal_mask(signal.SIG_BLOCK, CHILDREN_IGNORE):
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    assert child.stdout.readline() == "ready\n"
    for number in CHILDREN_IGNORE:
        child.send_signal(number)
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGTERM


def test_a_stop_request_names_its_signal():
    assert (str(StopRequest(signal.SIGHUP)), StopRequest(signal.SIGHUP).number) == ("SIGHUP", signal.SIGHUP)


def shared():
    return {path.name for path in Path("/dev/shm").iterdir()}


def leaver():
    """A process with shared memory and a semaphore, that of its resource tracker, and the files of both."""
    process = subprocess.Popen(
        [sys.executable, "-c", LEAVING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    tracker, memory, semaphore = process.stdout.readline().split()
    return process, int(tracker), {memory, f"sem.{semaphore.removeprefix('/')}"}


def test_what_a_killed_process_left_is_cleared_and_nothing_else(caplog):
    living, _, kept = leaver()
    killed, tracker, left = leaver()
    try:
        os.kill(tracker, signal.SIGKILL)
        killed.kill()
        assert (
            left | kept <= shared()
        )  # nobody has waited for it yet: a dead process may stay a zombie for long
        os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
        clear_shared_memory()
        assert kept <= shared()
        assert not left & shared()
        assert "removed 2 pieces of shared memory" in caplog.text
    finally:
        for process in (killed, living):
            process.communicate("")
    assert not kept & shared()


INHERITING = """
import multiprocessing, os, sys
from multiprocessing.shared_memory import SharedMemory
from flowcorr.processes import inherit_mark, mark_shared_memory

def name():
    inherit_mark()
    memory = SharedMemory(create=True, size=1)
    memory.unlink()
    print(os.getpid(), memory.name, flush=True)

if __name__ == "__main__":
    for mark in (lambda: None, mark_shared_memory):
        mark()
        child = multiprocessing.get_context("spawn").Process(target=name)
        child.start()
        child.join()
"""


def test_a_child_has_a_mark_of_its_own_where_its_parent_has_one(tmp_path):
    """Others' vllm-omni engines load flowcorr's plugin too."""
    (tmp_path / "inheriting.py").write_text(INHERITING)
    done = subprocess.run(
        [sys.executable, "inheriting.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    (_, other), (pid, own) = (line.split() for line in done.stdout.splitlines())
    assert not other.startswith("flowcorr")
    assert own.split("-")[:1] + own.split("-")[2:3] == ["flowcorr", pid]


def test_names_of_others_are_left_alone(tmp_path):
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    namespace = os.stat("/proc/self/ns/pid").st_ino
    alive = f"flowcorr-{namespace}-{os.getpid()}-{stat[19]}-x"
    kept = {
        alive,
        f"sem.{alive}",
        f"flowcorr-{namespace + 1}-{os.getpid()}-1-x",
        "psm_1",
        "flowcorr-shallow-0",
        "a",
    }
    reused = f"flowcorr-{namespace}-{os.getpid()}-{int(stat[19]) + 1}-x"
    for name in (*kept, reused, f"sem.{reused}", f"flowcorr-{namespace}-{2**22 + 1}-1-x"):
        (tmp_path / name).touch()
    clear_shared_memory(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == kept
    clear_shared_memory(tmp_path / "nowhere")
