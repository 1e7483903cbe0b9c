"""Order and randomness as functions of counters, not of a state.

Anything random about a sample is a hash of (seed, ..., sample), so that it does not depend on how many processes,
workers or micro-batches produced it, and any position is reached at once.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import numpy as np

from overnight import native

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_ROUNDS = 6
NEVER = np.uint64(0xFFFFFFFFFFFFFFFF)
"""The greatest word: the luck of what is not to be drawn."""


def mix(x: np.ndarray) -> np.ndarray:
    """Return the finalizer of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words that scrambles them.

    Args:
        x: uint64 array of any shape; the result has its shape.
    """
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return np.asarray(x ^ (x >> np.uint64(31)))


def key(*counters: int) -> int:
    """Return one 64-bit key from a tuple of counters, such as (seed, phase, epoch)."""
    word = np.zeros(1, np.uint64)
    for counter in counters:
        word = mix(word ^ np.array([counter & 0xFFFFFFFFFFFFFFFF], np.uint64))
    return int(word[0])


def order(index: np.ndarray, count: int, order_key: int) -> np.ndarray:
    """Return where a pseudo-random permutation of `count` items sends each index.

    A Feistel network on the next even power of two, walked until it falls inside (Black and Rogaway 2002): no table, so
    a corpus of any size is shuffled in no time and no memory.

    Args:
        index: integers in [0, count), any shape.
        count: size of the permutation.
        order_key: which permutation, from :func:`key`.

    Returns:
        int64 array of the shape of `index`, again in [0, count).
    """
    assert count > 0 and np.all((np.asarray(index) >= 0) & (np.asarray(index) < count)), "an index outside would walk for ever"
    half = max(1, (int(count - 1).bit_length() + 1) // 2)
    round_keys = mix(np.arange(_ROUNDS, dtype=np.uint64) + np.uint64(order_key))
    value = np.array(index, dtype=np.uint64, order="C")
    if library := _library():
        library.order(native.address(value), value.size, count, half, native.address(round_keys), _ROUNDS)
    else:
        _walk(value, count, half, round_keys)
    return value.astype(np.int64)


def _walk(value: np.ndarray, count: int, half: int, round_keys: np.ndarray) -> None:
    """Replace each value by where it is sent, as order.c does."""
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    todo = np.ones(value.shape, bool)
    while todo.any():
        left, right = value[todo] >> shift, value[todo] & mask
        for round_key in round_keys:
            left, right = right, left ^ (mix(right ^ round_key) & mask)
        value[todo] = (left << shift) | right
        todo = value >= np.uint64(count)


@cache
def _library() -> ctypes.CDLL | None:
    if library := native.optional_library(Path(__file__).with_name("order.c")):
        pointer, whole, word = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64
        library.order.argtypes = [pointer, whole, word, word, pointer, whole]
        library.order.restype = None
    return library


def random_words(keys: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Return independent uniform 64-bit words, one for each (key, counter) pair.

    Args:
        keys: uint64 array.
        counters: integers that broadcast against `keys`.
    """
    return mix(mix(keys) ^ (counters.astype(np.uint64) * _GOLDEN))
