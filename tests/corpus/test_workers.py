"""The seam that runs tasks on every core."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import process as executor
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight import machine
from overnight.corpus import workers
from overnight.corpus.workers import Processes, run_tasks
from overnight.errors import DataError, UserError
from tests.conftest import ROOT
from tests.corpus.busy_command import WAITS
from tests.processes import HANG, wait_until

R = TypeVar("R")


def _square(x: int) -> tuple[int, int]:
    return x * x, os.getpid()


def _fail(x: int) -> int:
    if x == 3:
        raise DataError("task 3")
    return x


def _die(x: int) -> int:
    if x == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def test_results_come_in_order_from_other_processes() -> None:
    results = list(run_tasks(_square, range(40), 2))
    assert [square for square, _ in results] == [x * x for x in range(40)]
    assert os.getpid() not in {pid for _, pid in results}


def _leave_holes(count: int) -> int:
    """Free blocks below one that stays, so that the C library does not return them by itself; returns resident bytes."""
    blocks = [bytes(2000) for _ in range(count)]
    _kept.append(bytes(2000))
    del blocks
    return _resident(count)


def _resident(_: int) -> int:
    return int(psutil.Process().memory_info().rss)


_kept: list[bytes] = []


@pytest.mark.skipif(machine._trim is None, reason="the C library has no malloc_trim")
def test_a_process_returns_what_one_kind_of_task_freed_before_the_next_kind() -> None:
    count = 50_000  # 100 MB
    with Processes(1) as process:
        before, after = (process.submit(task, count)() for task in (_leave_holes, _resident))
    assert before - after > 1000 * count


def _mapped_blocks(_: int) -> int:
    """Return how many blocks of a process lie outside its heap with one of 4 MB, after one of 24 MB was freed."""

    class Info(ctypes.Structure):  # of glibc's malloc.h
        _fields_ = tuple((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", *(f"rest{i}" for i in range(6))))

    told = ctypes.CDLL(None).mallinfo2
    told.restype = Info
    block = bytearray(24 << 20)
    del block
    before = told().hblks
    block = bytearray(4 << 20)
    mapped = told().hblks - before
    del block
    return int(mapped)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the C library has no mallinfo2")
def test_a_process_gives_large_blocks_back_though_larger_ones_came_and_went() -> None:
    with Processes(1) as process:
        assert process.submit(_mapped_blocks, 0)() == 1


def _arrow_allocator(_: int) -> str:
    return str(pa.default_memory_pool().backend_name)


def test_arrow_leaves_the_memory_of_processes_to_the_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARROW_DEFAULT_MEMORY_POOL", "to be put back")
    monkeypatch.delenv("ARROW_DEFAULT_MEMORY_POOL")
    machine.return_large_blocks()
    # Those of other tests are forked from one that may have loaded Arrow before.
    monkeypatch.setattr(workers, "get_context", multiprocessing.get_context)
    with Processes(1) as process:
        assert process.submit(_arrow_allocator, 0)() == "system"


def test_the_users_own_allocator_of_arrow_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARROW_DEFAULT_MEMORY_POOL", "mimalloc")
    machine.return_large_blocks()
    assert os.environ["ARROW_DEFAULT_MEMORY_POOL"] == "mimalloc"


def test_several_rounds_of_tasks_share_the_processes_which_end_with_the_last() -> None:
    with Processes(2) as engine:
        first, second = ({pid for _, pid in run_tasks(_square, range(40), engine)} for _ in range(2))
        assert len(first | second) <= 2
        assert not any(os.getpid() in pids for pids in (first, second))
    assert not multiprocessing.active_children()


def test_after_an_error_nothing_more_is_begun_and_the_processes_end() -> None:
    with pytest.raises(DataError, match="task 3"), Processes(2) as engine:
        list(run_tasks(_fail, range(10), engine))
    assert not multiprocessing.active_children()


def test_one_worker_or_one_task_stays_in_this_process() -> None:
    assert list(run_tasks(_square, range(3), 1)) == [(0, os.getpid()), (1, os.getpid()), (4, os.getpid())]
    assert list(run_tasks(_square, [2], 8)) == [(4, os.getpid())]
    assert list(run_tasks(_square, [], 8)) == []


def test_tasks_are_drawn_only_as_fast_as_they_are_worked_off() -> None:
    drawn = 0

    def tasks() -> Iterator[int]:
        nonlocal drawn
        for number in range(1, 1001):
            drawn = number
            yield number

    results = run_tasks(_square, tasks(), 2)
    next(results)
    assert drawn <= 10
    results.close()  # type: ignore[attr-defined]


def test_an_error_of_a_task_arrives_as_itself() -> None:
    with pytest.raises(DataError, match="task 3"):
        list(run_tasks(_fail, range(10), 2))


def test_a_killed_worker_is_an_error_and_no_hang() -> None:
    with pytest.raises(UserError, match="worker process was killed"):
        list(run_tasks(_die, range(10), 2))


@pytest.mark.parametrize("fails", ["the second process", "the thread", "the semaphores"])
def test_processes_that_cannot_be_started_are_told_with_what_to_do(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[BaseProcess] = []
    start = BaseProcess.start

    def one(process: BaseProcess) -> None:
        if fails == "the second process" and started:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        start(process)
        started.append(process)

    def none(*arguments: Any, **more: Any) -> None:
        raise RuntimeError("can't start new thread") if fails == "the thread" else PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(BaseProcess, "start", one)
    if fails == "the thread":
        monkeypatch.setattr(executor._ExecutorManagerThread, "start", none)
    if fails == "the semaphores":
        monkeypatch.setattr(workers, "ProcessPoolExecutor", none)
    with pytest.raises(UserError, match=r"^processes could not be started \(.+\); raise the limit .* or set data\.workers=1$"):
        list(run_tasks(_square, range(10), 2))
    for process in started:
        process.join(60)
    assert [process.exitcode for process in started] == [-signal.SIGKILL] * (fails != "the semaphores")


def test_a_worker_that_waits_returns_what_it_has_freed_and_not_between_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command trains the vocabulary meanwhile."""
    released: list[float] = []
    monkeypatch.setattr(workers, "_release_memory", lambda: released.append(time.monotonic()))
    monkeypatch.setattr(workers, "_last", None)
    for _ in range(20):
        workers._run_in_worker(_square, 2)
    assert released == []
    end = time.monotonic() + 20
    while not released and time.monotonic() < end:
        time.sleep(0.01)
    assert len(released) == 1


class _Recorded:
    """An engine of one worker that does a task when it is asked for its result, and keeps the order in which tasks were begun."""

    def __init__(self) -> None:
        self.begun: list[Any] = []

    def width(self) -> int:
        return 1

    def submit(self, function: Callable[[Any], R], task: Any) -> Callable[[], R]:
        self.begun.append(task)
        return lambda: function(task)


@given(st.lists(st.integers(0, 100), max_size=30))
def test_large_tasks_are_dealt_first_those_of_about_one_size_as_they_come_and_results_stay_in_order(sizes: list[int]) -> None:
    engine = _Recorded()
    tasks = list(enumerate(sizes))
    assert list(run_tasks(str, tasks, engine, lambda task: task[1])) == [str(task) for task in tasks]
    assert sorted(engine.begun) == tasks
    for (number, size), (later, next_size) in pairwise(engine.begun):
        assert next_size.bit_length() < size.bit_length() or (next_size.bit_length() == size.bit_length() and later > number)


def test_signals_are_held_only_where_a_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made before, such as a server that processes are forked from, would have them blocked for good."""
    made, masks = workers.get_context, list[set[int]]()

    def context(method: str) -> Any:
        masks.append(set(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
        return made(method)

    monkeypatch.setattr(workers, "get_context", context)
    assert [x for x, _ in run_tasks(_square, range(3), 2)] == [0, 1, 4]
    assert masks == [set()]


@contextlib.contextmanager
def _busy_command(folder: Path, *more_words: str) -> Iterator[subprocess.Popen[str]]:
    """Start a program in a session of its own, and wait until its workers are in their tasks."""
    words = [sys.executable, "-m", "tests.corpus.busy_command", str(folder), *more_words]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(words, cwd=ROOT, start_new_session=True, text=True, **both) as process:
        try:
            wait_until(lambda: len(_pids(folder)) == 2, process)
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _pids(folder: Path) -> list[int]:
    return [int(file.name) for file in folder.glob("[0-9]*")]


@pytest.mark.parametrize(
    ("first", "second", "said", "code"),
    [
        (signal.SIGINT, signal.SIGINT, "interrupted", 130),
        (signal.SIGTERM, signal.SIGTERM, "terminated", 143),
        (signal.SIGHUP, signal.SIGHUP, "terminated", 143),
        (signal.SIGINT, signal.SIGTERM, "interrupted", 130),
    ],
)
def test_a_second_signal_changes_nothing_but_ctrl_c_which_ends_the_tasks(
    first: int, second: int, said: str, code: int, tmp_path: Path
) -> None:
    with _busy_command(tmp_path) as process:
        assert process.stdout is not None
        process.send_signal(first)
        assert process.stdout.readline() == WAITS
        process.send_signal(second)
        if second != signal.SIGINT:
            (tmp_path / "end").touch()
        output, _ = process.communicate(timeout=HANG)
        assert (process.returncode, output) == (code, f"\novernight: {said}; the same command begins anew\n")
        assert not any(map(psutil.pid_exists, _pids(tmp_path)))


def test_a_second_ctrl_c_that_another_thread_takes_ends_the_tasks_too(tmp_path: Path) -> None:
    """It does not wake the thread that waits; neither does one that comes in the moment in which the wait begins."""
    with _busy_command(tmp_path, "thread") as process:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=HANG)
        assert (process.returncode, output) == (130, f"{WAITS}\novernight: interrupted; the same command begins anew\n")


def test_a_terminal_that_closes_stops_a_command_with_workers_in_one_line(tmp_path: Path) -> None:
    """All of its processes get the signal, Python's own among them, which told of its end with tracebacks."""
    with _busy_command(tmp_path) as process:
        assert process.stdout is not None
        os.killpg(process.pid, signal.SIGHUP)
        assert process.stdout.readline() == WAITS
        (tmp_path / "end").touch()
        output, _ = process.communicate(timeout=HANG)
        assert (process.returncode, output) == (143, "\novernight: terminated; the same command begins anew\n")
