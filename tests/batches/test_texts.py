"""The tokens of a batch are those of its sequences, one after another, from whatever shards they come."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overnight.batches.texts import copy_runs, runs, sequences
from tests.batches.test_loader import VOCABULARY

# Shard, first token and length of the first text, and of the second.
ROWS = st.lists(st.tuples(st.integers(0, 2), *[st.integers(0, 40), st.integers(0, 9)] * 2), min_size=1, max_size=12)
CORPORA = [np.arange(100 * number, 100 * number + 50, dtype=np.uint16) for number in range(3)]


@given(ROWS)
def test_a_sequence_is_its_first_text_and_its_second_between_special_tokens(drawn: list[tuple[int, int, int, int, int]]) -> None:
    wanted_ids, wanted_segments, starts = [], [], [0]
    for number, a, long, b, second in drawn:
        first, other = CORPORA[number][a : a + long].tolist(), CORPORA[number][b : b + second].tolist()
        behind = [*other, VOCABULARY.sep] if second else []
        wanted_ids += [VOCABULARY.cls, *first, VOCABULARY.sep, *behind]
        wanted_segments += [0] * (long + 2) + [1] * len(behind)
        starts.append(len(wanted_ids))
    rows = np.array([(a, a + long, b, b + second, 0) for _, a, long, b, second in drawn])
    numbers, keys = np.array([number for number, *_ in drawn]), np.zeros(len(drawn), np.uint64)
    ids, segments = sequences(CORPORA, numbers, rows, np.array(starts), keys, VOCABULARY)
    assert ids.tolist() == wanted_ids and segments.tolist() == wanted_segments
    assert ids.dtype == segments.dtype == np.int64


def test_no_runs_and_empty_ones_are_nothing() -> None:
    none, out = np.zeros(0, np.int64), np.full(3, 7)
    assert runs(none, none).tolist() == [] and runs(np.array([5, 9, 2]), np.array([2, 0, 3])).tolist() == [5, 6, 2, 3, 4]
    copy_runs(CORPORA, none, none, none, out, none)
    copy_runs(CORPORA, np.array([1, 0]), np.array([4, 4]), np.array([0, 0]), out, np.array([0, 1]))
    assert out.tolist() == [7, 7, 7]
    copy_runs(CORPORA, np.array([2, 0]), np.array([4, 5]), np.array([1, 2]), out, np.array([2, 0]))
    assert out.tolist() == [5, 6, 204]
