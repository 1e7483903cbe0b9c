"""Run pure tasks on every core, or on a cluster. :func:`run_tasks` is the one place that knows where; :mod:`cluster` is the other engine."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing import connection, get_context, parent_process
from typing import Any, Protocol, TypeVar

from overnight.errors import UserError
from overnight.signals import STOP_SIGNALS, hold_signals

T = TypeVar("T")
R = TypeVar("R")


class Engine(Protocol):
    """Where tasks are run."""

    def width(self) -> int:
        """Return how many tasks run at once, as it is now."""

    def submit(self, function: Callable[[Any], R], task: Any) -> Callable[[], R]:
        """Begin a task; return what waits for its result."""

    def stop(self) -> None:
        """Begin no more; called after the last result, or an error."""


Workers = int | Engine
"""Number of processes of this machine, or another engine."""


def run_tasks(function: Callable[[T], R], tasks: Iterable[T], workers: Workers, size: Callable[[T], float] | None = None) -> Iterator[R]:
    """Apply a function to every task and yield the results in the order of the tasks.

    The tasks are drawn only as fast as they are worked off, so they may be a generator that reads a large file; or, where their sizes are
    known, dealt all at once, the largest first, so that none of them is left over at the end for one worker alone.
    With one worker, or one task, everything runs in this process; on a cluster nothing does.

    Args:
        function: a function of a module (it travels by name); its result and its exceptions must pickle.
        tasks: what it is called with, one by one.
        workers: number of processes, 1 or more, or an engine.
        size: of a task, in any unit; only where all tasks and their results fit into memory.

    Raises:
        UserError: when a worker process was killed; the first exception of a task otherwise.
    """
    tasks = iter(tasks)
    if isinstance(workers, int):
        head = list(islice(tasks, 2))
        tasks = chain(head, tasks)
        if workers == 1 or len(head) < 2:
            yield from map(function, tasks)
            return
        workers = Processes(workers)
    try:
        yield from _in_window(function, tasks, workers) if size is None else _largest_first(function, list(tasks), workers, size)
    finally:
        workers.stop()


def _in_window(function: Callable[[T], R], tasks: Iterable[T], engine: Engine) -> Iterator[R]:
    pending: deque[Callable[[], R]] = deque()
    for task in tasks:
        pending.append(engine.submit(function, task))
        # A window, so that results and inputs in flight stay few; 3 a worker keeps all of them busy behind a slow one.
        if len(pending) >= 3 * engine.width():
            yield pending.popleft()()
    while pending:
        yield pending.popleft()()


def _largest_first(function: Callable[[T], R], tasks: list[T], engine: Engine, size: Callable[[T], float]) -> Iterator[R]:
    sizes = [size(task) for task in tasks]
    order = sorted(range(len(tasks)), key=lambda number: -sizes[number])
    pending = {number: engine.submit(function, tasks[number]) for number in order}
    for number in range(len(tasks)):
        yield pending.pop(number)()


class Processes:
    """The cores of this machine.

    Args:
        count: of processes, which start with the first task.
    """

    def __init__(self, count: int) -> None:
        self._pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_start_worker)
        self._count = count

    def width(self) -> int:
        """Return the number of processes."""
        return self._count

    def submit(self, function: Callable[[Any], R], task: Any) -> Callable[[], R]:
        """Begin a task; return what waits for its result."""
        try:
            # The first call starts the processes: one that its parent left while starting it would print a traceback.
            with hold_signals():
                pending: Future[R] = self._pool.submit(function, task)
        except BrokenProcessPool:
            raise _killed() from None

        def result() -> R:
            try:
                return pending.result()
            except BrokenProcessPool:
                raise _killed() from None

        return result

    def stop(self) -> None:
        """Wait for the tasks that run: they are seconds long and their outputs appear whole, so this leaves neither orphans nor halves."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _killed() -> UserError:
    return UserError(
        "a worker process was killed, most often for lack of memory; run the same command again to continue, with a smaller data.workers if memory is short"
    )


def _start_worker() -> None:
    """Leave Ctrl-C to the parent, end with the parent even when it is killed, and keep the tokenizer to one thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
