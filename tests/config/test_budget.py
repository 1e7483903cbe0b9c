"""A budget is a length of time, or the next such time of day; the recipe must fit it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest

from overnight import config
from overnight.config.budget import deadline_of
from tests.recipe import message, tree


@pytest.fixture(params=["UTC", "Europe/Berlin", "America/New_York"])
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from in_zone(request.param, monkeypatch)


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from in_zone("Europe/Berlin", monkeypatch)


def in_zone(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", name)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("8h", 28800), ("45m", 2700), ("45min", 2700), ("1h30m", 5400), ("1h 30m", 5400), ("1.5h", 5400), ("2d", 172800), ("90s", 90)],
)
def test_a_length_counts_from_the_start(text: str, seconds: int) -> None:
    assert deadline_of(text, 1000.0) == 1000.0 + seconds


@pytest.mark.usefixtures("zone")
def test_until_is_the_next_such_time_of_day() -> None:
    evening, morning = datetime(2026, 11, 22, 23, 30), datetime(2026, 11, 22, 6, 0)
    assert datetime.fromtimestamp(deadline_of("until 07:00", evening.timestamp())) == datetime(2026, 11, 23, 7, 0)
    assert datetime.fromtimestamp(deadline_of("until 7:00", morning.timestamp())) == datetime(2026, 11, 22, 7, 0)
    exact = datetime(2026, 11, 22, 7, 0)
    assert datetime.fromtimestamp(deadline_of("until 07:00", exact.timestamp())) == exact + timedelta(days=1)
    # The night in which Berlin's clocks go back has an hour more.
    assert datetime.fromtimestamp(deadline_of("until 07:00", datetime(2026, 10, 24, 23, 0).timestamp())) == datetime(2026, 10, 25, 7, 0)


@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize(
    ("day", "start", "fold", "until", "minutes"),
    [
        (datetime(2026, 10, 25), (2, 45), 1, "02:50", 5),
        (datetime(2026, 10, 25), (2, 15), 1, "02:30", 15),
        (datetime(2026, 10, 25), (2, 45), 0, "02:30", 45),
        (datetime(2026, 10, 25), (1, 15), 0, "02:30", 75),
        (datetime(2026, 3, 29), (1, 50), 0, "02:30", 40),  # 02:30 is skipped: as long after 02:00, which is 03:00
    ],
)
def test_until_knows_the_hour_that_comes_twice_and_the_one_that_is_skipped(
    day: datetime, start: tuple[int, int], fold: int, until: str, minutes: int
) -> None:
    began = day.replace(hour=start[0], minute=start[1], fold=fold).timestamp()
    assert deadline_of(f"until {until}", began) == began + 60 * minutes


@pytest.mark.parametrize(
    "text", ["", "8", "8x", "h", "0m", "-1h", "until", "until 7", "until 24:00", "until 07:60", "07:00", "1m1h", "99999999d", f"{10**30}d"]
)
def test_anything_else_is_no_budget(text: str) -> None:
    with pytest.raises(ValueError, match="must be a time such as 8h"):
        deadline_of(text, 0.0)


def refused(**schedule: Any) -> str:
    settings = {"name": "wsd", "warmup_ratio": 0.1, "stable_ratio": 0.5, **schedule}
    found = tree()
    found["budget"] = "8h"
    for phase in found["phases"].values():
        phase["optim"] = {**phase.get("optim", {}), "schedule": settings}
    return message(lambda: config.build_run(found))


def test_a_schedule_that_a_budget_cannot_cut_is_refused_with_what_to_do() -> None:
    assert "stable_ratio = 0.9: leaves no steps for the decay" in refused(stable_ratio=0.9)
    assert "total_steps = 100000: with a budget the number of steps is not known beforehand" in refused(total_steps=100000)
    assert "power = 2.0: decay = sqrt has none" in refused(decay="sqrt", power=2.0)


def test_a_batch_may_grow_under_a_budget_for_longer_than_the_share_of_its_phase() -> None:
    found = tree()
    found["budget"] = "8h"
    for phase in found["phases"].values():
        phase["optim"] = {**phase.get("optim", {}), "schedule": {"name": "wsd", "warmup_ratio": 0.1, "stable_ratio": 0.5}}
        phase["batch_warmup"] = {"initial_batch_size": 8, "steps": 5000}
    config.build_run(found)
    found["phases"]["short"]["batch_warmup"]["steps"] = 0
    assert "batch_warmup.steps = 0: must be above 0" in message(lambda: config.build_run(found))
