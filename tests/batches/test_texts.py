"""The tokens of a batch are those of its sequences, one after another, from whatever shards they come."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overnight.batches.matching import MATCHING
from overnight.batches.order import mix
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


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 10), st.integers(2, 30)), min_size=1, max_size=8), st.integers(0, 2**64 - 1))
def test_the_second_text_of_a_pair_has_tokens_of_the_first_and_others_of_its_own_shard(drawn: list[tuple[int, int, int]], key: int) -> None:
    halves = [long // 2 for _, _, long in drawn]
    rows = np.array([(a, a + long, a, a + half, MATCHING) for (_, a, long), half in zip(drawn, halves, strict=True)])
    starts = np.cumsum([0, *(long + half + 3 for (_, _, long), half in zip(drawn, halves, strict=True))])
    numbers, keys = np.array([number for number, *_ in drawn]), mix(np.arange(len(drawn), dtype=np.uint64) ^ np.uint64(key))
    ids, _ = sequences(CORPORA, numbers, rows, starts, keys, VOCABULARY)
    for (number, a, long), half, start in zip(drawn, halves, starts[:-1], strict=True):
        assert ids[start + 1 : start + 1 + long].tolist() == CORPORA[number][a : a + long].tolist()
        second = ids[start + 2 + long : start + 2 + long + half].tolist()
        assert set(second) <= set(CORPORA[number].tolist())


def test_no_runs_and_empty_ones_are_nothing() -> None:
    none, out = np.zeros(0, np.int64), np.full(3, 7)
    assert runs(none, none).tolist() == [] and runs(np.array([5, 9, 2]), np.array([2, 0, 3])).tolist() == [5, 6, 2, 3, 4]
    copy_runs(CORPORA, none, none, none, out, none)
    copy_runs(CORPORA, np.array([1, 0]), np.array([4, 4]), np.array([0, 0]), out, np.array([0, 1]))
    assert out.tolist() == [7, 7, 7]
    copy_runs(CORPORA, np.array([2, 0]), np.array([4, 5]), np.array([1, 2]), out, np.array([2, 0]))
    assert out.tolist() == [5, 6, 204]
