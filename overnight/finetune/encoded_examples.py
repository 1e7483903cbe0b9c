"""The sequences of a task, as the micro-batches of its steps.

Shapes: N tokens, S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from overnight.batches.order import key, order
from overnight.batches.packing import IGNORED, Batch, Sizes, StepBatches, balance_by_length, fill_lengths


@dataclass(frozen=True)
class EncodedExamples:
    """Token sequences with their targets, ready to be batched."""

    ids: list[np.ndarray]
    segments: list[np.ndarray]
    targets: dict[str, np.ndarray]
    """One value a sequence, by name; empty where they are not known."""
    rows_together: int = 1
    """Sequences that follow one another in every order, so many at a time: what they have in common cancels in the gradient of their batch."""
    token_targets: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """One value a token (T) of each sequence, by name."""

    several: int = 0
    """Rows that the sequences are made of, where one may be several (a question is its windows); 0 is a sequence each."""

    @property
    def rows(self) -> int:
        """Rows that the sequences are made of."""
        return self.several or len(self)

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, index: np.ndarray, pad_to_multiple: int = 0, longest: int = 0, pad: int = 0) -> Batch:
        """Return the flat batch of some sequences, in the order given.

        Args:
            pad_to_multiple: fill the stream up to a multiple of this many tokens, so that a compiled model and oneDNN see few shapes; 0 adds nothing.
            longest: tokens that a sequence may have, those that fill up too.
            pad: id of [PAD].
        """
        lengths = [len(self.ids[i]) for i in index]
        fills = fill_lengths(sum(lengths), pad_to_multiple, longest).tolist() if pad_to_multiple else []

        def stream(parts: list[np.ndarray], fill: int) -> torch.Tensor:
            return torch.from_numpy(np.concatenate([*(parts[i] for i in index), np.full(sum(fills), fill)]).astype(np.int64))

        lengths += fills
        return Batch(
            ids_N=stream(self.ids, pad),
            positions_N=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])),
            segments_N=stream(self.segments, 0),
            starts=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)),
            lengths=tuple(lengths),
            targets={name: torch.from_numpy(values[index]) for name, values in self.targets.items()}
            | {name: stream(values, IGNORED) for name, values in self.token_targets.items()},
        )

    def drawn(self, step: int, batch: int, micro_batch: int, seed: tuple[int, ...]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return the examples of a step, `batch` of an endless stream of shuffled epochs, and those of each of its micro-batches."""
        positions = np.arange(step * batch, (step + 1) * batch)
        epochs, index = positions // len(self), positions % len(self)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            group, row = np.divmod(index[here], self.rows_together)
            index[here] = order(group, len(self) // self.rows_together, key(*seed, int(epoch))) * self.rows_together + row
        return index, [index[rows] for rows in balance_by_length([len(self.ids[i]) for i in index], batch // micro_batch)]

    def step(
        self, step: int, batch: int, micro_batch: int, seed: tuple[int, ...], rank: int = 0, world: int = 1, **fill: int
    ) -> StepBatches:
        """Return the micro-batches of a step that process `rank` of `world` takes; see :meth:`drawn`, and :meth:`batch` for what fills them up."""
        index, bins = self.drawn(step, batch, micro_batch, seed)
        lengths = np.array([len(self.ids[i]) for i in index])
        sizes = Sizes(int(lengths.sum()), int((lengths**2).sum()), 0, batch)
        return StepBatches(tuple(self.batch(rows, **fill) for rows in bins[rank::world]), int(lengths.sum()), batch, sizes)

    def in_order(self, size: int) -> list[tuple[np.ndarray, Batch]]:
        """Return all sequences once, longest first in batches of `size`, each with the indices of its sequences."""
        longest_first = np.argsort([-len(x) for x in self.ids], kind="stable")
        return [(index, self.batch(index)) for index in np.split(longest_first, range(size, len(self), size))]
