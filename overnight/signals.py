"""The signals that ask a run to stop: the step in hand ends, a checkpoint is written, and the exit code names the signal."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from overnight.errors import UserError

STOP_SIGNALS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGUSR1: "stopped by SIGUSR1"}
"""The signals, and how the run then says it. Schedulers send SIGUSR1 some time before they end a job."""


def stop_signals() -> set[signal.Signals]:
    """Return the signals that ask a run to stop, without those that are ignored.

    SIGHUP comes when a terminal or an ssh connection closes, and counts as SIGTERM; `nohup` has it ignored, and a script the Ctrl-C of what it starts
    in the background (`&`).
    """
    return {number for number in (*STOP_SIGNALS, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN}


class Interrupted(UserError):
    """A signal asked the run to stop.

    Args:
        number: of the signal.
        where: the step and the phase.
        then: what was kept.
    """

    def __init__(self, number: int, where: str, then: str = "a checkpoint is written, the same command continues") -> None:
        super().__init__(f"{STOP_SIGNALS[signal.Signals(number)]} at {where}; {then}")
        self.exit_code = 128 + number


class Signals:
    """Which signal came first; Ctrl-C after it stops at once."""

    received: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.SIGTERM if number == signal.SIGHUP else number
        elif number == signal.SIGINT:
            raise KeyboardInterrupt


@contextmanager
def catch_signals() -> Iterator[Signals]:
    """Within it, the signals that ask a run to stop are noted instead of obeyed, so that the step in hand can end and be saved."""
    signals = Signals()
    before = {number: signal.signal(number, signals) for number in stop_signals()}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def terminate_at_end_of(descriptor: int) -> None:
    """Have this process get SIGTERM when nobody holds the other end of a pipe any more, as after a kill -9 of the process that held it.

    Args:
        descriptor: of the end for reading, which nothing comes through.
    """

    def watch() -> None:
        with suppress(OSError):
            os.read(descriptor, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def note_signals(at_interrupt: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Within it no signal interrupts; those that come are handled at its end.

    For a wait that an exception would leave in disorder, as that for a thread.

    Args:
        at_interrupt: called at a Ctrl-C, so that the wait ends.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread is interrupted
        yield
        return
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if number == signal.SIGINT:
            at_interrupt()

    before = {number: signal.signal(number, note) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in received:
            signal.raise_signal(late)


@contextmanager
def hold_signals() -> Iterator[None]:
    """As :func:`note_signals`, for what must not be left half done, as the start of a process: one that is started in it begins with these signals blocked."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with note_signals():
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
        try:
            yield
        finally:
            # Before the handlers are put back: what was blocked is noted now, as what another thread has taken was.
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
