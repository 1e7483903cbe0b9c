"""The learning rate of a phase whose length is decided on the way: warm-up, stable part, and a decay that may begin at any step.

Each :class:`Decision` holds from its step on. The factor is a function of the step and the decisions alone, so a phase that is resumed, or
trained again by the same decisions, takes the same rates. It is continuous: a decision changes where the curve goes, never where it is.

    warm-up  a line from where the curve is to 1 at update `warmup_steps`
    stable   1
    decay    the form of the schedule, of the share s that is left: s is 1 at `decay_begins`, falls on a line to 0 at `steps`, and where that
             end is moved, on a line from where it is to 0 at the new one

Where phases share a schedule, s is the share that is left of its whole decay, of which each phase has a stretch: s falls from where that begins, and to
where it ends, instead of from 1 and to 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from overnight.config import Schedule
from overnight.optim.schedules import decayed
from overnight.state_files import STRICT


@dataclass(frozen=True)
class Decision:
    """What is decided about the rest of a phase, once some steps of it are done."""

    __pydantic_config__ = STRICT
    phase: str
    at: int
    """Steps that were done; it holds from this step (from 0) on."""
    warmup_steps: int
    decay_begins: int | None
    """First step (from 0) of the decay; None before it is decided."""
    steps: int
    """Of the phase: decided, where the decay is, else expected."""
    why: str
    time: str
    """When it was decided (ISO 8601)."""
    seconds_per_step: float
    """As measured then, with evaluations and checkpoints in their share; 0 where it is not known."""


def decided_factor(schedule: Schedule, decisions: Sequence[Decision], step: int, ends: tuple[float, float] = (1.0, 0.0)) -> float:
    """Return what to multiply the peak learning rate by, 0 to 1.

    Args:
        schedule: of the phase, `wsd`; its form of decay counts.
        decisions: of the phase, by their steps; the first is of step 0. Those after `step` do not count.
        step: from 0.
        ends: what is left of the whole decay of its schedule where the phase begins and where it ends.
    """
    height, left = _curve([decision for decision in decisions if decision.at <= step], step)
    return height * decayed(schedule, _of_whole(ends, left))


def reached(decisions: Sequence[Decision]) -> float:
    """Return the share of the peak rate that the warm-up of a phase has come to at its end: 1, but where the decay had to begin before that."""
    return _curve(decisions, decisions[-1].steps)[0]


def _curve(decisions: Sequence[Decision], step: int) -> tuple[float, float]:
    """Return the factor of the warm-up and what is left of the decay, both at a step that no decision is after."""
    height, left = 0.0 if decisions[0].warmup_steps else 1.0, 1.0
    for decision, after in pairwise(decisions):
        height, left = _height(decision, height, after.at - 1), share_left(decision, left, after.at)
    return _height(decisions[-1], height, step), share_left(decisions[-1], left, step)


def decided_decay(schedule: Schedule, decisions: Sequence[Decision], step: int, ends: tuple[float, float]) -> float:
    """Return the factor of the decay alone, 1 while the phase warms up; arguments as those of :func:`decided_factor`."""
    left = share_of_decay_left([decision for decision in decisions if decision.at <= step], step)
    return decayed(schedule, _of_whole(ends, left))


def _of_whole(ends: tuple[float, float], left: float) -> float:
    """Return what is left of the whole decay where a share is left of that of a phase."""
    first, last = ends
    return last + (first - last) * left


def share_of_decay_left(decisions: Sequence[Decision], step: int) -> float:
    """Return what is left of the decay at a step that no decision is after, 1 to 0."""
    return _curve(decisions, step)[1]


def _height(decision: Decision, before: float, step: int) -> float:
    """Return the factor that the warm-up has reached at a step, and the decay begins from; `before`: at the last step before the decision."""
    if decision.decay_begins is not None:
        step = min(step, decision.decay_begins - 1)
    if step < decision.at:
        return before
    if step + 1 >= decision.warmup_steps:
        return 1.0
    return before + (1.0 - before) * (step + 1 - decision.at) / (decision.warmup_steps - decision.at)


def share_left(decision: Decision, before: float, step: int) -> float:
    """Return what is left of the decay at a step; `before`: where the decision was taken."""
    if decision.decay_begins is None or step < decision.decay_begins:
        return 1.0
    begins = max(decision.at, decision.decay_begins)
    return before * max(0, decision.steps - step) / (decision.steps - begins)
