"""The dispatcher in this process: the order of its tasks, and what ranks leave with it for each other."""

import asyncio
import contextlib
import sys
from dataclasses import replace

import pytest
from ray_tasks import Tasks

from flowcorr.workers.dispatcher import FlowcorrDispatcher, WorkerOptions

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("ray_cluster")]
OPTIONS = WorkerOptions(section="rollout", num_workers=1, resources={}, timeout=600.0)


async def report(dispatcher, reported):
    """Report events as the main rank does."""
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            reported.extend(await dispatcher.events(len(reported)))


def test_a_task_that_runs_again_comes_before_later_ones(ray_cluster, tmp_path):
    """With one worker, which dies in the first task; the main rank reports that before the task goes on."""

    async def run():
        dispatcher = FlowcorrDispatcher(OPTIONS, {}, sys.path)
        reporting = asyncio.create_task(report(dispatcher, reported))
        await dispatcher.start([ray_cluster.put(Tasks)])

        async def ask(method, *arguments):
            references, worker = await dispatcher.run(method, method, [ray_cluster.put(arguments)], 1)
            done.append((method, worker, await references[0]))

        await asyncio.gather(ask("die", str(tmp_path / "flag")), ask("pid"), ask("pair", "a"))
        places = await dispatcher.places()
        assert await dispatcher.num_busy() == 0
        await dispatcher.close()
        await dispatcher.closing()
        reporting.cancel()
        return places

    done, reported = [], []
    (place,) = asyncio.run(run())
    assert done == [("die", 0, place["pid"]), ("pid", 0, place["pid"]), ("pair", 0, ("a", ["a"]))]
    assert [event.kind for event in reported] == ["worker_lost", "shard_retried", "worker_restarted"]
    assert all(event.message for event in reported)


def test_a_retired_worker_is_not_replaced_and_its_task_runs_in_another(ray_cluster, tmp_path):
    """Two workers, of which the one at work is retired, by two ranks; the last one stays."""

    async def run():
        dispatcher = FlowcorrDispatcher(replace(OPTIONS, num_workers=2), {}, sys.path)
        reporting = asyncio.create_task(report(dispatcher, reported))
        await dispatcher.start([ray_cluster.put(Tasks)])
        arguments = [ray_cluster.put([str(tmp_path / "flag")])]
        task = asyncio.create_task(dispatcher.run("a wait", "wait_for", arguments, 1))
        while not await dispatcher.num_busy():
            await asyncio.sleep(0.01)
        (busy,) = (worker.number for worker in dispatcher._workers if worker.busy)
        ranks = await asyncio.gather(*(dispatcher.retire({busy: "faulty"}) for _ in range(2)))
        last = await dispatcher.retire({1 - busy: "faulty", busy: "faulty"})
        (tmp_path / "flag").touch()
        _, worker = await task
        places = await dispatcher.places()
        await dispatcher.close()
        reporting.cancel()
        return ranks, last, worker == 1 - busy, len(places)

    reported = []
    assert asyncio.run(run()) == ([True, True], False, True, 1)
    kinds = [event.kind for event in reported]
    assert sorted(kinds) == ["shard_retried", "worker_faulty", "worker_lost"]


def test_each_rank_gets_what_the_main_rank_shares_once():
    async def run():
        dispatcher = FlowcorrDispatcher(OPTIONS, {}, [])
        early = asyncio.create_task(dispatcher.shared(0, 2))
        await asyncio.sleep(0)
        await dispatcher.share(0, 3, ["weights"])
        assert await early == await dispatcher.shared(0, 1) == ["weights"]
        assert not dispatcher._shared  # no public call tells what it still holds

    asyncio.run(run())
