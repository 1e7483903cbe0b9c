"""Plain lines that say how far a stage is."""

from __future__ import annotations

import time
from collections.abc import Callable

_SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """One stage: how much is done, how fast, how long is left."""

    def __init__(self, stage: str, log: Callable[[str], None], unit: str = "MB") -> None:
        self._stage, self._log, self._unit = stage, log, unit
        self._began = self._last = time.monotonic()

    def update(self, done: float, fraction: float = 0.0) -> None:
        """Log it, if the last line is old enough.

        Args:
            done: work done, in millionths of the unit.
            fraction: share of the whole stage, 0 when unknown.
        """
        now = time.monotonic()
        if now - self._last < _SECONDS_BETWEEN_LINES:
            return
        self._last = now
        seconds = now - self._began
        # All may be read, and what was read last still be under way.
        left = f", {seconds * (1 - fraction) / fraction:.0f} s left" if 0 < fraction < 1 else ""
        self._log(f"{self._stage}: {done / 1e6:,.0f} {self._unit}, {done / 1e6 / seconds:,.1f} {self._unit}/s{left}")

    def end(self, done: float, result: str) -> None:
        """Log what came out, once."""
        seconds = time.monotonic() - self._began
        self._log(f"{self._stage}: {result} in {seconds:.1f} s ({done / 1e6 / max(seconds, 1e-3):,.1f} {self._unit}/s)")
