"""What a prepared folder holds, in numbers: one pass over the shards as numpy views, with the memory of one shard whatever their number."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from overnight.corpus.languages import language
from overnight.corpus.look import Selection, selected_documents
from overnight.corpus.prepared import Prepared, PreparedDocument
from overnight.errors import ConfigError

# Lengths below are counted one by one; above, in classes of 1 % (1,400 of them up to 2^32).
_EXACT, _CLASS = 4096, 1.01
# Tokens that are counted at once: numpy makes 8 bytes of each.
_BLOCK = 1 << 20
# Documents whose language is asked for, and tokens of the beginning that are decoded for it.
_LANGUAGE_DOCUMENTS, _LANGUAGE_TOKENS = 1000, 400
_LONGEST = 5


class Lengths:
    """How often which length occurs; exact below 4,096, else to 1 %."""

    def __init__(self) -> None:
        self.counts = np.zeros(_EXACT + 1500, np.int64)
        self.number = self.sum = self.longest = 0

    def add(self, lengths: np.ndarray) -> None:
        """Count lengths [N]."""
        if not len(lengths):
            return
        classes = np.minimum(lengths, _EXACT)
        long = lengths > _EXACT
        classes[long] = _EXACT + (np.log(lengths[long] / _EXACT) / np.log(_CLASS)).astype(np.int64)
        self.counts += np.bincount(classes, minlength=len(self.counts))
        self.number, self.sum = self.number + len(lengths), self.sum + int(lengths.sum())
        self.longest = max(self.longest, int(lengths.max()))

    def mean(self) -> float:
        """Return the mean; 0 of none."""
        return self.sum / max(self.number, 1)

    def quantile(self, share: float) -> int:
        """Return the length that this share of all does not exceed; 0 of none."""
        if not self.number:
            return 0
        place = int(np.searchsorted(np.cumsum(self.counts), share * self.number))
        return min(self.longest, place if place <= _EXACT else round(_EXACT * _CLASS ** (place - _EXACT + 0.5)))

    def within(self, edges: list[float]) -> list[int]:
        """Return how many are in each of the ranges between edges (the lower one belongs to it)."""
        values = np.arange(len(self.counts), dtype=np.float64)
        values[_EXACT:] = _EXACT * _CLASS ** (values[_EXACT:] - _EXACT)
        return [int(self.counts[(values >= low) & (values < high)].sum()) for low, high in pairwise(edges)]


@dataclass
class SplitStatistics:
    """What one split holds."""

    token_counts: np.ndarray
    """int64 [V]: how often each token occurs."""
    characters: int = 0
    """Of the clean text; of folders that do not know it, of the decoded text."""
    documents: Lengths = field(default_factory=Lengths)
    """Tokens of each."""
    sentences: Lengths = field(default_factory=Lengths)
    """Tokens of each."""
    labels: int = 0
    """Documents with a label."""


@dataclass
class SourceCount:
    """What one source gave to one split."""

    documents: int = 0
    tokens: int = 0
    characters: int = 0


@dataclass
class Statistics:
    """What a prepared folder holds."""

    splits: dict[str, SplitStatistics]
    sources: dict[tuple[int, str], SourceCount]
    """By the number of the source and the split; empty where the folder does not know."""
    longest: list[tuple[int, str, int, str]]
    """Tokens, split, number and name of the longest documents."""
    languages: Counter[str]
    """Of a random sample of the training documents; empty without the extra `cleaning`."""


def statistics(prepared: Prepared) -> Statistics:
    """Count what a prepared folder holds.

    Raises:
        DataError: when a shard is missing or damaged.
    """
    size = len(prepared.decoder.tokens)
    found = Statistics({split: SplitStatistics(np.zeros(size, np.int64)) for split in prepared.splits()}, {}, [], Counter())
    for split, counts in found.splits.items():
        first = 1
        for entry in prepared.entries(split):
            shard, rows = prepared.open(entry)
            for start in range(0, len(shard.tokens), _BLOCK):
                counts.token_counts += np.bincount(shard.tokens[start : start + _BLOCK], minlength=size)
            lengths = np.diff(shard.sentence_starts[shard.document_sentences])
            counts.documents.add(lengths)
            counts.sentences.add(np.diff(shard.sentence_starts))
            counts.labels += 0 if shard.labels is None else int((~np.isnan(shard.labels)).sum())
            for row in np.argsort(-lengths, kind="stable")[:_LONGEST].tolist():
                found.longest.append((int(lengths[row]), split, first + row, rows.names[row].as_py() if rows else ""))
            if rows:
                counts.characters += int(rows.characters.sum())
                _count_sources(found, split, rows.sources, lengths, rows.characters)
            first += entry.documents
        if prepared.table is None:
            counts.characters = int((counts.token_counts * prepared.decoder.characters()).sum())
    found.longest = sorted(found.longest, key=lambda each: -each[0])[:_LONGEST]
    found.languages = _languages(prepared)
    return found


def _count_sources(found: Statistics, split: str, sources: np.ndarray, tokens: np.ndarray, characters: np.ndarray) -> None:
    for number in np.unique(sources).tolist():
        count, mine = found.sources.setdefault((number, split), SourceCount()), sources == number
        count.documents += int(mine.sum())
        count.tokens += int(tokens[mine].sum())
        count.characters += int(characters[mine].sum())


def _languages(prepared: Prepared) -> Counter[str]:
    if "train" not in prepared.splits():
        return Counter()
    try:
        return Counter(
            language(prepared.decoder.text(document.tokens[:_LANGUAGE_TOKENS])) or "?"
            for document in selected_documents(prepared, Selection("train", sample=_LANGUAGE_DOCUMENTS))
        )
    except ConfigError:  # without the extra
        return Counter()


def sample_documents(prepared: Prepared, count: int, characters: int) -> list[tuple[PreparedDocument, str]]:
    """Return some training documents at random, with the beginnings of their texts."""
    if "train" not in prepared.splits():
        return []
    chosen = list(selected_documents(prepared, Selection("train", sample=count)))
    return [(document, prepared.decoder.text(document.tokens[:characters])[:characters]) for document in chosen]
