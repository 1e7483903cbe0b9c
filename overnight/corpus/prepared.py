"""A prepared folder as people and other programs read it: documents as text again, one shard in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from overnight.corpus import bytes as byte_text
from overnight.corpus import places
from overnight.corpus.document_table import DocumentRows, DocumentTable, open_document_table
from overnight.corpus.shards import SPLITS, Manifest, Shard, ShardEntry, check_shard, load_manifest, open_shard
from overnight.corpus.tokenizer import load_tokenizer, load_vocabulary
from overnight.errors import ConfigError, DataError

# Tokens that are made text at once; each takes as many bytes as the longest of the vocabulary.
_BLOCK = 1 << 16


class Decoder:
    """Token ids back to text.

    WordPiece forgets the white space around punctuation, and of a word it does not know everything; the text is that of the decoder of the
    `tokenizers` library, token by token. Bytes give back what was read.

    Args:
        folder: a prepared data folder.
        manifest: of the folder.

    Raises:
        DataError: when the vocabulary is missing, damaged or not that of the shards.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.is_bytes = manifest.tokenizer == byte_text.VOCABULARY_HASH
        self.tokens: list[str] = []
        """The vocabulary, id by id; of bytes as they stand in a list: `a`, `\\x0a`, and a mark for the space."""
        if self.is_bytes:
            self.tokens = [
                "\u2423" if byte == 32 else chr(byte) if 32 < byte < 127 else f"\\x{byte:02x}" for byte in range(byte_text.VOCABULARY_SIZE)
            ]
            return
        if (found := load_vocabulary(folder).hash) != manifest.tokenizer:
            raise DataError(
                f"{folder / 'manifest.json'}: was made with the tokenizer {manifest.tokenizer}, but vocab.txt and tokenizer.json beside it are {found}; "
                "put the right ones back, or delete the folder and prepare again"
            )
        tokenizer = load_tokenizer(folder)
        self.tokens = [str(tokenizer.id_to_token(token)) for token in range(tokenizer.get_vocab_size())]
        self._normalizer = tokenizer.normalizer
        # What a token is behind another one: its text depends on nothing else.
        first = tokenizer.decode([0], skip_special_tokens=False)
        behind = tokenizer.decode_batch([[0, token] for token in range(len(self.tokens))], skip_special_tokens=False)
        # Equally long, filled up with zero bytes, so that numpy joins them: twice as fast as joining a list of str.
        self._texts = np.array([text[len(first) :].encode() for text in behind])

    def normalized(self, text: str) -> str:
        """Return a text as the vocabulary has it: Chinese characters apart, and in lower case and without accents, where it is of those."""
        return text if self.is_bytes else str(self._normalizer.normalize_str(text))

    def characters(self) -> np.ndarray:
        """Return how many characters each token has in a text: int64 [V]."""
        if self.is_bytes:  # the bytes that begin a character
            return np.array([byte & 0xC0 != 0x80 for byte in range(byte_text.VOCABULARY_SIZE)], np.int64)
        return np.array([len(text.decode()) for text in self._texts.tolist()], np.int64)

    def text(self, tokens: np.ndarray) -> str:
        """Return the text of tokens [N], without white space around it."""
        if self.is_bytes:
            return tokens.tobytes().decode("utf-8", "replace").strip()
        blocks = (self._texts[tokens[start : start + _BLOCK]].tobytes() for start in range(0, len(tokens), _BLOCK))
        return b"".join(block.translate(None, b"\0") for block in blocks).decode("utf-8", "replace").strip()


@dataclass(frozen=True)
class PreparedDocument:
    """One document of a prepared folder."""

    split: str
    number: int
    """In its split, from 1."""
    name: str
    """Where it is from; empty where the folder does not know."""
    source: str
    """The entry of `data.paths`; empty where the folder does not know."""
    tokens: np.ndarray
    """uint8, uint16 or uint32 [N]."""
    lengths: np.ndarray
    """int64 [S]: tokens of each sentence."""
    label: float | None = None


def local_folder(path: str) -> Path:
    """Return a prepared folder that a command was given.

    Raises:
        ConfigError: when it is an address: only training reads those, and its copy lacks what is known of the documents.
    """
    if places.is_remote(path):
        raise ConfigError(f"{path}: is in storage, and this command reads folders of this machine; copy it into one, and name that")
    return Path(path)


class Prepared:
    """A prepared folder, opened; it holds one shard at a time, as views into the mapped file.

    Args:
        folder: a prepared data folder.

    Raises:
        DataError: when it is none, or its manifest or vocabulary cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise DataError(
                f"{folder}: is {'no folder' if folder.exists() else 'not there'}; name a folder that `overnight prepare` has made"
            )
        self.folder, self.manifest = folder, load_manifest(folder)
        self._open: tuple[ShardEntry, Shard, DocumentRows | None] | None = None
        self._verified: set[str] = set()

    @cached_property
    def decoder(self) -> Decoder:
        """What makes text of the tokens."""
        return Decoder(self.folder, self.manifest)

    @cached_property
    def table(self) -> DocumentTable | None:
        """Names and sources of the documents; None where the folder does not know them."""
        return open_document_table(self.folder, self.manifest)

    def entries(self, split: str) -> list[ShardEntry]:
        """Return the shards of a split, in order."""
        return [entry for entry in self.manifest.shards if entry.split == split]

    def splits(self) -> list[str]:
        """Return the splits that have documents, in order."""
        return [split for split in SPLITS if self.manifest.count(split, "documents")]

    def open(self, entry: ShardEntry) -> tuple[Shard, DocumentRows | None]:
        """Return a shard, its checksum compared the first time, and what is known of its documents.

        Raises:
            DataError: when it is missing or damaged.
        """
        if self._open is None or self._open[0] != entry:
            self._open = None  # one at a time
            shard = open_shard(self.folder, entry, verify=entry.name not in self._verified)
            self._open = (entry, shard, self.table.rows(entry) if self.table else None)
            self._verified.add(entry.name)
        return self._open[1:]

    def verify(self) -> None:
        """Compare every shard and the table of documents with their checksums, and the vocabulary with that of the manifest.

        Raises:
            DataError: when one is missing or damaged.
        """
        _ = self.table, self.decoder  # opening them compares
        for entry in self.manifest.shards:
            check_shard(self.folder, entry)
            self._verified.add(entry.name)

    def document(self, split: str, number: int) -> PreparedDocument:
        """Return one document.

        Args:
            number: in its split, from 1.

        Raises:
            DataError: when the split has no such document.
        """
        first = 1
        for entry in self.entries(split):
            if first <= number < first + entry.documents:
                return self._document(entry, first, number - first)
            first += entry.documents
        has = f"has documents 1 to {first - 1:,}" if first > 1 else "has no document"
        raise DataError(f"{self.folder}: there is no document {number:,} in {split}, which {has}")

    def documents(self, split: str) -> Iterator[PreparedDocument]:
        """Yield the documents of a split, in order."""
        first = 1
        for entry in self.entries(split):
            for row in range(entry.documents):
                yield self._document(entry, first, row)
            first += entry.documents

    def _document(self, entry: ShardEntry, first: int, row: int) -> PreparedDocument:
        shard, rows = self.open(entry)
        begin, end = shard.document_sentences[row : row + 2]
        starts = shard.sentence_starts[begin : end + 1]
        name = rows.names[row].as_py() if rows else ""
        source = self.manifest.sources[rows.sources[row]].path if rows else ""
        label = None if shard.labels is None or np.isnan(shard.labels[row]) else float(shard.labels[row])
        return PreparedDocument(entry.split, first + row, name, source, shard.tokens[starts[0] : starts[-1]], np.diff(starts), label)
