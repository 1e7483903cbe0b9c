"""Run pure tasks on every core, or on a cluster. :func:`run_tasks` is the one place that knows where; :mod:`cluster` is the other engine."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing import connection, get_context, parent_process, resource_tracker
from typing import Any, Protocol, Self, TypeVar

import pyarrow as pa

from overnight.errors import UserError
from overnight.machine import release_free_memory, return_large_blocks
from overnight.signals import STOP_SIGNALS, hold_signals, note_signals

T = TypeVar("T")
R = TypeVar("R")


class Engine(Protocol):
    """Where tasks are run."""

    def width(self) -> int:
        """Return how many tasks run at once, as it is now."""

    def submit(self, function: Callable[[Any], R], task: Any) -> Callable[[], R]:
        """Begin a task; return what waits for its result."""


Workers = int | Engine
"""Number of processes of this machine, which end with the tasks; or an engine, which serves for many times."""


def run_tasks(function: Callable[[T], R], tasks: Iterable[T], workers: Workers, size: Callable[[T], float] | None = None) -> Iterator[R]:
    """Apply a function to every task and yield the results in the order of the tasks.

    The tasks are drawn only as fast as they are worked off, so they may be a generator that reads a large file; or, where their sizes are
    known, dealt all at once, the largest first, so that none of the large is left over at the end for one worker alone.
    On this machine one task, or all with one worker, run in this process; on a cluster none does.

    Args:
        function: a function of a module (it travels by name); its result and its exceptions must pickle.
        tasks: what it is called with, one by one.
        workers: number of processes, 1 or more, or an engine.
        size: of a task, in any unit; only where all tasks and their results fit into memory.

    Raises:
        UserError: when a worker process was killed; the first exception of a task otherwise.
    """
    if isinstance(workers, int):
        with Processes(workers) as engine:
            yield from run_tasks(function, tasks, engine, size)
        return
    _release_memory()  # of what came before
    tasks = iter(tasks)
    if isinstance(workers, Processes):
        head = list(islice(tasks, 2))
        tasks = chain(head, tasks)
        if workers.width() == 1 or len(head) < 2:
            yield from map(function, tasks)
            return
    yield from _in_window(function, tasks, workers) if size is None else _largest_first(function, list(tasks), workers, size)


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
    # Those of about one size, to a power of two, in their own order, in which their results are wanted: else nothing is seen of what is done.
    scales = [math.frexp(size(task))[1] for task in tasks]
    order = sorted(range(len(tasks)), key=lambda number: -scales[number])
    pending = {number: engine.submit(function, tasks[number]) for number in order}
    for number in range(len(tasks)):
        yield pending.pop(number)()


class Processes:
    """The cores of this machine, until it is left.

    Args:
        count: of processes, which start with the first task and import for a third of a second each: several rounds of tasks share them.
    """

    def __init__(self, count: int) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._count = count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # Wait for the tasks that run: they are seconds long and their outputs appear whole, so this leaves neither orphans nor halves. A Ctrl-C
        # ends them instead. It must not interrupt the wait: Python would take the thread of the pool for ended, and its processes would wait for ever.
        if self._pool is not None:
            with note_signals(self._kill):
                _shut_down(self._pool)

    def width(self) -> int:
        """Return the number of processes."""
        return self._count

    def submit(self, function: Callable[[Any], R], task: Any) -> Callable[[], R]:
        """Begin a task; return what waits for its result.

        Raises:
            UserError: when a process was killed, or none can be started.
        """
        try:
            if self._pool is None:
                # Python's tracker of semaphores ignores Ctrl-C and SIGTERM itself; begun so, it does not see a terminal that closes either.
                with hold_signals():
                    resource_tracker.ensure_running()
                self._pool = ProcessPoolExecutor(self._count, mp_context=get_context("spawn"), initializer=_start_worker)
            # The first call starts the processes: one that its parent left while starting it would print a traceback.
            with hold_signals():
                pending: Future[R] = self._pool.submit(_run_in_worker, function, task)
        except BrokenProcessPool:
            raise _killed() from None
        except (OSError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "start new thread" not in str(error):
                raise
            self._give_up()
            raise UserError(
                f"processes could not be started ({error}); raise the limit (ulimit -u), make /dev/shm writable, or set data.workers=1"
            ) from None

        def result() -> R:
            try:
                return pending.result()
            except BrokenProcessPool:
                raise _killed() from None

        return result

    def _give_up(self) -> None:
        """End what has been started of the pool."""
        self._kill()
        pool, self._pool = self._pool, None
        if pool is not None:
            with note_signals(), contextlib.suppress(RuntimeError):  # of a thread that was to be joined and has not been started
                pool.shutdown(wait=True, cancel_futures=True)

    def _kill(self) -> None:
        for process in list((getattr(self._pool, "_processes", None) or {}).values()):
            process.kill()


def _shut_down(pool: ProcessPoolExecutor) -> None:
    """Wait for the tasks of a pool that run, and for its processes.

    Another thread does, since a signal need not wake the main one from a lock: not where the system gives it to another thread, nor in the
    moment in which the wait begins.
    """
    waits = threading.Thread(target=pool.shutdown, kwargs={"wait": True, "cancel_futures": True})
    try:
        waits.start()
    except RuntimeError:  # no more threads are allowed
        pool.shutdown(wait=True, cancel_futures=True)
        return
    while waits.is_alive():
        waits.join(0.1)


def _killed() -> UserError:
    return UserError(
        "a worker process was killed, most often for lack of memory; run the same command again to continue, with a smaller data.workers if memory is short"
    )


def _start_worker() -> None:
    """Leave Ctrl-C and a terminal that closes to the parent, end with the parent even when it is killed, return large blocks of memory, and keep the tokenizer to one thread."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return_large_blocks()
    threading.Thread(target=_end_with_parent, daemon=True).start()


# By which the last task of this process was run.
_last: Callable[[Any], Any] | None = None
# Returns what a worker has freed once it has had nothing to do for so many seconds, as while the command trains the vocabulary.
_idle: threading.Timer | None = None
_IDLE_SECONDS = 0.3


def _run_in_worker(function: Callable[[T], R], task: T) -> R:
    """Run a task, and before the first of another kind return what those before have freed, on top of which its memory would come."""
    global _last, _idle
    if _idle is not None:
        _idle.cancel()
    if _last not in (None, function):
        _release_memory()
    _last = function
    try:
        return function(task)
    finally:
        _idle = threading.Timer(_IDLE_SECONDS, _release_memory)
        _idle.daemon = True
        _idle.start()


def _release_memory() -> None:
    pa.default_memory_pool().release_unused()
    release_free_memory()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
