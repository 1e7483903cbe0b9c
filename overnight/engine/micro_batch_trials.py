"""The micro-batch of a phase, found by trial where the recipe leaves it open: the largest that fits, on a CPU the smallest that is as fast as any."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from overnight.batches.batch_size import micro_batch_sizes, usual_micro_batch, usual_on_gpu
from overnight.batches.loader import Samples
from overnight.batches.packing import Batch
from overnight.batches.streams import ByteBatch, Streams
from overnight.config import Run
from overnight.distributed.collectives import ErrorOnOtherRank, all_reduce_max
from overnight.distributed.world import World
from overnight.distributed.wrap import gradient_sync
from overnight.engine.loop import Objective
from overnight.engine.memory import (
    HOW_TO_SAVE_MEMORY,
    MemoryBudget,
    OutOfMemory,
    first_line,
    is_out_of_memory,
    memory_budget,
    peak,
    release,
    reset_peak,
)
from overnight.engine.workload import compiles_layers
from overnight.models.weight_copies import kept_copies
from overnight.optim.offload import offloaded
from overnight.optim.state import local

_SLOWER = 0.97
"""Share of the best throughput at which, on a CPU, a smaller micro-batch is as good."""
_FEW = 4
"""Sequences of which a second trial may be made in any case."""
_TURNS: int = 3
"""Times that two micro-batches take turns, to compare their speed."""


class Trial(NamedTuple):
    """Forward and backward at a micro-batch."""

    micro_batch: int
    peak: int
    """Memory of the process at most (bytes)."""
    seconds: float
    """Of one such pass."""

    @property
    def rate(self) -> float:
        """Sequences a second."""
        return self.micro_batch / self.seconds


def search(
    choices: Sequence[int],
    measure: Callable[[int], Trial | None],
    space: MemoryBudget,
    time_passes: Callable[[int, int], float] | None = None,
    world: World | None = None,
    first: int = 1,
) -> tuple[int, list[Trial]]:
    """Return the largest micro-batch that fits; with `time_passes` the smallest of those whose throughput is near the best.

    It doubles, and then looks at what lies between the last that fits and the first that does not. None but the first two, if they are small,
    is tried whose memory would be over the limit, on a line through those before.

    Args:
        choices: from the smallest.
        measure: tries one; None where memory ran out.
        space: memory now and at most.
        time_passes: seconds of so many passes of a micro-batch that was tried; only where speed decides.
        world: all processes must call it, and get the same.
        first: where it begins, at the next smaller choice, for all with the least of theirs; where that does not fit, it halves until one does.

    Returns:
        the micro-batch, and all that were tried.

    Raises:
        OutOfMemory: when the smallest does not fit.
    """
    world = world or World()
    tried: list[Trial] = []
    first = -all_reduce_max(-first, world)  # of a smaller GPU, or one that others use, it is less

    def fits(count: int) -> bool:
        over = expected(tried, count, space.used) > space.limit
        if all_reduce_max(int(over), world):
            return False
        found = measure(count)
        if all_reduce_max(int(found is None or found.peak > space.limit), world):
            return False
        assert found is not None
        # The slowest process makes all wait, and all must see the same.
        tried.append(found._replace(seconds=all_reduce_max(round(found.seconds * 1e9), world) / 1e9))
        return True

    refused = _begin([count for count in choices if count <= first] or choices[:1], fits) or choices[-1] + 1
    for count in choices if refused > choices[-1] else []:
        if count < min(2 * tried[-1].micro_batch, choices[-1]) or count == tried[-1].micro_batch:
            continue
        if not fits(count):
            refused = count
            break
        if time_passes and _levels_off(tried):
            break
    if not tried:
        least = f"the smallest micro-batch, {choices[0]}, does not fit into the {space.limit / 1e9:.2f} GB that may be used"
        raise OutOfMemory(f"{least}; {HOW_TO_SAVE_MEMORY}") if world.main else ErrorOnOtherRank(OutOfMemory.exit_code)
    if refused <= choices[-1]:
        between = [count for count in choices if tried[-1].micro_batch < count < refused]
        any(fits(count) for count in reversed(between))  # up to the first that does
    return _smallest_as_fast(tried, time_passes, world) if time_passes else tried[-1].micro_batch, tried


def _smallest_as_fast(tried: Sequence[Trial], time_passes: Callable[[int, int], float], world: World) -> int:
    """Return the smallest micro-batch whose throughput is near the best, or the largest if it is faster when the two take turns.

    The trials follow each other, and a machine that others use can have been fast in an early one and slow in all later ones.
    """
    best, large = max(trial.rate for trial in tried), tried[-1].micro_batch
    small = next(trial.micro_batch for trial in tried if trial.rate >= _SLOWER * best)
    ratios = []
    for turn in range(_TURNS if small < large else 0):
        order = (large, small) if turn % 2 else (small, large)
        rates = {}
        for count in order:
            passes = large // count
            seconds = all_reduce_max(round(time_passes(count, passes) * 1e9), world) / 1e9
            rates[count] = passes * count / seconds
        ratios.append(rates[small] / rates[large])
    return large if ratios and statistics.median(ratios) < _SLOWER else small


def _begin(choices: Sequence[int], fits: Callable[[int], bool]) -> int:
    """Try the last choice, and halve until one fits; return the smallest that did not, 0 where the last did."""
    refused = 0
    while choices and not fits(choices[-1]):
        refused = choices[-1]
        choices = [count for count in choices if 2 * count <= refused] or choices[:-1][:1]
    return refused


def expected(tried: Sequence[Trial], count: int, used: int) -> float:
    """Return memory that a micro-batch will take (bytes): on a line through the smallest and the largest that were tried.

    After one trial it is a line from what is used now, which takes gradients and libraries for activations too; few sequences are as the first.
    """
    if not tried:
        return 0.0
    if len(tried) == 1 and count <= _FEW:
        return tried[0].peak
    last = tried[-1]
    before = (0, used) if len(tried) == 1 else (tried[0].micro_batch, tried[0].peak)
    return last.peak + (last.peak - before[1]) / (last.micro_batch - before[0]) * (count - last.micro_batch)


def _levels_off(tried: Sequence[Trial]) -> bool:
    """Return whether the last two bring nothing over those before them."""
    before = [trial.rate for trial in tried[:-2]]
    return bool(before) and max(trial.rate for trial in tried[-2:]) < max(before) / _SLOWER


@dataclass(frozen=True)
class BatchSizeFinder:
    """What trials of a phase need."""

    run: Run
    model: nn.Module
    objective: Objective
    samples: Samples | Streams
    dtype: torch.dtype
    world: World

    def micro_batch(self, optimizer_bytes: int) -> tuple[int, str]:
        """Return the micro-batch for the phase, and a sentence on it; parameters, gradients and generators are left as they were.

        Args:
            optimizer_bytes: memory that the state of the optimizer will take besides (bytes).

        Raises:
            OutOfMemory: where one sequence does not fit.
        """
        device, world = self.world.device, self.world
        choices = micro_batch_sizes(self.samples.phase, world.size)
        if self.run.logging.grad_noise_every:  # which is seen between micro-batches
            choices = choices[:-1]
        if all_reduce_max(int(not reset_peak(device)), world):
            found = max(size for size in choices if size <= usual_micro_batch(self.samples.phase))
            return found, f"micro-batch {found}, the usual one: none was tried, since this system does not report a process's memory"
        space, was_training = memory_budget(device), self.model.training
        space = space._replace(limit=space.limit - optimizer_bytes)
        self.model.train()
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            found, tried = search(choices, self.measure, space, self.time_passes if device.type == "cpu" else None, world, self._first())
        self.model.train(was_training)
        if compiles_layers(self.run, device):
            torch._dynamo.reset()
        (chosen,) = (trial for trial in tried if trial.micro_batch == found)
        return found, (
            f"micro-batch {found} of {', '.join(str(trial.micro_batch) for trial in tried)} that were tried: {chosen.rate:,.1f} sequences/s, "
            f"{chosen.peak / 1e9:.2f} GB and {optimizer_bytes / 1e9:.2f} GB for the optimizer, {(space.limit - chosen.peak) / 1e9:.2f} GB below "
            f"the limit of {(space.limit + optimizer_bytes) / 1e9:.2f} GB"
        )

    def _first(self) -> int:
        """Return the micro-batch with which trials begin: the smallest, or on a GPU where each takes a compilation one that most have memory for.

        With FSDP a process that has no memory leaves the others waiting, so that it is not risked.
        """
        device = self.world.device
        if device.type == "cpu" or self._sharded or not compiles_layers(self.run, device):
            return 1
        return usual_on_gpu(self.run.model, self.samples.phase, memory_budget(device).limit, self.dtype.itemsize)

    @property
    def _sharded(self) -> bool:
        return hasattr(self.objective, "set_requires_gradient_sync")

    def measure(self, count: int) -> Trial | None:
        """Time forward and backward of a micro-batch: twice of full length, for its memory also beside gradients, then at least twice of average length, for its speed.

        Raises:
            OutOfMemory: where the others wait for this process in the middle of a pass, and cannot be informed.
        """
        device, fsdp = self.world.device, self._sharded
        if compiles_layers(self.run, device):
            # Else the shapes that are tried would use up the number of those that are compiled at all.
            torch._dynamo.reset()
        longest, took, failed = self.samples.longest(count), list[float](), ""
        # A GPU takes what fits, whatever its speed, and compiles each shape.
        average = self.samples.average(count) if device.type == "cpu" else longest
        reset_peak(device)
        try:
            # As many in all processes, which may wait for each other.
            for number, batch in enumerate([longest] * 2 + [average] * max(2, 16 // count)):
                took.append(self._pass(batch, last=fsdp and number > 0))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            failed = first_line(error)
        most = peak(device)
        release(self.model, device)
        if failed and fsdp:
            raise OutOfMemory(
                f"process {self.world.rank} ran out of memory at a trial of micro-batch {count} ({failed}); give a smaller one instead of 0"
            )
        return None if failed else Trial(count, most, min(took[2:]))

    def time_passes(self, count: int, passes: int) -> float:
        """Return seconds of so many passes of average length, of a micro-batch that is known to fit (on a CPU)."""
        batch = self.samples.average(count)
        found = sum(self._pass(batch, last=self._sharded) for _ in range(passes))
        release(self.model, self.world.device)
        return found

    def _pass(self, batch: Batch | ByteBatch, last: bool) -> float:
        """Take a forward and backward pass, the `last` of a step where gradients are sharded; return its seconds."""
        begun = time.perf_counter()
        with kept_copies(not self._sharded), gradient_sync(self.objective, last=last):
            summed, *_ = self.objective(batch.to(self.world.device), self.dtype)
            torch.stack(list(summed.values())).sum().backward()
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        return time.perf_counter() - begun


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return memory that the state of an optimizer will take at its first step (bytes, for Muon at most); 0 where it is there, or on the host."""
    if optimizer.state or offloaded(optimizer.param_groups[0]):
        return 0
    moments = len(getattr(optimizer, "moments", ("exp_avg", "exp_avg_sq")))
    return moments * sum(4 * local(p).numel() for group in optimizer.param_groups for p in group["params"])
