"""One of two ranks with a pool of workers is killed; the other one says what becomes of its tasks: RANK."""

import os
import signal
import sys
import time

from flowcorr import distributed
from flowcorr.errors import BackendError
from flowcorr.workers.dispatcher import WorkerOptions
from flowcorr.workers.pool import WorkerPool, ignore_event
from tests.ray_tasks import Tasks

if __name__ == "__main__":
    lost = int(sys.argv[1])
    distributed.start_ranks("cpu", timeout=600)
    options = WorkerOptions(section="rollout", num_workers=2, resources={"num_cpus": 0.1}, timeout=600.0)
    pool = WorkerPool(Tasks, options, address="local", on_event=ignore_event)
    distributed.gather(None, "the start")
    tasks = [pool.submit("a pause", "pid", 1.0) for _ in range(3)]
    tasks[0].result()
    if distributed.rank() == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        print("answers", len([task.result() for task in tasks]))
    except BackendError as error:
        print(f"after {time.monotonic() - begin:.1f} s", error)
    pool.close()
    sys.stdout.flush()
    os._exit(0)  # not to wait for the lost rank
