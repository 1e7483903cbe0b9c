"""What the machines of a job are told: when they start, begin again, and how the job ends."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from overnight.distributed.leader import Leader

Orders = list[tuple[int, dict[str, Any]]]


class Job:
    """Machines that do what they are told, and a clock."""

    def __init__(self, nodes: tuple[int, int], restarts: int = 0) -> None:
        self.now = 0.0
        self.leader = Leader(nodes, restarts, self.now)

    def ready(self, *numbers: int) -> Orders:
        for number in numbers:
            self.hear(number, ready=7000 + number, processes=2, host=f"node{number}")
        return self.orders()

    def hear(self, number: int, **message: Any) -> None:
        self.leader.hear(number, message, f"10.0.0.{number}", self.now)

    def ends(self, *ends: tuple[int, int, int]) -> Orders:
        """Machine, local number, exit code."""
        for number, local, code in ends:
            self.hear(number, ended=[self.leader.round, local, code])
        return self.orders()

    def orders(self, seconds: float = 0.0) -> Orders:
        self.now += seconds
        return self.leader.decide(self.now)


def all_of(*numbers: int, **order: Any) -> Orders:
    return [(number, order) for number in numbers]


def start(round: int, *numbers: int) -> Orders:
    master = [f"10.0.0.{numbers[0]}", 7000 + numbers[0]]
    world = 2 * len(numbers)
    return [(number, {"start": round, "first": 2 * at, "world": world, "master": master}) for at, number in enumerate(numbers)]


def test_a_fixed_number_of_machines_starts_when_all_are_there_and_ends_when_all_are_done() -> None:
    job = Job((2, 2))
    assert job.ready(1) == job.orders(60) == []
    assert job.ready(0) == start(0, 0, 1)
    assert job.ends((0, 0, 0), (0, 1, 0), (1, 0, 0)) == []
    assert job.ends((1, 1, 0)) == all_of(1, 0, end=0, why="")


def test_machines_that_do_not_come_end_the_job_after_ten_minutes() -> None:
    job = Job((2, 2))
    assert job.ready(0) == job.orders(599) == []
    ((number, order),) = job.orders(1)
    assert (number, order["end"]) == (0, 1) and "1 of 2 machines have joined" in order["why"]


def test_enough_machines_wait_ten_seconds_for_more() -> None:
    job = Job((1, 3))
    assert job.ready(0) == job.orders(9) == job.ready(1) == job.orders(9) == []
    assert job.orders(1) == start(0, 0, 1)


def test_a_failure_begins_all_again_as_often_as_asked_and_then_ends_with_its_cause() -> None:
    job = Job((2, 2), restarts=1)
    job.ready(0, 1)
    assert job.ends((0, 0, 1)) == []  # it lost the one that is killed, which is heard later
    assert job.ends((1, 1, -9), (0, 1, 1)) == []
    assert job.orders(1) == all_of(0, 1, again=False)
    assert job.ends((0, 0, -15)) == []  # they were told to
    assert job.ready(0, 1) == start(1, 0, 1)
    job.ends((0, 0, 1), (1, 1, -9))
    orders = job.orders(1)
    assert [(number, order["end"]) for number, order in orders] == [(0, 1), (1, 1)]
    assert "process 3 on node1 was killed by SIGKILL" in orders[0][1]["why"]


def test_a_wrong_recipe_and_a_signal_end_the_job_whatever_restarts_are_left() -> None:
    for code in (2, 130, 138, 143):
        job = Job((2, 2), restarts=3)
        job.ready(0, 1)
        assert job.ends(*((number, local, code) for number in (0, 1) for local in (0, 1))) == all_of(0, 1, end=code, why="")


def test_after_a_signal_nothing_begins_again() -> None:
    job = Job((1, 2), restarts=3)
    job.ready(0, 1)
    job.hear(1, stop=10)
    assert job.ends((0, 0, 138), (0, 1, 138), (1, 0, -9), (1, 1, 138)) == all_of(0, 1, end=138, why="")
    job = Job((2, 2), restarts=3)
    job.ready(0)
    job.hear(0, stop=15)
    assert job.orders() == all_of(0, end=143, why="")


def test_a_machine_that_comes_lets_all_begin_again_once_their_checkpoint_is_written() -> None:
    job = Job((1, 2))
    job.ready(1)
    assert job.orders(10) == start(0, 1)
    assert job.ready(0) == all_of(1, again=True)
    assert job.ends((1, 0, 143), (1, 1, 143)) == job.orders(60) == []
    assert job.ready(1) == start(1, 0, 1)


def test_a_machine_too_many_waits_until_one_is_lost() -> None:
    job = Job((2, 2), restarts=1)
    assert job.ready(0, 1, 2) == start(0, 0, 1)
    assert job.orders(60) == []
    job.leader.lose(1, job.now)
    assert job.orders(1) == all_of(0, again=False)
    assert job.ready(0) == start(1, 0, 2)


def test_a_lost_machine_ends_the_job_without_restarts() -> None:
    job = Job((2, 2))
    job.ready(0, 1)
    job.leader.lose(1, job.now)
    ((number, order),) = job.orders(1)
    assert (number, order["end"]) == (0, 1) and "a machine of this job, node1, no longer answers" in order["why"]


EVENTS = st.tuples(st.sampled_from(["ready", "ended", "lost", "stop", "time"]), st.integers(0, 3), st.sampled_from([0, 1, 2, 138, -9, -15]))


@given(st.integers(1, 3), st.integers(0, 1), st.integers(0, 2), st.lists(EVENTS, max_size=40))
def test_whatever_happens_the_machines_agree_on_the_round_and_the_job_ends(least: int, more: int, restarts: int, events: list[Any]) -> None:
    job = Job((least, least + more), restarts)
    training: dict[int, int] = {}
    ended = starts = 0
    for what, number, code in [*events, *[("time", 0, 0)] * 3]:
        if what == "ready" and number not in training:
            job.hear(number, ready=7000 + number, processes=1, host=f"node{number}")
        elif what == "ended" and number in training:
            job.hear(number, ended=[training[number], 0, code])
        elif what == "lost":
            job.leader.lose(number, job.now)
            training.pop(number, None)
        elif what == "stop":
            job.hear(number, stop=10)
        orders = job.orders(700 if what == "time" else 0.5)
        begin = [number for number, order in orders if "start" in order]
        if begin:
            starts += 1
            assert not training and least <= len(begin) <= least + more
            assert sorted(order["first"] for _, order in orders if "start" in order) == list(range(len(begin)))
        for to, order in orders:
            assert not ended, "nothing is said after the end"
            if "start" in order:
                training[to] = order["start"]
            else:
                training.pop(to, None)
        ended = ended or job.leader.over
    assert starts <= 1 + restarts + len(events)
    assert ended or training, "nobody waits for ever"
