"""What `budget` may say: a length of time, or the time of day at which everything is to be done."""

from __future__ import annotations

import re
from datetime import datetime, time, timedelta

_LENGTH = re.compile(
    r"(?:(?P<days>\d+(?:\.\d+)?) ?d(?:ays?)?)? ?(?:(?P<hours>\d+(?:\.\d+)?) ?h(?:ours?)?)? ?"
    r"(?:(?P<minutes>\d+(?:\.\d+)?) ?m(?:in|inutes?)?)? ?(?:(?P<seconds>\d+(?:\.\d+)?) ?s(?:ec|econds?)?)?"
)
_UNTIL = re.compile(r"until (\d{1,2}):(\d\d)")
_SECONDS = {"days": 86400.0, "hours": 3600.0, "minutes": 60.0, "seconds": 1.0}
# A date beyond has no place in some calendars, and no machine runs as long.
_LONGEST = 3650 * 86400.0
ALLOWED = "a time such as 8h, 45m or 1h30m, or 'until 07:00'"


def deadline_of(text: str, start: float) -> float:
    """Return when a budget that begins at `start` is over (seconds since 1970, both).

    `until` names the next such time of day: one that is past is tomorrow's.

    Raises:
        ValueError: when the text is no budget.
    """
    if until := _UNTIL.fullmatch(text.strip()):
        hour, minute = map(int, until.groups())
        if hour > 23 or minute > 59:
            raise ValueError(f"{text!r} is not a time of day; must be {ALLOWED}")
        day = datetime.fromtimestamp(start).date()
        # Local times of a day, not a day's seconds later: the clocks may change in the night. Where they go back a time comes twice, first
        # with fold 0; where they go forward it is skipped, and the later of the two readings is as long after the gap began.
        times = (datetime.combine(day + timedelta(days=later), time(hour, minute)) for later in (0, 1))
        twice = ((moment.timestamp(), moment.replace(fold=1).timestamp()) for moment in times)
        return next(moment for first, second in twice for moment in (first, max(first, second)) if moment > start)
    if not (length := _seconds(text)):
        raise ValueError(f"must be {ALLOWED}")
    if length > _LONGEST:
        raise ValueError(f"is longer than ten years; must be {ALLOWED}")
    return start + length


def is_length(text: str) -> bool:
    """Return whether a budget is a length of time, and not a time of day."""
    return _seconds(text) > 0


def length_of(text: str) -> float:
    """Return a length of time (s), above 0.

    Raises:
        ValueError: when the text is none.
    """
    if not (length := _seconds(text)):
        raise ValueError("must be a time such as 30m, 90s or 1h30m")
    return length


def _seconds(text: str) -> float:
    """Return a length of time (s); 0 where the text is none."""
    found = _LENGTH.fullmatch(text.strip())
    return sum(float(number) * _SECONDS[unit] for unit, number in found.groupdict().items() if number) if found else 0.0
