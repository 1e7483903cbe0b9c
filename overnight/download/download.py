"""Datasets into a folder: what is missing, several files at once, and a record of each as soon as it is whole."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from overnight.console import Line
from overnight.display import plural
from overnight.download.addresses import host_of, shown
from overnight.download.connection import Source
from overnight.download.jobs import Job, entry_of, jobs_of, megabytes
from overnight.download.manifest import NAME, Entry, Manifest, sha256_of
from overnight.download.patience import Attempts, LostError, StoppedError
from overnight.download.progress import DownloadProgress
from overnight.download.selection import SelectedDataset
from overnight.download.transfer import DiskFullError, Received, Transfer, put
from overnight.download.unpack import Unpacked, unpack
from overnight.errors import DataError, UserError

_LOOK_EVERY = 0.1
# Seconds that a file under way has to notice the end of the command; it then ends with the process.
_PATIENCE = 0.5


class Download:
    """The files of some datasets on their way into a folder, which is locked for this process.

    Args:
        folder: where to.
        source: where from.
        retries: failures in a row of one file.
        line: what is printed.
    """

    def __init__(self, folder: Path, source: Source, retries: int, line: Line) -> None:
        self._folder, self._source, self._retries, self._line = folder, source, retries, line
        self._manifest, self._guard = Manifest(folder), threading.Lock()
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._turns: dict[str, threading.Lock] = {}
        self._lost: set[str] = set()
        self._several = False

    def run(self, selected: Sequence[SelectedDataset], jobs: int, verify: bool = False) -> None:
        """Get what is not there.

        Args:
            selected: the datasets and their files.
            jobs: how many at once.
            verify: read what is there again.

        Raises:
            UserError: when a file could not be had; those that could are there and recorded.
        """
        todo = jobs_of(selected, self._folder, self._manifest, verify, self._line.print)
        self._several = len(todo) > 1
        waiting, progress = deque(todo), DownloadProgress(self._line)
        threads = [threading.Thread(target=self._work, args=(waiting,), daemon=True) for _ in range(min(jobs, len(todo)))]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                self._print()
                progress.show(todo)
                time.sleep(_LOOK_EVERY)
        finally:
            self._source.stop.set()
            for thread in threads:
                thread.join(_PATIENCE)
            self._line.clear()
            self._print()
        failed = [job.failed for job in todo if job.failed]
        if len(failed) > 1 and all(isinstance(error, UserError) for error in failed):
            raise DataError(f"{plural(len(failed), 'file')} of {len(todo)} could not be downloaded; the first: {failed[0]}")
        if failed:
            raise failed[0]

    def _work(self, waiting: deque[Job]) -> None:
        """Take one file after another, until there are no more or the command ends."""
        while not self._source.stop.is_set():
            try:
                job = waiting.popleft()
            except IndexError:
                return
            job.state = "under way"
            host = host_of(job.file.address)
            try:
                if host in self._lost:
                    raise DataError(f"{shown(job.file.address)}: was not requested, since {host} no longer answers")
                self._get(job)
            except StoppedError:
                return
            except Exception as error:
                job.failed = error
                if isinstance(error, LostError):  # each of its files would take as long to fail
                    self._lost.add(host)
                if self._several:  # else the command ends with it
                    self._lines.put(f"failed: {error}")
                if not isinstance(error, UserError) or isinstance(error, DiskFullError):
                    self._source.stop.set()  # no other file will fare better
            finally:
                job.state = "done"

    def _get(self, job: Job) -> None:
        if not job.dataset.pause or self._source.mirror:
            return self._get_now(job)
        with self._guard:
            turn = self._turns.setdefault(job.dataset.name, threading.Lock())
        with turn:
            self._get_now(job)
            self._source.stop.wait(job.dataset.pause)

    def _get_now(self, job: Job) -> None:
        target, file = self._folder / job.name, job.file

        def came(count: int) -> None:
            job.done += count

        def announced(total: int | None) -> None:
            job.total = total or job.total

        attempts = Attempts(self._retries, self._source.stop, self._lines.put)
        transfer = Transfer(file, target, self._source, attempts, came, announced)
        received = transfer.receive()
        if file.unpack:
            self._unpack(job, received)
        else:
            # Recorded first: a process that is killed between the two finds the part whole when it comes again.
            self._record({file.path: entry_of(job.dataset, file, received)})
            put(received.path, target)
        transfer.clear()
        self._lines.put(f"{target}: {megabytes(received.size)}")

    def _unpack(self, job: Job, received: Received) -> None:
        file = job.file
        try:
            members = unpack(received.path, file.unpack, self._folder / file.path, shown(file.address))
        except DiskFullError:
            raise
        except DataError:
            received.path.unlink()
            raise
        self._check_members(members)
        entries = {}
        for one in members:
            path = str(one.target.relative_to(self._folder))
            entries[path] = entry_of(job.dataset, file, Received(one.part, one.size, one.sha256), one.member)
        self._record(entries)
        for one in members:
            put(one.part, one.target)
        received.path.unlink()

    def _check_members(self, members: Sequence[Unpacked]) -> None:
        """Check that nothing is replaced that did not come from here, unless it is the same."""
        for one in members:
            if (
                one.target.exists()
                and str(one.target.relative_to(self._folder)) not in self._manifest.files
                and sha256_of(one.target) != one.sha256
            ):
                for other in members:
                    other.part.unlink()
                raise DataError(f"{one.target}: exists and differs from what is published; move it away to download it")

    def _record(self, entries: dict[str, Entry]) -> None:
        with self._guard:
            self._manifest.add(entries)

    def _print(self) -> None:
        """Print what the files had to say since the last time; only the thread that began the download prints."""
        while not self._lines.empty():
            self._line.print(self._lines.get())


def said(selected: Sequence[SelectedDataset], folder: Path) -> list[str]:
    """Return what is said at the end: of each dataset where it is, its license and its citation."""
    manifest = Manifest(folder)
    lines = []
    for one in selected:
        addresses = {file.address for file in one.files}
        sizes = [entry.size for entry in manifest.files.values() if entry.address in addresses]
        lines.append(f"{one.dataset.name}: {plural(len(sizes), 'file')}, {megabytes(sum(sizes))} in {folder}, recorded in {folder / NAME}")
        lines += [f"  license: {one.dataset.license}", f"  cite: {one.dataset.citation}"]
    return lines
