"""One thread for the model: requests wait in a queue, and those of one kind that wait together are answered together.

A large request, such as a question about a long text, takes many batches. Between two of them small requests are answered, so that nobody waits for all
of it, and it ends where nobody waits for its own answer any more.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

Answer = Callable[[Hashable, list[Any]], Sequence[Any]]
# Texts that are answered together.
_TOGETHER = 256
# Characters of a small request: about a batch on a CPU.
_SMALL = 1 << 14


class Busy(Exception):
    """More requests wait than may."""


class _Left(Exception):
    """Nobody waits for an answer any more."""


class _Answers(Future[list[Any]]):
    """Answers to come; `cancel` says that nobody waits for them, also while they are made."""

    left = False

    def cancel(self) -> bool:
        self.left = True
        return super().cancel()


@dataclass(frozen=True, eq=False)
class _Request:
    kind: Hashable
    texts: Sequence[Any]
    large: bool
    answers: _Answers


class Worker:
    """A thread that answers requests.

    Args:
        answer: one answer a text, for texts of one kind; called in the thread alone. It calls :meth:`between` between its batches.
        longest: most requests that wait.
    """

    def __init__(self, answer: Answer, longest: int) -> None:
        self._answer = answer
        self._queue: queue.Queue[_Request | None] = queue.Queue(longest)
        self._at_work: list[_Request] = []
        self._inside = False
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    def submit(self, kind: Hashable, texts: Sequence[Any]) -> Future[list[Any]]:
        """Return the answers to come; who waits for them no longer cancels them.

        Args:
            kind: requests of the same kind may be answered together.
            texts: of one request.

        Raises:
            Busy: too many wait already.
        """
        request = _Request(kind, texts, len(str(texts)) > _SMALL, _Answers())
        try:
            self._queue.put_nowait(request)
        except queue.Full:
            if not self._take(lambda waiting: [other for other in waiting if other.answers.left]):
                raise Busy from None
            return self.submit(kind, texts)
        return request.answers

    def between(self) -> None:
        """Answer small requests that wait behind the large one at work, which calls this between its batches.

        Raises:
            _Left: nobody waits for those at work any more, which ends them.
        """
        if self._inside or not self._at_work:
            return
        if all(request.answers.left for request in self._at_work):
            raise _Left
        if any(request.large for request in self._at_work) and (small := self._take(_small)):
            self._inside = True
            self._answer_all(small)
            self._inside = False

    def waiting(self) -> int:
        """Return how many requests wait."""
        return self._queue.qsize()

    def stop(self) -> None:
        """Answer what waits, and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _take(self, choose: Callable[[list[_Request]], list[_Request]]) -> list[_Request]:
        """Take requests out of the queue, wherever they stand."""
        with self._queue.mutex:
            waiting = list(self._queue.queue)
            taken = choose([request for request in waiting if request is not None])
            self._queue.queue.clear()
            self._queue.queue.extend(request for request in waiting if request not in taken)
            self._queue.not_full.notify(len(taken))
            return taken

    def _work(self) -> None:
        while (first := self._queue.get()) is not None:
            self._at_work = [first, *self._take(lambda waiting, first=first: _together(first, waiting))]
            self._answer_all(self._at_work)
            self._at_work = []

    def _answer_all(self, together: list[_Request]) -> None:
        # Who has gone in the meantime is not answered.
        if wanted := [request for request in together if request.answers.set_running_or_notify_cancel()]:
            self._answer_wanted(wanted)

    def _answer_wanted(self, wanted: list[_Request]) -> None:
        try:
            found = self._answer(wanted[0].kind, [text for request in wanted for text in request.texts])
        except Exception as error:
            if len(wanted) == 1:
                wanted[0].answers.set_exception(error)
            else:  # what is wrong with one is not the others' error
                for request in wanted:
                    self._answer_wanted([request])
            return
        first = 0
        for request in wanted:
            request.answers.set_result(list(found[first : first + len(request.texts)]))
            first += len(request.texts)


def _together(first: _Request, waiting: Iterable[_Request]) -> list[_Request]:
    """Return those that are answered with a request: small ones of its kind, up to the first that is not, or does not fit."""
    found, count = list[_Request](), len(first.texts)
    for request in waiting:
        count += len(request.texts)
        if first.large or request.large or request.kind != first.kind or count > _TOGETHER:
            break
        found.append(request)
    return found


def _small(waiting: list[_Request]) -> list[_Request]:
    """Return the first small request, and those that are answered with it."""
    small = [request for request in waiting if not request.large]
    return [small[0], *_together(small[0], (request for request in small[1:] if request.kind == small[0].kind))] if small else []
