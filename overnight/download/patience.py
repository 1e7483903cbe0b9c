"""Which failures are worth another try, and how long to wait before it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from overnight.display import duration, plural
from overnight.errors import DataError

LONGEST_WAIT = 900.0
"""Seconds that a server may ask for; one that wants more is left, to be asked again by the next command."""
_LONGEST_PAUSE = 60.0


class TemporaryError(Exception):
    """A failure that may be gone in a moment.

    Args:
        text: what failed, without any address.
        wait: seconds that the server asks for.
    """

    def __init__(self, text: str, wait: float = 0.0) -> None:
        super().__init__(text)
        self.wait = wait


class LostError(DataError):
    """A server does not answer, or nothing comes from it, however often it is asked."""


class StoppedError(Exception):
    """The command ends: what has come so far stays."""


class Attempts:
    """The tries of one file: exponential pauses with jitter, and never shorter than the server asks for.

    Args:
        retries: failures in a row, without a new byte between them, that are borne.
        stop: set when the command ends, which cuts every pause short.
        log: takes a line for the user.
    """

    def __init__(self, retries: int, stop: threading.Event, log: Callable[[str], None]) -> None:
        self._retries, self._stop, self._log = retries, stop, log
        self._failures = 0

    def failed(self, what: str, error: TemporaryError, progressed: bool, continues: bool) -> None:
        """Wait until the next try.

        Args:
            what: the address as it may be shown.
            error: what failed.
            progressed: whether there were new bytes since the last failure.
            continues: whether what has come is kept for the next try.

        Raises:
            LostError: when there were too many failures.
            DataError: when the server asks to come back much later.
            StoppedError: when the command ends.
        """
        self._failures = 1 if progressed else self._failures + 1
        if self._failures > self._retries:
            then = "what was downloaded is kept, and the same command continues" if continues else "the same command begins it anew"
            raise LostError(f"{what}: {error}, {plural(self._failures, 'time')}; {then}. Is there a network? --mirror names another place")
        if error.wait > LONGEST_WAIT:
            raise DataError(f"{what}: {error}, and asks to wait {duration(error.wait)}; after that the same command continues")
        pause = max(error.wait, min(_LONGEST_PAUSE, 2.0 ** (self._failures - 1)) * random.uniform(0.5, 1.0))
        self._log(f"{what}: {error}; trying again in {duration(max(pause, 1))} ({self._failures} of {self._retries})")
        if self._stop.wait(pause):
            raise StoppedError
