"""Dealing the sequences of a step to micro-batches, and laying them out as one flat stream.

Shapes: N tokens, S sequences, M predicted positions, K micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Provenance = dict[str, int | str]
"""Where a sequence comes from: `epoch` and `sample` of it (of bytes: `stream`), `shard`, and `row` of the shard (the document it begins in)."""
IGNORED = -100
"""Label of a row that only fills up a shape."""
MATCH_CLASSES = 4
"""Of token matching: in the first text, found in the second or not; in the second, found in the first or not: 2 · segment + found."""


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a host's tensor on a device, without a wait for what the device is still doing."""
    if device.type == "cpu":
        return tensor
    # What lies on a GPU already cannot be pinned.
    return (tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor).to(device, non_blocking=True)


@dataclass(frozen=True)
class Batch:
    """One micro-batch: a flat stream of tokens without padding between sequences."""

    ids_N: Tensor
    """Token ids (int64)."""
    positions_N: Tensor
    """Place of each token in its sequence (int64)."""
    segments_N: Tensor
    """0 in segment A, 1 in segment B (int64)."""
    starts: Tensor
    """Offset of each sequence in the stream, and the end of the last (int32, S + 1)."""
    lengths: tuple[int, ...]
    """Tokens of each sequence (S), on the host."""
    longest: int = 0
    """Length that attention may count on for every batch, so that a compiled model sees one shape; 0: the longest of this batch."""
    predicted_M: Tensor | None = None
    """Offsets of the tokens at which one is predicted (int64); only batches of pretraining have them."""
    causal: bool = False
    """Whether each token sees only itself and those before it."""
    targets: dict[str, Tensor] = field(default_factory=dict)
    """What the objective needs: `mlm` or, of a causal batch, `clm` (M ids, -100 where a row only fills up), `nsp` (S), `match` (N, -100 for none), `label` (S), `start`/`end` (S offsets)."""

    def to(self, device: torch.device) -> Batch:
        """Return the same batch on a device."""
        if device.type == "cpu":
            return self
        move: dict[str, Any] = {name: moved(value, device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **move, targets={name: moved(value, device) for name, value in self.targets.items()})


class Sizes(NamedTuple):
    """What the arithmetic of some sequences follows from (:func:`overnight.models.flops.training_flops`), whatever fills their stream up."""

    tokens: float
    """Of all sequences."""
    squares: float
    """Sum of the squares of their lengths, as attention goes."""
    predicted: float
    """Tokens at which the vocabulary head is computed."""
    sequences: float
    """At which next-sentence prediction is computed."""
    matched: float = 0
    """Tokens at which token matching is computed."""


@dataclass(frozen=True)
class StepBatches:
    """The micro-batches of one process for one optimizer step."""

    micro: tuple[Any, ...]
    """:class:`Batch`, or :class:`overnight.batches.streams.ByteBatch`."""
    tokens: int
    """Tokens of the whole global batch; of bytes, those that are predicted."""
    sequences: int
    """Sequences of the whole global batch."""
    sizes: Sizes | None = None
    """Of the whole global batch."""
    source: str = ""
    """Of a split with several named sources, the one that all of it is of."""
    sources: tuple[str, ...] = ()
    """Names of all sources of such a split."""

    def divisors(self) -> dict[str, int]:
        """Return the number of targets of this process's micro-batches, by loss.

        A loss is a sum divided by these (added up over the processes), which makes accumulation and world size invisible.
        """
        totals: dict[str, int] = {}
        for batch in self.micro:
            for name, target in batch.targets.items():
                # A number to predict may be any, also the one that stands for no class.
                count = target.numel() if target.is_floating_point() else int((target != IGNORED).sum())
                totals[name] = totals.get(name, 0) + count
        return totals


def balance_by_length(lengths: list[int] | Tensor, bins: int) -> list[list[int]]:
    """Share out sequences so that every bin has equally many, and as equally many tokens as that allows.

    Sorted by length and dealt back and forth; two bins differ by at most the longest sequence.

    Args:
        lengths: tokens of each sequence; their number must be a multiple of `bins`.
        bins: micro-batches × processes.

    Returns:
        for each bin the indices of its sequences, longest first.
    """
    lengths = torch.as_tensor(lengths, device="cpu")
    assert len(lengths) % bins == 0, f"{len(lengths)} sequences cannot be dealt to {bins} bins"
    rows = torch.argsort(lengths, descending=True, stable=True).view(-1, bins)
    rows[1::2] = rows[1::2].flip(1)
    return rows.t().tolist()


def fill_lengths(tokens: int, multiple: int, longest: int) -> npt.NDArray[np.int64]:
    """Return the lengths of sequences that fill a stream up to a multiple of some tokens.

    They are sequences of their own, so that attention never sees the fill beside text; always equally many, none empty.

    Args:
        tokens: of the stream.
        multiple: of tokens, to which it is filled up.
        longest: tokens that a sequence may have.
    """
    count = -(-multiple // longest) + 1
    more = count + -(tokens + count) % multiple
    return np.full(count, more // count) + (np.arange(count) < more % count)


class Walk(Sequence[StepBatches]):
    """Steps that are made when they are asked for, since those of a whole split may not fit in memory."""

    def __init__(self, make: Callable[[int], StepBatches], count: int) -> None:
        self.make, self._count = make, count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> StepBatches: ...
    @overload
    def __getitem__(self, at: slice) -> list[StepBatches]: ...
    def __getitem__(self, at: int | slice) -> StepBatches | list[StepBatches]:
        places = range(self._count)[at]
        return [self.make(place) for place in places] if isinstance(places, range) else self.make(places)
