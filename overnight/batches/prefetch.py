"""Batches made ahead of their use, in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator
from typing import TypeVar

Item = TypeVar("Item")


def prefetch(make: Callable[[int], Item], start: int, stop: int, depth: int = 2) -> Generator[Item, None, None]:
    """Yield make(start), ..., make(stop - 1), each made ahead of its use by one background thread.

    Args:
        make: builds the item of a step.
        depth: items held ready.

    Raises:
        whatever `make` raises, at the step that needed the item.
    """
    ready: queue.Queue[tuple[Item | None, BaseException | None]] = queue.Queue(depth)
    stopped = threading.Event()

    def put(item: Item | None, error: BaseException | None) -> None:
        while not stopped.is_set():
            try:
                return ready.put((item, error), timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for step in range(start, stop):
                if stopped.is_set():
                    return
                put(make(step), None)
        except BaseException as error:
            put(None, error)

    thread = threading.Thread(target=work, name="loader", daemon=True)
    thread.start()
    try:
        for _ in range(start, stop):
            item, error = ready.get()
            if error is not None:
                raise error
            yield item  # type: ignore[misc]
    finally:
        stopped.set()
        thread.join()
