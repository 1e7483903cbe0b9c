"""The pure tasks of preparation: each reads files, writes files whole, and does nothing where its output is there."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from overnight.config import Data
from overnight.corpus import dedup
from overnight.corpus.bytes import framed
from overnight.corpus.document import printable
from overnight.corpus.drops import Drops
from overnight.corpus.file_parts import Part, read_part
from overnight.corpus.paragraphs import COLUMN, sentence_counts
from overnight.corpus.readers import Document
from overnight.corpus.sentences import sentences
from overnight.corpus.shards import (
    SPLITS,
    ShardEntry,
    checked_chunk,
    is_sealed,
    read_labels,
    read_lists,
    read_table,
    seal_chunk,
    write_shard,
    write_table,
)
from overnight.corpus.text import Outcome, kept_text
from overnight.corpus.tokenizer import Encoder, count_words, load_tokenizer
from overnight.corpus.wikipedia_dump import DumpPart, PartCounts
from overnight.corpus.word_counts import WordCounts
from overnight.errors import DataError
from overnight.machine import release_free_memory
from overnight.run_dir.atomic import write_json
from overnight.state_files import file_digest, read_json, sealed

CLEANING = 7
"""Version of the rules by which text is cleaned and split into sentences: of :mod:`clean`, :mod:`personal`, :mod:`sentences`, :mod:`markup`, :mod:`wikitext` and :mod:`bytes`."""


@dataclass(frozen=True)
class CleanTask:
    texts: list[bytes] | None  # in UTF-8, as a string may take 4 bytes a character; None: the output is there already
    labels: list[float | None] | None  # of each text, where labels are kept
    groups: list[str] | None  # of each text, where there are groups
    names: list[str]
    sources: list[int]
    path: Path
    data: Data
    of: str  # which documents these are
    part: Part | None = None  # of a file, instead of texts


def clean_task(documents: list[Document] | Part, path: Path, data: Data) -> CleanTask:
    """Return what is to be done for a chunk of documents, or of a file; nothing where it is there already, made of the same."""
    of = _identity(documents)
    done = is_sealed(path, of)
    if not isinstance(documents, list):
        part = dataclasses.replace(documents, xml=b"") if done and isinstance(documents, DumpPart) else documents
        return CleanTask(None if done else [], None, None, [], [], path, data, of, part)
    labels = [document.label for document in documents] if data.label and not done else None
    groups = [printable(document.group) for document in documents] if data.group_field and not done else None
    texts = None if done else [document.text.encode(errors="surrogatepass") for document in documents]
    names = [document.name for document in documents]
    return CleanTask(texts, labels, groups, [printable(name) for name in names], [document.entry for document in documents], path, data, of)


def _identity(documents: list[Document] | Part) -> str:
    """Return what tells a chunk from one that begins or ends elsewhere: how a file is divided depends on `data.max_invalid_lines`, too."""
    if isinstance(documents, list):
        return printable(f"{documents[0].name} to {documents[-1].name}, {len(documents)} documents")
    size = len(documents.xml) if isinstance(documents, DumpPart) else 0
    return printable(f"{documents.name}, bytes {documents.start} to {documents.end + size}")


def clean_chunk(task: CleanTask) -> PartCounts | None:
    """Clean documents, and write them with their hashes, names and labels: a sentence a line, or the bytes that are read.

    Returns:
        What a part of a file held; None of other documents, which were counted when they were read.
    """
    if task.texts is None:
        return _counts(task)
    names, sources, labels, groups, happened = task.names, task.sources, task.labels, task.groups, {}
    given: Iterator[str] = (text.decode(errors="surrogatepass") for text in task.texts)
    if task.part:
        documents, counts = read_part(task.part)
        given, names = (document.text for document in documents), [printable(document.name) for document in documents]
        sources = [task.part.source] * len(names)
        labels = [document.label for document in documents] if task.data.label else None
        groups = [printable(document.group) for document in documents] if task.data.group_field else None
        happened["part"] = json.dumps(dataclasses.asdict(counts))
    as_bytes, outcome = task.data.tokenizer == "bytes", Outcome()
    texts: list[bytes] = []
    hashes, rows, ends = [], [], []
    for row, raw in enumerate(given):
        text = kept_text(raw, names[row], task.data, outcome)
        del raw  # of a large document each copy counts
        if not text:
            continue
        found = [text.encode("utf-8", "replace").decode()] if as_bytes else sentences(text)
        texts.append(framed(text) if as_bytes else "\n".join(found).encode())
        hashes.append(dedup.document_hash(found))
        rows.append(row)
        ends.append(sentence_counts(text) if task.data.repeated_paragraphs else [])
    kind = pa.large_binary() if as_bytes else pa.large_string()
    columns = {
        "hash": pa.array(hashes, pa.binary(16)),
        "text": pa.array(texts, kind),
        "name": pa.array([names[row] for row in rows], pa.string()),
        "source": pa.array([sources[row] for row in rows], pa.int32()),
    }
    if labels is not None:
        columns["label"] = pa.array([labels[row] for row in rows], pa.float32())
    if groups is not None:
        columns["group"] = pa.array([groups[row] for row in rows], pa.string())
    if task.data.repeated_paragraphs:
        columns[COLUMN] = pa.array(ends, pa.list_(pa.int32()))
    happened |= {"characters": str(outcome.characters), "short_characters": str(outcome.short_characters)}
    happened |= {"short": str(outcome.short), "drops": json.dumps(outcome.drops.as_json()), "masked": json.dumps(outcome.masked)}
    write_table(task.path, columns, happened)
    seal_chunk(task.path, task.of)
    return _counts(task)


def _counts(task: CleanTask) -> PartCounts | None:
    """Return what a part of a file held, out of its sealed chunk."""
    return PartCounts(**json.loads(read_table(checked_chunk(task.path)).schema.metadata[b"part"])) if task.part else None


def outcome_of(chunks: Sequence[Path]) -> Outcome:
    """Return what became of the documents of chunks, clean ones or those of tokens, in order."""
    total = Outcome()
    for path in chunks:
        happened = read_table(checked_chunk(path)).schema.metadata or {}
        total.short += int(happened.get(b"short", 0))
        total.characters += int(happened.get(b"characters", 0))
        total.short_characters += int(happened.get(b"short_characters", 0))
        total.drops.merge(Drops.from_json(json.loads(happened.get(b"drops", b"{}"))))
        total.masked.update(json.loads(happened.get(b"masked", b"{}")))
    return total


@dataclass(frozen=True)
class CountTask:
    """A clean chunk, and which of its documents to take."""

    clean: Path
    take: np.ndarray
    lowercase: bool


def _texts(path: Path, take: np.ndarray) -> pa.LargeStringArray:
    return read_table(checked_chunk(path)).column("text").filter(pa.array(take))


def count_chunk(task: CountTask) -> tuple[WordCounts, np.ndarray]:
    """Return how often each word of a chunk occurs, and the hashes of the words."""
    counts = WordCounts.of(count_words((text.as_py() for text in _texts(task.clean, task.take)), task.lowercase))
    return counts, counts.hashes()


@dataclass(frozen=True)
class TokenTask:
    clean: Path
    split: np.ndarray  # of each document: 0 dropped, else its place in SPLITS, from 1
    folder: Path
    tokenizer: str
    max_tokens_per_char: float = 0.0  # 0: any


def token_path(clean: Path, split: str) -> Path:
    return clean.with_name(clean.name.replace("clean", split))


def token_chunk(task: TokenTask) -> int:
    """Tokenize clean text into one file a split; returns how many tokens."""
    total = 0
    files = (task.folder / name for name in ("vocab.txt", "tokenizer.json"))
    encoder = (
        _encoder(task.folder, *((file.stat().st_size, file.stat().st_mtime_ns) for file in files))
        if task.tokenizer == "wordpiece"
        else None
    )
    for kind, name in enumerate(SPLITS, 1):
        path = token_path(task.clean, name)
        if not is_sealed(path):
            if encoder:
                _write_tokens(task, kind, path, encoder)
            else:
                write_shard(path, *_bytes(task.clean, task.split == kind))
            seal_chunk(path)
        total += len(read_table(checked_chunk(path)).column("tokens").values)
    return total


@lru_cache(1)
def _encoder(folder: Path, *written: tuple[int, int]) -> Encoder:
    """Return the encoder of a folder, the same for all chunks of a process until a file of the vocabulary is `written` anew."""
    return Encoder(load_tokenizer(folder))


def free_encoder() -> None:
    """Free what this process remembers of words, which is some 35 MB, once all is tokenized."""
    if _encoder.cache_info().currsize:
        _encoder.cache_clear()
        release_free_memory()


def _write_tokens(task: TokenTask, kind: int, path: Path, encoder: Encoder) -> None:
    """Write the tokens of the documents of one split, but of those with more for each character than are allowed (Cramming, arXiv 2212.14034)."""
    texts = _texts(task.clean, task.split == kind)
    tokens, lengths, counts = encoder.encode(text.as_py() for text in texts)
    drops, dropped, rows = Drops(), [], np.flatnonzero(task.split == kind)
    if task.max_tokens_per_char:
        ends = np.cumsum(counts)
        sums = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        per_document = sums[ends] - sums[ends - counts]
        long = per_document > task.max_tokens_per_char * pc.utf8_length(texts).to_numpy(zero_copy_only=False)
        names = read_table(task.clean).column("name").filter(pa.array(task.split == kind))
        for row in np.flatnonzero(long):
            drops.add("filters.max_tokens_per_char", names[int(row)].as_py(), texts[int(row)].as_py())
        dropped, rows = rows[long].tolist(), rows[~long]
        tokens, lengths = tokens[np.repeat(~long, per_document)], lengths[np.repeat(~long, counts)]
        counts = counts[~long]
    happened = {
        "drops": json.dumps(drops.as_json()),
        "dropped_rows": json.dumps(dropped),
        "empty_rows": json.dumps(rows[counts == 0].tolist()),
    }
    write_shard(path, tokens, lengths, counts[counts > 0], metadata=happened)


def without_dropped(clean: Path, split: np.ndarray) -> np.ndarray:
    """Return the split of each document of a clean chunk, with 0 for those that were dropped for their tokens."""
    left = split.copy()
    for name in SPLITS:
        happened = read_table(checked_chunk(token_path(clean, name))).schema.metadata or {}
        left[json.loads(happened.get(b"dropped_rows", b"[]"))] = 0
    return left


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
    source: str = ""


def make_shard(task: ShardTask) -> ShardEntry:
    """Write the documents of token chunks as one shard, with its entry for the manifest in a file of its own."""
    free_encoder()
    path = task.folder / task.name
    if task.entry.exists() and path.exists():
        done: ShardEntry = read_json(task.entry, ShardEntry, f"delete the folder {task.folder} and prepare again")
        if file_digest(path) != done.checksum:
            raise DataError(f"{path}: the shard was cut short or changed, its checksum differs; delete it and prepare again")
        return done
    tokens, lengths, counts, labels, kind = bytearray(), [], [], [], np.dtype(np.uint16)
    for chunk, first, last in task.parts:
        flat, sentence_lengths, offsets = read_lists(checked_chunk(chunk))
        starts = np.concatenate([[0], np.cumsum(sentence_lengths, dtype=np.int64)])
        a, b = offsets[first], offsets[last]
        # Copies: a view would keep its file mapped, and all the chunks of a shard are as large as the shard.
        tokens += flat[starts[a] : starts[b]].tobytes()
        lengths.append(sentence_lengths[a:b].copy())
        counts.append(np.diff(offsets[first : last + 1]))
        if (column := read_labels(chunk)) is not None:
            labels.append(column.take(pa.array(range(first, last), pa.int64())))
        kind = flat.dtype
        del flat, sentence_lengths, column
    sentence_lengths, documents_ = np.concatenate(lengths), np.concatenate(counts)
    size = write_shard(path, np.frombuffer(tokens, kind), sentence_lengths, documents_, pa.concat_arrays(labels) if labels else None)
    entry = ShardEntry(
        task.name, task.split, len(documents_), len(sentence_lengths), len(tokens) // kind.itemsize, size, file_digest(path), task.source
    )
    write_json(task.entry, sealed(dataclasses.asdict(entry)))
    return entry
