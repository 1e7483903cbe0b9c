"""How a phase is split into micro-batches: as the recipe says or as trials found, halved when memory runs out, and remembered.

The micro-batches of a phase are a list of (first step, sequences), kept in `memory.json` of the run folder: a run that is resumed takes the
same one in every step, also where it was halved on the way, and so ends with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from overnight.batches.batch_size import micro_batch, micro_batch_sizes
from overnight.batches.loader import Samples
from overnight.batches.streams import Streams
from overnight.checkpoint.reader import TrainingProgress
from overnight.config import Phase, Run
from overnight.distributed.collectives import all_reduce_max, raise_on_all_ranks
from overnight.distributed.world import World
from overnight.engine.context import PhaseContext
from overnight.engine.memory import (
    HOW_TO_SAVE_MEMORY,
    OutOfMemory,
)
from overnight.engine.metrics_logger import MetricsLogger
from overnight.engine.micro_batch_trials import BatchSizeFinder, optimizer_state_bytes
from overnight.engine.precision import DTYPES
from overnight.engine.workload import compiles_layers
from overnight.run_dir.atomic import write_json
from overnight.state_files import fitted, read_mapping, sealed


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
