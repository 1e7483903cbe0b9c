"""Sort more records than memory holds: sorted runs on the disk, merged a few dozen at a time until few are left.

A record is two 64-bit numbers, a key and a document; records are sorted by the first, then the second. A run is a file of nothing but
records, sealed with its checksum. A merge holds one block of each of its runs, whatever their number and however often a key occurs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from overnight.corpus.shards import checked_chunk, is_sealed, seal_chunk
from overnight.corpus.workers import Workers, run_tasks
from overnight.run_dir.atomic import write_whole

# Runs of one merge; and records of a block: 512 kB, so that a merge takes 32 MB, with its copies some 130.
FAN_IN = 64
BLOCK = 1 << 15
# Records of a range, the part of all keys that one task goes through at the end (256 MB).
RANGE = 1 << 24
_RECORD_BYTES = 16


def write_run(path: Path, records: np.ndarray) -> None:
    """Sort records and write them as a run: uint64 [N, 2]."""
    write_whole(path, [ordered(records).data.cast("B")] if len(records) else [])
    seal_chunk(path)


def ordered(records: np.ndarray) -> np.ndarray:
    """Return records sorted by key, then document: by the key alone, and of the few with an equal one by both, which takes half the time."""
    records = records[np.argsort(records[:, 0])]
    equal = records[1:, 0] == records[:-1, 0]
    tied = np.flatnonzero(np.append(equal, False) | np.append(False, equal)) if len(records) else np.zeros(0, np.int64)
    part = records[tied]
    records[tied] = part[np.lexsort((part[:, 1], part[:, 0]))]
    return records


def length(path: Path) -> int:
    """Return the number of records of a run."""
    return path.stat().st_size // _RECORD_BYTES


@dataclass(frozen=True)
class MergeTask:
    """Runs to make one of."""

    runs: list[Path]
    merged: Path


def merge_runs(task: MergeTask) -> None:
    """Merge runs into one and delete them; do nothing where that is done."""
    if not is_sealed(task.merged):
        runs = [checked_chunk(run) for run in task.runs]
        write_whole(task.merged, (block.data.cast("B") for block in merged(runs)))
        seal_chunk(task.merged)
    for run in task.runs:  # their seals stay, as the sign that they were there
        run.unlink(missing_ok=True)


def few_runs(runs: list[Path], work: Path, name: str, workers: Workers) -> list[Path]:
    """Merge runs, in processes, until there are :data:`FAN_IN` at most, which are returned.

    Args:
        runs: sealed; deleted where they are merged.
        work: folder of those that are made, `NAME-LEVEL-NUMBER.run`.
        name: of what is sorted.
        workers: processes; the runs do not depend on it.
    """
    level = 0
    while len(runs) > FAN_IN:
        level += 1
        groups = [runs[first : first + FAN_IN] for first in range(0, len(runs), FAN_IN)]
        tasks = [MergeTask(group, work / f"{name}-{level}-{number:05d}.run") for number, group in enumerate(groups)]
        for _ in run_tasks(merge_runs, tasks, workers):
            pass
        runs = [task.merged for task in tasks]
    return runs


def key_ranges(runs: Sequence[Path]) -> list[tuple[int, int]]:
    """Divide all 64-bit keys into ranges [low, high) of equal width, of about :data:`RANGE` records each where keys are hashes."""
    count = max(1, -(-sum(length(run) for run in runs) // RANGE))
    bounds = [(number << 64) // count for number in range(count + 1)]
    return list(pairwise(bounds))


def merged(runs: Sequence[Path], low: int = 0, high: int = 1 << 64) -> Iterator[np.ndarray]:
    """Yield the records of some runs whose keys are in [low, high), in order: blocks uint64 [N, 2], none empty.

    The runs are trusted: check them before.
    """
    spans = [(run, *_span(run, low, high)) for run in runs]
    left = {number: (first, last) for number, (_, first, last) in enumerate(spans) if first < last}
    heads: dict[int, np.ndarray] = {}
    while left or heads:
        for number, (first, last) in list(left.items()):
            if number not in heads:
                stop = min(first + BLOCK, last)
                heads[number] = _read(spans[number][0], first, stop)
                left[number] = (stop, last)
                if stop == last:
                    del left[number]
        # What is not read yet comes after the last record of its run that is; up to the least of these all is known.
        limit = min((tuple(heads[number][-1].tolist()) for number in left), default=None)
        parts = []
        for number, head in list(heads.items()):
            count = len(head) if limit is None else _not_above(head, *limit)
            parts.append(head[:count])
            if count == len(head):
                del heads[number]
            else:
                heads[number] = head[count:]
        yield ordered(np.concatenate(parts))


def _not_above(records: np.ndarray, key: int, document: int) -> int:
    keys = np.ascontiguousarray(records[:, 0])
    first, last = (int(np.searchsorted(keys, np.uint64(key), side)) for side in ("left", "right"))  # type: ignore[call-overload]
    return first + int(np.searchsorted(records[first:last, 1], np.uint64(document), "right"))


def _read(run: Path, first: int, last: int) -> np.ndarray:
    return np.fromfile(run, np.uint64, 2 * (last - first), offset=first * _RECORD_BYTES).reshape(-1, 2)


def _span(run: Path, low: int, high: int) -> tuple[int, int]:
    """Return where in a run the keys from low to below high lie."""
    everything = range(length(run))
    first, last = (
        bisect_left(everything, bound, key=lambda at: int(_read(run, at, at + 1)[0, 0]))
        if 0 < bound < 1 << 64
        else (0, len(everything))[bound > 0]
        for bound in (low, high)
    )
    return first, last
