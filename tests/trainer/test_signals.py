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
        assert handlers() == before
    assert said == [f"{number.name}: finishing this step and saving; again stops at once"]
    assert handlers() == before


def test_the_second_acts_as_it_did_before():
    with StopSignals(lambda text: None) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signals.received == signal.SIGTERM


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
