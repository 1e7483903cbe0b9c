"""A budget keeps to the time that really passes where the clock of the machine is set, while the run works and while it stands still."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest

from overnight.config import Run
from overnight.engine import budget_record, planner
from overnight.engine.budget_record import write_record
from tests.engine.fake_clock import FakeClock
from tests.engine.test_planner import LESS, WSD, clock, events, record_of, train
from tests.engine.test_pretrain import Stop

__all__ = ["clock"]
Make = Callable[..., Run]


@pytest.mark.parametrize("jump", [pytest.param(7200.0, marks=pytest.mark.heavy), -7200.0])
def test_a_clock_that_is_set_anew_is_noticed_and_changes_nothing(jump: float, tiny: Make, clock: FakeClock) -> None:
    run = tiny(**WSD, **LESS, budget="50s")
    real = planner.Planner.look

    def look(self: planner.Planner, step: int, logger: Any) -> bool:
        if step >= 20:
            clock.set_forward = jump
        return real(self, step, logger)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner.Planner, "look", look)
        out = train(run)
    assert f"was set 2 h 00 min {'forward' if jump > 0 else 'back'}" in out
    assert [event["event"] for event in events(run)].count("clock_jumped") == 1
    assert clock.now == pytest.approx(1050, abs=1.5)
    record = record_of(run)
    assert record.done is not None and abs(record.done - record.deadline) <= 1.5


@pytest.mark.parametrize("killed", [1, 24])
def test_a_clock_that_was_set_back_while_the_run_stood_still_gives_it_no_more_time(killed: int, tiny: Make, clock: FakeClock) -> None:
    run = tiny(**WSD, **LESS, budget="50s")
    clock.stop_at = killed
    with pytest.raises(Stop):
        train(run)
    clock.stop_at, clock.set_forward = -1, -86400.0
    out = train(run)
    assert re.search(r"was set (24 h 00|23 h 59) min back: .* the budget ends at", out), out
    assert clock.now == pytest.approx(1050, abs=3), "a second a step, and some between the last look and the stop are not known"
    assert [event["event"] for event in events(run)].count("clock_jumped") == 1
    record = record_of(run)
    assert record.done is not None and abs(record.done - record.deadline) <= 3
    assert "all phases are done" in train(run) and record_of(run) == record


def test_a_clock_that_was_set_back_before_any_training_neither_ends_a_budget_nor_lengthens_it(tiny: Make, clock: FakeClock) -> None:
    run = tiny(**WSD, **LESS, budget="50s")
    record = budget_record.begin_record(run)
    clock.now += 20
    write_record(run, dataclasses.replace(record, seen=clock.wall()))
    clock.set_forward = -86400.0
    train(run)
    assert clock.now == pytest.approx(1050, abs=1.5)
