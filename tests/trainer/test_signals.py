"""The first signal is noted, and only a deliberate Ctrl-C after it stops the run at once."""

import ctypes
import itertools
import os
import signal
import threading
import time
from collections import deque

import pytest

from flowcorr.processes import STOP_SIGNALS, StopRequest
from flowcorr.trainer import signals as module
from flowcorr.trainer.signals import REPEAT, StopSignals
from tests.forks import exit_code

OTHERS = [number for number in STOP_SIGNALS if number != signal.SIGINT]


class Clock:
    """Seconds that pass between the signals that a run sees, as each of them asks once."""

    def __init__(self):
        self.now, self.gaps = 0.0, deque()

    def __call__(self):
        self.now += self.gaps.popleft() if self.gaps else 0.0
        return self.now


class Reports(list):
    """The reports of a run's signals; `of(count)` waits for that many."""

    def __call__(self, number, again):
        self.append((number, again))

    def of(self, count):
        end = time.monotonic() + 60
        while len(self) < count:
            assert time.monotonic() < end, f"there are {len(self)} reports: {self}"
            time.sleep(0.001)
        return list(self)


@pytest.fixture
def run():
    """Signals as a run gets them once it has begun, what they report, and their clock."""
    clock, reports = Clock(), Reports()
    with StopSignals(clock) as signals:
        signals.report_to(reports)
        yield signals, reports, clock


def handlers():
    return [signal.getsignal(number) for number in STOP_SIGNALS]


def send(number, clock, after=0.0, *, then_wait=False):
    """Send a signal to this process, `after` seconds of the run's clock, and wait until the run has seen it."""
    clock.gaps.append(after)
    os.kill(os.getpid(), number)
    while clock.gaps:
        time.sleep(0.001)
    if then_wait:
        threading.Event().wait(60)


def test_the_signals_are_those_of_terminals_and_schedulers():
    assert {number.name for number in STOP_SIGNALS} == {"SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGTERM"}


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_is_noted_and_reported(number):
    before, reports = handlers(), Reports()
    with StopSignals() as signals:
        assert all(handler not in before for handler in handlers())
        signals.report_to(reports)
        assert signals.received is None
        os.kill(os.getpid(), number)
        assert signals.received == number
        assert reports.of(1) == [(number, False)]
    assert handlers() == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_key_that_is_held_is_one_signal(run):
    signals, reports, clock = run
    for _ in range(50):
        send(signal.SIGINT, clock, after=0.05)
    assert (signals.received, reports.of(1)) == (signal.SIGINT, [(signal.SIGINT, False)])


@pytest.mark.parametrize("first", STOP_SIGNALS)
def test_a_deliberate_ctrl_c_stops_at_once(run, first):
    signals, reports, clock = run
    send(first, clock)
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT, clock, after=REPEAT, then_wait=True)
    assert signals.received == first
    assert reports.of(2) == [(first, False), (signal.SIGINT, True)]


def test_a_wait_that_begins_beside_the_signal_is_interrupted_too(run, monkeypatch):
    """A signal that comes just before a wait does not end it, as if it were lost."""
    _, _, clock = run
    kill, calls = signal.pthread_kill, []

    def lose_the_first(*args):
        calls.append(args)
        if len(calls) > 1:
            kill(*args)

    monkeypatch.setattr(signal, "pthread_kill", lose_the_first)
    send(signal.SIGTERM, clock)
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT, clock, after=REPEAT, then_wait=True)


def test_however_slow_the_machine_the_run_does_not_take_its_own_signal_for_another(monkeypatch):
    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(60)

    ended, told = [], threading.Event()
    monkeypatch.setattr(module, "_end_process", lambda: ended.append(None))
    with StopSignals(itertools.count(0, REPEAT).__next__) as signals:  # each signal comes later by REPEAT
        signals.report_to(lambda number, again: again and told.set())
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        assert told.wait(60)
    assert ended == []


def stop_twice():
    clock = Clock()
    with StopSignals(clock) as signals:
        signals.report_to(Reports())
        send(signal.SIGINT, clock)
        send(signal.SIGINT, clock, after=REPEAT, then_wait=True)


def test_after_a_run_nothing_of_it_is_left():
    before, threads = handlers(), set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        stop_twice()
    assert handlers() == before
    assert signal.set_wakeup_fd(-1) == -1
    assert set(threading.enumerate()) <= threads


@pytest.mark.parametrize("later", OTHERS)
def test_no_other_signal_stops_a_run_that_is_saving(run, later):
    """A launcher passes its own on, and a scheduler repeats itself before it kills."""
    signals, reports, clock = run
    send(signal.SIGINT, clock)
    send(later, clock, after=10 * REPEAT)
    assert (signals.received, reports.of(1)) == (signal.SIGINT, [(signal.SIGINT, False)])


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_before_the_first_step_a_signal_ends_the_run(number):
    before = handlers()
    with pytest.raises(StopRequest, match=number.name) as caught, StopSignals():
        send(number, Clock(), then_wait=True)
    assert caught.value.number == number
    assert isinstance(caught.value, KeyboardInterrupt)
    assert handlers() == before


def press(after):
    """Press Ctrl-C after some seconds, from a thread."""
    threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT)).start()


def hang_outside_python(presses):
    module.REPEAT, module.REACTION = 0.2, 0.2
    with StopSignals() as signals:
        signals.report_to(lambda number, again: None)
        for count in range(presses):
            press(0.5 * count)
        library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)  # for ever


def hang_while_ending():
    module.REPEAT = 0.2
    with StopSignals() as signals:
        signals.report_to(lambda number, again: None)
        for after in (0, 0.5, 1.0):
            press(after)
        try:
            threading.Event().wait(600)
        finally:
            threading.Event().wait(600)


def test_a_call_that_hangs_is_ended_by_a_deliberate_ctrl_c():
    assert exit_code(hang_outside_python, 2, timeout=60) == 128 + signal.SIGINT


def test_an_ending_that_hangs_is_ended_by_one_more():
    assert exit_code(hang_while_ending, timeout=60) == 128 + signal.SIGINT


def test_with_nohup_a_closed_terminal_is_no_signal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.received is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def end_a_fork(number):
    """End a child of a run by a signal; the run itself has to see none."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    reports = Reports()
    with StopSignals() as signals:
        signals.report_to(reports)
        child = os.fork()
        if child == 0:
            try:
                os.kill(os.getpid(), number)
                time.sleep(60)
            finally:
                os._exit(128 + signal.SIGINT)
        _, status = os.waitpid(child, 0)
        time.sleep(0.02)
        assert (signals.received, reports) == (None, [])
    expected = 128 + signal.SIGINT if number == signal.SIGINT else -number
    assert os.waitstatus_to_exitcode(status) == expected


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_forked_process_has_signals_of_its_own(number):
    """As the workers of a reward that uses `multiprocessing`, which ends them by SIGTERM."""
    assert exit_code(end_a_fork, number, timeout=60) == 0


def test_in_another_thread_signals_stay_the_callers():
    before, seen = handlers(), []

    def work():
        with StopSignals() as signals:
            seen.append((signals.received, handlers()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(None, before)]
