"""Counts of words on end, compared with Python's own dictionary."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overnight.corpus.word_counts import WordCounter, WordCounts

TEXTS = st.lists(st.dictionaries(st.text("abé中𝒳", min_size=1, max_size=4), st.integers(1, 9), max_size=20), max_size=8)


def _counted(texts: list[dict[str, int]], most: int) -> WordCounter:
    counter = WordCounter(most)
    for text in texts:
        more = WordCounts.of(text)
        counter.add(more, more.hashes())
    return counter


def _in_a_dictionary(texts: list[dict[str, int]], most: int) -> Counter[str]:
    words: Counter[str] = Counter()
    for text in texts:
        words.update(text)
        least = 1
        while len(words) > (most if least == 1 else 3 * most // 4):
            least += 1
            words = Counter({word: count for word, count in words.items() if count >= least})
    return words


@given(texts=TEXTS, most=st.integers(1, 40))
def test_words_are_counted_and_the_rarest_go_as_in_a_dictionary_in_the_order_in_which_they_came(
    texts: list[dict[str, int]], most: int
) -> None:
    counter, expected = _counted(texts, most), _in_a_dictionary(texts, most)
    assert list(counter.counts().items()) == list(expected.items())
    assert (len(counter), counter.counts().total()) == (len(expected), expected.total())


@given(st.dictionaries(st.text("abc", min_size=1, max_size=4), st.integers(1, 9)), st.integers(1, 40))
def test_of_more_words_than_fit_the_rarest_go(counts: dict[str, int], most: int) -> None:
    left = dict(_counted([counts], most).counts().items())
    assert len(left) <= most and left.items() <= counts.items()
    if len(counts) <= most:
        assert left == counts
    elif len(often := {word for word, count in counts.items() if count > 1}) <= 3 * most // 4:
        assert set(left) == often  # no more than is needed
    assert not left or min(left.values()) > max((count for word, count in counts.items() if word not in left), default=0)


@given(st.dictionaries(st.text("abé中𝒳", min_size=1, max_size=4), st.integers(1, 4)), st.none() | st.integers(0, 9))
def test_the_most_frequent_words_come_first_and_equally_frequent_ones_by_the_alphabet(counts: dict[str, int], most: int | None) -> None:
    found = WordCounts.of(counts).most_frequent(most)
    assert list(found.items()) == sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:most]


def test_a_word_takes_some_40_bytes_while_it_is_counted() -> None:
    words = [np.base_repr(number, 36).lower().zfill(8) for number in range(100_000)]
    texts = [WordCounts.of(dict.fromkeys(words[start : start + 10_000], 1)) for start in range(0, 100_000, 10_000)]
    hashes = [text.hashes() for text in texts]
    tracemalloc.start()
    counter = WordCounter(100_000)
    for text, each in zip(texts, hashes, strict=True):
        counter.add(text, each)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(counter) == 100_000
    assert held < 40 * 100_000 and peak < 56 * 100_000
