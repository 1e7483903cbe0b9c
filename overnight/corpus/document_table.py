"""`documents.arrow`: of each document of the shards its name, its source, its characters and a hash of its text; one record batch a shard, in order.

It tells where a text is from and finds it again in another folder, whatever the tokenizer. Training never reads it. Folders that were prepared before
there was such a file are without.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from overnight.corpus import dedup
from overnight.corpus.bytes import FRAME
from overnight.corpus.shards import SPLITS, Manifest, ShardEntry, checked_chunk, read_table
from overnight.corpus.tasks import token_path
from overnight.errors import DataError
from overnight.run_dir.atomic import sync
from overnight.state_files import file_digest

NAME = "documents.arrow"
_AGAIN = "delete it and prepare again, which makes it anew"
_SCHEMA = pa.schema([("name", pa.string()), ("source", pa.int32()), ("characters", pa.int64()), ("hash", pa.uint64())])


@dataclass(frozen=True)
class DocumentRows:
    """What is known of the documents of one shard, in their order."""

    names: pa.Array
    """string [D]: the file, document n of it as `file#n`, a page as `file#title`, or an address."""
    sources: np.ndarray
    """int32 [D]: which of the sources of the manifest, from 0."""
    characters: np.ndarray
    """int64 [D]: of the clean text."""
    hashes: np.ndarray
    """uint64 [D]: the first 8 bytes of the hash by which exact duplicates are found; of clean text, so it does not depend on the tokenizer."""


def write_document_table(folder: Path, chunks: Sequence[Path], splits: Sequence[np.ndarray], entries: Sequence[ShardEntry]) -> str:
    """Write `documents.arrow` from clean chunks, one after another.

    Args:
        folder: the data folder, with `work/` in it.
        chunks: clean documents.
        splits: part of each document of each chunk: 0 dropped, else its place in SPLITS, from 1.
        entries: the shards, in order.

    Returns:
        its checksum, for the manifest.
    """
    path = folder / "work" / NAME
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, _SCHEMA, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        for kind, split in enumerate(SPLITS, 1):
            sizes = [entry.documents for entry in entries if entry.split == split]
            for batch in _regrouped(_batches(chunks, splits, kind), sizes):
                writer.write_batch(batch)
    sync(path)
    found = file_digest(path)
    os.replace(path, folder / NAME)
    sync(folder)
    return found


def _batches(chunks: Sequence[Path], splits: Sequence[np.ndarray], kind: int) -> Iterator[pa.RecordBatch]:
    """Yield what is known of the documents of one split that have tokens, chunk by chunk."""
    for clean, split in zip(chunks, splits, strict=True):
        happened = read_table(token_path(clean, SPLITS[kind - 1])).schema.metadata or {}
        take = split == kind
        for gone in (b"dropped_rows", b"empty_rows"):
            take[json.loads(happened.get(gone, b"[]"))] = False
        table = read_table(checked_chunk(clean)).filter(pa.array(take))
        text = table.column("text")
        # The bytes of a byte model are the text with what stands around it.
        characters = pc.utf8_length(text if pa.types.is_large_string(text.type) else text.cast(pa.large_string()))
        characters = characters.to_numpy(zero_copy_only=False) - (0 if pa.types.is_large_string(text.type) else FRAME)
        hashes = np.ascontiguousarray(dedup.hash_column(table.column("hash"))[:, :8]).view("<u8")[:, 0]
        yield pa.record_batch([table.column("name"), table.column("source"), pa.array(characters), pa.array(hashes)], schema=_SCHEMA)


def _regrouped(batches: Iterator[pa.RecordBatch], sizes: Sequence[int]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of batches anew, in batches of the given sizes."""
    left: list[pa.RecordBatch] = []
    for size in sizes:
        while sum(batch.num_rows for batch in left) < size:
            left.append(next(batches))
        table = pa.Table.from_batches(left, _SCHEMA)
        # Copied row by row: what is cut out of a batch keeps its buffers, whose sizes depend on where the batch ended.
        yield table.slice(0, size).combine_chunks().to_batches()[0].take(pa.array(range(size), pa.int64()))
        left = [batch for batch in table.slice(size).to_batches() if batch.num_rows]
    assert not left and not any(batch.num_rows for batch in batches), "documents without a shard"


class DocumentTable:
    """The file of a prepared folder, opened; one batch of it is in memory at a time.

    Args:
        folder: a prepared data folder.
        manifest: of the folder.

    Raises:
        DataError: when the file is missing, damaged, or of other shards.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.path = folder / NAME
        if not self.path.is_file():
            raise DataError(
                f"{self.path}: is missing, and the manifest names it; copy it from where the folder was prepared, or prepare again, which makes it anew"
            )
        if (found := file_digest(self.path)) != manifest.documents_checksum:
            raise DataError(f"{self.path}: is damaged, its checksum is {found}, the manifest says {manifest.documents_checksum}; {_AGAIN}")
        self._shards = [entry.name for entry in manifest.shards]
        self._file = pa.ipc.open_file(pa.memory_map(str(self.path)))
        if self._file.num_record_batches != len(self._shards):
            raise DataError(f"{self.path}: is of {self._file.num_record_batches} shards, the manifest has {len(self._shards)}; {_AGAIN}")

    def rows(self, entry: ShardEntry) -> DocumentRows:
        """Return what is known of the documents of a shard."""
        batch = self._file.get_batch(self._shards.index(entry.name))
        assert batch.num_rows == entry.documents
        sources, characters, hashes = (batch.column(name).to_numpy() for name in ("source", "characters", "hash"))
        return DocumentRows(batch.column("name"), sources, characters, hashes)


def open_document_table(folder: Path, manifest: Manifest) -> DocumentTable | None:
    """Return the table of a folder; None of one that was prepared before there was any."""
    return DocumentTable(folder, manifest) if manifest.documents_checksum else None
