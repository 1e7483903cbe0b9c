"""How a phase is split into micro-batches: found by trial where the recipe leaves it open, halved when memory runs out, and remembered.

The micro-batches of a phase are a list of (first step, sequences), kept in `memory.json` of the run folder: a run that is resumed takes the
same one in every step, also where it was halved on the way, and so ends with the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from overnight.batches.batch_size import micro_batch, micro_batch_sizes, usual_micro_batch, usual_on_gpu
from overnight.batches.loader import Samples
from overnight.batches.streams import Streams
from overnight.checkpoint.reader import TrainingProgress
from overnight.config import Phase, Run
from overnight.distributed.collectives import ErrorOnOtherRank, all_reduce_max, raise_on_all_ranks
from overnight.distributed.world import World
from overnight.distributed.wrap import gradient_sync
from overnight.engine.context import PhaseContext
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
from overnight.engine.metrics_logger import MetricsLogger
from overnight.engine.precision import DTYPES
from overnight.engine.workload import compiles_layers
from overnight.models.weight_copies import kept_copies
from overnight.optim.offload import offloaded
from overnight.optim.state import local
from overnight.run_dir.atomic import write_json
from overnight.state_files import fitted, read_mapping, sealed

_SLOWER = 0.97
"""Share of the best throughput at which, on a CPU, a smaller micro-batch is as good."""
_FEW = 4
"""Sequences of which a second trial may be made in any case."""


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
    by_speed: bool,
    world: World | None = None,
    first: int = 1,
) -> tuple[int, list[Trial]]:
    """Return the largest micro-batch that fits; `by_speed` the smallest of those whose throughput is near the best.

    It doubles, and then looks at what lies between the last that fits and the first that does not. None but the first two, if they are small,
    is tried whose memory would be over the limit, on a line through those before.

    Args:
        choices: from the smallest.
        measure: tries one; None where memory ran out.
        space: memory now and at most.
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
        if by_speed and _levels_off(tried):
            break
    if not tried:
        least = f"the smallest micro-batch, {choices[0]}, does not fit into the {space.limit / 1e9:.2f} GB that may be used"
        raise OutOfMemory(f"{least}; {HOW_TO_SAVE_MEMORY}") if world.main else ErrorOnOtherRank(OutOfMemory.exit_code)
    if refused <= choices[-1]:
        between = [count for count in choices if tried[-1].micro_batch < count < refused]
        any(fits(count) for count in reversed(between))  # up to the first that does
    best = max(trial.rate for trial in tried)
    good = [trial.micro_batch for trial in tried if trial.rate >= _SLOWER * best]
    return good[0] if by_speed else tried[-1].micro_batch, tried


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
            found, tried = search(choices, self.measure, space, device.type == "cpu", world, self._first())
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
                begun = time.perf_counter()
                with kept_copies(not fsdp), gradient_sync(self.objective, last=fsdp and number > 0):
                    summed, *_ = self.objective(batch.to(device), self.dtype)
                    torch.stack(list(summed.values())).sum().backward()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                took.append(time.perf_counter() - begun)
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


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return memory that the state of an optimizer will take at its first step (bytes, for Muon at most); 0 where it is there, or on the host."""
    if optimizer.state or offloaded(optimizer.param_groups[0]):
        return 0
    moments = len(getattr(optimizer, "moments", ("exp_avg", "exp_avg_sq")))
    return moments * sum(4 * local(p).numel() for group in optimizer.param_groups for p in group["params"])


@dataclass(frozen=True)
class _Known:
    """What `memory.json` has of a phase."""

    conditions: dict[str, Any]
    since: list[tuple[int, int]]


@dataclass
class MicroBatchSchedule:
    """The micro-batches of a phase: from which step on (from 0) how many sequences.

    Args:
        path: `memory.json` of the run folder.
        phase: its name.
        conditions: what they hold for: under others they are forgotten.
        world: all processes must ask; what the first one has counts.
    """

    path: Path
    phase: str
    conditions: dict[str, Any]
    world: World
    since: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        with raise_on_all_ranks(self.world):
            known = self._read().get(self.phase, {}) if self.world.main else {}
        flat = [number for pair in known.get("since", []) for number in pair] if known.get("conditions") == self.conditions else []
        numbers = from_first(flat, self.world)
        self.since = list(zip(numbers[::2], numbers[1::2], strict=True))

    def at(self, step: int) -> int:
        """Return the micro-batch of a step."""
        return next((count for first, count in reversed(self.since) if first <= step), self.since[0][1])

    def until(self, step: int, end: int) -> int:
        """Return the first step after `step` with another one, or `end`."""
        return min((first for first, _ in self.since if step < first < end), default=end)

    def use(self, step: int, count: int) -> None:
        """Take another from a step on; what was to come after is forgotten."""
        self.since = [(first, old) for first, old in self.since if first < step] + [(step, count)]

    def keep(self) -> None:
        """Remember them in the run folder."""
        write_json(self.path, sealed(self._read() | {self.phase: {"conditions": self.conditions, "since": self.since}}))

    def _read(self) -> dict[str, Any]:
        if not self.path.exists():
            return {}
        remedy = "delete it, and the micro-batches are found or taken anew"
        tree = read_mapping(self.path, remedy)
        fitted(tree, dict[str, _Known], str(self.path), remedy)
        return tree


def conditions(run: Run, phase: Phase, world: World) -> dict[str, Any]:
    """Return what the micro-batches of a phase depend on besides the recipe's identity."""
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type
    settings: dict[str, Any] = {
        "activation_checkpointing": run.memory.activation_checkpointing,
        "optimizer_cpu_offload": run.memory.optimizer_cpu_offload,
        "torch_compile": compiles_layers(run, world.device),
        "cuda_graphs": run.compute.cuda_graphs,
        "strategy": run.distributed.strategy,
    }
    if run.compute.deterministic:  # else absent, as it was before there was such a setting
        settings["deterministic"] = True
    return {"device": device, "processes": world.size, "micro_batch_size": phase.micro_batch_size, **settings}


def from_first(numbers: Sequence[int], world: World) -> list[int]:
    """Return the values of the first process, in all."""
    if world.size == 1:
        return list(numbers)
    found = torch.zeros(all_reduce_max(len(numbers) if world.main else 0, world), dtype=torch.int64)
    if world.main:
        found.copy_(torch.tensor(numbers, dtype=torch.int64))
    dist.broadcast(found, 0)
    return [int(number) for number in found]


def schedule_of(
    context: PhaseContext, name: str, samples: Samples | Streams, optimizer: torch.optim.Optimizer, logger: MetricsLogger
) -> MicroBatchSchedule:
    """Return the micro-batches of a phase: as remembered, as the recipe says, or found by trial.

    Args:
        name: of the phase.
        samples: of its training split.
    """
    run, world, step = context.run, context.world, context.progress.step
    phase = run.phases[name]
    found = MicroBatchSchedule(run.run_dir / "memory.json", name, conditions(run, phase, world), world)
    if found.since:
        if found.at(step) != phase.micro_batch_size:
            context.line.print(f"micro-batch {found.at(step)}, as {found.path} says")
    elif phase.micro_batch_size:
        found.use(0, phase.micro_batch_size)
    else:
        finder = BatchSizeFinder(run, context.workload.model, context.objective, samples, DTYPES[run.precision], world)
        count, text = finder.micro_batch(optimizer_state_bytes(optimizer))
        found.use(step, count)
        with raise_on_all_ranks(world):
            if world.main:
                found.keep()
        logger.event("micro_batch_size", text, micro_batch_size=count)
    return found


def halve(schedule: MicroBatchSchedule, phase: Phase, progress: TrainingProgress, world: World, error: OutOfMemory) -> tuple[str, int]:
    """Have the step at which memory ran out taken again in smaller micro-batches; return a sentence on it, and their size.

    Raises:
        OutOfMemory: where there is none smaller, or other processes wait for this one in a step that it cannot end.
    """
    count = micro_batch(phase, progress.step, world.size)
    what = f"{error} with micro-batches of {count}"
    smaller = [size for size in micro_batch_sizes(phase, world.size) if size <= count // 2]
    if not smaller:
        raise OutOfMemory(f"phase {progress.phase}, {what} up to {phase.seq_len} tokens. {HOW_TO_SAVE_MEMORY}") from None
    schedule.use(progress.step, smaller[-1])
    schedule.keep()
    if world.size > 1:
        raise OutOfMemory(
            f"process {world.rank}, phase {progress.phase}, {what}. The others cannot continue without it. {schedule.path} now says "
            f"{smaller[-1]}, with which the same command, or a restart by the launcher, resumes from the newest checkpoint"
        ) from None
    return f"{what}: taken again with {smaller[-1]}", smaller[-1]
