"""Near-duplicates by MinHash and locality-sensitive hashing, as tasks from files to files (Broder 1997; Leskovec et al., Mining of Massive Datasets, ch. 3).

1. `sign_chunk`, a chunk a task: sketches of the shingles of its documents (:mod:`shingles`) and, a run of the external sort, the keys of their bands.
2. The runs are merged, so that documents with an equal band come together, whatever memory there is (:mod:`external_sort`).
3. `find_pairs`, a range of keys a task: documents that share a band are pairs, kept where their sketches say that they are similar enough. In a band that
   more than two share, a document is compared with the first and with the one before it, so the pairs grow as the documents.
4. Connected pairs are a cluster, of which the first document stays. Only documents that are in a pair are in memory.

Nothing depends on the number of workers, and what a task has written is not done again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from overnight.corpus import external_sort, shingles
from overnight.corpus.progress import Progress
from overnight.corpus.shards import checked_chunk, is_sealed, read_table, seal_chunk
from overnight.corpus.words import text_and_offsets
from overnight.corpus.workers import Workers, run_tasks
from overnight.display import plural
from overnight.run_dir.atomic import write_whole

WORDS = 5
"""Of a shingle, as in Lee et al. 2022 (arXiv 2107.06499) and RefinedWeb (Penedo et al. 2023, arXiv 2306.01116)."""
# Of pairs whose similarity is the threshold so many share a band at least; of those above it, more.
_RECALL = 0.99
# Pairs compared at once: 16 MB of sketches.
_PAIRS = 1 << 14


def bands_for(threshold: float) -> tuple[int, int]:
    """Return how many bands of how many rows find a pair of that similarity with a probability of 0.99, and few below it: the most rows that can."""
    for rows in range(shingles.BINS, 0, -1):
        for bands in range(1, shingles.BINS // rows + 1):
            if 1 - (1 - threshold**rows) ** bands >= _RECALL:
                return bands, rows
    return shingles.BINS, 1


@dataclass(frozen=True)
class SignTask:
    """A clean chunk, and which of its documents to take."""

    clean: Path
    take: np.ndarray
    first: int  # number of its first document, of all that are taken
    threshold: float


def _sketches_path(clean: Path) -> Path:
    return clean.with_name(clean.name.replace("clean", "sketches")).with_suffix(".u16")


def _run_path(clean: Path) -> Path:
    return clean.with_name(clean.name.replace("clean", "bands")).with_suffix(".run")


def sign_chunk(task: SignTask) -> int:
    """Write the sketches of a chunk's documents and the run of their bands; returns the bytes of its text."""
    column = read_table(checked_chunk(task.clean)).column("text").filter(pa.array(task.take))
    text, offsets = text_and_offsets(column)
    if not is_sealed(_run_path(task.clean)):  # written last
        hashes, ends = shingles.ngram_hashes(text, offsets, WORDS, whole_short=True)
        sketch, keys = shingles.sketches(hashes, ends, *bands_for(task.threshold))
        write_whole(_sketches_path(task.clean), [sketch.data.cast("B")] if len(sketch) else [])
        seal_chunk(_sketches_path(task.clean))
        with_words = np.flatnonzero(np.diff(ends, prepend=0))
        numbers = np.repeat(np.uint64(task.first) + with_words.astype(np.uint64), keys.shape[1])
        external_sort.write_run(_run_path(task.clean), np.stack([keys[with_words].reshape(-1), numbers], axis=1))
    return int(offsets[-1] - offsets[0])


@dataclass(frozen=True)
class PairTask:
    """A range of the keys of bands."""

    runs: list[Path]
    low: int
    high: int
    sketches: list[Path]
    firsts: np.ndarray  # number of the first document of each
    threshold: float
    pairs: Path


def find_pairs(task: PairTask) -> None:
    """Write the pairs of documents that share a band with a key of the range and are similar: uint64 [P, 2], the smaller number first."""
    if not is_sealed(task.pairs):
        write_whole(task.pairs, (pairs.data.cast("B") for pairs in _similar_pairs(task) if len(pairs)))
        seal_chunk(task.pairs)


def _similar_pairs(task: PairTask) -> Iterator[np.ndarray]:
    before = np.zeros((0, 2), np.uint64)
    for block in external_sort.merged(task.runs, task.low, task.high):
        records = np.concatenate([before, block])
        group = int(np.searchsorted(np.ascontiguousarray(records[:, 0]), records[-1, 0]))
        before = records[[group, -1]]  # the last group may continue in the next block
        candidates = _candidates(records)
        for first in range(0, len(candidates), _PAIRS):
            pairs = candidates[first : first + _PAIRS]
            left, right = (_sketches(task, numbers) for numbers in pairs.T)
            yield np.ascontiguousarray(pairs[shingles.similarity(left, right) >= task.threshold])


def _candidates(records: np.ndarray) -> np.ndarray:
    """Return pairs of documents with an equal key, each once: of sorted records [N, 2], uint64 [P, 2]."""
    keys, documents = records[:, 0], records[:, 1]
    new = np.append(True, keys[1:] != keys[:-1])
    firsts = np.maximum.accumulate(np.where(new, np.arange(len(records)), 0))
    later = np.flatnonzero(~new)
    pairs = [np.stack([documents[of], documents[later]], axis=1) for of in (firsts[later], later - 1)]
    found = np.concatenate(pairs)
    return _distinct(found[found[:, 0] != found[:, 1]])


def _distinct(pairs: np.ndarray) -> np.ndarray:
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    return pairs[np.append(True, (pairs[1:] != pairs[:-1]).any(axis=1))] if len(pairs) else pairs


def _sketches(task: PairTask, numbers: np.ndarray) -> np.ndarray:
    """Return the sketches of documents by number: uint16 [P, BINS]."""
    found = np.empty((len(numbers), shingles.BINS), np.uint16)
    files = np.searchsorted(task.firsts, numbers.astype(np.int64), "right") - 1
    order = np.argsort(files, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(files[order])) + 1):
        file = int(files[rows[0]])
        stored = np.memmap(task.sketches[file], np.uint16, "r").reshape(-1, shingles.BINS)
        found[rows] = stored[numbers[rows].astype(np.int64) - task.firsts[file]]
    return found


def clusters(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the documents that are connected with an earlier one, and the first that each is connected with.

    Union-find on arrays: in each round every root is hung on the least root that a pair connects it with, and paths are shortened.

    Args:
        pairs: integers [P, 2].

    Returns:
        two arrays of document numbers, the first ascending.
    """
    numbers, places = np.unique(pairs, return_inverse=True)
    left, right = places.reshape(-1, 2).T
    root = np.arange(len(numbers))
    while (apart := root[left] != root[right]).any():
        a, b = root[left[apart]], root[right[apart]]
        np.minimum.at(root, np.maximum(a, b), np.minimum(a, b))
        while (shorter := root[root] != root).any():
            root[shorter] = root[root[shorter]]
    later = np.flatnonzero(root != np.arange(len(numbers)))
    return numbers[later].astype(np.int64), numbers[root[later]].astype(np.int64)


def find_near_duplicates(
    chunks: list[Path], take: list[np.ndarray], threshold: float, workers: Workers, log: Callable[[str], None]
) -> tuple[np.ndarray, np.ndarray]:
    """Find documents that are similar to an earlier one.

    Args:
        chunks: clean documents, in order; what is made lies beside them.
        take: bool [D] for each chunk, which documents to compare.
        threshold: Jaccard similarity of their shingles, above 0, from which on two documents are near-duplicates.
        workers: processes; what is found does not depend on it.
        log: called with plain lines.

    Returns:
        positions of near-duplicates among all documents of all chunks, ascending, int64; and of the document each is a near-duplicate of.
    """
    if not chunks:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    progress, work = Progress("near-duplicates", log), chunks[0].parent
    firsts = np.cumsum([0, *(int(each.sum()) for each in take)])
    tasks = (SignTask(path, each, int(first), threshold) for path, each, first in zip(chunks, take, firsts[:-1], strict=True))
    size = 0
    for number, more in enumerate(run_tasks(sign_chunk, tasks, workers, lambda task: task.clean.stat().st_size), 1):
        size += more
        progress.update(size, number / len(chunks))
    runs = external_sort.few_runs([_run_path(path) for path in chunks], work, "bands", workers)
    runs, sketches = ([checked_chunk(path) for path in paths] for paths in (runs, map(_sketches_path, chunks)))
    ranges = [
        PairTask(runs, low, high, sketches, firsts[:-1], threshold, work / f"pairs-{number:05d}.u64")
        for number, (low, high) in enumerate(external_sort.key_ranges(runs))
    ]
    for _ in run_tasks(find_pairs, ranges, workers):
        pass
    pairs = np.concatenate([np.fromfile(checked_chunk(task.pairs), np.uint64) for task in ranges]).reshape(-1, 2)
    found, kept = clusters(_distinct(pairs))
    progress.end(size, f"{plural(len(found), 'document')} like {len(np.unique(kept)):,} earlier ones")
    return _positions(take, firsts, found), _positions(take, firsts, kept)


def _positions(take: list[np.ndarray], firsts: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return where documents, numbered among those that are taken, are among all: int64, in the order given."""
    found, start = np.empty(len(numbers), np.int64), 0
    order = np.argsort(numbers, kind="stable")
    ends = np.searchsorted(numbers[order], firsts)
    for each, first, begin, end in zip(take, firsts, ends, ends[1:], strict=False):
        if begin < end:
            rows = order[begin:end]
            found[rows] = start + np.flatnonzero(each)[numbers[rows] - first]
        start += len(each)
    return found
