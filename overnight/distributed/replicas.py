"""Processes that should be alike: one whose numbers have drifted from the others', and one that is slower."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median_low

import torch
from torch import Tensor

from overnight.distributed.world import World, all_reduce_sum
from overnight.errors import TrainingError, first_names

# Integers as wide as an element.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# A process is slow at this multiple of the median's own work, if that is so many seconds, in so many lines of metrics one after another.
_SLOW, _EXCESS, _LINES = 1.5, 0.1, 3
# Lines before it is said again.
_AGAIN = 100


class ReplicaMismatch(TrainingError):
    """The processes do not hold the same numbers."""

    what = "processes differ"


def all_gather(row: Tensor, world: World) -> Tensor:
    """The rows of all processes (world, n), on the host."""
    rows = torch.zeros(world.size, *row.shape, dtype=row.dtype)
    rows[world.rank] = row.cpu()
    return all_reduce_sum(rows, world)


def checksums(tensors: Iterable[Tensor]) -> Tensor:
    """The bits of each tensor added up as integers that wrap around (n, int64): any one bit that differs shows. Waits for no device."""
    return torch.stack([t.detach().view(_BITS[t.element_size()]).sum(dtype=torch.int64) for t in tensors])


def compare_replicas(model: torch.nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
    """See that all processes hold the same bits in parameters, buffers and optimizer state. What FSDP2 cuts is nobody else's, and left out.

    Raises:
        Diverged: in all processes, naming those that differ and the first tensors.
    """
    named = dict(model.state_dict())
    for group in optimizer.param_groups:
        for name, p in zip(group["param_names"], group["params"], strict=True):
            named |= {f"{name}/{entry}": value for entry, value in optimizer.state[p].items()}
    whole = {name: value for name, value in named.items() if isinstance(value, Tensor) and not hasattr(value, "placements")}
    if not whole:
        return
    by_device: dict[torch.device, list[str]] = {}
    for name, value in whole.items():
        by_device.setdefault(value.device, []).append(name)
    names = [name for names in by_device.values() for name in names]
    sums = all_gather(torch.cat([checksums(whole[name] for name in names).cpu() for names in by_device.values()]), world)
    # What most of them hold is right, and at a tie what the first one holds.
    usual = sums.mode(0).values
    usual = torch.where((sums == usual).sum(0) * 2 > world.size, usual, sums[0])
    wrong = sums != usual
    if wrong.any():
        ranks = wrong.any(1).nonzero().flatten().tolist()
        tensors = first_names([names[at] for at in wrong.any(0).nonzero().flatten().tolist()])
        who = ("processes " if len(ranks) > 1 else "process ") + ", ".join(map(str, ranks))
        raise ReplicaMismatch(
            f"{who} of {world.size} ({', '.join(_hosts(world)[rank] for rank in ranks)}) no longer hold what the others hold: {tensors}"
        )


def _hosts(world: World) -> list[str]:
    """The names of the processes' machines (64 bytes of each)."""
    name = torch.zeros(64, dtype=torch.uint8)
    text = socket.gethostname().encode()[:64]
    name[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in all_gather(name, world).tolist()]


Timestamp = float | torch.cuda.Event
"""A moment in a device's work: the clock of a CPU (s), or an event in the stream of a GPU, which is read later."""


def timestamp(device: torch.device) -> Timestamp:
    """This moment in the work of a device, without waiting for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begun: Timestamp, ended: Timestamp) -> float:
    """Seconds between two moments, the last of which is past."""
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
    marks: list[tuple[Timestamp, Timestamp]] = field(default_factory=list)
    """Begin and end of the rest of its own work, step by step since the last line."""
    lines: dict[int, int] = field(default_factory=dict)
    """Lines in a row at which a process was slow."""

    def note(self, waited: float, worked: tuple[Timestamp, Timestamp]) -> None:
        """Count a step."""
        if self.world.size > 1:
            self.waited += waited
            self.marks.append(worked)

    def line(self) -> tuple[dict[str, float], str]:
        """Compare the work since the last line; all processes must ask.

        Returns:
            `wait_share`, the share of the slowest one's work for which the others wait on average; and a sentence when one has become slow.
        """
        if self.world.size == 1:
            return {}, ""
        mine = self.waited + sum(seconds_between(*marks) for marks in self.marks)
        own = all_gather(torch.tensor(mine, dtype=torch.float64), self.world).tolist()
        self.waited, self.marks = 0.0, []
        middle, slowest = median_low(own), max(own)
        slow = [rank for rank, seconds in enumerate(own) if seconds > _SLOW * middle and seconds > middle + _EXCESS]
        self.lines = {rank: self.lines.get(rank, 0) + 1 for rank in slow}
        told = [rank for rank, count in self.lines.items() if count % _AGAIN == _LINES]
        share = {"wait_share": round(1 - sum(own) / len(own) / slowest, 4) if slowest else 0.0}
        if not told:
            return share, ""
        hosts = _hosts(self.world)
        times = (f"process {rank} on {hosts[rank]} takes {own[rank] / middle:.1f} times as long" for rank in told)
        return share, f"{' and '.join(times)} as the median for its own work; the others wait"
