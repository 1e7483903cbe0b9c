"""Hashes of the word n-grams (shingles) of documents, and their sketches: shingles.c, or without a C compiler the same in numpy, several times slower.

A word is a run of letters, digits and accents of any alphabet, without their case, so that neither case, punctuation nor white space tells two documents
apart; a Chinese or Japanese character is a word of its own. A word's hash is a polynomial in its characters, an n-gram's one in the hashes of its words, both
mod 2^64 and mixed (Stafford's finalizer, as in splitmix64).

A sketch is one-permutation hashing (Li, Owen and Zhang 2012, arXiv 1208.1259): the first 8 bits of an n-gram's hash choose one of 256 bins, and each bin keeps
the least of 31 other bits. That is one comparison an n-gram, where 256 hash functions would take 256. Of a least value 15 bits are stored (b-bit minwise
hashing, Li and König 2010). Jaccard's similarity is estimated without bias as equal bins / bins that are full in either.

For the bands of locality-sensitive hashing every bin must hold a value: an empty one takes that of another, tried in an order that is the same for all
documents (densification, Shrivastava and Li 2014, arXiv 1406.4784; not always the nearest, as in Shrivastava 2017, arXiv 1703.04664), so that two
documents agree in any bin with a probability that is their similarity.
"""

from __future__ import annotations

import ctypes
import unicodedata
from functools import cache
from pathlib import Path

import numpy as np

from overnight import native

BINS = 256
_SOURCE = Path(__file__).with_name("shingles.c")
_CHARACTER_BASE, _WORD_BASE = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
_EMPTY = np.uint32(0xFFFFFFFF)
_EMPTY_16 = np.uint16(0xFFFF)
# All characters with a case, and all marks and symbols, are below; Chinese ones are also beyond.
_FOLDED = 0x20000
ALONE = ((0x3000, 0xA000), (0x20000, 0x40000))
"""Where the characters of Chinese and Japanese are, from and to, each of which is a word."""


@cache
def _folded() -> np.ndarray:
    """Return what each character is within a word, uint32 [_FOLDED]: itself without its case, 0 of punctuation, symbols, white space and controls."""

    def folded(character: str) -> int:
        if unicodedata.category(character) in ("Cc", "Cf") or unicodedata.category(character)[0] in "PSZ":
            return 0
        # Of few it is several characters (STRASSE and Straße): those are as they are.
        return ord(either) if len(either := character.casefold()) == 1 else ord(character.lower()[0])

    return np.array([folded(chr(code)) for code in range(_FOLDED)], np.uint32)


def _mixed(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


# Step t fills bin i from bin i ^ _STEPS[t]; every step is a permutation of the bins, and all together reach every bin.
_STEPS = (1 + np.argsort(_mixed(np.arange(1, BINS, dtype=np.uint64)), kind="stable")).astype(np.uint8)


def ngram_hashes(text: np.ndarray, offsets: np.ndarray, n: int, whole_short: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of all n-grams of words.

    Args:
        text: uint8, valid UTF-8.
        offsets: int64 [D+1]: document d is text[offsets[d]:offsets[d+1]].
        n: words of an n-gram.
        whole_short: a document of fewer words, but one at least, has one hash: that of all its words.

    Returns:
        hashes: uint64 [H], in the order of the text.
        ends: int64 [D]: those of document d are hashes[ends[d-1]:ends[d]], from 0 for the first.
    """
    text, offsets = np.ascontiguousarray(text), np.ascontiguousarray(offsets, np.int64)
    if (library := _library()) is None:
        return _plain_ngrams(text, offsets, n, whole_short)
    # A word and what separates it are 2 bytes at least, but for a document's last.
    out = np.empty((int(offsets[-1] - offsets[0]) + len(offsets)) // 2 + 1, np.uint64)
    ends, ring = np.zeros(len(offsets) - 1, np.int64), np.zeros(n, np.uint64)
    count = library.ngrams(
        native.address(text),
        native.address(offsets),
        ctypes.c_long(len(ends)),
        ctypes.c_long(n),
        ctypes.c_int(whole_short),
        native.address(_folded()),
        ctypes.c_uint64(_CHARACTER_BASE),
        ctypes.c_uint64(_WORD_BASE),
        native.address(ring),
        native.address(out),
        native.address(ends),
    )
    return out[:count], ends


def sketches(hashes: np.ndarray, ends: np.ndarray, bands: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the sketches of documents and the keys of their bands.

    Args:
        hashes, ends: of :func:`ngram_hashes`.
        bands: how many.
        rows: bins of a band; `bands * rows` is :data:`BINS` at most.

    Returns:
        sketch: uint16 [D, BINS], for :func:`similarity`.
        keys: uint64 [D, bands]: equal where all bins of a band are. Of a document without words they say nothing.
    """
    assert bands * rows <= BINS
    hashes, ends = np.ascontiguousarray(hashes), np.ascontiguousarray(ends, np.int64)
    if (library := _library()) is None:
        return _plain_sketches(hashes, ends, bands, rows)
    sketch, keys = np.empty((len(ends), BINS), np.uint16), np.empty((len(ends), bands), np.uint64)
    numbers = (ctypes.c_long(number) for number in (bands, rows))
    library.sketches(
        native.address(hashes),
        native.address(ends),
        ctypes.c_long(len(ends)),
        native.address(_STEPS),
        *numbers,
        native.address(sketch),
        native.address(keys),
    )
    return sketch, keys


def similarity(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the estimated Jaccard similarity of n-grams of pairs of documents: uint16 [P, BINS] twice -> float64 [P], 0 where neither has words.

    Its standard deviation is at most 0.031 (256 bins), and less where documents have fewer n-grams than there are bins.
    """
    full = ((a != _EMPTY_16) | (b != _EMPTY_16)).sum(axis=1)
    equal = ((a == b) & (a != _EMPTY_16)).sum(axis=1)
    return equal / np.maximum(full, 1)


@cache
def _library() -> ctypes.CDLL | None:
    if (library := native.optional_library(_SOURCE)) is None:
        return None
    library.ngrams.restype = ctypes.c_long
    library.sketches.restype = None
    return library


def _plain_words(text: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return hash and document of every word."""
    text, offsets = text[offsets[0] : offsets[-1]], offsets - offsets[0]
    offsets = np.append(0, np.cumsum((text & 0xC0) != 0x80))[offsets]  # of characters
    codes = np.frombuffer(text.tobytes().decode().encode("utf-32-le"), np.uint32)
    letters = np.where(codes < _FOLDED, _folded()[np.minimum(codes, _FOLDED - 1)], codes)
    separator = letters == 0
    alone = np.flatnonzero(np.any([(letters >= first) & (letters < end) for first, end in ALONE], axis=0))
    cut = np.zeros(len(letters) + 1, bool)
    cut[np.concatenate([offsets, alone, alone + 1])] = True
    begins = ~separator & (cut[:-1] | np.append(True, separator[:-1]))
    edges = np.append(np.flatnonzero(separator | begins), len(letters))
    which = np.flatnonzero(np.append(begins, False)[edges])
    starts, stops = edges[which], edges[which + 1]
    # Horner's rule for every word at once: sums over all the text, its characters weighted by the inverse of the base, and their differences.
    powers = np.cumprod(np.append(np.uint64(1), np.full(len(letters), _CHARACTER_BASE, np.uint64)))
    inverses = np.cumprod(np.append(np.uint64(1), np.full(len(letters), pow(_CHARACTER_BASE, -1, 1 << 64), np.uint64)))
    sums = np.append(np.uint64(0), np.cumsum((letters.astype(np.uint64) + np.uint64(1)) * inverses[:-1]))
    return _mixed((sums[stops] - sums[starts]) * powers[stops - 1]), np.searchsorted(offsets, starts, "right") - 1


def _plain_ngrams(text: np.ndarray, offsets: np.ndarray, n: int, whole_short: bool) -> tuple[np.ndarray, np.ndarray]:
    words, owners = _plain_words(text, offsets)
    documents = len(offsets) - 1
    windows = max(len(words) - n + 1, 0)
    rolling = np.zeros(windows, np.uint64)
    for j in range(n):
        rolling = rolling * np.uint64(_WORD_BASE) + words[j : j + windows]
    inside = owners[:windows] == owners[n - 1 : n - 1 + windows]
    found, of = _mixed(rolling[inside]), owners[:windows][inside]
    counts = np.bincount(owners, minlength=documents)
    short = np.flatnonzero((counts > 0) & (counts < n)) if whole_short else np.zeros(0, np.int64)
    if len(short):
        firsts = np.searchsorted(owners, short)
        whole = np.zeros(len(short), np.uint64)
        for j in range(n - 1):
            here = j < counts[short]
            whole[here] = whole[here] * np.uint64(_WORD_BASE) + words[firsts[here] + j]
        found, of = np.append(found, _mixed(whole)), np.append(of, short)
        order = np.argsort(of, kind="stable")
        found, of = found[order], of[order]
    return found, np.cumsum(np.bincount(of, minlength=documents))


def _plain_sketches(hashes: np.ndarray, ends: np.ndarray, bands: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    owners = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
    least = np.full((len(ends), BINS), _EMPTY, np.uint32)
    values = (hashes >> np.uint64(16)).astype(np.uint32) & np.uint32(0xFFFFFFFE)
    np.minimum.at(least.reshape(-1), owners * BINS + (hashes >> np.uint64(56)).astype(np.int64), values)
    sketch = np.where(least == _EMPTY, _EMPTY_16, least.astype(np.uint16))
    filled, bins = least.copy(), np.arange(BINS)
    todo = np.flatnonzero((least == _EMPTY).any(axis=1) & (least != _EMPTY).any(axis=1))
    for step in _STEPS:
        if not len(todo):
            break
        part = filled[todo]
        filled[todo] = part = np.where(part == _EMPTY, least[todo][:, bins ^ step], part)
        todo = todo[(part == _EMPTY).any(axis=1)]
    keys = np.tile(np.arange(bands, dtype=np.uint64), (len(ends), 1))
    for row in range(rows):
        keys = _mixed(keys ^ filled[:, row : bands * rows : rows]) + np.uint64(row)
    return sketch, keys
