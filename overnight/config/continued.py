"""Phases that continue the one before (`continues: true`): its optimizer, and its schedule, which is then one of the steps of all of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, TypeVar

from overnight.config.schema import Phase, Run

R = TypeVar("R", bound=Run)


def continued_problems(tree: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a recipe says of phases that continue others and may not: a default cannot be told from a choice later."""
    phases = tree.get("phases")
    named = list(phases.items()) if isinstance(phases, Mapping) else []
    if named and isinstance(named[0][1], Mapping) and named[0][1].get("continues") is True:
        yield f"phases.{named[0][0]}.continues = true: there is no phase before; leave it out"
    for (first, before), (name, phase) in pairwise(named):
        if not (isinstance(before, Mapping) and isinstance(phase, Mapping) and phase.get("continues") is True):
            continue
        if "optim" in phase:
            yield f"phases.{name}.optim: phases.{name}.continues = true takes that of {first}; leave one of the two out"
        for key in ("total_steps", "step_offset"):
            schedule = before.get("optim", {}).get("schedule", {}) if isinstance(before.get("optim", {}), Mapping) else {}
            if isinstance(schedule, Mapping) and schedule.get(key):
                yield f"phases.{first}.optim.schedule.{key} = {schedule[key]}: follows from the steps of the phases, since {name} continues this one; leave it out"


def continued(run: R) -> R:
    """Return a run whose phases that continue others have their optimizer, and a schedule of the steps of all of them."""
    return dataclasses.replace(run, phases=_joined(run.phases))


def chains(phases: Mapping[str, Phase]) -> list[list[str]]:
    """Return the names of phases, those together that have one schedule."""
    found: list[list[str]] = []
    for name, phase in phases.items():
        if phase.continues and found:
            found[-1].append(name)
        else:
            found.append([name])
    return found


def with_steps(phases: Mapping[str, Phase], steps: Mapping[str, int]) -> dict[str, Phase]:
    """Return the phases of a run with other steps, and a schedule that several of them have as long as they are together."""
    return _joined({name: dataclasses.replace(phase, steps=steps[name]) for name, phase in phases.items()})


def _joined(phases: Mapping[str, Phase]) -> dict[str, Phase]:
    """Return phases of which those that continue one have its optimizer and the part of its schedule that is theirs."""
    found = dict(phases)
    for names in (names for names in chains(phases) if len(names) > 1):
        optim, total, first = phases[names[0]].optim, sum(phases[name].steps for name in names), 0
        for name in names:
            part = dataclasses.replace(optim.schedule, total_steps=total, step_offset=first)
            mine = dataclasses.replace(optim, schedule=part, reset_moments=optim.reset_moments and not first)
            found[name] = dataclasses.replace(phases[name], optim=mine)
            first += phases[name].steps
    return found


def without_continued(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe as it may be read again: without what its phases have from those that they continue."""
    for before, phase in pairwise(tree["phases"].values()):
        if phase["continues"]:
            for key in ("total_steps", "step_offset"):
                before.get("optim", {}).get("schedule", {}).pop(key, None)
            del phase["optim"]
    return tree


def chain_problems(run: Run) -> Iterator[str]:
    """Yield what keeps phases from having one schedule: a warm-up that is longer than the first, or a rate that follows another batch."""
    for first, *others in chains(run.phases):
        phase = run.phases[first]
        schedule, rule = phase.optim.schedule, phase.optim.scaling.rule
        for name in others:
            if rule != "none" and run.phases[name].global_batch_size != phase.global_batch_size:
                yield f"phases.{name}.continues = true: needs the batch of {first}, {phase.global_batch_size}, since its rate follows the batch (optim.scaling.rule = {rule})"
        warmup = min(schedule.warmup_ratio * schedule.total_steps, schedule.max_warmup_steps or math.inf)
        if others and warmup > phase.steps:
            yield f"phases.{first}.optim.schedule.warmup_ratio = {schedule.warmup_ratio}: of the steps of all phases that continue this one the warm-up is longer than it; lower it"
