"""Whether the threads of a training get the cores that they compute on: all of a step wait for the one that does not."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from overnight.display import share

# Seconds between two looks, and the share of them that a thread may wait: those that load batches and write checkpoints take a few hundredths.
_EVERY, _MUCH = 20.0, 0.25


class CoreWaits:
    """How long the threads of this process were ready to run and had no core, as Linux counts it; elsewhere it is never long.

    Args:
        threads: folder of the system with one of each thread.
    """

    said = False
    """Whether this process has said it; it does so once, whatever it trains after another."""

    def __init__(self, threads: Path = Path("/proc/self/task")) -> None:
        self._threads = threads
        self._since, self._waited = time.monotonic(), self._waits()

    def look(self) -> str:
        """Return what is wrong where a thread waited for a quarter of the time since the last look; nothing within 20 s of it, and nothing twice."""
        seconds = time.monotonic() - self._since
        if CoreWaits.said or seconds < _EVERY:
            return ""
        longest = self._longest()
        if longest < _MUCH:
            return ""
        CoreWaits.said = True
        threads = torch.get_num_threads()
        fewer = f", or continue it with fewer than its {threads} threads (compute.threads)" if threads > 1 else ""
        return (
            f"warning: for {share(min(longest, 1.0))} of the last {seconds:.0f} s other programs kept a thread of this training from its core. "
            f"All threads of a step wait for the slowest, so training may be many times slower: leave the cores to it{fewer}"
        )

    def while_timed(self) -> str:
        """Return what is wrong with steps that were timed since this was made, where a thread waited for a quarter of that time."""
        longest = self._longest()
        if longest < _MUCH:
            return ""
        return (
            f"while steps were timed, other programs kept a thread from its core for {share(min(longest, 1.0))} of the time, so this machine seemed slower "
            "than it is, and the network was chosen for that speed"
        )

    def _longest(self) -> float:
        """Return the largest share of the time since the last look that a thread waited."""
        now, before, waited = time.monotonic(), self._waited, self._waits()
        seconds = max(now - self._since, 1e-9)
        self._since, self._waited = now, waited
        return max((waits - before.get(thread, 0.0) for thread, waits in waited.items()), default=0.0) / seconds

    def _waits(self) -> dict[str, float]:
        """Return how long each thread has waited so far (s)."""
        found: dict[str, float] = {}
        for file in self._threads.glob("*/schedstat"):
            try:
                found[file.parent.name] = int(file.read_text(encoding="ascii").split()[1]) / 1e9
            except (OSError, ValueError, IndexError):
                continue  # a thread that has ended
        return found
