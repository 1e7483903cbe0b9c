"""`overnight bench loader`: how many tokens a second one core makes into batches, and how long it takes to begin at any step.

Everything that the loader does is in it: order, reading, masking, dealing to micro-batches, tensors. The text is made up, in the shape of books: sentences of 22 tokens, documents of 60
sentences. What is counted is the time of this process on its core (not the clock), so that others on the same core do not change it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from overnight.batches.loader import Samples
from overnight.batches.mixture import MixedSamples
from overnight.batches.prefetch import prefetch
from overnight.batches.streams import Streams
from overnight.bench.measure import Row, Timing, measure, printed, rate_row, time_row
from overnight.bench.sizes import VOCABULARY
from overnight.config import BertPhase, BytePhase, Mix
from overnight.corpus.shards import Shard
from overnight.corpus.tokenizer import SPECIALS, Vocabulary, vocabulary

_SENTENCE, _SENTENCES, _BATCH, _MICRO = 22, 60, 256, 32
_REPEATS, _STEPS = 9, 8
_LAUNCHES = 6000
_FAR = 5
"""Epochs before the one in which a run is begun again."""


def run(tiny: bool = False) -> None:
    """Measure and print the rows, JSON last."""
    tokens = 200_000 if tiny else 16_000_000
    words = made_up_vocabulary()
    shards = [made_up_shard(tokens, number, source) for number, source in enumerate(("books", "books", "web", "web"))]
    plain = [Shard(s.name, s.tokens, s.sentence_starts, s.document_sentences) for s in shards]
    with printed("loader") as rows:
        for length, nsp, whole_word in ((128, False, False), (128, False, True), (128, True, False), (512, False, False)):
            phase = BertPhase(1000, _BATCH, length, _MICRO, nsp=nsp, whole_word=whole_word, max_predictions_per_seq=0)
            name = f"{'pairs' if nsp else 'segments'} of {length}{', whole words' * whole_word}"
            rows.append(batches_row(name, Samples(plain, words, phase, (0, 0, 0))))
            if not whole_word and length == 128:
                rows.append(plans_row(f"plans of {name}", plain[0], words, phase))
        phase = BertPhase(1000, _BATCH, 128, _MICRO, nsp=False, max_predictions_per_seq=0)
        # One micro-batch, as a GPU takes it: there a small network waits for its batches.
        night = BertPhase(
            1000,
            _BATCH,
            128,
            _BATCH,
            nsp=False,
            max_predictions_per_seq=0,
            whole_sentences=True,
            short_seq_prob=1.0,
            mlm_probability=0.3,
            token_matching=0.1,
        )
        for name, each in (("whole sentences", replace(night, token_matching=0.0)), ("whole sentences, a tenth matched", night)):
            rows.append(batches_row(name, Samples(plain, words, each, (0, 0, 0))))
        rows.append(
            launches_row(Samples(plain, words, replace(night, global_batch_size=4 * _BATCH, micro_batch_size=4 * _BATCH), (0, 0, 0)))
        )
        mixes = {"books": Mix(weight=3), "web": Mix(weight=1)}
        rows.append(batches_row("segments of 128, two sources", MixedSamples(shards, words, phase, (0, 0, 0), None, mixes)))
        raw = [made_up_bytes(shard) for shard in shards]
        rows.append(
            batches_row("bytes, windows of 256", Streams(raw, BytePhase(1000, _BATCH, 256, _MICRO, num_document_groups=_BATCH), (0, 0, 0)))
        )
        with tempfile.TemporaryDirectory() as folder:
            for name, nsp in (("segments", False), ("pairs", True)):
                rows.append(
                    seek_row(f"begin {name} in epoch {_FAR + 1}", plain, words, BertPhase(1000, _BATCH, 128, _MICRO, nsp=nsp), Path(folder))
                )
        for row in rows:
            shown = f"{row.value / 1e6:8.2f} M {row.unit}" if row.unit.endswith("/s") else f"{row.value:8.2f} {row.unit}"
            print(f"{row.name:34} {shown}" + (f", {row.peer} {row.peer_value:.2f}" if row.peer else ""))


def made_up_vocabulary() -> Vocabulary:
    """Return a vocabulary of a published one's size, of which a fifth continues a word."""
    plain = VOCABULARY * 4 // 5
    return vocabulary(
        [*SPECIALS, *(f"{'##' * (i > plain)}{i}" for i in range(VOCABULARY - len(SPECIALS)))],
        lowercase=True,
    )


def made_up_shard(tokens: int, seed: int, source: str) -> Shard:
    """Return a shard of random tokens in sentences and documents of random lengths."""
    rng = np.random.default_rng(seed)
    lengths = rng.geometric(1 / _SENTENCE, tokens // _SENTENCE)
    ends = np.flatnonzero(rng.random(len(lengths) - 1) < 1 / _SENTENCES) + 1
    text = rng.integers(len(SPECIALS), VOCABULARY, lengths.sum()).astype(np.uint16)
    documents = np.concatenate([[0], ends, [len(lengths)]]).astype(np.int64)
    return Shard(f"train-{seed:05d}.arrow", text, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), documents, source=source)


def made_up_bytes(shard: Shard) -> Shard:
    """Return the documents of a shard as bytes, one for each token."""
    starts = shard.sentence_starts[shard.document_sentences]
    return Shard(shard.name, (shard.tokens % 256).astype(np.uint8), starts, np.arange(len(starts), dtype=np.int64))


def _timed(function: Callable[[int], object], repeats: int) -> Timing:
    seconds = []
    for number in range(repeats):
        start = time.process_time()
        function(number)
        seconds.append(time.process_time() - start)
    return Timing(tuple(seconds))


def batches_row(name: str, samples: Samples | Streams) -> Row:
    """Return the tokens a second of the batches of some steps, once the plans of the epoch are there."""
    tokens: list[int] = []

    def steps(number: int) -> None:
        tokens.append(sum(samples.step(number * _STEPS + i, pad_to_multiple=64).tokens for i in range(_STEPS)))

    steps(0)
    tokens.clear()
    took = _timed(steps, _REPEATS)
    return rate_row(name, "tokens/s", statistics.mean(tokens), took)


def launches_row(samples: Samples) -> Row:
    """Return how long a thread takes that asks for small operations, as one that launches kernels does, while the loader makes the batches of its steps; alone as the peer (ms)."""
    x = torch.zeros(8)

    def step() -> None:
        for _ in range(_LAUNCHES):
            x.add_(1.0)

    ahead = prefetch(lambda number: samples.step(number, pad_to_multiple=64), 0, _REPEATS + 4)
    next(ahead)
    alone = measure({"step": step}, warmup=1, repeats=_REPEATS)["step"]
    together = measure({"step": lambda: (next(ahead), step())}, warmup=2, repeats=_REPEATS)["step"]
    ahead.close()
    return time_row(f"{_LAUNCHES:,} launches beside the loader", together, "alone", alone)


def plans_row(name: str, shard: Shard, words: Vocabulary, phase: BertPhase) -> Row:
    """Return the tokens a second of which the examples of an epoch are listed."""
    took = _timed(lambda number: Samples([shard], words, phase, (number, 0, 0)).epoch_size(), 3)
    return rate_row(name, "tokens/s", len(shard.tokens), took)


def seek_row(name: str, shards: list[Shard], words: Vocabulary, phase: BertPhase, folder: Path) -> Row:
    """Return the time from nothing but open shards and kept plans to the batches of a step in a far epoch (ms)."""

    def fresh() -> Samples:
        return Samples(shards, words, phase, (0, 0, 0), folder)

    far = int(fresh().sizes(_FAR * fresh().epoch_size())[_FAR]) // phase.global_batch_size + 3
    fresh().step(far)
    return time_row(name, _timed(lambda number: fresh().step(far + number), _REPEATS))
