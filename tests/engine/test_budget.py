"""Whatever the machine does, a run with a budget ends on time, with a decay to 0, and few decisions: on simulated machines, without a clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight.batches.batch_size import batch_size, sequences_before
from overnight.config import BatchWarmup, BertPhase, Schedule
from overnight.engine.budget import Moment, Share, Speed, begin, least_budget, look, planned_steps, reserve, steps_within
from overnight.optim.decisions import Decision, decided_factor

Machine = Callable[[int, float], float]
"""Seconds of a step, by the phase and the seconds that have passed."""

ONE = [Share("short", 1000, 1.0, 0.03, 0.3)]
TWO = [Share("short", 1800, 1.0, 0.05, 0.3), Share("long", 200, 2.5, 0.1, 0.5)]


class Night(NamedTuple):
    """What a simulated run has done."""

    ended: float
    decisions: list[list[Decision]]
    steps: list[int]


def simulate(shares: list[Share], machine: Machine, budget: float, after: float = 0.0) -> Night:
    """Take steps as the trainer does, on a machine that exists only here."""
    now, known, end = 0.0, 0.0, budget - reserve(after, budget)
    night = Night(0.0, [], [])
    for number, share in enumerate(shares):
        decisions = [begin(shares, number, end - now, known, "")]
        speed, done, next_look, steps = Speed([(0, now)]), 0, 1, decisions[0].steps
        while done < steps:
            now += machine(number, now)
            done += 1
            if done == next_look and done < steps:
                speed.note(share.work(done), now)
                moment = Moment(done, end - now, speed.seconds_per_step(), done, speed.enough(end - now), "")
                found = look(shares, number, decisions, moment, budget)
                assert found.next > done and found.steps > done
                steps, next_look = found.steps, found.next
                if found.decision:
                    assert found.decision.at == done
                    decisions.append(found.decision)
        assert decisions[-1].steps == steps and decisions[-1].decay_begins is not None, "every phase ends by a decision"
        known = decisions[-1].seconds_per_step * (shares[number + 1].flops / share.flops if number + 1 < len(shares) else 1)
        night.decisions.append(decisions)
        night.steps.append(steps)
    return night._replace(ended=now)


def assert_shaped(night: Night) -> None:
    """The rate rises to its peak, is held, and falls to 0, without a jump that is not one of its own steps."""
    form = Schedule(name="wsd")
    for decisions, steps in zip(night.decisions, night.steps, strict=True):
        values = [decided_factor(form, decisions, t) for t in range(steps + 1)]
        begins = decisions[-1].decay_begins
        assert begins is not None and values[steps] == 0
        assert all(a <= b for a, b in pairwise(values[:begins]))
        assert all(a >= b for a, b in pairwise(values[max(0, begins - 1) :]))


@pytest.mark.parametrize("shares", [ONE, TWO])
@pytest.mark.parametrize("seconds", [0.02, 0.4, 5.0])
def test_an_even_machine_needs_no_second_plan(shares: list[Share], seconds: float) -> None:
    night = simulate(shares, lambda phase, now: seconds * shares[phase].flops, 3600.0, 400.0)
    assert_shaped(night)
    end = 3600.0 - reserve(400.0, 3600.0)
    assert end - 3 * seconds * shares[-1].flops <= night.ended <= end
    for share, decisions, steps in zip(shares, night.decisions, night.steps, strict=True):
        assert len(decisions) == 3
        begins = decisions[-1].decay_begins
        assert begins is not None and steps - begins == pytest.approx(share.decay * steps, abs=2)
        assert decisions[1].warmup_steps == pytest.approx(share.warmup * steps, abs=0.02 * steps + 10)


def test_time_is_divided_as_the_steps_of_the_recipe_by_their_time() -> None:
    night = simulate(TWO, lambda phase, now: (0.4, 1.0)[phase], 3600.0)
    assert night.steps[0] / night.steps[1] == pytest.approx(9, rel=0.05)


def test_a_phase_that_is_slower_than_its_operations_say_gets_fewer_steps() -> None:
    night = simulate(TWO, lambda phase, now: (0.4, 2.0)[phase], 3600.0)
    assert night.steps[0] / night.steps[1] == pytest.approx(18, rel=0.1) and night.ended == pytest.approx(3600, rel=0.01)


@pytest.mark.parametrize("shares", [ONE, TWO])
@settings(max_examples=40)
@given(st.floats(0.05, 2.0), st.floats(0.4, 2.5), st.floats(0.0, 1.0))
def test_a_machine_that_turns_slower_or_faster_once_ends_on_time(shares: list[Share], seconds: float, change: float, when: float) -> None:
    budget = 3600.0

    def machine(phase: int, now: float) -> float:
        return seconds * shares[phase].flops * (change if now > when * budget else 1.0)

    night = simulate(shares, machine, budget)
    assert_shaped(night)
    # A phase of a few steps cannot end between two of them.
    assert abs(night.ended - budget) <= 0.02 * budget + 2 * seconds * shares[-1].flops * max(1.0, change)
    assert max(map(len, night.decisions)) <= 30


@settings(max_examples=40)
@given(st.floats(0.1, 1.0), st.integers(0, 1000), st.floats(0.0, 0.4))
def test_noise_and_pauses_end_on_time(seconds: float, seed: int, noise: float) -> None:
    budget, draw = 3600.0, random.Random(seed)

    def machine(phase: int, now: float) -> float:
        # The last pause lies before the last tenth: nothing makes up for one in the last minute.
        pause = 60.0 if draw.random() < 0.002 and now < 0.9 * budget else 0.0
        return seconds * draw.lognormvariate(0.0, noise) + pause

    night = simulate(ONE, machine, budget)
    assert_shaped(night)
    assert abs(night.ended - budget) <= 0.02 * budget
    assert max(map(len, night.decisions)) <= 43


def test_a_machine_that_stood_still_until_after_the_deadline_ends_after_the_shortest_decay_and_says_how_late() -> None:
    night = simulate(ONE, lambda phase, now: 3000.0 if 1800 <= now < 1801 else 0.4, 3600.0)
    assert_shaped(night)
    (decisions,) = night.decisions
    begins = decisions[-1].decay_begins
    assert begins is not None and night.steps[0] - begins >= 0.02 * begins
    assert 4800 < night.ended < 4800 + 0.05 * night.steps[0] * 0.4
    assert any("late" in decision.why for decision in decisions)


def growing(first: int, parts: int, steps: int) -> tuple[BertPhase, Share]:
    """A phase whose batch grows, and as its budget sees it."""
    phase = BertPhase(1000, first * parts, batch_warmup=BatchWarmup(first, steps))
    return phase, ONE[0]._replace(work=lambda step: sequences_before(phase, step) / phase.global_batch_size)


@settings(max_examples=30)
@given(st.integers(1, 8), st.integers(2, 16), st.integers(1, 4000), st.floats(0.1, 2.0))
def test_a_batch_that_grows_ends_on_time_with_the_share_of_its_decay(first: int, parts: int, steps: int, seconds: float) -> None:
    phase, share = growing(first, parts, steps)
    taken = [0]

    def machine(number: int, now: float) -> float:
        taken[0] += 1
        return seconds * batch_size(phase, taken[0] - 1) / phase.global_batch_size

    night = simulate([share], machine, 3600.0)
    assert_shaped(night)
    (decisions,), (whole,) = night.decisions, night.steps
    end = 3600.0 - reserve(0.0, 3600.0)
    assert end - 0.01 * 3600 <= night.ended <= end + seconds
    begins = decisions[-1].decay_begins
    assert begins is not None and whole - begins == pytest.approx(share.decay * whole, rel=0.1, abs=3)


@given(st.integers(1, 8), st.integers(2, 16), st.integers(1, 4000), st.floats(0.0, 5000.0))
def test_the_steps_within_some_work_are_the_most_that_do_no_more(first: int, parts: int, steps: int, work: float) -> None:
    _, share = growing(first, parts, steps)
    found = steps_within(share, work)
    assert share.work(found) <= work < share.work(found + 1)
    assert steps_within(ONE[0], work) == int(work)


def test_the_steps_that_measure_the_speed_hardly_move_the_weights() -> None:
    (decisions,) = simulate(ONE, lambda phase, now: 0.4, 3600.0).decisions
    measured = decisions[1]
    assert measured.at <= 60
    assert decided_factor(Schedule(name="wsd"), decisions[:1], measured.at - 1) < 1e-3
    without = simulate([ONE[0]._replace(warmup=0.0)], lambda phase, now: 0.4, 3600.0).decisions[0]
    assert decided_factor(Schedule(name="wsd"), without, 0) == 1.0


@pytest.mark.parametrize("seconds", [0.02, 0.4])
def test_a_limited_warm_up_is_so_long_whatever_the_budget_is(seconds: float) -> None:
    night = simulate([ONE[0]._replace(max_warmup_steps=40)], lambda phase, now: seconds, 3600.0)
    (decisions,), (steps,) = night.decisions, night.steps
    rates = [decided_factor(Schedule(name="wsd"), decisions, step) for step in range(steps)]
    assert 40 <= rates.index(1.0) + 1 <= 40 + decisions[1].at
    assert decisions[-1].decay_begins is not None and steps - decisions[-1].decay_begins == pytest.approx(0.3 * steps, rel=0.01)
    (short,) = simulate([ONE[0]._replace(max_warmup_steps=40)], lambda phase, now: 4.0, 3600.0).decisions
    assert short[1].warmup_steps == pytest.approx(short[1].at + 0.03 * 900, abs=1), "the share, where that is less"


@pytest.mark.parametrize(
    ("done", "seconds", "budget", "off", "moves", "moved"),
    [
        # 0.04 of the 150 steps that are left, in seconds; the same of few steps is less than 0.003 of a long budget, or than a second.
        (850, 1.0, 1000.0, 6, 0, False),
        (850, 1.0, 1000.0, 7, 0, True),
        (850, 1.0, 1000.0, -7, 0, True),
        (850, 1.0, 3000.0, 9, 0, False),
        (850, 1.0, 3000.0, 10, 0, True),
        (850, 0.125, 10.0, 8, 0, False),
        (850, 0.125, 10.0, 9, 0, True),
        # One step alone must be 0.01 of the budget.
        (990, 8.0, 800.0, 1, 0, False),
        (990, 9.0, 800.0, 1, 0, True),
        (990, 4.0, 800.0, 2, 0, True),
        # Before the decay begins, and after forty moves, nothing is moved.
        (699, 1.0, 1000.0, 50, 0, False),
        (700, 1.0, 1000.0, 50, 0, True),
        (850, 1.0, 1000.0, 7, 39, True),
        (850, 1.0, 1000.0, 7, 40, False),
    ],
)
def test_the_end_of_a_decay_is_moved_where_it_is_off_by_more_than_noise(
    done: int, seconds: float, budget: float, off: int, moves: int, moved: bool
) -> None:
    decisions = [Decision("short", 0, 30, None, 1000, "", "", seconds)]
    decisions += [Decision("short", 700 + number, 30, 700, 1000, "", "", seconds) for number in range(1 + moves)]
    moment = Moment(done, (1000 + off - done) * seconds, seconds, done, True, "")
    found = look(ONE, 0, decisions, moment, budget)
    assert found.steps == 1000 + (off if moved else 0) and (found.decision is not None) is moved


def test_the_noise_of_the_clock_does_not_move_the_end_to_and_fro_by_a_step() -> None:
    rng = random.Random(0)
    for _ in range(20):
        (decisions,) = simulate(ONE, lambda phase, now: 1.46 * rng.uniform(0.95, 1.05), 180.0, 35.0).decisions
        assert len(decisions) == 3, [decision.why for decision in decisions]


def test_steps_of_a_minute_are_timed_by_few() -> None:
    (decisions,) = simulate(ONE, lambda phase, now: 60.0, 3600.0).decisions
    assert decisions[1].at <= 4 and decisions[1].seconds_per_step == 60.0


def test_a_first_step_that_compiles_for_minutes_is_not_taken_for_the_speed() -> None:
    night = simulate(ONE, lambda phase, now: 300.0 if now == 0 else 0.4, 3600.0)
    (decisions,) = night.decisions
    assert decisions[1].seconds_per_step == pytest.approx(0.4) and decisions[1].warmup_steps > 200
    assert abs(night.ended - 3600) <= 0.01 * 3600


@pytest.mark.parametrize("shares", [ONE, TWO])
@pytest.mark.parametrize("slow", range(1, 8))
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.8])
def test_one_early_step_however_slow_leaves_the_rest_of_the_time_to_the_steps_after_it(
    shares: list[Share], slow: int, share: float
) -> None:
    taken = [0]

    def machine(phase: int, now: float) -> float:
        taken[0] += 1
        return share * 180.0 if taken[0] == slow else 0.4 * shares[phase].flops

    night = simulate(shares, machine, 180.0)
    assert_shaped(night)
    assert 0.93 * 180.0 < night.ended < 182.0
    decays = [next(d for d in decisions if d.decay_begins is not None) for decisions in night.decisions]
    assert all(first.seconds_per_step < 1.0 + shares[number].flops for number, first in enumerate(decays)), "the slow one is not the speed"


@pytest.mark.parametrize("steps", range(1, 12))
def test_a_budget_of_a_few_steps_is_kept_where_it_is_not_less_than_three(steps: int) -> None:
    night = simulate(ONE, lambda phase, now: 10.0, 10.5 * steps)
    assert_shaped(night)
    assert sum(night.steps) <= max(steps, 3)


def test_one_pause_is_no_slower_machine() -> None:
    speed = Speed([(0, 0.0)])
    for step in range(10, 70, 10):
        speed.note(step, step * 0.5 + (600.0 if step >= 40 else 0.0))
    assert speed.seconds_per_step() == 0.5


def test_steps_that_mostly_compile_are_expected_to_take_what_the_fastest_takes_at_first_alone() -> None:
    speed = Speed([(0, 0.0)])
    for work, seconds in ((1, 20.0), (2, 26.0), (4, 26.2), (8, 40.0), (13, 52.0)):
        speed.note(work, seconds)
    assert speed.seconds_per_step(first=True) == pytest.approx(0.1) and speed.seconds_per_step() > 2.0
    assert Speed([(0, 0.0), (5, 3.0)], fastest=0.4).seconds_per_step(first=True) == pytest.approx(0.6), "a little faster is noise"


def test_the_plan_scales_all_phases_by_one_factor() -> None:
    assert planned_steps(TWO, 0, 0, 1800 * 0.4 + 200 * 1.0, 0.4) == [1800, 200]
    assert planned_steps(TWO, 0, 100, 2 * (1800 * 0.4 + 200 * 1.0) - 40, 0.4) == [3600, 400]
    assert planned_steps(TWO, 1, 0, 100.0, 1.0) == [100]


@given(st.floats(0, 10_000), st.floats(0, 10_000))
def test_the_least_budget_leaves_a_tenth_for_pretraining(spent: float, after: float) -> None:
    least = least_budget(spent, after)
    assert least - spent - reserve(after, least) == pytest.approx(0.1 * least, abs=1e-6)
