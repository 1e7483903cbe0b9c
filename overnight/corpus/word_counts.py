"""How often each word of a corpus occurs, in some 40 bytes a word: Python's own dictionary of them takes 150."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from overnight.corpus.words import text_and_offsets
from overnight.machine import release_free_memory

# Words that are Python's own strings at once.
_BLOCK = 10_000


@dataclass(frozen=True)
class WordCounts:
    """Words, each once, and how often each occurs."""

    words: pa.LargeStringArray
    counts: np.ndarray
    """int64 [W]."""

    @classmethod
    def of(cls, counts: Mapping[str, int]) -> Self:
        """Return counts of words as they stand in a dictionary, in its order."""
        return cls(pa.array(list(counts), pa.large_string()), np.fromiter(counts.values(), np.int64, len(counts)))

    def __len__(self) -> int:
        return len(self.counts)

    def total(self) -> int:
        """Return how many words there are, each as often as it occurs."""
        return int(self.counts.sum())

    def items(self) -> Iterator[tuple[str, int]]:
        """Yield each word and how often it occurs, in order."""
        for start in range(0, len(self), _BLOCK):
            yield from zip(self.words[start : start + _BLOCK].to_pylist(), self.counts[start : start + _BLOCK].tolist(), strict=True)

    def of_length(self, most: int) -> WordCounts:
        """Return the words of so many characters at most."""
        fits = pc.less_equal(pc.utf8_length(self.words), most)
        return self if pc.all(fits).as_py() else WordCounts(self.words.filter(fits), self.counts[fits.to_numpy(zero_copy_only=False)])

    def most_frequent(self, most: int | None = None) -> WordCounts:
        """Return so many words at most, or all, the most frequent first; of equally frequent ones the first of the alphabet."""
        table = pa.table({"count": self.counts, "word": self.words})
        order = pc.sort_indices(table, [("count", "descending"), ("word", "ascending")])[:most]
        return WordCounts(self.words.take(order), self.counts[order.to_numpy()])

    def hashes(self) -> np.ndarray:
        """Return a hash of each word: uint64 [W]."""
        return np.array([xxhash.xxh3_64_intdigest(word.encode()) for word in self.words.to_pylist()], np.uint64)


class WordCounter:
    """Counts of words that are added up: the words on end, in the order in which they first came, and where each is by its hash.

    Of a million words two have the same hash with a probability of 3e-8; they would be counted as the first of them. What is held grows in place: arrays that
    are made anew for each text, each a little longer, would leave as much memory again in gaps between them.

    Args:
        most: words at most; beyond, the rarest go.
    """

    def __init__(self, most: int) -> None:
        self._most, self._size = most, 0
        self._text = bytearray()
        # Room that is not used yet takes no memory. The hashes ascend; beside each is the number of its word.
        self._counts, self._ends = np.empty(most, np.int64), np.empty(most, np.int64)
        self._hashes, self._numbers = np.empty(most, np.uint64), np.empty(most, np.int32)

    def __len__(self) -> int:
        return self._size

    def add(self, more: WordCounts, hashes: np.ndarray) -> None:
        """Count the words of a text; of more words than there may be those that occur once go, and of the rarest so many that a quarter of the room is free.

        Args:
            more: the words.
            hashes: of them, of :meth:`WordCounts.hashes`.
        """
        there = self._hashes[: self._size]
        places = np.searchsorted(there, hashes)
        known = places < self._size
        known[known] = there[places[known]] == hashes[known]
        self._counts[self._numbers[places[known]]] += more.counts[known]
        self._append(more, hashes, places, ~known)
        if self._size > self._most:
            self._drop_rare()

    def _append(self, more: WordCounts, hashes: np.ndarray, places: np.ndarray, new: np.ndarray) -> None:
        start, stop = self._size, self._size + int(np.count_nonzero(new))
        self._make_room(stop)
        flat, offsets = text_and_offsets(more.words)
        lengths = np.diff(offsets)
        before = len(self._text)
        self._text += flat[offsets[0] : offsets[-1]][np.repeat(new, lengths)].data
        self._ends[start:stop] = before + np.cumsum(lengths[new])
        self._counts[start:stop] = more.counts[new]
        order = np.argsort(hashes[new])
        where = places[new][order]
        self._hashes[:stop] = np.insert(self._hashes[:start], where, hashes[new][order])
        self._numbers[:stop] = np.insert(self._numbers[:start], where, (start + order).astype(np.int32))
        self._size = stop

    def _make_room(self, size: int) -> None:
        if size > len(self._counts):
            for name in ("_counts", "_ends", "_hashes", "_numbers"):
                setattr(self, name, np.concatenate([array := getattr(self, name), np.empty(size - len(array), array.dtype)]))

    def _drop_rare(self) -> None:
        counts, ends = self._counts[: self._size], self._ends[: self._size]
        least = 2
        while np.count_nonzero(counts >= least) > 3 * self._most // 4:
            least += 1
        keep = counts >= least
        lengths = np.diff(ends, prepend=0)
        self._drop_text(keep, lengths)
        numbers = self._numbers[: self._size]
        kept, renumbered = keep[numbers], np.cumsum(keep, dtype=np.int32) - 1
        size = int(np.count_nonzero(keep))
        self._hashes[:size], self._numbers[:size] = self._hashes[: self._size][kept], renumbered[numbers[kept]]
        self._counts[:size], self._ends[:size] = counts[keep], np.cumsum(lengths[keep])
        self._size = size
        release_free_memory()

    def _drop_text(self, keep: np.ndarray, lengths: np.ndarray) -> None:
        """Keep some words, of these lengths, moved to where the text begins."""
        flat, start, size = np.frombuffer(self._text, np.uint8), 0, 0
        for first in range(0, len(keep), _BLOCK):
            here = lengths[first : first + _BLOCK]
            stop = start + int(here.sum())
            kept = flat[start:stop][np.repeat(keep[first : first + _BLOCK], here)]
            flat[size : size + len(kept)] = kept
            start, size = stop, size + len(kept)
        del flat  # a view keeps the text from being cut
        del self._text[size:]

    def counts(self) -> WordCounts:
        """Return what was counted."""
        offsets = np.concatenate([np.zeros(1, np.int64), self._ends[: self._size]])
        words = pa.LargeStringArray.from_buffers(self._size, pa.py_buffer(offsets), pa.py_buffer(bytes(self._text)))
        return WordCounts(words, self._counts[: self._size].copy())
