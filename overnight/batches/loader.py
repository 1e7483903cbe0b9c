"""Shards to the batches of any step, at once: the loader's state is the step number.

Sample number p of a phase (counted from 0 over all its steps) is sample order(seed, epoch)(p') of its epoch; each epoch has
its own pairs, order and masks. Nothing depends on the number of processes, the micro-batch or where training stopped.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from overnight.batches import masking, matching, pairs, texts
from overnight.batches.batch_size import batch_size, micro_batch, pad_to_multiple, sequences_before
from overnight.batches.kept_plans import boundaries, keep_array, kept_array
from overnight.batches.lengths import expected_lengths
from overnight.batches.order import key, mix, order
from overnight.batches.packing import IGNORED, Batch, Provenance, Sizes, StepBatches, Walk, balance_by_length, fill_lengths
from overnight.config import BertPhase
from overnight.corpus.shards import Shard
from overnight.corpus.tokenizer import Vocabulary
from overnight.errors import DataError
from overnight.machine import usable_cores

# What the counters of a key stand for, so that no two uses share one.
_PLAN, _ORDER, _MASK, _MATCH = 1, 2, 3, 4
# Steps in which the room for predictions falls: twentieths of all tokens.
_ROOMS = 20


class StepSamples(NamedTuple):
    """The samples of a step (S sequences), and the micro-batches that they are dealt to."""

    epochs: np.ndarray
    samples: np.ndarray
    """Numbers in their epoch."""
    shards: np.ndarray
    rows: np.ndarray
    """Of the plan of their shard (S, 5)."""
    bins: list[list[int]]
    """The sequences of each micro-batch. Process r of n has the micro-batches r, r + n, r + 2n, ..."""


@dataclass
class Samples:
    """The endless stream of a phase's samples over the epochs of a corpus.

    Args:
        shards: of one split.
        vocabulary: special ids.
        phase: length, pairs, masks.
        seed: of the run, the phase's place in it, and whether this is for validation.
        cache: folder for the plans of epochs, so that a resumed run need not make them again.
    """

    shards: list[Shard]
    vocabulary: Vocabulary
    phase: BertPhase
    seed: tuple[int, ...]
    cache: Path | None = None
    passed_over: int = 0
    """Sequences of the stream that are left out before those of any step."""

    def __post_init__(self) -> None:
        # What is known of the epochs changes as they are read: by the loader's thread, and where one asks for the provenance of a step.
        self._lock = threading.RLock()
        self._sizes: list[int] = []
        self._epoch = -1
        self._plans: list[np.ndarray] = []
        self._bounds = np.zeros(1, np.int64)
        self._boundaries = [boundaries(shard) for shard in self.shards] if self.cache else []
        self._mask_rate: Callable[[int], float] = lambda step: self.phase.mlm_probability
        self._pairs: Callable[[int], float] = lambda step: matching.share_of_pairs(self.phase, step)

    def sizes(self, position: int) -> np.ndarray:
        """Return the first positions of all epochs up to the one that holds `position` and of the next."""
        while sum(self._sizes) <= position:
            epoch = len(self._sizes)
            # The size of an epoch is kept beside its plans, so that a run which resumes in a later one need not look at them.
            path = self._kept("size", key(*self.seed, _PLAN, epoch), *self._boundaries)
            known = None if path is None else kept_array(path)
            size = int(known[0]) if known is not None else sum(len(plan) for plan in self._load(epoch))
            if size == 0:
                raise DataError("the corpus holds no example: it has no document with a sentence; add text or lower data.min_chars")
            if path and known is None:
                keep_array(path, np.array([size], np.int32))
            self._sizes.append(size)
        return np.concatenate([[0], np.cumsum(self._sizes)])

    def set_micro_batch_size(self, size: int) -> None:
        """Split the steps from now on into micro-batches of so many sequences; 0: still to be found."""
        self.phase = replace(self.phase, micro_batch_size=size)

    def set_mask_rate(self, rate: Callable[[int], float]) -> None:
        """Predict another share of the tokens in each step, at most that of the phase."""
        self._mask_rate = rate

    def set_share_of_pairs(self, share: Callable[[int], float]) -> None:
        """Make another share of the sequences in each step a pair for token matching."""
        self._pairs = share

    def epoch_size(self) -> int:
        """Return samples in the first epoch."""
        with self._lock:
            return int(self.sizes(0)[1])

    def passes(self, examples: int) -> dict[str, tuple[float, float]]:
        """Return the share of each source, and how often it is read in the first so many examples; nothing where there is no mixture."""
        return {}

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the epoch of each position of the stream, and the number of its sample in that epoch."""
        bounds = self.sizes(int(positions.max()))
        epochs = np.searchsorted(bounds, positions, side="right") - 1
        samples = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            index = positions[here] - bounds[epoch]
            samples[here] = order(index, int(bounds[epoch + 1] - bounds[epoch]), key(*self.seed, _ORDER, int(epoch)))
        return epochs, samples

    def _load(self, epoch: int) -> list[np.ndarray]:
        if epoch != self._epoch:
            # Threads, since a plan is made outside of Python's lock.
            with ThreadPoolExecutor(min(usable_cores(), max(len(self.shards), 1)), "plans") as pool:
                self._plans = list(pool.map(partial(self._plan, epoch), range(len(self.shards)), self.shards))
            self._bounds = np.concatenate([[0], np.cumsum([len(plan) for plan in self._plans])])
            self._epoch = epoch
        return self._plans

    def _plan(self, epoch: int, number: int, shard: Shard) -> np.ndarray:
        make = pairs.plan_pairs if self.phase.nsp else partial(pairs.plan_segments, whole_sentences=self.phase.whole_sentences)
        seed = key(*self.seed, _PLAN, epoch, number)

        def fresh() -> np.ndarray:
            return make(shard, self.phase.seq_len, self.phase.short_seq_prob, seed)

        path = self._kept(self._boundaries[number], seed) if self.cache else None
        if path is None:
            return fresh()
        if (kept := kept_array(path)) is not None:
            return kept.reshape(-1, pairs.COLUMNS)
        keep_array(path, plan := fresh())
        return plan

    def _kept(self, *facts: str | int) -> Path | None:
        """Return where something is kept that follows from these facts and the phase: its name holds all that it depends on, so a stale one is never read."""
        rule = self.phase.seq_len, self.phase.short_seq_prob, self.phase.nsp, self.phase.whole_sentences
        everything = repr((pairs.VERSION, facts, rule))
        return self.cache / f"{hashlib.blake2b(everything.encode(), digest_size=12).hexdigest()}.npy" if self.cache else None

    def rows(self, epochs: np.ndarray, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the shard number (S) and plan row (S, 5) of samples, as :func:`locate` returns them."""
        numbers, rows = np.empty(len(samples), np.int64), np.empty((len(samples), pairs.COLUMNS), np.int64)
        for epoch in np.unique(epochs):
            plans = self._load(int(epoch))
            here = np.flatnonzero(epochs == epoch)
            numbers[here] = np.searchsorted(self._bounds, samples[here], side="right") - 1
            for shard in np.unique(numbers[here]):
                mine = here[numbers[here] == shard]
                rows[mine] = plans[shard][samples[mine] - self._bounds[shard]]
        return numbers, rows

    def _keys(self, use: int, epochs: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """Return key(*seed, use, epoch, sample) of each sample."""
        return mix(mix(np.uint64(key(*self.seed, use)) ^ epochs.astype(np.uint64)) ^ samples.astype(np.uint64))

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Return tokens of the examples of plan rows, special ones included."""
        inner = rows[:, pairs.A_END] - rows[:, pairs.A_START] + rows[:, pairs.B_END] - rows[:, pairs.B_START]
        return inner + 2 + (rows[:, pairs.B_END] > rows[:, pairs.B_START])

    def batch(
        self, epochs: np.ndarray, samples: np.ndarray, numbers: np.ndarray, rows: np.ndarray, pad_to_multiple: int = 0, rate: float = 0.0
    ) -> Batch:
        """Return the flat batch of some samples: masked, or as they are where the next token is predicted.

        Args:
            epochs, samples: of each sequence (S), as :meth:`locate` returns them.
            numbers, rows: of each sequence, as :meth:`rows` returns them.
            pad_to_multiple: fill the stream up to a multiple of this many tokens, with equally many predicted rows every time,
                so that a compiled model sees few shapes; 0 adds nothing.
            rate: share of the tokens to predict; 0 is that of the phase.
        """
        vocabulary, phase = self.vocabulary, self.phase
        rate = rate or phase.mlm_probability
        lengths = self.lengths(rows)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        keys, matching_S = self._keys(_MASK, epochs, samples), matching.is_matching(rows)
        ids, segments = texts.sequences([shard.tokens for shard in self.shards], numbers, rows, starts, keys, vocabulary)
        causal, counts = phase.objective == "causal", self._predictions(lengths, rate)
        if causal:
            predicted, labels = masking.next_tokens(ids, starts)
        else:
            ids, predicted, labels = masking.mask(ids, starts, keys, counts, vocabulary, phase.whole_word)
        labels_N = matching.match_labels(ids, segments, lengths, matching_S, vocabulary.is_special) if phase.token_matching else None
        positions = np.arange(len(ids)) - np.repeat(starts[:-1], lengths)
        if pad_to_multiple:
            fills = fill_lengths(len(ids), pad_to_multiple, phase.seq_len)
            ids, segments = _filled(ids, fills.sum(), vocabulary.pad), _filled(segments, fills.sum(), 0)
            positions = np.concatenate([positions, *[np.arange(n) for n in fills]]).astype(np.int64)
            starts = np.concatenate([starts, starts[-1] + np.cumsum(fills)])
            lengths = np.concatenate([lengths, fills]).astype(np.int64)
            most = len(ids) if causal else int(len(ids) * _room(rate, phase.mlm_probability)) + len(counts)
            predicted, labels = (_filled(found, most - len(found), value) for found, value in ((predicted, 0), (labels, IGNORED)))
        targets = {"clm" if causal else "mlm": torch.from_numpy(labels)}
        if labels_N is not None:
            targets["match"] = torch.from_numpy(_filled(labels_N, len(ids) - len(labels_N), IGNORED))
        if phase.nsp:
            targets["nsp"] = torch.from_numpy(rows[:, pairs.IS_RANDOM].copy())
        return Batch(
            ids_N=torch.from_numpy(ids),
            positions_N=torch.from_numpy(positions),
            segments_N=torch.from_numpy(segments),
            starts=torch.from_numpy(starts.astype(np.int32)),
            lengths=tuple(lengths.tolist()),
            longest=phase.seq_len if pad_to_multiple else 0,
            predicted_M=torch.from_numpy(predicted),
            causal=causal,
            targets=targets,
        )

    def _predictions(self, lengths: np.ndarray, rate: float) -> np.ndarray:
        """Return how many tokens of each sequence are predicted, by the objective of the phase."""
        return lengths - 1 if self.phase.objective == "causal" else masking.predictions(lengths, rate, self.phase.max_predictions_per_seq)

    def longest(self, count: int) -> Batch:
        """Return a micro-batch of so many sequences of full length, laid out as those of the stream are: what memory is measured with."""
        return self._of_length(count, self.phase.seq_len)

    def average(self, count: int) -> Batch:
        """Return a micro-batch of so many sequences of about the average length: what speed is measured with."""
        return self._of_length(count, round(expected_lengths(self.phase).mean))

    def _of_length(self, count: int, length: int) -> Batch:
        number = max(range(len(self.shards)), key=lambda i: len(self.shards[i].tokens))
        inner = min(length - (3 if self.phase.nsp else 2), len(self.shards[number].tokens))
        half = inner // 2 if self.phase.nsp else inner
        rows = np.zeros((count, pairs.COLUMNS), np.int64)
        rows[:, [pairs.A_END, pairs.B_START, pairs.B_END]] = half, half, inner
        return self.batch(np.zeros(count, np.int64), np.arange(count), np.full(count, number), rows, pad_to_multiple(self.phase, count))

    def step(self, step: int, rank: int = 0, world: int = 1, pad_to_multiple: int = 0) -> StepBatches:
        """Return what one process does in optimizer step `step` (from 0) of the phase.

        Args:
            step: counted within the phase.
            rank, world: which of how many processes.
            pad_to_multiple: as in :meth:`batch`.

        Raises:
            ConfigError: when the batch cannot be split into equal shares for the processes.
        """
        epochs, samples, numbers, rows, bins = self.step_samples(step, world)
        lengths = self.lengths(rows)
        rate, batch = self._mask_rate(step), len(epochs)
        predicted, tokens = int(self._predictions(lengths, rate).sum()), int(lengths.sum())
        return StepBatches(
            micro=tuple(
                self.batch(epochs[m], samples[m], numbers[m], rows[m], pad_to_multiple, rate) for m in map(np.array, bins[rank::world])
            ),
            tokens=tokens,
            sequences=batch,
            sizes=Sizes(tokens, int((lengths**2).sum()), predicted, batch * self.phase.nsp, tokens * bool(self.phase.token_matching)),
        )

    def step_samples(self, step: int, world: int = 1) -> StepSamples:
        """Return the samples of optimizer step `step` (from 0) of the phase, and how they are dealt to the micro-batches of all processes.

        Raises:
            ConfigError: when the batch cannot be split into equal shares for the processes.
        """
        batch = batch_size(self.phase, step)
        bins = batch // micro_batch(self.phase, step, world)
        with self._lock:
            epochs, samples = self.locate(sequences_before(self.phase, step) + self.passed_over + np.arange(batch, dtype=np.int64))
            numbers, rows = self.rows(epochs, samples)
        if share := self._pairs(step):
            rows = matching.with_matching(rows, self._keys(_MATCH, epochs, samples), share, self.phase.seq_len)
        return StepSamples(epochs, samples, numbers, rows, balance_by_length(self.lengths(rows).tolist(), bins))

    def provenance(self, step: int, world: int, number: int) -> list[Provenance]:
        """Return where the sequences of a micro-batch come from.

        Args:
            step: counted within the phase.
            number: of the micro-batch: process r of n has r, r + n, r + 2n, ...
        """
        drawn = self.step_samples(step, world)
        found: list[Provenance] = []
        for i in drawn.bins[number]:
            shard = self.shards[drawn.shards[i]]
            sentence = int(np.searchsorted(shard.sentence_starts, drawn.rows[i][pairs.A_START], side="right")) - 1
            row = int(np.searchsorted(shard.document_sentences, sentence, side="right")) - 1
            found.append({"epoch": int(drawn.epochs[i]), "sample": int(drawn.samples[i]), "shard": shard.name, "row": row})
        return found

    def validation_steps(self, count: int) -> list[StepBatches]:
        """Return the first `count` samples of the stream (or all of one epoch), as steps of one micro-batch: the same every time."""
        return list(self.whole(count))

    def whole(self, count: int | None = None) -> Walk:
        """Return all samples of the first epoch, or the first `count` of them, as :meth:`validation_steps`."""
        size = self.epoch_size()
        positions = np.arange(size if count is None else min(count, size), dtype=np.int64)
        epochs, samples = self.locate(positions)
        numbers, rows = self.rows(epochs, samples)
        lengths = self.lengths(rows)
        # Each micro-batch is of one source, so that the loss of each is known at no cost.
        names = tuple(dict.fromkeys(shard.source for shard in self.shards))
        sources = np.array([names.index(shard.source) for shard in self.shards])[numbers]
        by_length, ends = np.lexsort((-lengths, sources)), np.cumsum(np.bincount(sources, minlength=len(names)))
        micro = self.phase.micro_batch_size
        parts = [mine[at : at + micro] for mine in np.split(by_length, ends[:-1]) for at in range(0, len(mine), micro)]

        def make(step: int) -> StepBatches:
            m = parts[step]
            found = self.batch(epochs[m], samples[m], numbers[m], rows[m])
            of = {"source": names[sources[m[0]]], "sources": names} if len(names) > 1 else {}
            return StepBatches((found,), int(lengths[m].sum()), len(m), **of)  # type: ignore[arg-type]

        return Walk(make, len(parts))


def _filled(array: np.ndarray, count: int, value: int) -> np.ndarray:
    """Return an array with so many of a value behind it; a fifth of the time of np.pad."""
    return np.concatenate([array, np.full(count, value, array.dtype)])


def _room(rate: float, most: float) -> float:
    """Return the share of the tokens that there is room for: a rate that falls takes few values of it, so that a compiled model sees few shapes."""
    return min(most, math.ceil(rate * _ROOMS) / _ROOMS)
