"""Which tokens make an example: segment pairs for next-sentence prediction, or single segments.

A plan lists the examples of one epoch of one shard, as token offsets, so that an example costs 20 bytes and no text is copied.
The rule is that of `create_pretraining_data.py` (Devlin et al. 2018): sentences are gathered until they reach the target
length; A is a random number of them; B is the rest, or, half of the time, sentences from a random document, and what
that leaves over of the first document is put back. One thing differs: the short tenth is drawn for each example, not
once for a document, since one draw for a whole book would split it into thousands of examples of two tokens.

One example is drawn after the other, so a shard's plan is one thread's work: pairs.c does it, without Python's lock, so that shards are planned at
the same time; without a C compiler the functions here do the same, ten times slower.
"""

from __future__ import annotations

import ctypes
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np

from overnight import native
from overnight.corpus.shards import Shard

# Columns of a plan: tokens [a_start, a_end) and [b_start, b_end) of the shard, and whether B is random.
A_START, A_END, B_START, B_END, IS_RANDOM = range(5)
COLUMNS = 5
# Of the rule that makes a plan: raise it with any change, so that no plan of the old rule is read again.
VERSION = 1


def plan_pairs(shard: Shard, length: int, short_seq_prob: float, seed: int) -> np.ndarray:
    """Return the pairs of one epoch of a shard; in C, or without a compiler by :func:`plain_pairs`.

    Args:
        shard: the documents, none empty; a random B comes from another document of the same shard, if it has one.
        length: longest example (tokens, with [CLS] and two [SEP]).
        short_seq_prob: share of examples that aim at a uniform length in [2, length - 3].
        seed: of this shard and epoch, from :func:`overnight.batches.order.key`.

    Returns:
        int32 array (examples, 5): a_start, a_end, b_start, b_end, is_random.
    """
    if (library := _library()) is None:
        return plain_pairs(shard, length, short_seq_prob, seed)
    # An example has at least one sentence that no earlier one had.
    starts, documents = (np.ascontiguousarray(each, np.int64) for each in (shard.sentence_starts, shard.document_sentences))
    out, state = np.empty((len(starts), COLUMNS), np.int32), _state(seed)
    count = library.pairs(
        native.address(state),
        native.address(starts),
        native.address(documents),
        len(documents) - 1,
        length - 3,
        short_seq_prob,
        native.address(out),
    )
    return out[:count].copy()


def plain_pairs(shard: Shard, length: int, short_seq_prob: float, seed: int) -> np.ndarray:
    """Return what :func:`plan_pairs` does, one example after the other in Python."""
    rng, budget = Random(seed), length - 3
    # memoryview items are plain ints at a fraction of numpy's cost per access.
    starts, documents = shard.sentence_starts.data, shard.document_sentences.data
    out, count = array("i"), len(shard.document_sentences) - 1
    draw = rng.random
    for document in range(count):
        sentence, end = documents[document], documents[document + 1]
        while sentence < end:
            target = 2 + int(draw() * (budget - 1)) if draw() < short_seq_prob else budget
            # The first sentence boundary at or past the target, or the end of the document.
            stop = min(bisect_left(starts, starts[sentence] + target, sentence + 1, end), end)
            split = sentence + (1 + int(draw() * (stop - sentence - 1)) if stop - sentence > 1 else 1)
            a_start, a_end = starts[sentence], starts[split]
            if stop - sentence == 1 or draw() < 0.5:
                other = _other_document(document, count, draw)
                first = documents[other] + int(draw() * (documents[other + 1] - documents[other]))
                # The original appends a sentence before it looks at the length: B is never empty.
                wanted = max(1, target - (a_end - a_start))
                last = min(bisect_left(starts, starts[first] + wanted, first + 1, documents[other + 1]), documents[other + 1])
                b_start, b_end, is_random, sentence = starts[first], starts[last], 1, split
            else:
                b_start, b_end, is_random, sentence = a_end, starts[stop], 0, stop
            excess = (a_end - a_start) + (b_end - b_start) - budget
            if excess > 0:
                from_a = _tokens_off_a(a_end - a_start, b_end - b_start, excess)
                a_start, a_end = _truncate(a_start, a_end, from_a, rng)
                b_start, b_end = _truncate(b_start, b_end, excess - from_a, rng)
            out.extend((a_start, a_end, b_start, b_end, is_random))
    return np.frombuffer(out, np.int32).reshape(-1, COLUMNS) if out else np.zeros((0, COLUMNS), np.int32)


def _other_document(document: int, count: int, draw: Callable[[], float]) -> int:
    """Return another document, each as likely; where there is no other, this one, as in the original."""
    other = int(draw() * (count - 1))
    return min(other + (other >= document), count - 1)


def _tokens_off_a(length_a: int, length_b: int, excess: int) -> int:
    """Return how many of `excess` tokens A loses when the longer segment loses one at a time (B at a tie)."""
    gap = length_a - length_b
    if gap > 0:
        return min(excess, gap) + max(0, excess - gap) // 2
    return max(0, excess + gap) // 2


def _truncate(start: int, end: int, cut_tokens: int, rng: Random) -> tuple[int, int]:
    """Drop `cut_tokens` tokens, each from the front or the back with equal chance."""
    front = rng.getrandbits(cut_tokens).bit_count() if cut_tokens else 0
    return start + front, end - (cut_tokens - front)


def plan_segments(shard: Shard, length: int, short_seq_prob: float, seed: int, whole_sentences: bool = False) -> np.ndarray:
    """Return the single segments of one epoch of a shard: every token of every document once, in runs that fill the length.

    Args, returns: as :func:`plan_pairs`; B is empty and `is_random` 0. `length` counts [CLS] and one [SEP].
        whole_sentences: end where a sentence ends, so that the next segment begins with one; a sentence longer than the length is cut.
    """
    if (library := _library()) is None:
        return plain_segments(shard, length, short_seq_prob, seed, whole_sentences)
    starts, documents = (np.ascontiguousarray(each, np.int64) for each in (shard.sentence_starts, shard.document_sentences))
    # Whole sentences: a sentence may be an example, and a cut one several. Else an example has two tokens at least, but for the last one of a document.
    tokens = int(starts[-1])
    room = len(starts) + tokens // (length - 2) if whole_sentences else (tokens + 1) // 2 + len(documents)
    out, state = np.empty((room, COLUMNS), np.int32), _state(seed)
    count = library.segments(
        native.address(state),
        native.address(starts),
        native.address(documents),
        len(documents) - 1,
        length - 2,
        short_seq_prob,
        whole_sentences,
        native.address(out),
    )
    return out[:count].copy()


def plain_segments(shard: Shard, length: int, short_seq_prob: float, seed: int, whole_sentences: bool = False) -> np.ndarray:
    """Return what :func:`plan_segments` does, one example after the other in Python."""
    rng, budget = Random(seed), length - 2
    starts, documents = shard.sentence_starts.tolist(), shard.document_sentences.tolist()
    out = array("i")
    for sentence, last in pairwise(documents):
        start, end = starts[sentence], starts[last]
        while start < end:
            target = 2 + int(rng.random() * (budget - 1)) if rng.random() < short_seq_prob else budget
            stop = min(start + target, end)
            if whole_sentences:
                following = bisect_right(starts, start, sentence, last)
                fits = bisect_right(starts, start + target, following, last + 1) - 1
                stop = starts[fits] if fits >= following else min(starts[following], start + budget)
            out.extend((start, stop, stop, stop, 0))
            start = stop
    return np.frombuffer(out, np.int32).reshape(-1, COLUMNS) if out else np.zeros((0, COLUMNS), np.int32)


@cache
def _library() -> ctypes.CDLL | None:
    if (library := native.optional_library(Path(__file__).with_name("pairs.c"))) is None:
        return None
    pointer, whole, share = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    library.pairs.argtypes = [pointer, pointer, pointer, whole, whole, share, pointer]
    library.segments.argtypes = [pointer, pointer, pointer, whole, whole, share, ctypes.c_int, pointer]
    library.pairs.restype = library.segments.restype = whole
    return library


def _state(seed: int) -> np.ndarray:
    """Return the state of `Random(seed)`: uint32 [625], its words and which of them is next."""
    return np.array(Random(seed).getstate()[1], np.uint32)
