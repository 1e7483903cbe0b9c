"""Batches that are made ahead: in order, no further ahead than they may be, and with an end."""

from __future__ import annotations

import threading

import pytest

from overnight.batches.prefetch import prefetch
from overnight.errors import DataError
from tests.processes import HANG


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "loader"]


@pytest.mark.parametrize(("start", "stop"), [(0, 20), (5, 9), (3, 3)])
def test_prefetch_yields_in_order_and_ends_its_thread(start: int, stop: int) -> None:
    assert list(prefetch(lambda step: step * step, start, stop)) == [step * step for step in range(start, stop)]
    assert loader_threads() == []


def test_prefetch_raises_the_error_of_the_maker_at_its_item() -> None:
    def make(step: int) -> int:
        if step == 3:
            raise DataError("shard gone")
        return step

    found = []
    with pytest.raises(DataError, match="shard gone"):
        for item in prefetch(make, 0, 10):
            found.append(item)
    assert found == [0, 1, 2] and loader_threads() == []


def test_prefetch_stops_its_thread_when_the_consumer_stops() -> None:
    made = []
    items = prefetch(lambda step: made.append(step) or step, 0, 10**9, depth=2)  # type: ignore[func-returns-value]
    assert next(items) == 0
    items.close()
    assert loader_threads() == [] and len(made) < 10


def test_prefetch_works_ahead_by_no_more_than_its_depth() -> None:
    made = threading.Semaphore(0)
    count = 0

    def make(step: int) -> int:
        nonlocal count
        count += 1
        made.release()
        return step

    items = prefetch(make, 0, 100, depth=3)
    next(items)
    # Three lie ready beyond the one taken, and one more is made and waits for room.
    for _ in range(5):
        assert made.acquire(timeout=HANG)
    assert not made.acquire(timeout=0.3) and count == 5
    items.close()
