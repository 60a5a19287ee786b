# SPDX-License-Identifier: MIT
"""The interruption of calls that take too long, where the system supports it."""

import signal
import threading
import time

import pytest

from tilescale import alarm
from tilescale.alarm import raise_after


def test_what_runs_too_long_is_interrupted():
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(KeyError, match="too long"), raise_after(0.01, KeyError("too long")):
        while True:
            pass
    with raise_after(10, KeyError("soon enough")):
        pass
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (0, 0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_a_destructor_swallows_is_raised_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(alarm, "AGAIN_S", 0.05)

    class Slow:
        def __del__(self) -> None:
            time.sleep(60)

    with pytest.raises(KeyError, match="too long"), raise_after(0.05, KeyError("too long")):
        Slow()
        while True:
            pass


def test_another_thread_goes_on():
    done = threading.Event()

    def run() -> None:
        with raise_after(1e-6, KeyError("in the wrong thread")):
            done.set()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done.is_set()


def test_systems_without_the_signal_go_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(signal, "SIGALRM")
    with raise_after(1e-6, KeyError("nobody raises it")):
        pass
