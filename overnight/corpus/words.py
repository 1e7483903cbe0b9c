"""The distinct words and marks of a text: words.c, or without a C compiler the same with pyarrow, at half the speed."""

from __future__ import annotations

import ctypes
import re
import string
from functools import cache
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from overnight import native

# Every ASCII punctuation mark is a word of its own to BERT.
WORD_OR_MARK = re.compile(r"[!-/:-@\[-`{-~]|[^!-/:-@\[-`{-~]+")
_SOURCE = Path(__file__).with_name("words.c")
# Of a byte: 1 separates words, 2 is a word of its own.
_KINDS = np.zeros(256, np.uint8)
_KINDS[[ord(" "), ord("\n")]] = 1
_KINDS[list(string.punctuation.encode())] = 2


def distinct_words(content: bytes | bytearray) -> tuple[list[str], np.ndarray]:
    """Return the words and marks of a text, each once, in the order in which they first occur, and of each place which word it is.

    Args:
        content: UTF-8 of words that spaces and line ends separate, and marks of ASCII, each of which is a word of its own; other white space is part of a word.

    Returns:
        words: all different, none empty.
        places: int32 [W], numbers of words.
    """
    if (library := _library()) is None:
        return _plain_words(content.decode())
    flat = np.frombuffer(content, np.uint8)
    count = ctypes.c_long()
    slots = 1 << max(10, (len(content) // 20).bit_length())
    while True:
        # Untouched, the ends of these take no memory.
        places = np.empty(len(content), np.int32)
        starts, ends = np.empty(slots // 2, np.int64), np.empty(slots // 2, np.int64)
        table = np.zeros(slots, np.uint32)
        size = library.distinct(
            native.address(flat),
            ctypes.c_long(len(flat)),
            native.address(_KINDS),
            native.address(table),
            ctypes.c_long(slots),
            native.address(places),
            native.address(starts),
            native.address(ends),
            ctypes.byref(count),
        )
        if size >= 0:
            break
        slots *= 4
    spans = zip(starts[:size].tolist(), ends[:size].tolist(), strict=True)
    return [content[start:end].decode() for start, end in spans], places[: count.value]


def ragged(values: np.ndarray, offsets: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return values[offsets[p] : offsets[p + 1]] for each place p, on end."""
    offsets = offsets.astype(np.int32)  # half the memory: there are never 2^31
    lengths = np.diff(offsets)[places]
    # To the number of each value that is returned is added where those of its place begin, less what comes before it.
    shift = offsets[:-1][places]
    shift -= np.cumsum(lengths, dtype=np.int32)
    shift += lengths
    numbers = np.repeat(shift, lengths)
    numbers += np.arange(len(numbers), dtype=np.int32)
    found: np.ndarray = values[numbers]
    return found


def text_and_offsets(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of a large string or binary column without a copy: uint8 [N] of its file, int64 [D+1]."""
    offsets, flat = (
        np.frombuffer(part, kind) if part else np.zeros(0, kind)
        for part, kind in zip(column.buffers()[1:], (np.int64, np.uint8), strict=True)
    )
    return flat, offsets[column.offset : column.offset + len(column) + 1] if len(column) else np.zeros(1, np.int64)


@cache
def _library() -> ctypes.CDLL | None:
    if (library := native.optional_library(_SOURCE)) is None:
        return None
    library.distinct.restype = ctypes.c_long
    return library


def _plain_words(text: str) -> tuple[list[str], np.ndarray]:
    column = pc.split_pattern(pa.array([text.replace("\n", " ")], pa.large_string()), " ").values.dictionary_encode()
    parts = [WORD_OR_MARK.findall(word) for word in column.dictionary.to_pylist()]
    numbers: dict[str, int] = {}
    flat = np.fromiter((numbers.setdefault(part, len(numbers)) for part in chain.from_iterable(parts)), np.int32)
    offsets = np.cumsum([0, *map(len, parts)])
    return list(numbers), ragged(flat, offsets, column.indices.to_numpy())
