"""How a run keeps to its budget of time: what is decided about the length of its phases, and when. No clock, file or network is met here.

The `steps` of the recipe's phases are shares. The time that pretraining has divides them all by one factor, which follows at every moment from
the time left and the measured time of a step. A phase is held at its peak rate until what is left of its time is that of its decay; then
the decay begins, and only where its end comes to lie several per cent away from where it should is the end moved (:func:`look`).
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from overnight.display import duration
from overnight.optim.decisions import Decision, share_of_decay_left

# Steps that are timed before a decision, and seconds, or this share of the time; and the share after which it is taken on fewer steps.
_TIMED_STEPS, _TIMED_SECONDS, _TIMED_SHARE, _TIMED_AT_MOST = 5, 10.0, 0.01, 0.03
# Intervals between looks without which no decision is taken: in a median of three, one step that stood still does not count.
_LEAST_INTERVALS = 3
# Looks at the clock: so many in a phase that is held, and one for so many parts of what is left of a decay.
_LOOKS, _PARTS = 50, 8
# Stretches over which the time of a step is measured, and steps of one at least.
_STRETCHES, _STRETCH = 5, 5
# The end of a decay is moved where it is off by more than this share of what is left of the decay, this of the budget, and a second; so often
# at most. One step alone must be this share of the budget: else the noise of the clock moves the end to and fro.
_OFF, _OFF_BUDGET, _OFF_SECONDS, _MOVES, _ONE_STEP = 0.04, 0.003, 1.0, 40, 0.01
# The shortest decay, however late it is: this share of the steps before it. Less would leave the rate's end without its use.
_LEAST_DECAY = 0.02
# No step is faster (s): as if all were, the steps warm up by which the speed is measured, which so hardly move the weights.
_FASTEST = 1e-3
# What is kept free: a share of what was estimated for the work after pretraining, and of the budget.
_RESERVE, _RESERVE_BUDGET = 0.1, 0.005
# Share of a budget that pretraining must have.
_LEAST_TRAINING = 0.1


class Share(NamedTuple):
    """A phase as its budget sees it."""

    name: str
    steps: int
    """Of the recipe."""
    flops: float
    """Operations of a step, compared with those of the other phases."""
    warmup: float
    """Share of the steps."""
    decay: float
    """Share of the steps."""
    work: Callable[[int], float] = float
    """So many full batches are what so many first steps read: fewer than steps where the batch grows."""
    max_warmup_steps: int = 0
    """0: no limit."""

    def limited(self, warmup: int) -> int:
        """Return so many steps of warm-up, or the most that there may be."""
        return min(warmup, self.max_warmup_steps or warmup)


class Moment(NamedTuple):
    """What is known at a look at the clock."""

    done: int
    """Steps of the phase."""
    left: float
    """Time that is left for pretraining (s)."""
    seconds_per_step: float
    """With a full batch."""
    timed: int
    """Steps of the phase that this process has taken."""
    measured: bool
    """Whether they were enough for a decision."""
    time: str
    """ISO 8601."""


class Look(NamedTuple):
    """What a look at the clock has found."""

    steps: int
    """Of the phase: decided or expected."""
    next: int
    """Steps after which to look again."""
    decision: Decision | None = None


@dataclass
class Speed:
    """How long a full batch takes now: the median over a few stretches between looks at the clock, so that one pause counts as one."""

    marks: list[tuple[float, float]] = field(default_factory=list)
    """Full batches done and seconds, at each look."""
    warm: bool = False
    """Whether the first look is forgotten: what is laid out and compiled in the first step counts only as long as nothing else does."""
    fastest: float = math.inf
    """Seconds of a full batch in the fastest interval between looks, that of the first step among them."""
    first: tuple[float, float] = (0.0, 0.0)
    """Full batches and seconds of the interval that is forgotten."""

    def note(self, work: float, seconds: float) -> None:
        """Remember a look after so many full batches."""
        if self.marks:
            done, before = self.marks[-1]
            self.fastest = min(self.fastest, (seconds - before) / (work - done))
        if len(self.marks) == 2 and not self.warm:
            (done, before), (last, ended) = self.marks
            self.first = last - done, ended - before
            del self.marks[0]
            self.warm = True
        if len(self.marks) > _LEAST_INTERVALS + 1 and self.marks[-1][0] - self.marks[-2][0] < _STRETCH:
            del self.marks[-1]
        self.marks.append((work, seconds))
        del self.marks[: -_STRETCHES - 1]

    def seconds_per_step(self, first: bool = False) -> float:
        """Return seconds of a step with a full batch; infinite before one was seen.

        Args:
            first: of all, for what is expected of the whole phase. A GPU compiles in several of its first steps, whose median is then none of the
                steps to come: where the fastest takes less than half of it, that one counts.
        """
        rates = [(ended - began) / (last - done) for (done, began), (last, ended) in pairwise(self.marks)]
        median = statistics.median(rates) if rates else math.inf
        return max(self.fastest if first and 2 * self.fastest < median else median, 1e-9)

    @property
    def compiled(self) -> float:
        """How much longer than others the first step took (s); 0 before others were seen."""
        work, seconds = self.first
        return max(0.0, seconds - work * self.seconds_per_step()) if len(self.marks) > 1 and self.warm else 0.0

    def enough(self, left: float) -> bool:
        """Return whether a decision can be taken on it, with so much time left for pretraining (s), as the clock has it.

        A step that compiles for minutes, or in which the machine stands still, says nothing of those after it, and a decay that was begun for
        it cannot be taken back. So one step alone, however slow, decides only where the time is over; two do where not even the faster fits twice.
        """
        (first, began), (last, ended) = self.marks[0], self.marks[-1]
        if left <= 0:
            return last > first
        seconds, several = ended - began, len(self.marks) > _LEAST_INTERVALS
        timed = several and last - first >= _TIMED_STEPS and seconds >= min(_TIMED_SECONDS, _TIMED_SHARE * left)
        return timed or (several and seconds >= _TIMED_AT_MOST * left) or (self.warm and 2 * self.fastest > left)


def reserve(after: float, budget: float) -> float:
    """Return the time that pretraining must leave (s).

    Args:
        after: estimate of what follows it (s).
        budget: all of the time (s).
    """
    return after * (1 + _RESERVE) + _RESERVE_BUDGET * budget


def least_budget(spent: float, after: float) -> float:
    """Return the shortest budget that leaves pretraining a tenth (s), with so much spent before it and estimated for after it (s)."""
    return (spent + after * (1 + _RESERVE)) / (1 - _RESERVE_BUDGET - _LEAST_TRAINING)


def steps_within(share: Share, work: float) -> int:
    """Return the most steps that read no more than so many full batches."""
    most = 1
    while share.work(most) <= work:
        most *= 2
    return bisect.bisect_right(range(most), work, key=share.work) - 1


def planned_steps(shares: Sequence[Share], number: int, done: int, left: float, seconds_per_step: float) -> list[int]:
    """Return the steps of phase `number` and of those after it that just take the time left.

    Args:
        shares: of all phases; the time of a step in a later one follows from its operations.
        done: steps of phase `number`.
        left: for pretraining (s).
        seconds_per_step: in phase `number`, with a full batch.
    """
    whole = sum(_work(share) for share in shares[number:]) / shares[number].flops * seconds_per_step
    factor = max(0.0, left + shares[number].work(done) * seconds_per_step) / whole
    return [max(1, steps_within(share, factor * share.work(share.steps))) for share in shares[number:]]


def _work(share: Share) -> float:
    """Return the operations of a phase as the recipe has it, compared with those of the other phases."""
    return share.work(share.steps) * share.flops


def begin(shares: Sequence[Share], number: int, left: float, seconds_per_step: float, time: str) -> Decision:
    """Return the first decision of a phase, before its first step: how it warms up until its speed is measured.

    Args:
        left: for pretraining (s).
        seconds_per_step: as far as it is known from the phase before; else 0.
    """
    share = shares[number]
    steps = max(2, planned_steps(shares, number, 0, left, seconds_per_step or _FASTEST)[0])
    why = "expected from the phase before" if seconds_per_step else "its speed is measured first"
    return Decision(share.name, 0, share.limited(math.ceil(share.warmup * steps)), None, steps, why, time, seconds_per_step)


def look(shares: Sequence[Share], number: int, decisions: Sequence[Decision], moment: Moment, budget: float) -> Look:
    """Return how many steps a phase has, when to look again, and what is to be decided now.

    Args:
        number: of the phase.
        decisions: of the phase so far; the first is that of :func:`begin`.
        budget: all of the time (s).
    """
    newest, done = decisions[-1], moment.done
    wanted = planned_steps(shares, number, done, moment.left, moment.seconds_per_step)[0]
    if not moment.measured:
        after = done + max(1, moment.timed // 2)
        if newest.decay_begins is not None:
            return Look(newest.steps, after)
        return Look(max(wanted if len(decisions) == 1 else newest.steps, after + 1), after)
    if newest.decay_begins is not None:
        return _in_decay(shares, number, decisions, moment, budget)
    least = done + max(1, math.ceil(_LEAST_DECAY * done))
    steps, share = max(wanted, least), shares[number]
    begins = max(done, 1, steps - max(1, round(share.decay * steps)))
    after = done + max(1, steps // _LOOKS)
    if len(decisions) == 1 and begins > done:
        warmup = newest.warmup_steps
        if done < warmup:
            warmup = done + share.limited(max(1, round(share.warmup * (steps - done))))
        why = f"a step takes {seconds_text(moment.seconds_per_step)}"
        return Look(steps, min(after, begins), Decision(share.name, done, warmup, None, steps, why, *_said(moment)))
    if begins > after:
        return Look(steps, after)
    why = f"the decay takes the rest of the phase's time, at {seconds_text(moment.seconds_per_step)} a step"
    if steps > wanted:
        why = f"there is no time left for more than the shortest decay{_late(steps, wanted, moment)}"
    decision = Decision(share.name, done, newest.warmup_steps, begins, max(steps, begins + 1), why, *_said(moment))
    return Look(decision.steps, _next_in_decay(done, decision), decision)


def _in_decay(shares: Sequence[Share], number: int, decisions: Sequence[Decision], moment: Moment, budget: float) -> Look:
    """Look during a decay: its end is moved where it would be too early or too late. The phases after it keep the time that they had when it began."""
    newest, done = decisions[-1], moment.done
    begins = newest.decay_begins
    assert begins is not None
    first = next(decision for decision in decisions if decision.decay_begins is not None)
    share = shares[number]
    later = sum(map(_work, shares[number + 1 :])) / _work(share) * share.work(first.steps) * first.seconds_per_step
    wanted = steps_within(share, share.work(done) + max(0.0, moment.left - later) / moment.seconds_per_step)
    shortest = math.ceil(_LEAST_DECAY * done * share_of_decay_left(decisions, done))
    steps = max(wanted, done + 1, min(newest.steps, done + shortest))
    off, left = abs(steps - newest.steps), newest.steps - max(done, begins)
    moves = sum(decision.decay_begins is not None for decision in decisions) - 1
    much = max(_OFF * left * moment.seconds_per_step, _OFF_BUDGET * budget, _OFF_SECONDS)
    if off == 1:
        much = max(much, _ONE_STEP * budget)
    if done < begins or off * moment.seconds_per_step <= much or moves >= _MOVES:
        return Look(newest.steps, _next_in_decay(done, newest))
    lost = (newest.steps - wanted) * moment.seconds_per_step
    why = (
        f"at {seconds_text(moment.seconds_per_step)} a step ({seconds_text(newest.seconds_per_step)} before) it would end {duration(abs(lost))} "
        f"{'late' if lost > 0 else 'early'}: its decay is made {'longer' if steps > newest.steps else 'shorter'}{_late(steps, wanted, moment)}"
    )
    decision = Decision(newest.phase, done, newest.warmup_steps, begins, steps, why, *_said(moment))
    return Look(steps, _next_in_decay(done, decision), decision)


def _next_in_decay(done: int, decision: Decision) -> int:
    assert decision.decay_begins is not None
    first = max(done, decision.decay_begins)
    return first + max(1, (decision.steps - first) // _PARTS)


def _said(moment: Moment) -> tuple[str, float]:
    return moment.time, moment.seconds_per_step


def _late(steps: int, wanted: int, moment: Moment) -> str:
    """Return by how much the phase will end late, where a decay cannot be so short that it does not."""
    if steps <= wanted:
        return ""
    return f"; it ends about {duration((steps - wanted) * moment.seconds_per_step)} late"


def seconds_text(seconds: float) -> str:
    """Return the time of a step as people say it: 0.42 s, 38 ms."""
    return f"{seconds:,.2f} s" if seconds >= 0.1 else f"{seconds * 1000:.3g} ms"
