"""The clocks of a run with a budget: the time of day, in which its end is given, and one that nobody sets, by which its time is measured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

# Difference between the clocks that is a jump of one of them (s).
_JUMP = 60.0


class Clock:
    """What the machine has."""

    def wall(self) -> float:
        """Return seconds since 1970, as the system believes them now."""
        return time.time()

    def seconds(self) -> float:
        """Return seconds from some moment on; where the system can, those count in which it was suspended."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


CLOCK = Clock()


def moment_text(moment: float | None = None) -> str:
    """Return a moment (seconds since 1970), or the present one, as ISO 8601 in local time."""
    return datetime.fromtimestamp(CLOCK.wall() if moment is None else moment).astimezone().isoformat(timespec="seconds")


def time_of_day(moment: float) -> str:
    """Return a moment as people say it within a day: 07:00; with the date where it is another day's."""
    then = datetime.fromtimestamp(moment)
    today, hours = datetime.fromtimestamp(CLOCK.wall()).date(), then.strftime("%H:%M")
    return hours if then.date() == today else f"{hours} on {then.date()}"


class RunClock:
    """The time of a run in one process.

    Args:
        deadline: by the time of day (seconds since 1970).
        now: the present moment, as :meth:`BudgetRecord.now` knows it.
    """

    def __init__(self, deadline: float, now: float) -> None:
        self._behind = now - CLOCK.seconds()
        self._end = deadline - self._behind
        self._apart = 0.0
        self.pauses: dict[str, float] = {}
        """How long each kind of pause between the steps took the last time (s)."""

    def left(self) -> float:
        """Return the time to the deadline (s)."""
        return self._end - CLOCK.seconds()

    def of_steps(self) -> float:
        """Return a clock that stands still in a pause (s)."""
        return CLOCK.seconds() - self._apart

    @contextmanager
    def pause(self, what: str) -> Iterator[None]:
        """Count the time of an evaluation or a checkpoint apart from that of the steps."""
        began = CLOCK.seconds()
        yield
        self.pauses[what] = CLOCK.seconds() - began
        self._apart += self.pauses[what]

    def scale(self, what: str, factor: float) -> None:
        """Expect a kind of pause to take so many times what it took."""
        if what in self.pauses:
            self.pauses[what] *= factor

    def jumped(self) -> float:
        """Return by how much the time of day was set forward (s), since this was last called; 0 where it was not.

        The clock that nobody sets is believed: the deadline stays the same moment, and is another time of day.
        """
        jump = CLOCK.wall() - CLOCK.seconds() - self._behind
        if abs(jump) < _JUMP:
            return 0.0
        self._behind += jump
        return jump
