"""Signals that wait while something must not be left half done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from overnight.signals import STOP_SIGNALS, catch_signals, hold_signals

SHOW_MASK = "import signal; print(*sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"


class Stop(Exception):
    pass


@pytest.fixture
def stopping() -> object:
    """Signals that raise."""

    def stop(number: int, frame: object) -> None:
        raise Stop(number)

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_that_is_held_is_handled_at_the_end(stopping: None, number: int) -> None:
    done = []
    with pytest.raises(Stop), hold_signals():
        os.kill(os.getpid(), number)
        done.append(number)
    assert done == [number]
    with pytest.raises(Stop):
        os.kill(os.getpid(), number)


def test_a_signal_that_another_thread_takes_is_held_too(stopping: None) -> None:
    done = []
    with pytest.raises(Stop), hold_signals():
        # Begun here it would inherit the mask, and take none.
        (thread := threading.Thread(target=_take)).start()
        thread.join()
        done.append(True)
    assert done == [True]


def _take() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    signal.raise_signal(signal.SIGTERM)


def test_without_a_signal_nothing_is_left_changed(stopping: None) -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with hold_signals():
        pass
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_process_that_is_started_meanwhile_begins_with_the_signals_blocked() -> None:
    with hold_signals():
        blocked = subprocess.run([sys.executable, "-c", SHOW_MASK], capture_output=True, text=True, check=True).stdout.split()
    assert blocked == [str(int(number)) for number in sorted({*STOP_SIGNALS, signal.SIGHUP})]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_what_nohup_or_a_script_in_the_background_ignores_stays_ignored(number: int) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with catch_signals() as signals, hold_signals():
            os.kill(os.getpid(), number)
        assert signals.received is None and signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_another_thread_is_never_interrupted_and_holds_nothing() -> None:
    masks: list[set[int]] = []

    def hold() -> None:
        with hold_signals():
            masks.append(set(signal.pthread_sigmask(signal.SIG_BLOCK, [])))

    (thread := threading.Thread(target=hold)).start()
    thread.join()
    assert masks == [set()]
