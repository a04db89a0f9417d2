"""train.signals: when a signal ends the run at once, and when it waits."""

import os
import signal

import pytest

from train.signals import Interrupted, Signals


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_waits_while_held_and_a_second_one_does_not(number, exit_code):
    with Signals() as signals:
        with signals.held():
            os.kill(os.getpid(), number)
            assert signals.received is not None
            assert (signals.received.name, signals.received.exit_code) == (number.name, exit_code)
            with pytest.raises(Interrupted):
                os.kill(os.getpid(), number)
        with pytest.raises(Interrupted) as caught:
            os.kill(os.getpid(), number)
        assert caught.value.exit_code == exit_code


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Signals():
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) != before
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
