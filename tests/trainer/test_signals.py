"""The first signal is noted, the second acts."""

import os
import signal
import threading

import pytest

from flowcorr.trainer.signals import StopSignals


def handlers():
    return signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_is_noted_and_hands_back(number):
    before, said = handlers(), []
    with StopSignals(said.append) as signals:
        assert handlers() != before
        assert signals.received is None
        os.kill(os.getpid(), number)
        assert signals.received == number
        assert handlers()[0] == before[0]
    assert said == [f"{number.name}: finishing this step and saving; again stops at once"]
    assert handlers() == before


def test_the_second_acts_as_it_did_before():
    with StopSignals(lambda text: None) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signals.received == signal.SIGTERM


def test_a_sigterm_that_comes_twice_at_once_is_one(monkeypatch):
    """As from a scheduler that signals both the launcher, which passes it on, and the rank."""
    seen, before = [], signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with StopSignals(lambda text: None) as signals:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            assert (signals.received, seen) == (signal.SIGTERM, [])
            monkeypatch.setattr("flowcorr.trainer.signals.ECHO", 0.0)
            os.kill(os.getpid(), signal.SIGTERM)
            assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_without_a_signal_nothing_changes():
    before = handlers()
    with StopSignals(print) as signals:
        pass
    assert (signals.received, handlers()) == (None, before)


def test_in_another_thread_signals_stay_the_callers():
    before, seen = handlers(), []

    def work():
        with StopSignals(print) as signals:
            seen.append((signals.received, handlers()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(None, before)]
