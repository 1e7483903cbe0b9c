"""What the phases of a run share in one process, and the parts of its trainer with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from overnight.checkpoint.reader import TrainingProgress
from overnight.checkpoint.writer import CheckpointWriter
from overnight.config import Phase, Run
from overnight.console import Line
from overnight.distributed.world import World
from overnight.engine.loop import Objective
from overnight.engine.workload import Workload
from overnight.models.flops import Peak
from overnight.run_dir.metrics import Metrics
from overnight.signals import Signals

if TYPE_CHECKING:
    from overnight.engine.planner import Planner


@dataclass
class PhaseContext:
    """What the phases of a run share in one process."""

    run: Run
    workload: Workload
    """Data and network."""
    objective: Objective
    """Losses of the network, of which the backward pass adds up the gradients of all processes."""
    world: World
    progress: TrainingProgress
    writer: CheckpointWriter
    metrics: Metrics
    line: Line
    signals: Signals
    phases: dict[str, Phase]
    """Of the run, by name; with a budget, their steps are those that are decided or expected by now."""
    planner: Planner | None = None
    """Keeps the run to its budget, where it has one."""
    peak: Peak | None = None
    """What the devices of all processes compute at most; None leaves out the share of it that is used."""
    carried: dict[str, Tensor] = field(default_factory=dict)
    """State of the checkpoint that the run resumes from, of a model that carries one."""
    announces: bool = True
    """Whether a phase prints what it will do."""
