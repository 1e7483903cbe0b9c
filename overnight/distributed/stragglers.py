"""The time that each process works, and which of them keeps the others waiting."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median_low

import torch

from overnight.distributed.collectives import all_gather, host_names
from overnight.distributed.world import World

# A process is slow at this multiple of the median's own work, if that is so many seconds, in so many lines of metrics one after another.
_SLOW, _EXCESS, _LINES = 1.5, 0.1, 3
# Lines before it is said again.
_AGAIN = 100


Timestamp = float | torch.cuda.Event
"""A moment in a device's work: the clock of a CPU (s), or an event in the stream of a GPU, which is read later."""


def timestamp(device: torch.device) -> Timestamp:
    """Return this moment in the work of a device, without waiting for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begun: Timestamp, ended: Timestamp) -> float:
    """Return seconds between two moments, the last of which is past."""
    if isinstance(begun, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
        return begun.elapsed_time(ended) / 1000
    assert isinstance(begun, float) and isinstance(ended, float)
    return ended - begun


@dataclass
class StragglerMonitor:
    """The own work of each process, without what it waits for the others, and which of them lags."""

    world: World
    waited: float = 0.0
    """Seconds that it waited for a batch since the last line, which no other process does for it."""
    timestamps: list[tuple[Timestamp, Timestamp]] = field(default_factory=list)
    """Begin and end of the rest of its own work, step by step since the last line."""
    lines: dict[int, int] = field(default_factory=dict)
    """Lines in a row at which a process was slow."""

    def note(self, waited: float, worked: tuple[Timestamp, Timestamp]) -> None:
        """Count a step."""
        if self.world.size > 1:
            self.waited += waited
            self.timestamps.append(worked)

    def line(self) -> tuple[dict[str, float], str]:
        """Compare the work since the last line; all processes must ask.

        Returns:
            `straggler_wait_fraction`, the share of the slowest one's work for which the others wait on average; and a sentence when one has become slow.
        """
        if self.world.size == 1:
            return {}, ""
        mine = self.waited + sum(seconds_between(*timestamps) for timestamps in self.timestamps)
        own = all_gather(torch.tensor(mine, dtype=torch.float64), self.world).tolist()
        self.waited, self.timestamps = 0.0, []
        middle, slowest = median_low(own), max(own)
        slow = [rank for rank, seconds in enumerate(own) if seconds > _SLOW * middle and seconds > middle + _EXCESS]
        self.lines = {rank: self.lines.get(rank, 0) + 1 for rank in slow}
        named = [rank for rank, count in self.lines.items() if count % _AGAIN == _LINES]
        share = {"straggler_wait_fraction": round(1 - sum(own) / len(own) / slowest, 4) if slowest else 0.0}
        if not named:
            return share, ""
        hosts = host_names(self.world)
        times = (f"process {rank} on {hosts[rank]} takes {own[rank] / middle:.1f} times as long" for rank in named)
        return share, f"{' and '.join(times)} as the median for its own work; the others wait"
