"""Small made-up shards and vocabularies for the tests of batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from overnight.corpus.shards import Shard
from overnight.corpus.tokenizer import SPECIALS, Vocabulary, vocabulary

Documents = list[list[int]]
"""Tokens of each sentence of each document."""


def words(size: int = 200, continued: int = 60) -> Vocabulary:
    """A vocabulary of `size` pieces, the last `continued` of which continue a word."""
    plain = size - len(SPECIALS) - continued
    return vocabulary([*SPECIALS, *(f"w{i}" for i in range(plain)), *(f"##c{i}" for i in range(continued))], lowercase=True)


def shard(documents: Documents, name: str = "train-00000.arrow", size: int = 200, unique: bool = False, source: str = "") -> Shard:
    """A shard of documents whose sentences have these lengths; with `unique`, token i of the shard is i."""
    sentences = [length for document in documents for length in document]
    count = sum(sentences)
    tokens = np.arange(count) if unique else np.random.default_rng(count).integers(len(SPECIALS), size, count)
    return Shard(
        name,
        tokens.astype(np.uint32 if unique else np.uint16),
        np.concatenate([[0], np.cumsum(sentences)]).astype(np.int64),
        np.concatenate([[0], np.cumsum([len(document) for document in documents])]).astype(np.int64),
        source=source,
    )


def book_like(seed: int, documents: int, most_sentences: int = 40, mean: int = 20) -> Documents:
    """Documents of random sentences."""
    rng = np.random.default_rng(seed)
    return [rng.geometric(1 / mean, rng.integers(1, most_sentences + 1)).tolist() for _ in range(documents)]


def any_documents(least: int = 1, most: int = 6) -> st.SearchStrategy[Documents]:
    """Documents of at least one sentence, sentences of at least one token."""
    sentence: st.SearchStrategy[int] = st.integers(1, 60)
    return st.lists(st.lists(sentence, min_size=1, max_size=12), min_size=least, max_size=most)


def spans(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Start and end of consecutive runs."""
    ends = np.cumsum(lengths).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))
