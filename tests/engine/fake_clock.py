"""A clock for budgets that only the steps of a training move."""

from __future__ import annotations

from overnight.engine import run_clock


class FakeClock(run_clock.Clock):
    """A clock that only the steps move."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.now, self.set_forward, self.step_seconds, self.steps, self.stop_at = 1000.0, 0.0, seconds, 0, -1
        self.slow: dict[int, float] = {}

    def wall(self) -> float:
        return 1_800_000_000 + self.now + self.set_forward

    def seconds(self) -> float:
        return self.now
