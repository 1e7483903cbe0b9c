"""Paragraphs that many documents have, such as notices, headings and menus: counted over the whole corpus in one pass, left out in a second.

A paragraph is known by a hash of 64 bits. Pairs of paragraph and document are sorted on the disk (:mod:`external_sort`), and only the hashes of paragraphs
that are left out are ever in memory together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from overnight.config import Data
from overnight.corpus import dedup, external_sort
from overnight.corpus.drops import Drops
from overnight.corpus.exact_duplicates import first_occurrences
from overnight.corpus.progress import Progress
from overnight.corpus.sentences import sentences
from overnight.corpus.shards import checked_chunk, is_sealed, read_table, seal_chunk, write_table
from overnight.corpus.workers import Workers, run_tasks
from overnight.run_dir.atomic import write_whole

COLUMN = "paragraphs"
"""Of a clean chunk: sentences of each paragraph of a document, list<int32>; there only where they are asked for."""


def sentence_counts(text: str) -> list[int]:
    """Return how many sentences each paragraph of a clean text has."""
    return [len(sentences(paragraph)) for paragraph in text.split("\n\n")] if text else []


def _paragraphs(batch: pa.RecordBatch) -> tuple[list[list[str]], np.ndarray, np.ndarray]:
    """Return the paragraphs of a chunk, of each its sentences, their hashes, and the row of each."""
    counts = batch.column(COLUMN)
    found: list[list[str]] = []
    for text, lengths in zip(batch.column("text").to_pylist(), counts.to_pylist(), strict=True):
        lines, first = text.split("\n"), 0
        assert sum(lengths) == len(lines)
        for length in lengths:
            found.append(lines[first : first + length])
            first += length
    hashes = np.array([xxhash.xxh3_64_intdigest(" ".join(lines).encode()) for lines in found], np.uint64)
    return found, hashes, np.repeat(np.arange(len(counts)), counts.value_lengths().to_numpy(zero_copy_only=False))


@dataclass(frozen=True)
class CountTask:
    """A clean chunk, and which of its documents are no exact duplicates."""

    clean: Path
    take: np.ndarray
    first: int  # number of its first document


def _run_path(clean: Path) -> Path:
    return clean.with_name(clean.name.replace("clean", "paragraphs")).with_suffix(".run")


def count_paragraphs(task: CountTask) -> None:
    """Write a run of the paragraphs of a chunk, each once for every document that has it."""
    if not is_sealed(_run_path(task.clean)):
        _, hashes, rows = _paragraphs(read_table(checked_chunk(task.clean)))
        records = np.stack([hashes, np.uint64(task.first) + rows.astype(np.uint64)], axis=1)[task.take[rows]]
        external_sort.write_run(_run_path(task.clean), np.unique(records, axis=0) if len(records) else records)


@dataclass(frozen=True)
class FindTask:
    """A range of the hashes of paragraphs."""

    runs: list[Path]
    low: int
    high: int
    most: int
    found: Path


def find_repeated(task: FindTask) -> None:
    """Write the hashes of paragraphs that more than `most` documents have, ascending: uint64."""
    if not is_sealed(task.found):
        write_whole(task.found, (keys.data.cast("B") for keys in _repeated(task) if len(keys)))
        seal_chunk(task.found)


def _repeated(task: FindTask) -> Iterator[np.ndarray]:
    open_key, open_count = np.zeros(0, np.uint64), np.zeros(0, np.int64)  # the last key may have more in the next block
    for block in external_sort.merged(task.runs, task.low, task.high):
        keys, counts = np.unique(block[:, 0], return_counts=True)
        if len(open_key) and keys[0] == open_key[0]:
            counts[0] += open_count[0]
        else:
            keys, counts = np.append(open_key, keys), np.append(open_count, counts)
        open_key, open_count = keys[-1:], counts[-1:]
        yield keys[:-1][counts[:-1] > task.most]
    yield open_key[open_count > task.most]


@dataclass(frozen=True)
class LeaveOutTask:
    """A clean chunk, and the hashes of the paragraphs to leave out."""

    clean: Path
    repeated: Path
    min_chars: int


def _kept_path(clean: Path) -> Path:
    return clean.with_name(f"kept-{clean.name}")


def leave_out(task: LeaveOutTask) -> tuple[int, int]:
    """Write a chunk without repeated paragraphs; returns how many it had, and how many are left out.

    Also a paragraph that a document has already had is left out. A document of which too little is left is dropped.
    """
    batch = read_table(checked_chunk(task.clean))
    paragraphs, hashes, rows = _paragraphs(batch)
    if is_sealed(_kept_path(task.clean)):
        return len(hashes), int(read_table(checked_chunk(_kept_path(task.clean))).schema.metadata[b"left_out"])
    wanted = np.fromfile(checked_chunk(task.repeated), np.uint64)
    places = np.minimum(np.searchsorted(wanted, hashes), max(len(wanted) - 1, 0))
    out = wanted[places] == hashes if len(wanted) else np.zeros(len(hashes), bool)
    again = np.ones(len(hashes), bool)
    if len(hashes):
        again[np.unique(np.stack([rows.astype(np.uint64), hashes], axis=1), axis=0, return_index=True)[1]] = False
    drops, names, seen = Drops(), batch.column("name").to_pylist(), set()
    for number in np.flatnonzero(out | again).tolist():
        if hashes[number] in seen:  # one sample of each
            drops.counts["repeated_paragraphs"] += 1
        else:
            seen.add(hashes[number])
            drops.add("repeated_paragraphs", names[rows[number]], " ".join(paragraphs[number]))
    kept: list[list[str]] = [[] for _ in range(batch.num_rows)]
    for number in np.flatnonzero(~(out | again)).tolist():
        kept[rows[number]] += paragraphs[number]
    touched = np.bincount(rows[out | again], minlength=batch.num_rows) > 0
    stays = np.array(
        [
            bool(lines) and (not cut or sum(map(len, lines)) + len(lines) - 1 >= task.min_chars)
            for lines, cut in zip(kept, touched, strict=True)
        ],
        bool,
    )
    _write_kept(task, batch, kept, stays, drops, int((out | again).sum()))
    return len(hashes), int((out | again).sum())


def _write_kept(task: LeaveOutTask, batch: pa.RecordBatch, kept: list[list[str]], stays: np.ndarray, drops: Drops, left_out: int) -> None:
    names = batch.column("name").to_pylist()
    for row in np.flatnonzero(~stays).tolist():
        drops.add("min_chars", names[row], " ".join(kept[row]))
    texts = [lines for lines, stay in zip(kept, stays, strict=True) if stay]
    columns = {
        "hash": pa.array([dedup.document_hash(lines) for lines in texts], pa.binary(16)),
        "text": pa.array(["\n".join(lines) for lines in texts], pa.large_string()),
    }
    others = [name for name in batch.schema.names if name not in (*columns, COLUMN)]
    columns |= {name: batch.column(name).filter(pa.array(stays)) for name in others}
    metadata = {key.decode(): value.decode() for key, value in batch.schema.metadata.items()}
    before = Drops.from_json(json.loads(metadata.get("drops", "{}")))
    before.merge(drops)
    metadata |= {
        "short": str(int(metadata["short"]) + int((~stays).sum())),
        "drops": json.dumps(before.as_json()),
        "left_out": str(left_out),
    }
    write_table(_kept_path(task.clean), columns, metadata)
    seal_chunk(_kept_path(task.clean))


def without_repeated_paragraphs(chunks: list[Path], data: Data, workers: Workers, log: Callable[[str], None]) -> list[Path]:
    """Return clean chunks of which paragraphs that more than `data.repeated_paragraphs` documents have are left out; where it is 0, the chunks as they are.

    Args:
        chunks: clean documents with the column :data:`COLUMN`, in order; what is made lies beside them.
        data: settings.
        workers: processes; nothing depends on it.
        log: called with plain lines.
    """
    if not chunks or not data.repeated_paragraphs:
        return chunks
    progress, work = Progress("paragraphs", log, "M paragraphs"), chunks[0].parent
    ends = np.cumsum([read_table(checked_chunk(path)).num_rows for path in chunks])
    first = np.split(first_occurrences(chunks, workers), ends[:-1])
    tasks = (CountTask(path, take, int(end) - len(take)) for path, take, end in zip(chunks, first, ends, strict=True))
    for number, _ in enumerate(run_tasks(count_paragraphs, tasks, workers), 1):
        progress.update(0, number / len(chunks) / 2)
    runs = external_sort.few_runs([_run_path(path) for path in chunks], work, "paragraphs", workers)
    runs = [checked_chunk(run) for run in runs]
    ranges = [
        FindTask(runs, low, high, data.repeated_paragraphs, work / f"repeated-{number:05d}.u64")
        for number, (low, high) in enumerate(external_sort.key_ranges(runs))
    ]
    for _ in run_tasks(find_repeated, ranges, workers):
        pass
    if not is_sealed(repeated := work / "repeated.u64"):
        write_whole(repeated, (checked_chunk(task.found).read_bytes() for task in ranges))
        seal_chunk(repeated)
    total = left_out = 0
    for had, without in run_tasks(leave_out, (LeaveOutTask(path, repeated, data.min_chars) for path in chunks), workers):
        total, left_out = total + had, left_out + without
        progress.update(total, 0.5)
    progress.end(total, f"{left_out:,} of {total:,} are left out")
    return [_kept_path(path) for path in chunks]
