"""All documents of a byte split in one order, joined and split into strings: the text that streams read.

Shapes: D documents, S strings of an epoch, R pieces to read.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from overnight.batches.order import order
from overnight.corpus.shards import Shard
from overnight.errors import DataError

# Documents that are ordered at once, so that what the order needs on the way stays small.
_BLOCK = 1 << 20


class Documents:
    """The documents of a split, by their number over all its files.

    Args:
        shards: files of bytes; they stay memory-mapped.

    Raises:
        DataError: when they hold WordPiece tokens.
    """

    def __init__(self, shards: list[Shard]) -> None:
        for shard in shards:
            if shard.tokens.dtype != np.uint8:
                raise DataError(f"{shard.name} holds WordPiece tokens, not bytes; prepare another folder with data.tokenizer = bytes")
            assert len(shard.document_sentences) == len(shard.sentence_starts), "a document of bytes is one sentence"
        self.names = [shard.name for shard in shards]
        self.bytes = [shard.tokens for shard in shards]
        self.starts = [shard.sentence_starts for shard in shards]
        self.first: list[int] = np.cumsum([0, *(len(starts) - 1 for starts in self.starts)]).tolist()
        """Number of the first document of each file, and of all documents (files + 1)."""
        # Two tables of 82 M documents: four bytes each, not eight.
        self.lengths_D = np.concatenate([np.diff(starts).astype(np.int32) for starts in self.starts])
        self.labels_D: np.ndarray | None = None
        if any(shard.labels is not None for shard in shards):
            missing = (np.full(len(shard.sentence_starts) - 1, np.nan, np.float32) for shard in shards)
            self.labels_D = np.concatenate([gap if s.labels is None else s.labels for s, gap in zip(shards, missing, strict=True)])

    def __len__(self) -> int:
        return len(self.lengths_D)

    def place(self, document: int) -> tuple[str, int]:
        """Return the file of a document, and its row there."""
        file = bisect_right(self.first, document) - 1
        return self.names[file], document - self.first[file]

    def text(self, document: int, start: int, end: int) -> np.ndarray:
        """Return bytes of a part of a document."""
        file = bisect_right(self.first, document) - 1
        at = int(self.starts[file][document - self.first[file]])
        return self.bytes[file][at + start : at + end]


class Joined:
    """Documents in the order of a key, on end, split between documents into strings of nearly equal bytes.

    Each cut is as near as a document's end can be to its place, and every string has at least one document. The order is a function, so
    the only table is where each document ends.

    Args:
        documents: at least as many as strings.
        key: of the order, from :func:`overnight.batches.order.key`.
        strings: S.
    """

    def __init__(self, documents: Documents, key: int, strings: int) -> None:
        count = len(documents)
        assert 0 < strings <= count
        self.documents, self.key = documents, key
        self._starts = np.zeros(count + 1, np.int64)
        for at in range(0, count, _BLOCK):
            block = order(np.arange(at, min(at + _BLOCK, count)), count, key)
            self._starts[at + 1 : at + 1 + len(block)] = documents.lengths_D[block]
        np.cumsum(self._starts, out=self._starts)
        places = np.arange(1, strings) * (self._starts[-1] / strings)
        after = np.clip(np.searchsorted(self._starts, places), 1, count)
        nearest = np.where(places - self._starts[after - 1] < self._starts[after] - places, after - 1, after)
        # At least one document each: in what exceeds that, the cuts may not fall.
        spare = np.maximum.accumulate(np.concatenate([[0], nearest - np.arange(1, strings), [count - strings]]))
        bounds = np.minimum(spare, count - strings) + np.arange(strings + 1)
        self.starts_S = self._starts[bounds]
        """First byte of each string, and the end of the last (S + 1)."""

    def read(self, starts_R: np.ndarray, ends_R: np.ndarray, width: int) -> np.ndarray:
        """Return bytes [start, end) of the joined documents, one row each, zeros behind: (R, width) uint8."""
        out = np.zeros((len(starts_R), width), np.uint8)
        row, place = self._within(starts_R, ends_R)
        first, last = self._starts[place], self._starts[place + 1]
        begin, end = np.maximum(first, starts_R[row]), np.minimum(last, ends_R[row])
        numbers = order(place, len(self.documents), self.key)
        columns = row, numbers, begin - first, end - first, begin - starts_R[row]
        for r, number, a, b, at in zip(*(column.tolist() for column in columns), strict=True):
            out[r, at : at + b - a] = self.documents.text(number, a, b)
        return out

    def document(self, position: int) -> tuple[str, int]:
        """Return the document that has a byte: its file, and its row there."""
        place = np.searchsorted(self._starts, [position], side="right") - 1
        return self.documents.place(int(order(place, len(self.documents), self.key)[0]))

    def ends(self, starts_R: np.ndarray, ends_R: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the labeled documents whose last byte lies in [start, end): row, place of that byte behind its start, label."""
        labels_D = self.documents.labels_D
        assert labels_D is not None
        row, place = self._within(starts_R, ends_R)
        last = self._starts[place + 1] - 1
        labels = labels_D[order(place, len(self.documents), self.key)]
        take = (last < ends_R[row]) & ~np.isnan(labels)
        return row[take], (last - starts_R[row])[take], labels[take]

    def _within(self, starts_R: np.ndarray, ends_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which documents have bytes in [start, end): for each the row, and its place in the order."""
        first = np.searchsorted(self._starts, starts_R, side="right") - 1
        counts = np.searchsorted(self._starts, ends_R, side="left") - first
        row = np.repeat(np.arange(len(starts_R)), counts)
        return row, np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts) + first[row]
