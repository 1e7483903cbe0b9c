"""A schedule that is decided on the way is a function of the step and the decisions: continuous, that of `wsd` where nothing changes, 0 at the end."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.config import Schedule
from overnight.optim.decisions import Decision, decided_factor
from overnight.optim.schedules import factor


def decision(at: int, warmup: int, begins: int | None, steps: int) -> Decision:
    return Decision("short", at, warmup, begins, steps, "", "", 0.0)


FORMS = [Schedule(name="wsd"), Schedule(name="wsd", power=2.0), Schedule(name="wsd", decay="sqrt")]


@pytest.mark.parametrize("form", FORMS)
@given(warmup=st.integers(0, 20), stable=st.integers(1, 30), decay=st.integers(1, 40))
def test_one_decision_before_the_first_step_is_the_wsd_schedule(form: Schedule, warmup: int, stable: int, decay: int) -> None:
    steps = warmup + stable + decay
    fixed = Schedule(name="wsd", warmup_ratio=warmup / steps, stable_ratio=stable / steps, power=form.power, decay=form.decay)
    decided = [decision(0, warmup, warmup + stable, steps)]
    # Where the decay begins, the shares of the steps are rounded.
    assert [decided_factor(form, decided, t) for t in range(steps)] == pytest.approx(
        [factor(fixed, t, steps) for t in range(steps)], rel=1e-9, abs=1e-7
    )


@pytest.mark.parametrize("form", FORMS)
@given(st.data())
def test_a_decision_changes_where_the_curve_goes_and_never_where_it_is(form: Schedule, data: st.DataObject) -> None:
    warmup = data.draw(st.integers(1, 30))
    decisions = [decision(0, warmup, None, 1000)]
    at = data.draw(st.integers(1, 60))
    warmup = at + data.draw(st.integers(1, 30)) if at < warmup else warmup
    decisions.append(decision(at, warmup, None, 1000))
    at += data.draw(st.integers(0, 40))
    begins = at + data.draw(st.integers(0, 10))
    steps = begins + data.draw(st.integers(10, 60))
    decisions.append(decision(at, warmup, begins, steps))
    for _ in range(data.draw(st.integers(0, 4))):
        if max(at, begins) > steps - 2:
            break
        at = data.draw(st.integers(max(at, begins), steps - 2))
        steps = at + data.draw(st.integers(1, 60))
        decisions.append(decision(at, warmup, begins, steps))
    values = [decided_factor(form, decisions, t) for t in range(steps + 1)]
    assert all(0 <= value <= 1 for value in values) and values[steps] == 0
    rising = [value for value in values[:begins]]
    assert all(a <= b for a, b in pairwise(rising))
    falling = values[max(0, begins - 1) :]
    assert all(a >= b for a, b in pairwise(falling))
    for number, later in enumerate(decisions[1:], 1):
        # At the step of a decision a decay is where it would have been without it, and a warm-up goes on by one step of its line.
        if later.decay_begins is not None and later.at > later.decay_begins:
            assert values[later.at] == pytest.approx(decided_factor(form, decisions[:number], later.at), abs=1e-12)
        if later.decay_begins is None:
            assert values[later.at] - values[later.at - 1] <= 1 / max(1, later.warmup_steps - later.at) + 1e-12


def test_the_square_root_falls_fastest_at_first_as_published() -> None:
    form = Schedule(name="wsd", warmup_ratio=0.0, stable_ratio=0.2, decay="sqrt")
    values = [factor(form, t, 100) for t in range(101)]
    # Hägele et al. 2024, equation 2: 1 - sqrt((n - (N - N_decay)) / N_decay).
    assert values[20:] == pytest.approx([1 - ((n - 20) / 80) ** 0.5 for n in range(20, 101)], abs=1e-7)
    assert values[:20] == [1.0] * 20


def test_decisions_after_a_step_do_not_count_at_it() -> None:
    first, second = decision(0, 10, None, 100), decision(50, 10, 60, 90)
    assert all(decided_factor(FORMS[0], [first, second], t) == decided_factor(FORMS[0], [first], t) for t in range(50))


def test_a_decay_that_must_begin_while_the_rate_still_rises_falls_from_there() -> None:
    values = [decided_factor(FORMS[0], [decision(0, 100, None, 1000), decision(20, 100, 20, 30)], t) for t in range(31)]
    assert values[19] == values[20] == 0.2
    assert values[20:] == pytest.approx([0.2 * (30 - t) / 10 for t in range(20, 31)])
