"""Which documents of bytes an epoch of a mixture has: of each source the next of its passes, each of which is a permutation of all its documents.

Shapes: D documents of an epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import xxhash

from overnight.batches.concat_documents import Documents
from overnight.batches.mixture import by_source, shares
from overnight.batches.order import key, order
from overnight.config import Mix
from overnight.corpus.shards import Shard

# What the counters of a key stand for; see streams.
_DRAW = 4


class Drawn(Documents):
    """Some documents, each as often as its number is given.

    Args:
        documents: all of them.
        numbers_D: which ones, in order.
    """

    def __init__(self, documents: Documents, numbers_D: np.ndarray) -> None:
        self.all, self.numbers_D = documents, numbers_D
        self.lengths_D = documents.lengths_D[numbers_D]
        self.labels_D = None if documents.labels_D is None else documents.labels_D[numbers_D]

    def text(self, document: int, start: int, end: int) -> np.ndarray:
        """Return bytes of a part of a document."""
        return self.all.text(int(self.numbers_D[document]), start, end)

    def place(self, document: int) -> tuple[str, int]:
        """Return the file of a document, and its row there."""
        return self.all.place(int(self.numbers_D[document]))


class DocumentMixture:
    """The documents of every epoch of a mixture of sources.

    An epoch has as many bytes as the sources have (by weights), or each source as often as it says (by epochs); what is no whole number of documents is carried
    to the next epoch, so that over all of them each document of a source is read equally often, give or take one.

    Args:
        shards: of the training text, with their sources.
        seed: of the phase.
        mixes: how often each source is read, of :func:`overnight.batches.mixture.mixture`.

    Raises:
        DataError: when a source has no document to train on.
    """

    def __init__(self, shards: Sequence[Shard], seed: tuple[int, ...], mixes: Mapping[str, Mix]) -> None:
        found = by_source(shards, list(mixes))
        self.documents = Documents([shard for mine in found.values() for shard in mine])
        sizes = {name: float(sum(len(shard.tokens) for shard in mine)) for name, mine in found.items()}
        self._counts = {name: sum(len(shard.sentence_starts) - 1 for shard in mine) for name, mine in found.items()}
        self._seeds = {name: (*seed, xxhash.xxh3_64_intdigest(name.encode()), _DRAW) for name in found}
        self.shares = shares(mixes, sizes)
        """Of each source in the bytes."""
        by_weight = any(mix.weight > 0 for mix in mixes.values())
        everything = sum(sizes.values())
        self.times = {name: self.shares[name] * everything / sizes[name] if by_weight else mixes[name].epochs for name in found}
        """How often each source is read in an epoch."""
        self.bytes = int(sum(self.times[name] * size for name, size in sizes.items()))
        """Of an epoch, about."""

    def epoch(self, number: int) -> Drawn:
        """Return the documents of an epoch, source by source."""
        drawn, first = [], 0
        for name, count in self._counts.items():
            start, end = (round(at * self.times[name] * count) for at in (number, number + 1))
            for turn in range(start // count, -(-end // count)):
                places = np.arange(max(start - turn * count, 0), min(end - turn * count, count))
                drawn.append((first + order(places, count, key(*self._seeds[name], turn))).astype(np.int32))
            first += count
        return Drawn(self.documents, np.concatenate(drawn))

    def passes(self, epochs: float) -> dict[str, tuple[float, float]]:
        """Return the share of each source, and how often it is read in so many epochs."""
        return {name: (part, self.times[name] * epochs) for name, part in self.shares.items()}

    def least(self) -> int:
        """Return documents that every epoch has at least."""
        return sum(int(self.times[name] * count) for name, count in self._counts.items())
