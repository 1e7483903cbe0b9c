"""Which lines and documents are left out (`data.filters`): the rules of Gopher and C4, each by the name of its setting.

Gopher is Rae et al. 2021 (arXiv 2112.11446), C4 Raffel et al. 2020 (arXiv 1910.10683). A repetition is what came before in the same document; the
first occurrence is none. Everything is linear in the text but sorting its words.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from overnight.config import Filters
from overnight.corpus.drops import Drops
from overnight.corpus.sentences import ends_like_a_sentence, sentences

_BULLET = re.compile("[•●‣◦▪∙·]|[-*+–—] ")
_LEAST_LINES = 5
"""From so many lines on a share of them says something: many a text of one line begins with a dash or ends with an ellipsis."""
_ELLIPSES = ("...", "…")
_HASH, _ELLIPSIS = re.compile("#"), re.compile(r"\.\.\.|…")
_ASCII_SYMBOLS = string.punctuation.encode()
_DIGITS, _SYMBOLS = re.compile(r"\d+"), re.compile(r"(?:[^\w\s]|_)+")


def kept_lines(lines: list[str], filters: Filters, name: str, drops: Drops) -> list[str]:
    """Return the lines that the rules for lines keep, and the empty ones, which are between paragraphs.

    Args:
        lines: of a document.
        filters: the rules.
        name: of the document.
        drops: gets the others.
    """
    if not filters.lines_end_sentences and not filters.min_words_per_line:
        return lines
    kept = []
    for line in lines:
        if not line:
            kept.append(line)
        elif filters.min_words_per_line and len(line.split()) < filters.min_words_per_line:
            drops.add("filters.min_words_per_line (lines)", name, line)
        elif filters.lines_end_sentences and _is_no_sentence(line):
            drops.add("filters.lines_end_sentences (lines)", name, line)
        else:
            kept.append(line)
    return kept


def _is_no_sentence(line: str) -> bool:
    """Return whether a line ends like none, and holds none that has ended: C4 also leaves out whole paragraphs that lack their last mark."""
    return (line.endswith(_ELLIPSES) or not ends_like_a_sentence(line)) and len(sentences(line)) < 2


def rejection(text: str, lines: Sequence[str], filters: Filters) -> str:
    """Return which setting rejects a document, or an empty string.

    Args:
        text: clean, paragraphs with a blank line between them.
        lines: its lines in the source, none empty.
        filters: the rules.
    """
    words = text.split()
    rules = (_by_length(text, words, filters), _by_characters(text, filters), _by_words(words, filters), _by_lines(lines, filters))
    return next(chain(*rules, _by_repetition(words, filters)), "")


def _by_length(text: str, words: Sequence[str], filters: Filters) -> Iterator[str]:
    if filters.max_chars and len(text) > filters.max_chars:
        yield "max_chars"
    if len(words) < filters.min_words:
        yield "min_words"
    if filters.max_words and len(words) > filters.max_words:
        yield "max_words"
    if filters.min_sentences and len(sentences(text)) < filters.min_sentences:
        yield "min_sentences"


def _by_characters(text: str, filters: Filters) -> Iterator[str]:
    if filters.min_letters == 0 and filters.max_symbols == 1:
        return
    seen = len("".join(text.split()))
    symbols = _number_of_symbols(text)
    if seen - symbols - sum(map(len, _DIGITS.findall(text))) < filters.min_letters * seen:
        yield "min_letters"
    if symbols > filters.max_symbols * seen:
        yield "max_symbols"


def _number_of_symbols(text: str) -> int:
    if text.isascii():  # five times as fast
        return len(text) - len(text.encode().translate(None, _ASCII_SYMBOLS))
    # A vowel sign or an accent belongs to its letter.
    return sum(unicodedata.category(char)[0] != "M" for part in _SYMBOLS.findall(text) for char in part)


def _by_words(words: Sequence[str], filters: Filters) -> Iterator[str]:
    count = len(words)
    size = sum(map(len, words))
    if size < filters.min_mean_word_length * count:
        yield "min_mean_word_length"
    if filters.max_mean_word_length and size > filters.max_mean_word_length * count:
        yield "max_mean_word_length"
    if filters.min_words_with_letters:
        lettered = sum(word.isalpha() or any(map(str.isalpha, word)) for word in words)
        if lettered < filters.min_words_with_letters * count:
            yield "min_words_with_letters"
    if filters.max_hashes_per_word:
        text = " ".join(words)
        if max(len(_HASH.findall(text)), len(_ELLIPSIS.findall(text))) > filters.max_hashes_per_word * count:
            yield "max_hashes_per_word"
    if filters.min_stop_words and len({word.lower() for word in words}.intersection(filters.stop_words)) < filters.min_stop_words:
        yield "min_stop_words"


def _by_lines(lines: Sequence[str], filters: Filters) -> Iterator[str]:
    if len(lines) >= _LEAST_LINES and sum(_BULLET.match(line) is not None for line in lines) > filters.max_bullet_lines * len(lines):
        yield "max_bullet_lines"
    if len(lines) >= _LEAST_LINES and sum(line.endswith(_ELLIPSES) for line in lines) > filters.max_ellipsis_lines * len(lines):
        yield "max_ellipsis_lines"
    if len(distinct := set(lines)) == len(lines):
        return
    if len(lines) - len(distinct) > filters.max_repeated_lines * len(lines):
        yield "max_repeated_lines"
    size = sum(map(len, lines))
    if size - sum(map(len, distinct)) > filters.max_repeated_line_chars * size:
        yield "max_repeated_line_chars"


def _by_repetition(words: Sequence[str], filters: Filters) -> Iterator[str]:
    limits = (*filters.max_top_ngrams, *filters.max_repeated_ngrams)
    if min(limits) == 1 or len(words) < 2:
        return
    ids: dict[str, int] = {}
    first = np.fromiter((ids.setdefault(word, len(ids)) for word in words), np.int64, len(words))
    sizes = np.fromiter(map(len, words), np.int64, len(words))
    ends = np.concatenate([[0], np.cumsum(sizes)])
    total, codes = int(ends[-1]), first
    for n, limit in enumerate(limits, 2):
        if len(codes) < 2:
            return
        # The number of a sequence is that of its first n - 1 words and its last one; numbered anew, so that it stays small.
        _, where, codes, counts = np.unique(
            codes[:-1] * len(ids) + first[n - 1 :], return_index=True, return_inverse=True, return_counts=True
        )
        if len(counts) == len(codes):
            return  # nothing is there twice, and no longer sequence can be
        if n <= 4:
            most = int(counts.max())
            chars = most * int((ends[where + n] - ends[where])[counts == most].max()) if most > 1 else 0
            if min(chars, total) > limit * total:  # "a a a" is there twice in "a a a a"
                yield f"max_top_ngrams.{n}"
            continue
        chars = _covered(where, len(codes), n, sizes)
        if chars > limit * total:
            yield f"max_repeated_ngrams.{n}"
        if chars <= min(limits[n - 2 :]) * total:
            return  # what repeats of longer sequences lies within what repeats of these


def _covered(first: np.ndarray, count: int, n: int, sizes: np.ndarray) -> int:
    """Return the characters in sequences of n words that came before, each once; sequences that begin at `first` are the first of their kind."""
    changes = np.zeros(count + n, np.int64)
    repeated = np.ones(count, bool)
    repeated[first] = False
    np.add.at(changes, np.flatnonzero(repeated), 1)
    np.add.at(changes, np.flatnonzero(repeated) + n, -1)
    return int(sizes[np.cumsum(changes)[: len(sizes)] > 0].sum())
