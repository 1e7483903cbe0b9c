"""One thread for the model: requests wait in a queue, and those of one kind that wait together are answered together."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

Answer = Callable[[Hashable, list[Any]], Sequence[Any]]
# Texts that are answered together.
_TOGETHER = 256


class Busy(Exception):
    """More requests wait than may."""


@dataclass(frozen=True)
class _Request:
    kind: Hashable
    texts: Sequence[Any]
    answers: Future[list[Any]]


class Worker:
    """A thread that answers requests.

    Args:
        answer: one answer a text, for texts of one kind; called in the thread alone.
        longest: most requests that wait.
    """

    def __init__(self, answer: Answer, longest: int) -> None:
        self._answer = answer
        self._queue: queue.Queue[_Request | None] = queue.Queue(longest)
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    def submit(self, kind: Hashable, texts: Sequence[Any]) -> Future[list[Any]]:
        """Return the answers to come.

        Args:
            kind: requests of the same kind may be answered together.
            texts: of one request.

        Raises:
            Busy: too many wait already.
        """
        request = _Request(kind, texts, Future())
        try:
            self._queue.put_nowait(request)
        except queue.Full:
            if not self._drop_gone():
                raise Busy from None
            return self.submit(kind, texts)
        return request.answers

    def _drop_gone(self) -> bool:
        """Take those out of the queue that nobody waits for any more; returns whether there were any."""
        with self._queue.mutex:
            waiting = list(self._queue.queue)
            kept = [request for request in waiting if request is None or not request.answers.cancelled()]
            self._queue.queue.clear()
            self._queue.queue.extend(kept)
            return len(kept) < len(waiting)

    def waiting(self) -> int:
        """Return how many requests wait."""
        return self._queue.qsize()

    def stop(self) -> None:
        """Answer what waits, and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        following: _Request | None = self._queue.get()
        while following is not None:
            together, count, first = [following], len(following.texts), following
            following = None
            while count < _TOGETHER:
                try:
                    following = self._queue.get_nowait()
                except queue.Empty:
                    following = None
                    break
                if following is None:  # the end, behind what waits
                    self._do(together)
                    return
                if following.kind != first.kind or count + len(following.texts) > _TOGETHER:
                    break
                together.append(following)
                count, following = count + len(following.texts), None
            self._do(together)
            following = following or self._queue.get()

    def _do(self, together: list[_Request]) -> None:
        # Who has gone in the meantime is not answered.
        wanted = [request for request in together if request.answers.set_running_or_notify_cancel()]
        if wanted:
            self._answer_all(wanted)

    def _answer_all(self, wanted: list[_Request]) -> None:
        try:
            found = self._answer(wanted[0].kind, [text for request in wanted for text in request.texts])
        except Exception as error:
            if len(wanted) == 1:
                wanted[0].answers.set_exception(error)
            else:  # what is wrong with one is not the others' error
                for request in wanted:
                    self._answer_all([request])
            return
        first = 0
        for request in wanted:
            request.answers.set_result(list(found[first : first + len(request.texts)]))
            first += len(request.texts)
