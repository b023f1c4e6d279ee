"""Requests whose answers do not arrive are sent again; the event loop's clock jumps, so that no test waits."""

import asyncio
import selectors

import pytest

from flowcorr.rollout.vllm_omni.patience import Patience, PatientSender


class JumpingSelector(selectors.SelectSelector):
    """Where the event loop would wait for a timer, its clock jumps to that time."""

    now = 0.0

    def select(self, timeout=None):
        assert timeout is not None, "the event loop would wait for ever"
        self.now += timeout
        return super().select(0)


def run(main):
    selector = JumpingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main), selector.now


class Engine:
    """Answers request `n` with `10 n`, `delays[attempt][n]` seconds after it was sent; None loses the answer."""

    def __init__(self, *delays):
        self.delays = delays
        self.sent = []
        self.cancelled = []

    async def answer(self, request):
        attempt = self.sent.count(request)
        self.sent.append(request)
        delay = self.delays[min(attempt, len(self.delays) - 1)][request]
        try:
            await asyncio.sleep(1e9 if delay is None else delay)
        except asyncio.CancelledError:
            self.cancelled.append(request)
            raise
        return 10 * request


PATIENCE = Patience(first=1000, least=100, factor=3, attempts=3)


def answers(engine, count, *, steps=10, before=(), patience=PATIENCE):
    """The answers to requests `0..count - 1`, after calls `before`, and the time when all are there."""

    async def main():
        sender = PatientSender(engine.answer, patience)
        for earlier in before:
            await sender.answers(range(earlier), steps=steps)
        return await sender.answers(range(count), steps=steps)

    return run(main())


def test_answers_come_in_the_order_of_their_requests():
    engine = Engine([3, 1, 2])
    assert answers(engine, 3) == ([0, 10, 20], 3)
    assert engine.sent == [0, 1, 2]


@pytest.mark.parametrize("lost", [[None, 1, 1], [None, None, 1], [1, 1, None]])
def test_only_requests_without_an_answer_are_sent_again(lost, caplog):
    engine = Engine(lost, [5, 5, 5])
    found, took = answers(engine, 3)
    assert found == [0, 10, 20]
    assert engine.sent[3:] == [request for request, delay in enumerate(lost) if delay is None]
    assert took == 1 + PATIENCE.least + 5
    assert "may have lost them: their requests are sent again (attempt 2 of 3)" in caplog.text


def test_a_slow_engine_keeps_its_requests_and_its_answers_count():
    engine = Engine([1, 150], [1, 1e6])
    assert answers(engine, 2) == ([0, 10], 150)
    assert engine.sent == [0, 1, 1]
    assert engine.cancelled == [1]  # the second attempt, once the first has its answer


def test_an_engine_without_any_answer_is_given_up_after_all_attempts():
    engine = Engine([1, None], [None, None])
    with pytest.raises(
        TimeoutError, match="1 of 2 answers did not arrive within 100 s, although.*sent 3 times"
    ):
        answers(engine, 2)
    assert engine.sent == [0, 1, 1, 1]
    assert sorted(engine.cancelled) == [1, 1, 1]


def test_a_request_that_fails_is_not_sent_again():
    class Failing(Engine):
        async def answer(self, request):
            await super().answer(request)
            raise RuntimeError("out of memory")

    engine = Failing([1, 5])
    with pytest.raises(RuntimeError, match="out of memory"):
        answers(engine, 2)
    assert engine.sent == [0, 1]


def test_before_the_first_sample_the_engine_has_longer():
    engine = Engine([999])
    assert answers(engine, 1) == ([0], 999)
    assert engine.sent == [0]


def test_a_probe_says_nothing_about_samples():
    engine = Engine([1], [999])

    async def main():
        sender = PatientSender(engine.answer, PATIENCE)
        await sender.answers([0], steps=0)
        await sender.answers([0], steps=10)

    run(main())
    assert engine.sent == [0, 0]


@pytest.mark.parametrize(("seconds", "sent_again"), [(770, 0), (790, 4)])
def test_patience_follows_the_work_that_is_missing(seconds, sent_again):
    """A sample takes 60 s, so that four take 240 s: three times that is granted after the latest answer, not 100 s."""
    engine = Engine([60] + [seconds] * 4)
    answers(engine, 5, before=(1,))
    assert len(engine.sent) == 1 + 5 + sent_again


def test_the_defaults_grant_minutes_whatever_the_work():
    patience = Patience()
    assert patience.seconds(10, None) >= 600
    assert patience.seconds(1, 1e-3) == 600
    assert patience.seconds(512 * 10, 1.0) == 3 * 5120
