"""The pure tasks of preparation: each reads files, writes files whole, and does nothing where its output is there."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from overnight.corpus import dedup
from overnight.corpus.clean import clean, sentences
from overnight.corpus.files import write_json
from overnight.corpus.shards import SPLITS, ShardEntry, checksum, read_lists, read_table, write_shard, write_table
from overnight.corpus.tokenizer import count_words, encode, load_tokenizer


@dataclass(frozen=True)
class CleanTask:
    texts: list[str] | None  # None: the output is there already
    path: Path
    min_chars: int


def clean_chunk(task: CleanTask) -> None:
    """Documents -> clean ones, a sentence a line, with their hashes."""
    if task.texts is None:
        return
    texts, hashes = [], []
    for text in task.texts:
        found = sentences(text) if len(text := clean(text)) >= task.min_chars else []
        if found:
            texts.append("\n".join(found))
            hashes.append(dedup.document_hash(found))
    columns = {"hash": pa.array(hashes, pa.binary(16)), "text": pa.array(texts, pa.large_string())}
    write_table(task.path, columns, {"short": str(len(task.texts) - len(texts))})


@dataclass(frozen=True)
class CountTask:
    """A clean chunk, and which of its documents to take."""

    clean: Path
    take: np.ndarray


def _texts(path: Path, take: np.ndarray) -> list[str]:
    return [str(text) for text in read_table(path).column("text").filter(pa.array(take)).to_pylist()]


def count_chunk(task: CountTask) -> Counter[str]:
    return count_words(_texts(task.clean, task.take))


@dataclass(frozen=True)
class TokenTask:
    clean: Path
    split: np.ndarray  # of each document: 0 dropped, 1 train, 2 valid
    folder: Path


def token_path(clean: Path, split: str) -> Path:
    return clean.with_name(clean.name.replace("clean", split))


def token_chunk(task: TokenTask) -> int:
    """Clean text -> tokens, one file a split; returns how many tokens."""
    total = 0
    tokenizer = load_tokenizer(task.folder)
    for kind, name in enumerate(SPLITS, 1):
        path = token_path(task.clean, name)
        if not path.exists():
            tokens, lengths, counts = encode(_texts(task.clean, task.split == kind), tokenizer)
            write_shard(path, tokens, lengths, counts[counts > 0])
        total += len(read_table(path).column("tokens").values)
    return total


@dataclass(frozen=True)
class ShardTask:
    folder: Path
    name: str
    split: str
    parts: list[tuple[Path, int, int]]  # token chunk, first and last+1 document
    entry: Path


def make_shard(task: ShardTask) -> ShardEntry:
    """Documents out of token chunks -> one shard, with its entry for the manifest beside."""
    path = task.folder / task.name
    if task.entry.exists() and path.exists():
        return ShardEntry(**json.loads(task.entry.read_text()))
    tokens, lengths, counts = [], [], []
    for chunk, first, last in task.parts:
        flat, sentence_lengths, offsets = read_lists(chunk)
        starts = np.concatenate([[0], np.cumsum(sentence_lengths, dtype=np.int64)])
        a, b = offsets[first], offsets[last]
        tokens.append(flat[starts[a] : starts[b]])
        lengths.append(sentence_lengths[a:b])
        counts.append(np.diff(offsets[first : last + 1]))
    flat, sentence_lengths, documents_ = np.concatenate(tokens), np.concatenate(lengths), np.concatenate(counts)
    size = write_shard(path, flat, sentence_lengths, documents_)
    entry = ShardEntry(task.name, task.split, len(documents_), len(sentence_lengths), len(flat), size, checksum(path))
    write_json(task.entry, dataclasses.asdict(entry))
    return entry
