"""Several sources of text as one stream of examples: of which source each position is, as a function of the position.

A stream of K sources is cut in two, the source of the largest share and the rest, the rest again, and so on. Of the first n positions of a stream the
larger part has round(n f), f its share of that stream; so a position belongs to it where that number grows, and is its position number round(n f) there. No table
and no state: any position is found at once, and every source is read in its own order. A source has never half a sequence more or less than its
share for K = 2, and never more than (1 + H_{K-2}) / 2 (H the harmonic numbers: 1 for three sources, less than 2 for ten).

Shapes: P positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import xxhash

from overnight.batches.loader import Samples
from overnight.batches.packing import Provenance
from overnight.batches.pairs import COLUMNS
from overnight.config import BertPhase, Data, Mix, Phase
from overnight.corpus.shards import Shard
from overnight.corpus.tokenizer import Vocabulary
from overnight.errors import DataError

# A share of a stream is a multiple of 2^-31, so that its product with a position fits in 64 bits; positions stay below 2^32.
_BITS = 31
# The number of a sample in its epoch has the place of its source above these bits, so that masks differ from source to source.
_SAMPLE_BITS = 40


def mixture(data: Data, phase: Phase) -> dict[str, Mix]:
    """Return how often a phase reads each source, by name; of those that it reads; nothing where no sources are named."""
    given: Mapping[str, Mix] = phase.mixture or data.sources
    by_weight = any(mix.weight > 0 for mix in given.values())
    return {name: given[name] for name in data.sources if name in given and (given[name].weight > 0 or not by_weight)}


def shares(mixes: Mapping[str, Mix], sizes: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each source in what is read, which sum to 1.

    Args:
        mixes: of :func:`mixture`.
        sizes: of each source, in what shares are counted in (examples, bytes).
    """
    by_weight = any(mix.weight > 0 for mix in mixes.values())
    parts = {name: mix.weight if by_weight else mix.epochs * sizes[name] for name, mix in mixes.items()}
    return {name: part / sum(parts.values()) for name, part in parts.items()}


def by_source(shards: Sequence[Shard], names: Sequence[str]) -> dict[str, list[Shard]]:
    """Return the shards of each of some sources.

    Raises:
        DataError: when a source has none.
    """
    found: dict[str, list[Shard]] = {name: [shard for shard in shards if shard.source == name] for name in names}
    for name, mine in found.items():
        if not mine:
            raise DataError(
                f"data.sources.{name}: no document is left to train on (equal ones in a source before it count there); "
                "leave it out of the mixture, or prepare again with other text"
            )
    return found


class Interleave:
    """Which source each position of a stream is of, and its position in the stream of that source.

    Args:
        shares: of the sources, above 0, which sum to 1.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        self.sources = len(shares)
        by_share = sorted(range(len(shares)), key=lambda source: -shares[source])
        left = np.cumsum([shares[source] for source in reversed(by_share)])[::-1]
        self._splits = [
            (source, max(1, round(shares[source] / rest * (1 << _BITS)))) for source, rest in zip(by_share, left.tolist(), strict=True)
        ]

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each position, and the position there: int64 [P], below 2^32 -> int64 [P], int64 [P]."""
        sources, places = np.empty_like(positions), np.empty_like(positions)
        here, rest = np.arange(len(positions)), np.asarray(positions, np.int64)
        for source, fraction in self._splits[:-1]:
            before = _rounded(rest, fraction)
            mine = _rounded(rest + 1, fraction) > before
            sources[here[mine]], places[here[mine]] = source, before[mine]
            here, rest = here[~mine], (rest - before)[~mine]
        sources[here], places[here] = self._splits[-1][0], rest
        return sources, places

    def counts(self, position: int) -> list[int]:
        """Return how many of the positions before this one are of each source."""
        found, rest = [0] * self.sources, np.array(position)
        for source, fraction in self._splits[:-1]:
            found[source] = int(_rounded(rest, fraction))
            rest = rest - found[source]
        found[self._splits[-1][0]] = int(rest)
        return found


def _rounded(count: np.ndarray, fraction: int) -> np.ndarray:
    return (count * fraction + (1 << (_BITS - 1))) >> _BITS


class MixedSamples(Samples):
    """The endless stream of a phase's samples of several sources: each is read in its own order, over epochs of its own.

    Args:
        shards: of the training text, with their sources.
        vocabulary, phase, seed, cache: as of :class:`Samples`. The order of a source depends on its name, not on the others.
        mixes: how often each source is read, of :func:`mixture`.

    Raises:
        DataError: when a source has no document to train on.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        vocabulary: Vocabulary,
        phase: BertPhase,
        seed: tuple[int, ...],
        cache: Path | None,
        mixes: Mapping[str, Mix],
    ) -> None:
        found = by_source(shards, list(mixes))
        super().__init__([shard for mine in found.values() for shard in mine], vocabulary, phase, seed)
        self.mixes = mixes
        self.parts = {
            name: Samples(mine, vocabulary, phase, (*seed, xxhash.xxh3_64_intdigest(name.encode())), cache) for name, mine in found.items()
        }
        self._first_shard = np.cumsum([0, *(len(mine) for mine in found.values())])
        self._interleave: Interleave | None = None

    def epoch_size(self) -> int:
        """Return the examples in the first epochs of all sources together."""
        return sum(part.epoch_size() for part in self.parts.values())

    def shares(self) -> dict[str, float]:
        """Return the share of each source in the examples."""
        return shares(self.mixes, {name: part.epoch_size() for name, part in self.parts.items()})

    def passes(self, examples: int) -> dict[str, tuple[float, float]]:
        """Return the share of each source, and how often it is read in the first so many examples."""
        return {name: (share, share * examples / self.parts[name].epoch_size()) for name, share in self.shares().items()}

    def interleave(self) -> Interleave:
        """Return which source each position is of."""
        if self._interleave is None:
            self._interleave = Interleave(list(self.shares().values()))
        return self._interleave

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the epoch of its source for each position of the stream, and the number of its sample there, which says the source too."""
        sources, places = self.interleave().locate(positions)
        epochs, samples = np.empty_like(positions), np.empty_like(positions)
        for number, part in enumerate(self.parts.values()):
            mine = np.flatnonzero(sources == number)
            if len(mine):
                epochs[mine], samples[mine] = part.locate(places[mine])
                samples[mine] += number << _SAMPLE_BITS
        return epochs, samples

    def provenance(self, step: int, world: int, number: int) -> list[Provenance]:
        """Return where the sequences of a micro-batch come from: `epoch` and `sample` are those of their source, which the shard tells."""
        found = super().provenance(step, world, number)
        return [{**each, "sample": int(each["sample"]) & ((1 << _SAMPLE_BITS) - 1)} for each in found]

    def rows(self, epochs: np.ndarray, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the shard number (S) and plan row (S, 5) of samples, as :meth:`locate` returns them."""
        sources, own = samples >> _SAMPLE_BITS, samples & ((1 << _SAMPLE_BITS) - 1)
        numbers, rows = np.empty(len(samples), np.int64), np.empty((len(samples), COLUMNS), np.int64)
        for number, part in enumerate(self.parts.values()):
            mine = np.flatnonzero(sources == number)
            if len(mine):
                numbers[mine], rows[mine] = part.rows(epochs[mine], own[mine])
                numbers[mine] += self._first_shard[number]
        return numbers, rows
