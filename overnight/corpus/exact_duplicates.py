"""Equal documents, whatever their number, as tasks from files to files.

1. `sort_hashes`, some chunks a task: a run of the external sort of the first halves of the hashes of their documents.
2. The runs are merged, so that equal hashes come together, whatever memory there is (:mod:`external_sort`).
3. `find_repeats`, a range of hashes a task: documents whose first half is that of another are compared by the second half, too, which is read from their chunk.

A byte a document is in memory, which says whether it is the first. Nothing depends on the number of workers, and what a task has written is not done again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from overnight.corpus import external_sort
from overnight.corpus.dedup import hash_column
from overnight.corpus.shards import checked_chunk, is_sealed, read_table, seal_chunk
from overnight.corpus.workers import Workers, run_tasks
from overnight.run_dir.atomic import write_whole

# Documents of a run, at least, where there are so many: 16 MB, so that small chunks make no crowd of files.
_RUN = 1 << 20
# Documents that are marked at once.
_BLOCK = 1 << 20


def first_occurrences(chunks: list[Path], workers: Workers) -> np.ndarray:
    """Return which documents are the first of their hash, in the order of the documents of all chunks: bool [D].

    Args:
        chunks: clean documents, in order; what is made lies beside them.
        workers: processes; what is found does not depend on it.
    """
    counts = [read_table(path).num_rows for path in chunks]
    firsts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
    first = np.ones(int(firsts[-1]), bool)
    if not len(first):
        return first
    work, name = chunks[0].parent, chunks[0].name.partition("clean")[0] + "hashes"
    tasks = [
        SortTask(chunks[start:stop], int(firsts[start]), work / f"{name}-{number:05d}.run")
        for number, (start, stop) in enumerate(_groups(counts))
    ]
    for _ in run_tasks(sort_hashes, tasks, workers):
        pass
    runs = external_sort.few_runs([task.run for task in tasks], work, name, workers)
    runs = [checked_chunk(run) for run in runs]
    ranges = [
        RepeatTask(runs, low, high, chunks, firsts[:-1], work / f"{name}-{number:05d}.u64")
        for number, (low, high) in enumerate(external_sort.key_ranges(runs))
    ]
    for _ in run_tasks(find_repeats, ranges, workers):
        pass
    for task in ranges:
        with open(checked_chunk(task.repeats), "rb") as file:
            while block := file.read(8 * _BLOCK):
                first[np.frombuffer(block, np.uint64).astype(np.int64)] = False
    return first


def _groups(counts: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the chunks of each run, first and last + 1, from the number of documents of each chunk."""
    start = size = 0
    for number, count in enumerate(counts, 1):
        size += count
        if size >= _RUN or number == len(counts):
            yield start, number
            start, size = number, 0


@dataclass(frozen=True)
class SortTask:
    """Clean chunks on end."""

    chunks: list[Path]
    first: int  # number of their first document
    run: Path


def sort_hashes(task: SortTask) -> None:
    """Write the run of the first halves of the hashes of some chunks."""
    if not is_sealed(task.run):
        # Copies: a view would keep its whole file mapped, which of thousands of chunks is a GB.
        halves = np.concatenate([_halves(checked_chunk(path))[:, 0].copy() for path in task.chunks])
        external_sort.write_run(task.run, np.stack([halves, np.arange(task.first, task.first + len(halves), dtype=np.uint64)], axis=1))


def _halves(chunk: Path) -> np.ndarray:
    """Return the hashes of a chunk in halves: uint64 [D, 2]."""
    return np.ascontiguousarray(hash_column(read_table(chunk).column("hash"))).view(np.uint64)


@dataclass(frozen=True)
class RepeatTask:
    """A range of the first halves of hashes."""

    runs: list[Path]
    low: int
    high: int
    chunks: list[Path]
    firsts: np.ndarray  # number of the first document of each
    repeats: Path


def find_repeats(task: RepeatTask) -> None:
    """Write the documents with a hash of the range that an earlier one has: uint64."""
    if not is_sealed(task.repeats):
        write_whole(task.repeats, (found.data.cast("B") for found in _repeats(task) if len(found)))
        seal_chunk(task.repeats)


def _repeats(task: RepeatTask) -> Iterator[np.ndarray]:
    before = np.zeros((0, 2), np.uint64)  # of the last first half, the first document of each second half: more may come in the next block
    for block in external_sort.merged(task.runs, task.low, task.high):
        records = np.concatenate([before, block])
        equal = records[1:, 0] == records[:-1, 0]
        shared = records[np.append(equal, False) | np.append(False, equal)]
        second = _second_halves(task, shared[:, 1])
        order = np.lexsort((shared[:, 1], second, shared[:, 0]))
        shared, second = shared[order], second[order]
        again = np.zeros(len(shared), bool)
        again[1:] = (shared[1:, 0] == shared[:-1, 0]) & (second[1:] == second[:-1])
        yield np.ascontiguousarray(shared[again, 1])
        last = records[-1, 0]
        before = shared[~again & (shared[:, 0] == last)] if len(equal) and equal[-1] else records[-1:]


def _second_halves(task: RepeatTask, documents: np.ndarray) -> np.ndarray:
    """Return the second halves of the hashes of documents by number: uint64 [P]."""
    found = np.empty(len(documents), np.uint64)
    chunks = np.searchsorted(task.firsts, documents.astype(np.int64), "right") - 1
    order = np.argsort(chunks, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(chunks[order])) + 1) if len(order) else ():
        chunk = int(chunks[rows[0]])
        found[rows] = _halves(task.chunks[chunk])[documents[rows].astype(np.int64) - task.firsts[chunk], 1]
    return found
