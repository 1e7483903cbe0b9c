"""What is expected of the lengths of a phase's sequences is what its samples have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from overnight.batches.lengths import expected_lengths
from overnight.batches.loader import Samples
from overnight.config import BertPhase, BytePhase
from tests.batches.corpus import book_like, shard, words

# Long documents, of which few sequences are the end.
BOOKS = shard(book_like(1, 12, most_sentences=2000))


@pytest.mark.parametrize(
    ("short", "nsp", "pairs"),
    [(short, False, pairs) for short in (0.0, 0.1, 0.5, 1.0) for pairs in (False, True)] + [(0.0, True, False), (0.1, True, False)],
)
def test_samples_have_the_expected_lengths(short: float, nsp: bool, pairs: bool) -> None:
    phase = BertPhase(
        steps=1, global_batch_size=1200, seq_len=96, micro_batch_size=1200, short_seq_prob=short, nsp=nsp, token_matching=pairs
    )
    stream = Samples([BOOKS], words(), phase, (0,))
    lengths = stream.lengths(stream.step_samples(0).rows)
    mean, square = expected_lengths(phase, pairs)
    assert lengths.mean() == pytest.approx(mean, rel=0.05) and (lengths**2).mean() == pytest.approx(square, rel=0.08)


@pytest.mark.parametrize(
    ("length", "settings"),
    [
        (64, {"whole_sentences": True, "short_seq_prob": 0.0}),
        (128, {"whole_sentences": True, "short_seq_prob": 0.0}),
        (512, {"whole_sentences": True, "short_seq_prob": 0.0}),
        (128, {"whole_sentences": True, "short_seq_prob": 1.0}),
        (128, {"nsp": True, "short_seq_prob": 1.0}),
        (512, {"nsp": True, "short_seq_prob": 1.0}),
    ],
)
def test_where_a_sentence_ends_is_expected(length: int, settings: dict[str, Any]) -> None:
    phase = BertPhase(steps=1, global_batch_size=1200, seq_len=length, micro_batch_size=1200, **{"nsp": False, **settings})
    stream = Samples([BOOKS], words(), phase, (0,))
    assert np.mean(stream.lengths(stream.step_samples(0).rows)) == pytest.approx(expected_lengths(phase).mean, rel=0.08)


def test_the_windows_of_a_byte_model_are_full() -> None:
    phase = BytePhase(steps=1, global_batch_size=4, seq_len=64)
    assert expected_lengths(phase) == (64, 64**2)
