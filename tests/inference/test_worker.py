"""Requests that wait are answered together, small ones between the batches of a large one, and those that nobody waits for not at all."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from overnight.inference.worker import Busy, Worker


def test_requests_that_wait_are_answered_together_and_too_many_are_refused() -> None:
    begun, go_on = threading.Event(), threading.Event()
    batches: list[tuple[Any, list[Any]]] = []

    def answer(kind: Any, texts: list[Any]) -> list[Any]:
        begun.set()
        go_on.wait()
        batches.append((kind, texts))
        if kind == "bad":
            raise ValueError("no")
        return [text * 2 for text in texts]

    worker = Worker(answer, 4)
    first = worker.submit("a", [1])
    begun.wait()
    waiting = [worker.submit("a", [2, 3]), worker.submit("a", [4]), worker.submit("bad", [5]), worker.submit("a", [6])]
    with pytest.raises(Busy):
        worker.submit("a", [7])
    assert worker.waiting() == 4
    go_on.set()
    worker.stop()
    assert [first.result(), waiting[0].result(), waiting[1].result(), waiting[3].result()] == [[2], [4, 6], [8], [12]]
    with pytest.raises(ValueError, match="no"):
        waiting[2].result()
    assert batches == [("a", [1]), ("a", [2, 3, 4]), ("bad", [5]), ("a", [6])]


def test_who_has_left_is_not_answered_and_makes_room_for_others() -> None:
    begun, go_on = threading.Event(), threading.Event()
    answered: list[Any] = []

    def answer(kind: Any, texts: list[Any]) -> list[Any]:
        begun.set()
        go_on.wait()
        answered.extend(texts)
        return texts

    worker = Worker(answer, 2)
    worker.submit("a", [1])
    begun.wait()
    left = [worker.submit("a", [2]), worker.submit("a", [3])]
    with pytest.raises(Busy):
        worker.submit("a", [4])
    assert left[0].cancel()
    stays = worker.submit("a", [5])
    with pytest.raises(Busy):
        worker.submit("a", [6])
    go_on.set()
    worker.stop()
    assert answered == [1, 3, 5] and stays.result() == [5]


def test_a_request_that_cannot_be_answered_leaves_those_that_wait_with_it_their_answers() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def answer(kind: Any, texts: list[Any]) -> list[Any]:
        begun.set()
        go_on.wait()
        return [60 // text for text in texts]

    worker = Worker(answer, 4)
    worker.submit("a", [1])
    begun.wait()
    good, bad, other = (worker.submit("a", texts) for texts in ([2, 3], [4, 0], [5]))
    go_on.set()
    worker.stop()
    assert (good.result(), other.result()) == ([30, 20], [12])
    with pytest.raises(ZeroDivisionError):
        bad.result()


class Batches:
    """A worker whose answers take as many batches as their kind says, the first of them once `go_on` is set."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.done: list[str] = []
        self.worker = Worker(self.answer, 8)

    def answer(self, kind: Any, texts: list[Any]) -> list[Any]:
        self.begun.set()
        self.go_on.wait()
        for batch in range(kind):
            self.worker.between()
            self.done.append(f"{' '.join(text.strip() for text in texts)} {batch}")
        return texts


def long(name: str) -> str:
    """Return a text that is large for a request."""
    return name + " " * 20_000


def test_small_requests_are_answered_between_the_batches_of_a_large_one() -> None:
    batches = Batches()
    first = batches.worker.submit(4, [long("large")])
    batches.begun.wait()
    asked = [(2, "a"), (4, long("next")), (2, "b"), (1, "c")]
    answers = [first, *(batches.worker.submit(kind, [text]) for kind, text in asked)]
    batches.go_on.set()
    batches.worker.stop()
    assert [found.result()[0].strip() for found in answers] == ["large", "a", "next", "b", "c"]
    assert batches.done == ["a b 0", "a b 1", "large 0", "c 0", "large 1", "large 2", "large 3", *(f"next {n}" for n in range(4))]


def test_a_large_request_is_answered_alone() -> None:
    batches = Batches()
    batches.worker.submit(1, ["first"])
    batches.begun.wait()
    for text in ("a", long("large"), "b", "c"):
        batches.worker.submit(1, [text])
    batches.go_on.set()
    batches.worker.stop()
    assert batches.done == ["first 0", "a 0", "b c 0", "large 0"]


def test_a_request_at_work_ends_when_nobody_waits_for_it_any_more() -> None:
    batches = Batches()
    left = batches.worker.submit(1_000_000, [long("left")])
    batches.begun.wait()
    left.cancel()
    stays = batches.worker.submit(1, ["stays"])
    batches.go_on.set()
    assert stays.result(60) == ["stays"]
    batches.worker.stop()
    assert batches.done == ["stays 0"]


def test_what_is_wrong_with_a_small_request_is_not_the_error_of_the_large_one_around_it() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def answer(kind: Any, texts: list[Any]) -> list[Any]:
        begun.set()
        go_on.wait()
        if kind == "bad":
            raise ValueError("no")
        worker.between()
        return texts

    worker = Worker(answer, 4)
    large = worker.submit("a", [long("large")])
    begun.wait()
    bad, good = worker.submit("bad", ["b"]), worker.submit("a", ["g"])
    go_on.set()
    worker.stop()
    assert (large.result(), good.result()) == ([long("large")], ["g"])
    with pytest.raises(ValueError, match="no"):
        bad.result()
