"""Batches of a model at work: sequences of like length together, in memory that does not grow with the shapes that come.

On a CPU oneDNN makes a kernel for every shape of a matrix product (0.3 ms, up to half a MB), keeps 1,024 of them, and torch as many again. So a batch is
filled up to a shape that came before: a small one, such as a single text, to one of eight an octave, and a large one to the next of finer sizes, which of most
is the largest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from overnight.batches.packing import Batch
from overnight.machine import release_free_memory

# Sizes in an octave: what is rounded up to one of eight is 1/16 larger on average. A batch of more tokens has finer ones: most are as large as may be,
# and so of one size.
_IN_AN_OCTAVE, _OF_LARGE = 8, 32
_SMALL = 1024
_KERNELS = 256


def keep_few_kernels() -> None:
    """Have oneDNN and torch keep 256 kernels each, unless the environment says how many; of effect before the first matrix product of the process."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(_KERNELS))


_TRIM_AFTER = 1 << 15
_answered = 0


def give_memory_back(tokens: int) -> None:
    """Return free memory to the system, once in 32,768 tokens, for some hundredths of their time.

    The results of batches of ever new sizes lie between kernels that are kept, so that the C library finds less and less room that fits.

    Args:
        tokens: how many were answered since it was last called.
    """
    global _answered
    _answered += tokens
    if _answered >= _TRIM_AFTER:
        _answered = 0
        release_free_memory()


def rounded_up(count: int, sizes: int = _IN_AN_OCTAVE) -> int:
    """Return the next of few sizes: multiples of an eighth of the power of two below, so that there are eight from each power of two to the next, or so many."""
    step = max(1, (1 << (count - 1).bit_length() >> 1) // sizes)
    return -(-count // step) * step


def by_tokens(lengths: Sequence[int], tokens: int) -> Iterator[npt.NDArray[np.intp]]:
    """Yield the places of sequences, longest first, as many at once as have so many tokens together, and twice as many padded to the longest, or one."""
    order = np.argsort([-n for n in lengths], kind="stable")
    first, total = 0, 0
    for at, place in enumerate(order):
        if at > first and (total + lengths[place] > tokens or (at + 1 - first) * lengths[order[first]] > 2 * tokens):
            yield order[first:at]
            first, total = at, 0
        total += lengths[place]
    if len(order):
        yield order[first:]


def filled_up(batch: Batch, pad: int) -> Batch:
    """Return a batch with sequences of [PAD] behind its own, so that its tokens, its sequences and their longest are of few sizes.

    The sizes are those of :func:`rounded_up`, of a large batch 32 an octave.

    Args:
        batch: without targets.
        pad: id of [PAD].
    """
    assert not batch.targets and batch.predicted_M is None
    tokens, sequences, longest = len(batch.ids_N), len(batch.lengths), max(batch.lengths)
    sizes = _IN_AN_OCTAVE if tokens <= _SMALL else _OF_LARGE
    count = rounded_up(sequences, sizes) - sequences
    more = rounded_up(tokens + count, sizes) - tokens
    while more > count * longest:  # more than they hold
        count = rounded_up(sequences + count + 1, sizes) - sequences
        more = rounded_up(tokens + count, sizes) - tokens
    if not more:
        return replace(batch, longest=rounded_up(longest))
    added = [more // count + (i < more % count) for i in range(count)]
    none = torch.zeros(more, dtype=torch.int64, device="cpu")
    return replace(
        batch,
        ids_N=torch.cat([batch.ids_N, none + pad]),
        positions_N=torch.cat([batch.positions_N, *(torch.arange(n, device="cpu") for n in added)]),
        segments_N=torch.cat([batch.segments_N, none]),
        starts=torch.cat([batch.starts, tokens + torch.tensor(added, dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)]),
        lengths=(*batch.lengths, *added),
        longest=rounded_up(longest),
    )
