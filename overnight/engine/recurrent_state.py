"""The state that a byte model carries from window to window, stream by stream, and how it is dealt to the processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from overnight.batches.packing import moved
from overnight.batches.streams import ByteBatch
from overnight.distributed.collectives import all_gather
from overnight.distributed.world import World
from overnight.errors import DataError


class RecurrentState:
    """The carried state of this process's streams, zero at first.

    A window's new state is kept aside until :meth:`commit`, so that a step that is done again begins from the same one.

    Args:
        streams: numbers of this process's streams, ascending.
        shape: of the state of one stream.
        world: the processes among which the streams are dealt.
    """

    def __init__(self, streams: Sequence[int], shape: tuple[int, ...], world: World | None = None) -> None:
        self.world = world or World()
        self.streams = torch.tensor(list(streams), dtype=torch.int64)
        self.state = torch.zeros(len(self.streams), *shape, device=self.world.device)
        self._next: list[tuple[Tensor, Tensor]] = []
        self._broken: Tensor | None = None

    def enter(self, batch: ByteBatch) -> ByteBatch:
        """Return the batch with the state of its streams, which the network takes for zero where a group of documents begins."""
        return replace(batch, state_B=self.state[self._rows(batch.streams)])

    def leave(self, batch: ByteBatch, state_B: Tensor) -> None:
        """Take the state after a window. That of a stream that is not finite is zeroed, and no other stream's."""
        rows = self._rows(batch.streams)
        broken_B = ~torch.isfinite(state_B).flatten(1).all(1)
        self._next.append((rows, state_B.masked_fill(broken_B.view(-1, *[1] * (state_B.ndim - 1)), 0.0)))
        whole = torch.zeros(len(self.streams), dtype=torch.bool, device=self.state.device)
        whole[rows] = broken_B
        self._broken = whole if self._broken is None else self._broken | whole

    def commit(self) -> None:
        """Take the states of the step, which is done, for those that the next one begins with."""
        for rows, state_B in self._next:
            self.state[rows] = state_B
        self._next = []

    def drop(self) -> None:
        """Drop the states of the step, which will be done again."""
        self._next, self._broken = [], None

    def broken(self) -> list[int]:
        """Return streams whose state was zeroed since this was last asked, because it was not finite; waits for the device."""
        found = [] if self._broken is None else self.streams[self._broken.cpu()].tolist()
        self._broken = None
        return found

    def whole(self) -> Tensor:
        """Return the state of all streams of all processes on the host, in the order of the streams; all processes must ask."""
        streams, rows = (all_gather(tensor, self.world).flatten(0, 1) for tensor in (self.streams, self.state))
        return rows[torch.argsort(streams)]

    def load(self, whole: Tensor) -> None:
        """Take this process's share of a state of all streams.

        Raises:
            DataError: when it is of other streams or of another network.
        """
        here = (len(self.streams) * self.world.size, *self.state.shape[1:])
        if whole.shape != here:
            raise DataError(
                f"the carried state of the checkpoint is of shape {tuple(whole.shape)}, this run's of {here}: streams, and a stream's"
            )
        self.state.copy_(whole[self.streams])

    def _rows(self, streams: Tensor) -> Tensor:
        return moved(torch.searchsorted(self.streams, streams), self.state.device)
