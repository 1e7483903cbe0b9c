"""The pure tasks of preparation: each reads files, writes files whole, and does nothing where its output is there."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from overnight.config import Data
from overnight.corpus import dedup
from overnight.corpus.bytes import document_bytes
from overnight.corpus.clean import clean
from overnight.corpus.paragraphs import COLUMN, sentence_counts
from overnight.corpus.readers import Document
from overnight.corpus.sentences import sentences
from overnight.corpus.shards import (
    SPLITS,
    ShardEntry,
    checked_chunk,
    checksum,
    is_sealed,
    read_labels,
    read_lists,
    read_table,
    seal_chunk,
    write_shard,
    write_table,
)
from overnight.corpus.tokenizer import count_words, encode, load_tokenizer
from overnight.errors import DataError
from overnight.run_dir.atomic import write_json
from overnight.state_files import read_json, sealed

CLEANING = 2
"""Version of the rules by which text is cleaned and split into sentences: of :mod:`clean`, :mod:`sentences`, :mod:`markup` and :mod:`bytes`."""


@dataclass(frozen=True)
class CleanTask:
    texts: list[str] | None  # None: the output is there already
    labels: list[float | None] | None  # of each text, where labels are kept
    names: list[str]
    path: Path
    min_chars: int
    tokenizer: str
    groups: list[str] | None = None  # of each text, where `data.group_field` is set
    paragraphs: bool = False  # whether to keep where they end


def clean_task(documents: list[Document], path: Path, data: Data) -> CleanTask:
    """Return what is to be done for a chunk of documents."""
    done = is_sealed(path)
    labels = [document.label for document in documents] if data.label and not done else None
    texts, names = None if done else [document.text for document in documents], [document.name for document in documents]
    names = [_printable(name) for name in names]
    groups = [_printable(document.group) for document in documents] if data.group_field and not done else None
    return CleanTask(texts, labels, names, path, data.min_chars, data.tokenizer, groups, data.repeated_paragraphs > 0)


def _printable(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode()  # a file's name may be no UTF-8, nor may a string in JSON be text


def clean_chunk(task: CleanTask) -> None:
    """Clean documents, and write them with their hashes, names and labels: a sentence a line, or the bytes that are read."""
    if task.texts is None:
        return
    make = _framed if task.tokenizer == "bytes" else _split
    texts: list[str | bytes] = []
    hashes, rows = [], []
    for row, text in enumerate(task.texts):
        found, digest = make(text, task.min_chars)
        if found:
            texts.append(found)
            hashes.append(digest)
            rows.append(row)
    kind = pa.large_binary() if task.tokenizer == "bytes" else pa.large_string()
    columns = {
        "hash": pa.array(hashes, pa.binary(16)),
        "text": pa.array(texts, kind),
        "name": pa.array([task.names[row] for row in rows], pa.string()),
    }
    if task.labels is not None:
        columns["label"] = pa.array([task.labels[row] for row in rows], pa.float32())
    if task.groups is not None:
        columns["group"] = pa.array([task.groups[row] for row in rows], pa.string())
    if task.paragraphs:
        columns[COLUMN] = pa.array([sentence_counts(clean(task.texts[row])) for row in rows], pa.list_(pa.int32()))
    write_table(task.path, columns, {"short": str(len(task.texts) - len(texts))})
    seal_chunk(task.path)


def _split(text: str, min_chars: int) -> tuple[str, bytes]:
    found = sentences(text) if len(text := clean(text)) >= min_chars else []
    return "\n".join(found), dedup.document_hash(found)


def _framed(text: str, min_chars: int) -> tuple[bytes, bytes]:
    found = document_bytes(text)
    inner = found[2:-1].decode()
    return (found if inner and len(inner) >= min_chars else b""), dedup.document_hash([inner])


@dataclass(frozen=True)
class CountTask:
    """A clean chunk, and which of its documents to take."""

    clean: Path
    take: np.ndarray


def _texts(path: Path, take: np.ndarray) -> list[str]:
    return [str(text) for text in read_table(checked_chunk(path)).column("text").filter(pa.array(take)).to_pylist()]


def count_chunk(task: CountTask) -> Counter[str]:
    return count_words(_texts(task.clean, task.take))


@dataclass(frozen=True)
class TokenTask:
    clean: Path
    split: np.ndarray  # of each document: 0 dropped, else its place in SPLITS, from 1
    folder: Path
    tokenizer: str


def token_path(clean: Path, split: str) -> Path:
    return clean.with_name(clean.name.replace("clean", split))


def token_chunk(task: TokenTask) -> int:
    """Tokenize clean text into one file a split; returns how many tokens."""
    total = 0
    tokenizer = load_tokenizer(task.folder) if task.tokenizer == "wordpiece" else None
    for kind, name in enumerate(SPLITS, 1):
        path = token_path(task.clean, name)
        if not is_sealed(path):
            if tokenizer:
                tokens, lengths, counts = encode(_texts(task.clean, task.split == kind), tokenizer)
                write_shard(path, tokens, lengths, counts[counts > 0])
            else:
                write_shard(path, *_bytes(task.clean, task.split == kind))
            seal_chunk(path)
        total += len(read_table(checked_chunk(path)).column("tokens").values)
    return total


def _bytes(path: Path, take: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, pa.Array | None]:
    """Return bytes, their number in each document, one sentence for each, and the labels."""
    table = read_table(checked_chunk(path)).filter(pa.array(take))
    column = table.column("text")
    offsets, flat = (np.frombuffer(part, kind) for part, kind in zip(column.buffers()[1:], (np.int64, np.uint8), strict=True))
    offsets = offsets[column.offset : column.offset + len(column) + 1]
    labels = table.column("label") if "label" in table.schema.names else None
    return flat[offsets[0] : offsets[-1]], np.diff(offsets), np.ones(len(table), np.int64), labels


@dataclass(frozen=True)
class ShardTask:
    folder: Path
    name: str
    split: str
    parts: list[tuple[Path, int, int]]  # token chunk, first and last+1 document
    entry: Path


def make_shard(task: ShardTask) -> ShardEntry:
    """Write the documents of token chunks as one shard, with its entry for the manifest in a file of its own."""
    path = task.folder / task.name
    if task.entry.exists() and path.exists():
        done: ShardEntry = read_json(task.entry, ShardEntry, f"delete the folder {task.folder} and prepare again")
        if checksum(path) != done.checksum:
            raise DataError(f"{path}: the shard was cut short or changed, its checksum differs; delete it and prepare again")
        return done
    tokens, lengths, counts, labels = [], [], [], []
    for chunk, first, last in task.parts:
        flat, sentence_lengths, offsets = read_lists(checked_chunk(chunk))
        starts = np.concatenate([[0], np.cumsum(sentence_lengths, dtype=np.int64)])
        a, b = offsets[first], offsets[last]
        tokens.append(flat[starts[a] : starts[b]])
        lengths.append(sentence_lengths[a:b])
        counts.append(np.diff(offsets[first : last + 1]))
        if (column := read_labels(chunk)) is not None:
            labels.append(column[first:last])
    flat, sentence_lengths, documents_ = np.concatenate(tokens), np.concatenate(lengths), np.concatenate(counts)
    size = write_shard(path, flat, sentence_lengths, documents_, pa.concat_arrays(labels) if labels else None)
    entry = ShardEntry(task.name, task.split, len(documents_), len(sentence_lengths), len(flat), size, checksum(path))
    write_json(task.entry, sealed(dataclasses.asdict(entry)))
    return entry
