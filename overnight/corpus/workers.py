"""Run pure tasks on every core. This one function is the seam where a cluster comes in."""

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
from typing import TypeVar

from overnight.errors import UserError
from overnight.signals import STOP_SIGNALS, hold_signals

T = TypeVar("T")
R = TypeVar("R")


def run_tasks(function: Callable[[T], R], tasks: Iterable[T], workers: int) -> Iterator[R]:
    """Apply a function to every task, in processes, and yield the results in the order of the tasks.

    The tasks are drawn only as fast as they are worked off, so they may be a generator that reads a large file.
    With one worker, or one task, everything runs in this process.

    Args:
        function: a function of a module (it travels by name); its result and its exceptions must pickle.
        tasks: what it is called with, one by one.
        workers: number of processes, 1 or more.

    Raises:
        UserError: when a worker process was killed; the first exception of a task otherwise.
    """
    tasks = iter(tasks)
    head = list(islice(tasks, 2))
    if workers == 1 or len(head) < 2:
        yield from map(function, chain(head, tasks))
        return
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start_worker)
    pending: deque[Future[R]] = deque()
    try:
        for task in chain(head, tasks):
            # The first call starts the processes: one that its parent left while starting it would print a traceback.
            with hold_signals():
                pending.append(pool.submit(function, task))
            # A window, so that results and inputs in flight stay few; 3 a worker keeps all of them busy behind a slow one.
            if len(pending) >= 3 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            "a worker process was killed, most often for lack of memory; run the same command again to continue, with a smaller data.workers if memory is short"
        ) from None
    finally:
        # Tasks are seconds long and their outputs appear whole: letting the running ones finish leaves neither orphans nor halves.
        pool.shutdown(wait=True, cancel_futures=True)


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
