"""What a budget of time will come to: how long the stages after pretraining take, and how many steps that leaves to each phase."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from overnight.batches.matching import too_short
from overnight.byte_lm.rehearsal import probe_seconds
from overnight.checkpoint.run_corpus import with_data
from overnight.config import BertPhase, BertRun, ByteRun, Run, differences, identity
from overnight.config.budget import deadline_of
from overnight.config.load import stored_run
from overnight.display import duration, plural
from overnight.distributed.world import World
from overnight.engine import run_clock
from overnight.engine.budget import least_budget, planned_steps, reserve, seconds_text
from overnight.engine.budget_record import read_record
from overnight.engine.planner import shares
from overnight.engine.rehearsal import seconds_per_step
from overnight.engine.run_clock import time_of_day
from overnight.engine.training_run import set_up_machine
from overnight.engine.workload import build_workload
from overnight.evaluation.rehearsal import evaluation_seconds
from overnight.finetune.rehearsal import finetune_seconds
from overnight.optim.decisions import Decision

# Time that the last two stages take at most where networks are small (s): three times that of night-cpu. What larger ones take above it, the share of a
# budget that is kept free pays.
_EXPORT_AND_REPORT = 6.0


@dataclass(frozen=True)
class TimePlan:
    """What a budget is expected to come to, if the run began now."""

    budget: str
    deadline: float
    """Seconds since 1970."""
    pretraining: float
    """Time for the steps (s); below 0 where what follows takes all of it."""
    seconds_per_step: float
    """In the first phase."""
    steps: dict[str, int]
    """Of every phase."""
    without_pairs: list[str]
    """Phases that are too short for their token matching."""
    after: dict[str, float]
    """Estimates of what follows pretraining (s)."""
    least: float
    """The shortest budget that leaves pretraining a tenth (s)."""


def seconds_after_pretraining(run: Run) -> dict[str, float]:
    """Return how long each stage after pretraining will take (s), by name: those of tasks by a rehearsal on prepared data.

    Raises:
        DataError: when the data of a task cannot be used.
    """
    after: dict[str, float] = {}
    if isinstance(run, BertRun):
        after |= {name: finetune_seconds(run, name, with_data(run).data_dir) for name in run.finetune}
        after["evaluation"] = evaluation_seconds(with_data(run))
    elif isinstance(run, ByteRun):
        after |= {name: probe_seconds(run, name) for name in run.linear_probe}
    return after | {"export and report": _EXPORT_AND_REPORT}


def time_plan(run: Run) -> TimePlan:
    """Return what the budget of a run will come to, by a rehearsal of its first phase and its tasks; nothing is kept.

    Raises:
        DataError: when the prepared data, or that of a task, cannot be used.
    """
    now, device = run_clock.CLOCK.wall(), set_up_machine(run)
    after = seconds_after_pretraining(run)
    with TemporaryDirectory() as folder:
        aside = dataclasses.replace(with_data(run), out=str(Path(folder)))
        if isinstance(aside, BertRun):
            aside = dataclasses.replace(aside, init="")  # its weights do not change the time
        seconds = seconds_per_step(aside, build_workload(aside, World(device=device)), 0, device)
    deadline = deadline_of(run.budget, now)
    left = deadline - now - reserve(sum(after.values()), deadline - now)
    steps = planned_steps(shares(run), 0, 0, left, seconds)
    least, named = least_budget(0.0, sum(after.values())), dict(zip(run.phases, steps, strict=True))
    without = [name for name, phase in run.phases.items() if isinstance(phase, BertPhase) and too_short(phase, named[name])]
    return TimePlan(run.budget, deadline, left, seconds, named, without, after, least)


def decisions_of(run: Run) -> list[Decision]:
    """Return what a run folder has decided of the length of its phases; none where no speed was measured there, or it holds another run."""
    if not run.budget or not (run.run_dir / "run.yaml").exists() or not (record := read_record(run)) or record.budget != run.budget:
        return []
    if any(differences(identity(stored_run(run.run_dir)), identity(run))) or all(len(record.of(name)) < 2 for name in run.phases):
        return []
    return record.decisions


def decided_steps(run: Run, decisions: Sequence[Decision]) -> dict[str, int]:
    """Return the steps of every phase as decisions have them; those of which none is measured keep their ratio to the last that is."""
    known = {name: [decision for decision in decisions if decision.phase == name] for name in run.phases}
    found = {name: mine[-1].steps for name, mine in known.items() if len(mine) > 1}
    last = next(reversed(found))
    return {
        name: found.get(name) or max(1, round(found[last] / run.phases[last].steps * phase.steps)) for name, phase in run.phases.items()
    }


def decided_text(budget: str, steps: Mapping[str, int], decisions: Sequence[Decision]) -> str:
    """Return the steps of the phases and where their decays begin, as far as they are decided."""
    begins = {decision.phase: decision.decay_begins for decision in decisions}
    said = [
        f"{name} {plural(count, 'step')}, its rate decays from step {begin:,}"
        if (begin := begins.get(name)) is not None
        else f"{name} about {plural(count, 'step')}"
        for name, count in steps.items()
    ]
    return f"budget {budget}: as this run has decided so far: {'; '.join(said)}"


def time_plan_text(plan: TimePlan) -> str:
    """Return a plan of time for people."""
    after = ", ".join(f"{name} {duration(seconds)}" for name, seconds in plan.after.items())
    if plan.pretraining <= 0:
        return f"budget {plan.budget}: is too short. What follows pretraining is estimated at {after}; the shortest possible budget is {duration(plan.least)}"
    steps = ", ".join(
        f"{name} {plural(count, 'step')}{' (too few for token matching)' * (name in plan.without_pairs)}"
        for name, count in plan.steps.items()
    )
    return (
        f"budget {plan.budget}: begun now, it ends at {time_of_day(plan.deadline)}. Pretraining gets {duration(plan.pretraining)}, about {steps}, at "
        f"{seconds_text(plan.seconds_per_step)} a step in the first phase, as timed now; evaluations and checkpoints take part of that time. What follows is "
        f"estimated at {after}"
    )
