"""Byte streams: groups of documents drawn without replacement, read by carried state window by window.

An epoch orders the documents of a split and joins them in S groups. Group number g, counted over all epochs, is read by stream g mod B;
a stream reads its groups one after another, each in windows of T bytes. So every document is read once an epoch, and where a stream stands
at a step follows from the lengths of the groups alone: nothing depends on the number of processes, the micro-batch or where
training stopped.

Shapes: B rows (streams), T bytes of a window, S groups of an epoch, K documents that end in a window.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from overnight.batches.batch_size import micro_batch
from overnight.batches.concat_documents import Documents, Joined
from overnight.batches.drawn_documents import DocumentMixture
from overnight.batches.order import key
from overnight.batches.packing import IGNORED, Provenance, Sizes, StepBatches, Walk, moved
from overnight.config import BytePhase, Mix
from overnight.corpus.shards import Shard
from overnight.errors import DataError

VALIDATION_STREAMS = 16
"""Streams of an evaluation, as many as Puri et al. 2018 take."""
MIN_GROUPS = 1000
"""Groups of an epoch at least, unless the phase says how many (Puri et al. 2018)."""
# What the counters of a key stand for.
_ORDER = 2


@dataclass(frozen=True)
class ByteBatch:
    """One window of some streams."""

    ids_BT: Tensor
    """Bytes (int64)."""
    streams: Tensor
    """Which stream each row is (int64, B), on the host."""
    fresh_B: Tensor
    """Whether a group begins with this window, so that the state is zeroed before it (bool)."""
    targets: dict[str, Tensor] = field(default_factory=dict)
    """What the objective needs: `byte` (B, T ids, -100 where a row only fills up), `label` (K numbers)."""
    ends_K: Tensor | None = None
    """Offsets b*T + t of the last byte of the documents that end in this window and have a label (int64); None without an auxiliary objective."""
    state_B: Tensor | None = None
    """Carried state of the rows (fp32, B and the shape of one stream's state); None is zero."""

    def to(self, device: torch.device) -> ByteBatch:
        """Return the same batch on a device."""
        found: dict[str, Any] = {
            name: moved(value, device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and name not in ("streams", "state_B")
        }
        return replace(self, **found, targets={name: moved(value, device) for name, value in self.targets.items()})


def _steps(windows_B: np.ndarray, count: int) -> int:
    """Return in how many steps `count` windows are read, or all, where each stream that has one left reads one a step."""
    read = np.cumsum(len(windows_B) - np.searchsorted(np.sort(windows_B), np.arange(windows_B.max()), side="right"))
    return min(len(read), int(np.searchsorted(read, count)) + 1)


class Streams:
    """The endless stream of a phase's windows over the epochs of a corpus of bytes.

    Args:
        shards: of one split, prepared with `data.tokenizer = bytes`.
        phase, seed: as of :class:`overnight.batches.loader.Samples`.
        mixes: how often each named source is read; empty reads every document once an epoch.

    Raises:
        DataError: when a source has no text, or the corpus holds WordPiece tokens, or lacks the labels that the phase needs.
    """

    def __init__(self, shards: list[Shard], phase: BytePhase, seed: tuple[int, ...], mixes: Mapping[str, Mix] | None = None) -> None:
        self.mixture = DocumentMixture(shards, seed, mixes) if mixes else None
        self.documents, self.phase, self.seed = self.mixture.documents if self.mixture else Documents(shards), phase, seed
        if phase.label_weight > 0 and self.documents.labels_D is None:
            raise DataError(f"label_weight = {phase.label_weight}, but the corpus was prepared without data.label; prepare it with one")
        self.passed_over, self.groups = 0, phase.num_document_groups or max(MIN_GROUPS, phase.global_batch_size)
        self._lock = threading.Lock()  # of what follows, as in Samples
        self._joined: dict[int, Joined] = {}
        # Bytes of the groups of the epochs so far, and the windows that each stream has read when it ends each of its groups (turns, B).
        self._lengths, self._ends = np.zeros(0, np.int64), np.zeros((0, phase.global_batch_size), np.int64)

    def stream_numbers(self, rank: int = 0, world: int = 1) -> range:
        """Return the streams of one process: neighbors, so that the states of all processes on end are in the order of the streams.

        Raises:
            ConfigError: when the batch cannot be split into equal shares for the processes.
            DataError: when there are fewer documents than groups.
        """
        micro_batch(self.phase, 0, world)
        count, batch = self.mixture.least() if self.mixture else len(self.documents), self.phase.global_batch_size
        if count < self.groups:
            remedy = f"set the phase's `num_document_groups` to {batch:,} (its global_batch_size) to {count:,}"
            raise DataError(
                f"the corpus holds {count:,} documents to train on, but an epoch is split into {self.groups:,} groups of at least one; "
                f"{remedy if count >= batch else f'lower global_batch_size and `num_document_groups` of the phase to {count:,} at most'}, or add documents"
            )
        share = batch // world
        return range(rank * share, (rank + 1) * share)

    def set_micro_batch_size(self, size: int) -> None:
        """Split the steps from now on into micro-batches of so many sequences; 0: still to be found."""
        self.phase = replace(self.phase, micro_batch_size=size)

    def epoch_size(self) -> int:
        """Return windows that the bytes of an epoch fill; the last one of a group may be short."""
        return -(-(self.mixture.bytes if self.mixture else int(self.documents.lengths_D.sum(dtype=np.int64))) // self.phase.seq_len)

    def passes(self, examples: int) -> dict[str, tuple[float, float]]:
        """Return the share of each source, and how often it is read in so many windows; nothing where there is no mixture."""
        return self.mixture.passes(examples / self.epoch_size()) if self.mixture else {}

    def longest(self, count: int) -> ByteBatch:
        """Return full windows of so many streams, of random bytes and laid out as those of the stream are: what memory and speed are measured with."""
        length = self.phase.seq_len
        text_BT = torch.randint(256, (count, length + 1), generator=torch.Generator().manual_seed(0))
        targets, ends_K = {"byte": text_BT[:, 1:].contiguous()}, None
        if self.phase.label_weight > 0:
            # A document ends in each window.
            targets["label"], ends_K = torch.zeros(count), torch.arange(1, count + 1) * length - 1
        return ByteBatch(text_BT[:, :-1].contiguous(), torch.arange(count), torch.ones(count, dtype=torch.bool), targets, ends_K)

    average = longest

    def step(self, step: int, rank: int = 0, world: int = 1, pad_to_multiple: int = 0) -> StepBatches:
        """Return what one process does in optimizer step `step` (from 0) of the phase.

        Args:
            step: counted within the phase.
            rank, world: which of how many processes.
            pad_to_multiple: does nothing: every batch of bytes has the same shape.

        Raises:
            as :meth:`stream_numbers`.
        """
        batch, length = self.phase.global_batch_size, self.phase.seq_len
        mine, rows = self.stream_numbers(rank, world), micro_batch(self.phase, step, world)
        with self._lock:
            numbers_B, windows_B = self._locate(step)
            counts_B = np.minimum(self._lengths[numbers_B] - windows_B * length, length + 1)
            # A stream may be an epoch behind another; the newest table is kept for those that will need it next.
            epochs_B, newest = self._order_of(numbers_B), self._order_of(len(self._lengths) - 1)
            joined = self._joined = {epoch: self._join(epoch) for epoch in np.union1d(epochs_B[mine], newest).tolist()}
        micro = []
        for first in range(mine.start, mine.stop, rows):
            streams, reads = np.arange(first, first + rows), []
            for epoch in np.unique(epochs_B[streams]).tolist():
                here = streams[epochs_B[streams] == epoch]
                starts = joined[epoch].starts_S[numbers_B[here] % self.groups] + windows_B[here] * length
                reads.append((here - first, joined[epoch], starts, starts + counts_B[here]))
            micro.append(self._batch(streams, windows_B[streams] == 0, reads))
        read_B, predicted = np.minimum(counts_B, length), int((counts_B - 1).sum())
        return StepBatches(tuple(micro), predicted, batch, Sizes(int(read_B.sum()), int((read_B**2).sum()), predicted, 0))

    def provenance(self, step: int, world: int, number: int) -> list[Provenance]:
        """Return where the windows of a micro-batch come from: its streams, and the document in which each window begins.

        Args:
            step: counted within the phase.
            number: of the micro-batch: process r of n has r, r + n, r + 2n, ...
        """
        rows = micro_batch(self.phase, step, world)
        first = self.stream_numbers(number % world, world).start + number // world * rows
        with self._lock:
            numbers_B, windows_B = self._locate(step)
            joined_by_stream = {stream: self._join(self._order_of(int(numbers_B[stream]))) for stream in range(first, first + rows)}
        found: list[Provenance] = []
        for stream, joined in joined_by_stream.items():
            epoch, group = divmod(int(numbers_B[stream]), self.groups)
            name, row = joined.document(int(joined.starts_S[group] + windows_B[stream] * self.phase.seq_len))
            found.append({"epoch": epoch, "stream": stream, "shard": name, "row": row})
        return found

    def validation_steps(self, count: int) -> Walk:
        """Return the first steps of :meth:`whole` that hold `count` windows, or all of them: the same every time."""
        return self.whole(count=count)

    def whole(self, streams: int = VALIDATION_STREAMS, count: int | None = None) -> Walk:
        """Return all documents once, on end in so many streams (or as many as there are documents), as steps of one micro-batch.

        A stream that has come to its end is not in the batches of the later steps. Each stream begins fresh. With a count, only the first steps
        that hold so many windows.
        """
        return self._walk(streams, streams, count)

    def random_groups(self, groups: int = VALIDATION_STREAMS, count: int | None = None) -> Walk:
        """Return `groups` of 1,000 random ones of the split (or of as many as there are documents), side by side, as :meth:`whole`."""
        return self._walk(max(MIN_GROUPS, groups), groups, count)

    def _walk(self, groups: int, streams: int, count: int | None) -> Walk:
        """Return the first `streams` groups of the documents in `groups`, side by side to their end, or until `count` windows are read."""
        length, most = self.phase.seq_len, len(self.documents)
        joined = Joined(self.documents, key(*self.seed, _ORDER, 0), min(groups, most))
        bounds = joined.starts_S[: min(streams, most) + 1]
        windows = -(-np.diff(bounds) // length)

        def make(step: int) -> StepBatches:
            rows = np.flatnonzero(windows > step)
            starts = bounds[rows] + step * length
            ends = np.minimum(starts + length + 1, bounds[rows + 1])
            batch = self._batch(rows, np.full(len(rows), step == 0), [(np.arange(len(rows)), joined, starts, ends)])
            return StepBatches((batch,), int((ends - starts - 1).sum()), len(rows))

        return Walk(make, int(windows.max()) if count is None else _steps(windows, count))

    def _locate(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the group of each stream at a step, counted over all epochs, and the window in it: (B), (B).

        A group of L bytes is L / T windows, rounded up: its last byte is read too, where the label of a document belongs.
        """
        batch, step = self.phase.global_batch_size, step + self.passed_over // self.phase.global_batch_size
        while not len(self._ends) or self._ends[-1].min() <= step:
            epoch = self._order_of(len(self._lengths))
            self._lengths = np.concatenate([self._lengths, np.diff(self._join(epoch).starts_S)])
            self._joined.pop(epoch - 2, None)
            turns = len(self._lengths) // batch
            windows = -(-self._lengths[: turns * batch] // self.phase.seq_len)
            self._ends = np.cumsum(windows.reshape(turns, batch), axis=0)
        turn, streams = (self._ends <= step).sum(0), np.arange(batch)
        read = np.where(turn > 0, self._ends[turn - 1, streams], 0)
        return turn * batch + streams, step - read

    def _order_of(self, numbers: Any) -> Any:
        """Return the epoch whose order of the documents these groups are of, array or number."""
        return numbers // self.groups if self.phase.reshuffle else numbers * 0

    def _join(self, epoch: int) -> Joined:
        """Return the documents in the order of an epoch, split into its groups."""
        if epoch not in self._joined:
            found = self.mixture.epoch(epoch) if self.mixture else self.documents
            self._joined[epoch] = Joined(found, key(*self.seed, _ORDER, epoch), self.groups)
        return self._joined[epoch]

    def _batch(self, streams: np.ndarray, fresh_B: np.ndarray, reads: list[tuple[np.ndarray, Joined, np.ndarray, np.ndarray]]) -> ByteBatch:
        """Return the batch of some streams.

        Args:
            streams: of each row (B).
            fresh_B: whether a group begins.
            reads: rows, and of which joined documents which bytes [start, end) they read, with the one behind the window.
        """
        length = self.phase.seq_len
        text, counts = np.zeros((len(streams), length + 1), np.int64), np.zeros(len(streams), np.int64)
        ends, labels = [np.zeros(0, np.int64)], [np.zeros(0, np.float32)]
        for rows, joined, starts, stops in reads:
            text[rows], counts[rows] = joined.read(starts, stops, length + 1), stops - starts
            if self.phase.label_weight > 0:
                row, place, label = joined.ends(starts, np.minimum(stops, starts + length))
                ends.append(rows[row] * length + place)
                labels.append(label)
        bytes_BT = np.where(np.arange(1, length + 1) < counts[:, None], text[:, 1:], IGNORED)
        targets, ends_K = {"byte": torch.from_numpy(bytes_BT)}, None
        if self.phase.label_weight > 0:
            places = np.concatenate(ends)
            by_place = np.argsort(places)
            ends_K = torch.from_numpy(places[by_place])
            targets["label"] = torch.from_numpy(np.concatenate(labels)[by_place])
        ids_BT = torch.from_numpy(np.ascontiguousarray(text[:, :length]))
        return ByteBatch(ids_BT, torch.from_numpy(streams), torch.from_numpy(fresh_B), targets, ends_K)
