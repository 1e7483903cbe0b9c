"""A training that keeps to a budget of time: looks at the clock between steps, takes the decisions of `engine.budget`, and keeps them in `budget.json`.

A decision is written before it is obeyed. A run that is resumed, or goes back, before the step of a decision obeys it there, and decides nothing
until it has come to the last one. The first process decides for all.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from overnight.batches.batch_size import batch_warmup, sequences_before
from overnight.batches.lengths import expected_lengths
from overnight.batches.masking import predictions
from overnight.batches.matching import pairs_before, share_of_pairs, too_short
from overnight.batches.packing import Sizes
from overnight.config import BertPhase, Phase, Run
from overnight.config.continued import chains
from overnight.display import duration, plural
from overnight.distributed.collectives import raise_on_all_ranks
from overnight.distributed.world import World
from overnight.engine import run_clock
from overnight.engine.budget import Moment, Share, Speed, begin, look, planned_steps, reserve, seconds_text
from overnight.engine.budget_record import BudgetRecord, begin_record, close_record, set_by_clock, write_record
from overnight.engine.metrics_logger import MetricsLogger
from overnight.engine.micro_batch import from_first
from overnight.engine.run_clock import RunClock, moment_text, time_of_day
from overnight.models.flops import training_flops
from overnight.optim.decisions import Decision, decided_decay, decided_factor, reached
from overnight.optim.schedules import peak_lr, stretch
from overnight.state_files import fitted

# Passes over a text after which more of them help little (Muennighoff et al. 2023, arXiv 2305.16264).
_EPOCHS = 4


def shares(run: Run, without_pairs: Mapping[str, int] | None = None) -> list[Share]:
    """Return the phases of a run with a budget as it sees them.

    Args:
        without_pairs: from which step on phases, by name, leave out the pairs that their recipe has.
    """
    found = []
    for name, phase in run.phases.items():
        part, flops, most = stretch(phase), _flops(run, phase), phase.optim.schedule.max_warmup_steps
        work = partial(_full_batches, phase, _flops(run, phase, pairs=True) / flops - 1, (without_pairs or {}).get(name, math.inf))
        found.append(Share(name, phase.steps, flops, part.warmup, part.decay, work, most))
    return found


def _full_batches(phase: Phase, more: float, without_pairs: float, steps: int) -> float:
    """Return how many full batches without pairs take as long as so many first steps.

    Args:
        more: how much longer one of pairs alone takes, as a share.
        without_pairs: the first step without any.
    """
    whole = sequences_before(phase, steps) + more * pairs_before(phase, int(min(steps, without_pairs)))
    return whole / phase.global_batch_size


def _flops(run: Run, phase: Phase, pairs: bool = False) -> float:
    """Return the operations of a step with a full batch of sequences of about the usual lengths.

    Args:
        pairs: all of them are pairs for token matching.
    """
    batch, length, (mean, square) = phase.global_batch_size, phase.seq_len, expected_lengths(phase, pairs)
    predicted, nsp, matched = batch * mean, 0, 0.0
    if isinstance(phase, BertPhase):
        if phase.objective == "masked":
            predicted *= int(predictions(np.array([length]), phase.mlm_probability, phase.max_predictions_per_seq)[0]) / length
        nsp, matched = batch * phase.nsp, batch * mean * bool(phase.token_matching)
    return training_flops(run.model, run.data.vocab_size, Sizes(batch * mean, batch * square, predicted, nsp, matched))


class Planner:
    """The budget of a run, in one process.

    Args:
        run: with a budget.
        world: the processes that share it.
        phases: of the run, by name; their steps are set to those that are decided or expected.
    """

    def __init__(self, run: Run, world: World, phases: dict[str, Phase]) -> None:
        self.run, self.world, self.phases = run, world, phases
        with raise_on_all_ranks(world):
            text = json.dumps(dataclasses.asdict(begin_record(run))) if world.main else ""
        whole = bytes(from_first(list(text.encode()), world)).decode()
        self.record: BudgetRecord = fitted(json.loads(whole), BudgetRecord, "budget.json of the first process", "start all anew")
        self.clock = RunClock(self.record.deadline, self.record.now())
        self._number, self._epoch, self._validation, self._began, self._next = 0, 0, 0, 0, 0
        self.before_decay = False
        """Whether the decay of the first phase is likely to be decided at the next look or the one after it: a run that gets more time goes back to a checkpoint from before it."""
        self._speed, self.shares = Speed(), shares(run, pairs_end(self.record, phases))
        self._per_sequence = [s.flops / phase.global_batch_size for s, phase in zip(self.shares, run.phases.values(), strict=True)]
        for name in phases:
            if known := self.record.of(name):
                self._set_steps(name, known[-1].steps)

    def begin(self, number: int, done: int, epoch: int, validation: int, logger: MetricsLogger) -> None:
        """Begin or resume a phase.

        Args:
            number: of the phase, from 0.
            done: steps of it.
            epoch: examples of an epoch.
            validation: examples of an evaluation.
            logger: is told what was decided at this step: a checkpoint is written before a decision.
        """
        self.clock.scale("evaluation", self._per_sequence[number] / self._per_sequence[self._number])
        self._number, self._epoch, self._validation, self._began = number, epoch, validation, done
        with raise_on_all_ranks(self.world):
            if self.world.main:
                self.record = set_by_clock(self.run, self.record, self.clock, partial(logger.event, "clock_jumped"))
        name, known = self._name, self.record.of(self._name)
        if not known:
            before = self.record.of(self.shares[number - 1].name)[-1] if number else None
            seconds = before.seconds_per_step * (self.shares[number].flops / self.shares[number - 1].flops) if before else 0.0
            self._decide(begin(self.shares, number, self.left(), seconds, moment_text()), 1)
            known = self.record.of(name)
        self._next = max(done + 1, known[-1].at)
        self._set_steps(name, max(known[-1].steps, 0 if self.decays(name) else self._next + 1))
        self._speed = Speed([(self.shares[number].work(done), self.clock.of_steps())])
        if len(known) > 1 and self.record.trained is None:
            left, when = self.clock.left(), time_of_day(self.record.deadline)
            over = f"ended at {when}: the rest is made as short as possible"
            logger.context.line.print(f"budget {self.run.budget}: " + (f"ends at {when}, in {duration(left)}" if left > 0 else over))
        for decision in [decision for decision in known[1:] if decision.at == done]:
            self._tell(decision, logger)

    @property
    def _name(self) -> str:
        return self.shares[self._number].name

    def decays(self, phase: str) -> bool:
        """Return whether the end of a phase is decided."""
        known = self.record.of(phase)
        return bool(known) and known[-1].decay_begins is not None

    @property
    def measuring(self) -> bool:
        """Whether the phase has just begun, and how fast it is will only be known after some steps."""
        return len(self.record.of(self._name)) == 1

    def learning_rates(self, phase: Phase, name: str) -> Callable[[int], float]:
        """Return the learning rate of a phase as a function of its step, from 0, by all decisions up to that step."""
        peak, schedule, ends = peak_lr(phase), phase.optim.schedule, stretch(self.run.phases[name]).ends
        first = next(names[0] for names in chains(self.run.phases) if name in names)
        peak *= reached(self.record.of(first)) if first != name else 1.0  # the first had the warm-up
        return lambda step: peak * decided_factor(schedule, self.record.of(name), step, ends)

    def decay_factors(self, phase: Phase, name: str) -> Callable[[int], float]:
        """Return the factor of the decay of a phase as a function of its step, from 0, by all decisions up to that step."""
        schedule, ends = phase.optim.schedule, stretch(self.run.phases[name]).ends
        return lambda step: decided_decay(schedule, self.record.of(name), step, ends)

    def shares_of_pairs(self, phase: BertPhase, name: str) -> Callable[[int], float]:
        """Return the share of pairs for token matching as a function of the step of a phase, from 0: none once it is known to be too short for them."""
        return lambda step: 0.0 if self.leaves_out_pairs(name, step) else share_of_pairs(phase, step)

    def leaves_out_pairs(self, name: str, step: int) -> bool:
        """Return whether a step of a phase, from 0, has no pairs because the phase was too short for them when its speed was measured, whatever it came to later."""
        return step >= pairs_end(self.record, self.phases).get(name, math.inf)

    def due(self, step: int) -> bool:
        """Return whether :meth:`look` wants to be called after so many steps: the same in all processes."""
        return (self.record.trained is None and step >= self._next) or any(d.at == step for d in self.record.of(self._name))

    def look(self, step: int, logger: MetricsLogger) -> bool:
        """Look at the clock after so many steps, or obey what was decided there; return whether a decision was taken now.

        Args:
            logger: is told.
        """
        for decision in [decision for decision in self.record.of(self._name) if decision.at == step]:
            self._tell(decision, logger)
        if self.record.trained is not None or step < self._next:
            return False
        found: list[int] = []
        with raise_on_all_ranks(self.world):
            if self.world.main:
                found = self._found(step, logger)
        steps, self._next, *decided = from_first(found, self.world)
        self._set_steps(self._name, steps)
        if decided and not self.world.main:
            # The others need of it what decides the rate.
            warmup, decay, end = decided
            self._append(Decision(self._name, step, warmup, decay if decay >= 0 else None, end, "", "", 0.0))
        # By what all processes know, since they all write the checkpoint.
        begins = (1 - self.shares[self._number].decay) * steps
        self.before_decay = not self._number and not self.measuring and not self.decays(self._name) and begins <= 3 * self._next - 2 * step
        if decided:
            self._tell(self.record.of(self._name)[-1], logger)
        return bool(decided)

    def _found(self, step: int, logger: MetricsLogger) -> list[int]:
        """Return what the first process has found: steps, when to look again, and what it has decided and written."""
        self.record = set_by_clock(self.run, self.record, self.clock, partial(logger.event, "clock_jumped"))
        self._speed.note(self.shares[self._number].work(step), self.clock.of_steps())
        every = {"evaluation": self.run.logging.eval_every, "checkpoint": self.run.checkpoint.save_every}
        between = sum(self._pause(what) / steps for what, steps in every.items() if steps)
        left, enough = self.left(), self._speed.enough(self.left(guess=False))
        moment = Moment(step, left, self._speed.seconds_per_step(self.measuring) + between, step - self._began, enough, moment_text())
        found = look(self.shares, self._number, self.record.of(self._name), moment, self.record.seconds)
        if decision := found.decision:
            self._append(decision)
        write_record(self.run, self.record)
        if not decision:
            return [found.steps, found.next]
        steps, decay = found.steps, -1 if decision.decay_begins is None else decision.decay_begins
        if len(self.record.of(self._name)) == 2 and self.leaves_out_pairs(self._name, step):  # decided with pairs, and now there are none
            steps = planned_steps(self.shares, self._number, step, left, decision.seconds_per_step or 1e9)[0]
        return [steps, found.next, decision.warmup_steps, decay, decision.steps]

    def _decide(self, decision: Decision, after: int) -> None:
        """Take a decision before the first step of a phase; all processes have the one of the first."""
        numbers = from_first([decision.warmup_steps, decision.steps], self.world)
        self._append(dataclasses.replace(decision, warmup_steps=numbers[0], steps=numbers[1]))
        with raise_on_all_ranks(self.world):
            if self.world.main:
                write_record(self.run, self.record)

    def _append(self, decision: Decision) -> None:
        self.record = dataclasses.replace(self.record, decisions=[*self.record.decisions, decision])
        self.shares = shares(self.run, pairs_end(self.record, self.phases))

    def _set_steps(self, name: str, steps: int) -> None:
        for later, count in expected_steps(self.run, name, steps).items():
            self.phases[later] = dataclasses.replace(self.phases[later], steps=count)

    def left(self, guess: bool = True) -> float:
        """Return the time that is left for the steps of pretraining (s).

        Each phase ends with an evaluation and a checkpoint (see `_pause`), and begins with as much as this one, such as trials of micro-batches or compilation.
        """
        evaluation, checkpoint = (self._pause(what, guess) for what in ("evaluation", "checkpoint"))
        here, *later = self._per_sequence[self._number :]
        ends = evaluation * (1 + sum(later) / here) + checkpoint * (1 + len(later))
        ends += len(later) * (self._pause("start") + self._pause("warm-up") + self._speed.compiled) if guess else 0.0
        return self.clock.left() - reserve(self.record.after_seconds, self.record.seconds) - ends

    def _pause(self, what: str, guess: bool = True) -> float:
        """Return the time of an evaluation or a checkpoint (s); of an evaluation before the first, that of its forward passes, a third of a step's.

        The first step, which may compile for minutes, is nothing to guess from.
        """
        known = 0.0
        if guess and what == "evaluation" and self._speed.warm:
            known = self._validation / self.phases[self._name].global_batch_size * self._speed.seconds_per_step() / 3
        return self.clock.pauses.get(what, known)

    def _tell(self, decision: Decision, logger: MetricsLogger) -> None:
        """Print a decision, and write it among the metrics; also each time when it is come to again."""
        known = self.record.of(decision.phase)
        if decision is known[0]:
            return
        begun = decision.decay_begins is None and not self._number
        text = expectation(self.record, self.shares, decision, max(0.0, self.left())) if begun else decision_text(decision)
        more = {"step": decision.at, "steps": decision.steps, "decay_begins": decision.decay_begins, "decided": decision.time}
        logger.event("budget", f"budget {self.run.budget}: {text}", **more)
        for event, message in length_warnings(self.phases[decision.phase], decision, decision is known[1], self._epoch):
            logger.event(event, message)

    def finish(self, log: Callable[[str], None]) -> None:
        """Write down that pretraining is done; say how it came out."""
        if self.record.trained is not None:
            return
        self.record = dataclasses.replace(self.record, trained=(now := self.record.now()), seen=now)
        with raise_on_all_ranks(self.world):
            if self.world.main:
                write_record(self.run, self.record)
                left = self.clock.left()
                rest = f"{duration(abs(left))} {'left' if left >= 0 else 'over'}, {duration(self.record.after_seconds)} estimated for what follows"
                log(f"budget {self.run.budget}: pretraining is done, {rest}" if self.record.after else close_record(self.run))


def pairs_end(record: BudgetRecord, phases: Mapping[str, Phase]) -> dict[str, int]:
    """Return the phases that were too short for pairs when their speed was measured, and from which step on (from 0) they have none."""
    found: dict[str, int] = {}
    for name, phase in phases.items():
        known = record.of(name)
        if not isinstance(phase, BertPhase) or not phase.token_matching:
            continue
        if found and not phase.token_matching_steps:  # what keeps up what was never learned
            found[name] = 0
        elif len(known) > 1 and too_short(phase, known[1].steps):
            found[name] = known[1].at
    return found


def expected_steps(run: Run, name: str, steps: int) -> dict[str, int]:
    """Return the steps of a phase, and those of the phases after it in the ratio that the recipe gives them."""
    names = list(run.phases)
    factor = steps / run.phases[name].steps
    return {later: steps if later == name else max(1, round(factor * run.phases[later].steps)) for later in names[names.index(name) :]}


def expectation(record: BudgetRecord, phases: Sequence[Share], decision: Decision, left: float) -> str:
    """Return what a run will do with its time, once the speed of its first phase is measured.

    Args:
        left: for pretraining (s).
    """
    counts = planned_steps(phases, 0, decision.at, left, decision.seconds_per_step or 1e9)
    first, *later = [f"{share.name} about {plural(steps, 'step')}" for share, steps in zip(phases, counts, strict=True)]
    gone = run_clock.CLOCK.wall() - record.started
    text = f"ends at {time_of_day(record.deadline)}. {duration(gone)} are over; pretraining gets {duration(left)}: "
    text += f"{first} of {seconds_text(decision.seconds_per_step)}{''.join(f', {words}' for words in later)}"
    if record.after:
        parts = [f"{name} {duration(seconds)}" for name, seconds in record.after.items()]
        text += f"; what follows is estimated at {', '.join(parts)}"
    return text


def decision_text(decision: Decision) -> str:
    """Return what is decided of the length of a phase, or expected of one behind the first."""
    if decision.decay_begins is None:
        return f"phase {decision.phase} gets about {plural(decision.steps, 'step')}: {decision.why}"
    text = f"phase {decision.phase}, step {decision.at:,}: its rate decays from step {decision.decay_begins:,} to step {decision.steps:,}"
    return f"{text}: {decision.why}" if decision.why else text


def length_warnings(phase: Phase, decision: Decision, first: bool, epoch: int) -> Iterator[tuple[str, str]]:
    """Yield what the length of a phase means for its settings and its text, each as an event and a message.

    Args:
        first: whether it is the first decision since the phase began.
        epoch: examples of an epoch.
    """
    gets, grows = f"phase {decision.phase} gets about {plural(decision.steps, 'step')}", batch_warmup(phase).steps
    if first and isinstance(phase, BertPhase) and too_short(phase, decision.steps):
        yield (
            "token_matching",
            f"with its pairs {gets.replace(' gets', ' would get')}: too few for token matching, which takes the first "
            f"{phase.token_matching_steps:,} (token_matching_steps). It is left out: "
            "masked tokens are learned sooner, but tasks that compare texts are hardly learned",
        )
    if decision.decay_begins is not None:
        return
    if decision.steps <= grows:
        yield (
            "batch_warmup",
            f"{gets}, and its batch grows for {grows:,} (batch_warmup.steps): it never reaches {phase.global_batch_size:,} sequences",
        )
    if (epochs := sequences_before(phase, decision.steps) / max(1, epoch)) > _EPOCHS:
        yield (
            "repeats",
            f"phase {decision.phase} will read its text about {epochs:,.0f} times; after about {_EPOCHS} passes more of them help little: "
            "a shorter budget, more text or a larger network would use the time better",
        )


def open_planner(run: Run, world: World, phases: Mapping[str, Phase]) -> tuple[Planner | None, dict[str, Phase]]:
    """Return the planner of a run, None where it has no budget, and its phases with their steps as they are decided so far."""
    known = dict(phases)
    return (Planner(run, world, known) if run.budget else None), known
