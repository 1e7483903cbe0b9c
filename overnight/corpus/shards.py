"""Token shards on disk, format version 3: written whole, opened as zero-copy numpy views.

A prepared folder holds `manifest.json`, `train-00000.arrow`, ..., the same of `valid` and `test`, and for WordPiece tokens `vocab.txt`
and `tokenizer.json`. A shard is an uncompressed Arrow IPC file of one record batch, one row a document: `tokens: list<uint16>`
(uint32 for a vocabulary above 65,536, uint8 for bytes) and `sentences: list<int32>`, the number of tokens of each sentence, which
sum to the tokens (bytes: one sentence). Where labels are kept there is `label: float32`, null where a document has none.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from overnight.corpus.bytes import VOCABULARY_HASH
from overnight.corpus.readers import Source
from overnight.corpus.source_files import SourceFiles
from overnight.corpus.tokenizer import load_vocabulary
from overnight.errors import DataError
from overnight.run_dir.atomic import whole_file, write_json
from overnight.state_files import STRICT, file_digest, fitted, read_json, read_mapping, sealed

FORMAT_VERSION = 3
SPLITS = ("train", "valid", "test")
ARRIVING = ".arriving"
"""Folder in a copy of data in storage (:mod:`shard_cache`), by which it is told from a folder that was prepared here."""
# Of the machine: a file that cannot be read because of one is whole.
_LIMITS = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


@dataclass(frozen=True)
class ShardEntry:
    """A shard as the manifest knows it."""

    __pydantic_config__ = STRICT
    name: str
    split: str
    documents: int
    sentences: int
    tokens: int
    bytes: int
    checksum: str
    """XXH3-64 of the file, 16 hex digits."""
    source: str = ""
    """Name of the source of all its documents (`data.sources`); empty where none are named."""


@dataclass(frozen=True)
class Manifest:
    """What a prepared folder holds, and from what it was made."""

    __pydantic_config__ = STRICT
    version: int
    tokenizer: str
    """Hash of the vocabulary (see `tokenizer.Vocabulary.hash`), or `bytes.VOCABULARY_HASH`."""
    vocab_size: int
    settings: dict[str, Any]
    """The values of `config.Data` that decide the bytes of the shards."""
    sources: list[Source]
    duplicates: int
    """Documents dropped because an equal one came before."""
    short: int
    """Documents dropped because they had fewer characters than `min_chars`, or no token at all."""
    shards: list[ShardEntry]
    cleaning: int = 1
    """Version of the rules by which text is cleaned and split into sentences (`tasks.CLEANING`); manifests without it are of the first."""
    first_documents: dict[str, list[str]] = field(default_factory=dict)
    """Where the first documents of `valid` and `test` are from: a file, its document number n as `file#n`, or a page as `file#title`."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Documents (or lines) dropped, by the setting that did it; `drops.json` has samples."""
    masked: dict[str, int] = field(default_factory=dict)
    """Placeholders that were put for personal data, by kind."""
    documents_checksum: str = ""
    """XXH3-64 of `documents.arrow`; manifests without it have no such file."""
    source_files: SourceFiles | None = None
    """The files of this machine that were read; of manifests without it that is not known."""

    def count(self, split: str, what: str) -> int:
        """Return a sum over the shards of a split: `documents`, `sentences`, `tokens` or `bytes`."""
        return sum(getattr(shard, what) for shard in self.shards if shard.split == split)

    def files(self) -> list[str]:
        """Return the names of the files of the folder that belong to it: the shards, the table of documents and the vocabulary, where there are such."""
        table = ["documents.arrow"] if self.documents_checksum else []
        return [
            *(shard.name for shard in self.shards),
            *table,
            *([] if self.tokenizer == VOCABULARY_HASH else ["vocab.txt", "tokenizer.json"]),
        ]

    def fingerprint(self) -> str:
        """Return a hash of what the shards and the vocabulary hold, 32 hex digits: another one is another corpus."""
        return xxhash.xxh3_128_hexdigest(" ".join([self.tokenizer, *(shard.checksum + shard.source for shard in self.shards)]).encode())


@dataclass(frozen=True)
class Shard:
    """Numpy views into one memory-mapped shard."""

    name: str
    tokens: np.ndarray
    """uint8, uint16 or uint32 [N]: all documents on end."""
    sentence_starts: np.ndarray
    """int64 [S+1]: sentence s is tokens[sentence_starts[s]:sentence_starts[s+1]]."""
    document_sentences: np.ndarray
    """int64 [D+1]: document d owns sentences document_sentences[d] to document_sentences[d+1]."""
    labels: np.ndarray | None = None
    """float32 [D]: the number that belongs to each document, NaN where there is none; None where none were kept."""
    source: str = ""
    """Name of the source of all its documents; empty where none are named."""


def write_shard(
    path: Path,
    tokens: np.ndarray,
    sentence_lengths: np.ndarray,
    document_sentences: np.ndarray,
    labels: pa.Array | None = None,
    metadata: dict[str, str] | None = None,
) -> int:
    """Write documents as one Arrow file.

    Args:
        path: where it goes.
        tokens: uint8, uint16 or uint32 [N].
        sentence_lengths: int32 [S], tokens of each sentence.
        document_sentences: int32 [D], sentences of each document.
        labels: float32 [D], null where a document has none; None keeps no labels.
        metadata: of the table, where it is no shard yet.

    Returns:
        The number of bytes written.
    """
    sentence_offsets = _offsets(document_sentences)
    token_offsets = _offsets(sentence_lengths)[sentence_offsets]
    assert token_offsets[-1] == len(tokens) < 1 << 31
    lists = [
        pa.ListArray.from_arrays(pa.array(token_offsets.astype(np.int32)), pa.array(tokens)),
        pa.ListArray.from_arrays(pa.array(sentence_offsets.astype(np.int32)), pa.array(sentence_lengths.astype(np.int32))),
    ]
    return write_table(path, {"tokens": lists[0], "sentences": lists[1]} | ({} if labels is None else {"label": labels}), metadata)


def write_table(path: Path, columns: dict[str, pa.Array], metadata: dict[str, str] | None = None) -> int:
    """Write columns as an Arrow file of one record batch; returns its size in bytes."""
    batch = pa.record_batch(list(columns.values()), names=list(columns))
    if metadata:
        batch = batch.replace_schema_metadata(metadata)
    with whole_file(path) as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)
    return path.stat().st_size


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def read_table(path: Path) -> pa.RecordBatch:
    """Return the only record batch of an Arrow file, memory-mapped. Its bytes are trusted: compare the checksum before.

    Raises:
        DataError: when it is missing or is no such file.
    """
    try:
        with pa.memory_map(str(path)) as source:
            return pa.ipc.open_file(source).get_batch(0)
    except (OSError, ValueError, pa.ArrowException) as error:
        if any(os.strerror(code) in str(error) for code in _LIMITS):
            raise DataError(
                f"{path}: cannot be read: {error}; raise the limits of this machine (ulimit -a), and run the same command again"
            ) from None
        raise DataError(f"{path}: is not a readable Arrow file: {error}; delete the folder {path.parent} and prepare again") from None


def seal_chunk(path: Path, of: str = "") -> None:
    """Write the checksum of an intermediate Arrow file beside it, as the sign that it is done, and `of` what it was made."""
    write_json(_beside(path), sealed({"bytes": path.stat().st_size, "xxh3_64": file_digest(path), "of": of}))


def is_sealed(path: Path, of: str = "") -> bool:
    """Return whether :func:`seal_chunk` was called for this file, and with the same `of` where one is given."""
    return _beside(path).exists() and (not of or _seal(path).of == of)


def checked_chunk(path: Path) -> Path:
    """Return the path of a sealed file, once its bytes are seen to be those that were sealed (reads it once, some GB/s).

    Raises:
        DataError: when they are not.
    """
    again, written = _again(path), _seal(path)
    try:
        same = path.stat().st_size == written.bytes and file_digest(path) == written.xxh3_64
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; {again}") from None
    if not same:
        raise DataError(f"{path}: was cut short or changed since it was written, its checksum differs; {again}")
    return path


@dataclass(frozen=True)
class _Chunk:
    __pydantic_config__ = STRICT
    bytes: int
    xxh3_64: str
    of: str = ""


def _seal(path: Path) -> _Chunk:
    return read_json(_beside(path), _Chunk, _again(path))


def _again(path: Path) -> str:
    return f"delete the folder {path.parent.parent} and prepare again"


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def read_lists(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what :func:`write_shard` was given: tokens [N], sentence lengths [S], sentences of each document [D] as offsets [D+1]."""
    batch = read_table(path)
    tokens, sentences = batch.column("tokens"), batch.column("sentences")
    offsets = sentences.offsets.to_numpy().astype(np.int64)
    return tokens.values.to_numpy(), sentences.values.to_numpy(), offsets


def read_labels(path: Path) -> pa.Array | None:
    """Return the labels that :func:`write_shard` was given."""
    batch = read_table(path)
    return batch.column("label") if "label" in batch.schema.names else None


def open_shards(folder: Path, split: str, verify: bool = True) -> list[Shard]:
    """Open the shards of a split, in order.

    Args:
        folder: a prepared data folder.
        split: `train`, `valid` or `test`.
        verify: compare each file with its checksum (reads it once, some GB/s).

    Raises:
        DataError: the folder is not prepared, was made by another format or tokenizer, or a shard is missing or damaged.
    """
    assert split in SPLITS, split
    manifest = load_manifest(folder)
    if manifest.tokenizer != VOCABULARY_HASH and (found := load_vocabulary(folder).hash) != manifest.tokenizer:
        raise DataError(
            f"{folder / 'manifest.json'}: was made with the tokenizer {manifest.tokenizer}, but vocab.txt and tokenizer.json beside it are {found}; "
            "put the right ones back, or delete the folder and prepare again"
        )
    return [open_shard(folder, entry, verify) for entry in manifest.shards if entry.split == split]


def open_shard(folder: Path, entry: ShardEntry, verify: bool = True) -> Shard:
    """Open one shard; for arguments and errors see :func:`open_shards`."""
    path = check_shard(folder, entry, verify)
    tokens, lengths, document_sentences = read_lists(path)
    column = read_labels(path)
    labels = None if column is None else column.fill_null(math.nan).to_numpy()
    return Shard(entry.name, tokens, _offsets(lengths), document_sentences, labels, entry.source)


def check_shard(folder: Path, entry: ShardEntry, verify: bool = True) -> Path:
    """Check that a shard is there and whole, and return its path; for arguments and errors see :func:`open_shards`."""
    path = folder / entry.name
    again = "run the same command again, which fetches it anew" if (folder / ARRIVING).is_dir() else "prepare again, which makes it anew"
    if not path.exists():
        raise DataError(f"{path}: the shard is missing; {again}")
    again = f"delete it and {again}"
    if path.stat().st_size != entry.bytes:
        raise DataError(f"{path}: the shard has {path.stat().st_size} bytes, the manifest says {entry.bytes}; {again}")
    if verify and (found := file_digest(path)) != entry.checksum:
        raise DataError(f"{path}: the shard is damaged, its checksum is {found}, the manifest says {entry.checksum}; {again}")
    return path


def save_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json`; its presence says that the folder is prepared."""
    write_json(folder / "manifest.json", sealed(dataclasses.asdict(manifest)))


def load_manifest(folder: Path) -> Manifest:
    """Read `manifest.json`.

    Raises:
        DataError: when it is missing, damaged, changed since it was written, or of another format version.
    """
    path, again = folder / "manifest.json", "delete the folder and prepare again"
    if not path.exists():
        raise DataError(f"{path}: is missing, so the folder is not prepared; run `overnight prepare` first")
    tree = read_mapping(path, again)
    if (version := tree.get("version")) != FORMAT_VERSION:
        raise DataError(f"{path}: is of format version {version!r}, this program reads {FORMAT_VERSION}; {again}")
    found: Manifest = fitted(tree, Manifest, str(path), again)
    return found
