"""Counters, losses and clock of a phase: how fast it is, what of the device it uses, and how long it still takes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from overnight.batches.batch_size import sequences_before
from overnight.batches.lengths import expected_lengths
from overnight.checkpoint.reader import TrainingProgress
from overnight.config import Phase
from overnight.distributed.collectives import all_reduce_sum, all_reduce_sums
from overnight.distributed.world import World
from overnight.engine.loop import StepResult
from overnight.models.flops import Peak


@dataclass
class Spent:
    """What was done in a stretch of time."""

    seconds: float = 0.0
    waited: float = 0.0
    tokens: int = 0
    sequences: int = 0
    flops: float = 0.0

    def add(self, seconds: float, done: StepResult, flops: float) -> None:
        """Count a step."""
        self.seconds += seconds
        self.waited += done.waited
        self.tokens += done.tokens
        self.sequences += done.sequences
        self.flops += flops


def peak_of_all(peak: Peak | None, world: World) -> Peak | None:
    """Return the sum of the peaks of all processes' devices, or None where one of them is not known."""
    found = all_reduce_sums(
        {"flops": peak.flops if peak else 0.0, "unknown": float(peak is None), "measured": float(bool(peak and peak.measured))}, world
    )
    return None if found["unknown"] else Peak(found["flops"], measured=found["measured"] > 0)


class Throughput:
    """Counters, losses and clock of a phase: throughput since the last line, and the time that is left.

    Args:
        phases: of the run, by name.
        number: of the phase, from 0.
        flops: operations of a step, of all processes.
        peak: of the devices of all processes; None leaves out the share of it that is used.
        running: sum and number of targets of each loss since the last line of metrics, of the checkpoint that the phase resumes from.
    """

    def __init__(
        self,
        phases: Mapping[str, Phase],
        number: int,
        world: World | None = None,
        flops: Callable[[StepResult], float] = lambda done: 0.0,
        peak: Peak | None = None,
        running: dict[str, list[float]] | None = None,
    ) -> None:
        self._world = world or World()
        self._phases, self._flops = phases, flops
        self.peak = peak
        self._number = number
        self._exceeds = 0.0
        self._clock = time.perf_counter()
        self._unread: list[StepResult] = []
        self.running = running or {}
        self._since, self._all = Spent(), Spent()

    def note(self, done: StepResult, progress: TrainingProgress, wait: bool) -> None:
        """Count a step; its losses stay on the device until they are read, with all before them.

        Args:
            wait: read them now. The device has then done the step, so that the clock counts it.
        """
        self._unread.append(done)
        if wait:
            self.read()
        now = time.perf_counter()
        spent, self._clock = max(now - self._clock, 1e-9), now  # a coarse clock may stand still
        progress.step, progress.global_step = done.step, progress.global_step + 1
        progress.skipped += bool(done.skipped)
        progress.tokens += done.tokens
        progress.sequences += done.sequences
        progress.seconds += spent
        flops = self._flops(done)
        for spans in (self._since, self._all):
            spans.add(spent, done, flops)

    def read(self) -> None:
        """Add up the losses and targets that were not read yet, of all processes; what is not finite, of a step that was skipped, is left out."""
        if not self._unread:
            return
        names = list(self._unread[0].losses)
        read = all_reduce_sum(torch.stack([done.losses[name] for done in self._unread for name in names]), self._world).view(-1, len(names))
        for done, row in zip(self._unread, read.tolist(), strict=True):
            for name, loss in zip(names, row, strict=True):
                before, count = self.running.get(name, [0.0, 0])
                more = done.targets[name] if math.isfinite(loss) else 0
                self.running[name] = [before + (loss * more if more else 0.0), count + more]
        self._unread = []

    def take_losses(self) -> dict[str, list[float]]:
        """Return the sum and the number of targets of each loss since this was last called."""
        running, self.running = self.running, {}
        return running

    def pause(self) -> None:
        """Do not count the time since the last step."""
        self._clock = time.perf_counter()

    def rate(self) -> dict[str, float]:
        """Return tokens and sequences a second since the last call, the share of the peak that the matrix products took, and of the time waiting for a batch.

        There is no share of a peak that was never known, or that the matrix products exceed (:meth:`exceeds`), which then was none.
        """
        spent, self._since = self._since, Spent()
        rate = spent.flops / spent.seconds
        self._exceeds = rate if self.peak and rate > self.peak.flops else 0.0
        return {
            "tokens_per_s": round(spent.tokens / spent.seconds, 1),
            "sequences_per_s": round(spent.sequences / spent.seconds, 1),
            **({"mfu": round(rate / self.peak.flops, 4)} if self.peak and not self._exceeds else {}),
            "data_wait_fraction": round(spent.waited / spent.seconds, 4),
        }

    def exceeds(self) -> str:
        """Return what is wrong with the peak, if the matrix products of the last :meth:`rate` ran above it."""
        if not self._exceeds or not self.peak:
            return ""
        return (
            f"the matrix products ran at {Peak(self._exceeds, False).text()}, above the peak of {self.peak.text()}, so that is not the peak "
            "(was the machine busy while it was measured?): no MFU is reported from here on"
        )

    def left(self, progress: TrainingProgress, budget: float = 0.0) -> dict[str, float]:
        """Return seconds left in this phase and in each later one, at the same rate of tokens.

        Args:
            budget: what they are in all, where the steps are fitted to a time again and again; 0: what the steps take that are planned now.
        """
        phases = list(self._phases.items())[self._number :]
        _, phase = phases[0]
        per_token = self._all.seconds / self._all.sequences / expected_lengths(phase).mean
        whole = {name: sequences_before(p, p.steps) * expected_lengths(p).mean for name, p in phases}
        done = sequences_before(phase, progress.step) * expected_lengths(phase).mean
        left = {name: (tokens - done * (at == 0)) * per_token for at, (name, tokens) in enumerate(whole.items())}
        fits = budget / sum(left.values()) if budget > 0 and any(left.values()) else 1.0
        return {name: fits * seconds for name, seconds in left.items()}
