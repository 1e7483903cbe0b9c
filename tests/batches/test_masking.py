"""Masks: how many, which, and what stands in their place."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight.batches.masking import context_free_loss, mask, predictions
from overnight.batches.order import key, random_words
from tests.batches.corpus import words

VOCABULARY = words()
FIRST_WORD, FIRST_CONTINUATION = 5, 140


def flat(lengths: list[int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids of sequences `[CLS] ... [SEP]`, every other one with a [SEP] in its middle, and their starts."""
    rng = np.random.default_rng(seed)
    parts = []
    for number, length in enumerate(lengths):
        ids = rng.integers(FIRST_WORD, VOCABULARY.size, length)
        if number % 2:
            ids[length // 2] = VOCABULARY.sep
        ids[0], ids[-1] = VOCABULARY.cls, VOCABULARY.sep
        parts.append(ids)
    return np.concatenate(parts), np.concatenate([[0], np.cumsum(lengths)])


def keys_of(count: int, first: int = 0) -> np.ndarray:
    return np.array([key(4, sample) for sample in range(first, first + count)], np.uint64)


def one_by_one(ids: np.ndarray, starts: np.ndarray, keys: np.ndarray, counts: np.ndarray, whole_word: bool) -> list[int]:
    """Return the offsets that are chosen, by a walk over the words (or tokens) of each sequence in the order of their luck."""
    chosen: list[int] = []
    for sequence, (start, end) in enumerate(pairwise(starts.tolist())):
        can = [ids[i] not in (VOCABULARY.cls, VOCABULARY.sep) for i in range(start, end)]
        found: list[list[int]] = []
        for i in range(start, end):
            joins = whole_word and i > start and can[i - start] and can[i - start - 1] and VOCABULARY.continuation[ids[i]]
            if joins:
                found[-1].append(i)
            elif can[i - start]:
                found.append([i])
        luck = {word[0]: int(random_words(keys[sequence : sequence + 1], np.array([(word[0] - start) * 4]))[0]) for word in found}
        left = int(counts[sequence])
        for word in sorted(found, key=lambda word: luck[word[0]]):
            if len(word) <= left:
                left -= len(word)
                chosen += word
    return sorted(chosen)


LENGTHS = st.lists(st.integers(3, 140), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("length", "rate", "most", "count"),
    [
        (128, 0.15, 20, 19),
        (512, 0.15, 80, 77),
        (512, 0.2, 80, 80),
        (3, 0.15, 20, 1),
        (10, 0.15, 20, 2),
        (20, 0.15, 20, 3),
        (64, 1.0, 10, 10),
        (512, 0.3, 0, 154),
    ],
)
def test_the_number_of_predictions_is_the_rounded_share_of_all_tokens(length: int, rate: float, most: int, count: int) -> None:
    assert predictions(np.array([length]), rate, most).tolist() == [count]
    # create_pretraining_data.py: min(max_predictions, max(1, int(round(len(tokens) * rate)))).
    assert count == min(most or length, max(1, round(length * rate)))


@settings(max_examples=100)
@given(LENGTHS, st.floats(0.01, 1.0), st.integers(1, 90), st.integers(0, 10**6), st.booleans())
def test_masking_changes_only_what_it_reports(lengths: list[int], rate: float, most: int, seed: int, whole_word: bool) -> None:
    ids, starts = flat(lengths, seed)
    before, counts = ids.copy(), predictions(np.array(lengths), rate, most)
    new, chosen, labels = mask(ids, starts, keys_of(len(lengths), seed), counts, VOCABULARY, whole_word)
    assert np.array_equal(ids, before)
    assert (np.diff(chosen) > 0).all()
    assert np.array_equal(labels, ids[chosen])
    assert not np.isin(labels, (VOCABULARY.cls, VOCABULARY.sep)).any()
    untouched = np.ones(len(ids), bool)
    untouched[chosen] = False
    assert np.array_equal(new[untouched], ids[untouched])
    assert (new >= 0).all() and (new < VOCABULARY.size).all()
    per_sequence = np.bincount(np.searchsorted(starts, chosen, "right") - 1, minlength=len(lengths))
    available = np.add.reduceat(~np.isin(ids, (VOCABULARY.cls, VOCABULARY.sep)), starts[:-1])
    if whole_word:
        assert (per_sequence <= counts).all()
    else:
        assert np.array_equal(per_sequence, np.minimum(counts, available))


@settings(max_examples=60)
@given(LENGTHS, st.integers(0, 10**6), st.booleans())
def test_a_sequence_is_masked_alike_whatever_stands_beside_it(lengths: list[int], seed: int, whole_word: bool) -> None:
    ids, starts = flat(lengths, seed)
    keys, counts = keys_of(len(lengths), seed), predictions(np.array(lengths), 0.15, 20)
    new, chosen, labels = mask(ids, starts, keys, counts, VOCABULARY, whole_word)
    for i, (start, end) in enumerate(pairwise(starts)):
        alone = mask(ids[start:end], np.array([0, end - start]), keys[i : i + 1], counts[i : i + 1], VOCABULARY, whole_word)
        mine = (chosen >= start) & (chosen < end)
        assert np.array_equal(alone[0], new[start:end])
        assert np.array_equal(alone[1], chosen[mine] - start)
        assert np.array_equal(alone[2], labels[mine])


@pytest.mark.parametrize("whole_word", [False, True])
def test_four_fifths_are_masked_a_tenth_random_a_tenth_kept(whole_word: bool) -> None:
    lengths = [128] * 2000
    ids, starts = flat(lengths, 0)
    new, chosen, labels = mask(ids, starts, keys_of(2000), predictions(np.array(lengths), 0.15, 20), VOCABULARY, whole_word)
    count, size = len(chosen), VOCABULARY.size
    masked, kept = new[chosen] == VOCABULARY.mask, new[chosen] == labels
    # A random token is [MASK], or the true one, once in the size of the vocabulary.
    for share, expected in ((masked.mean(), 0.8 + 0.1 / size), (kept.mean(), 0.1 + 0.1 / size)):
        assert abs(share - expected) < 5 * np.sqrt(expected * (1 - expected) / count)
    other = np.bincount(new[chosen][~masked & ~kept], minlength=size)
    other = np.delete(other, VOCABULARY.mask)
    assert abs(other.mean() * size - count * 0.1) < 5 * np.sqrt(count * 0.1) + 30
    assert np.abs(other - other.mean()).max() < 6 * np.sqrt(other.mean())


def test_every_place_is_as_likely() -> None:
    lengths = [34] * 20_000
    ids, starts = flat([34] * 2, 0)
    ids = np.tile(ids[:34], 20_000)
    _, chosen, _ = mask(ids, np.arange(20_001) * 34, keys_of(20_000), predictions(np.array(lengths), 0.15, 20), VOCABULARY, False)
    places = np.bincount(chosen % 34, minlength=34)
    assert places[0] == places[33] == 0 and places.sum() == 20_000 * 5
    assert np.abs(places[1:33] - places.sum() / 32).max() < 5 * np.sqrt(places.sum() / 32)
    assert starts[0] == 0


def test_another_key_is_another_mask() -> None:
    ids, starts = flat([128], 1)
    a, b = (mask(ids, starts, keys_of(1, first), np.array([19]), VOCABULARY, False)[1] for first in (0, 1))
    assert not np.array_equal(a, b)


def word_of(ids: np.ndarray) -> np.ndarray:
    """Number of the word of each token, one loop, -1 for [CLS] and [SEP]."""
    numbers, word = [], -1
    before = VOCABULARY.cls
    for token in ids.tolist():
        special = token in (VOCABULARY.cls, VOCABULARY.sep)
        if not special and (token < FIRST_CONTINUATION or before in (VOCABULARY.cls, VOCABULARY.sep)):
            word += 1
        numbers.append(-1 if special else word)
        before = token
    return np.array(numbers)


@settings(max_examples=100)
@given(LENGTHS, st.integers(0, 10**6), st.integers(1, 40))
def test_whole_words_are_predicted_with_all_their_pieces(lengths: list[int], seed: int, most: int) -> None:
    ids, starts = flat(lengths, seed)
    counts = predictions(np.array(lengths), 0.3, most)
    _, chosen, _ = mask(ids, starts, keys_of(len(lengths), seed), counts, VOCABULARY, True)
    for i, (start, end) in enumerate(pairwise(starts)):
        words_here = word_of(ids[start:end])
        picked = chosen[(chosen >= start) & (chosen < end)] - start
        names, sizes = np.unique(words_here[words_here >= 0], return_counts=True)
        taken = np.isin(names, words_here[picked])
        assert sizes[taken].sum() == len(picked) <= counts[i]
        # No word that would still fit was passed over.
        assert not len(names[~taken]) or sizes[~taken].min() > counts[i] - len(picked)


def test_a_word_longer_than_the_count_is_passed_over() -> None:
    ids = np.array([VOCABULARY.cls, FIRST_WORD, FIRST_CONTINUATION, FIRST_CONTINUATION + 1, VOCABULARY.sep])
    _, chosen, labels = mask(ids, np.array([0, 5]), keys_of(1), np.array([2]), VOCABULARY, True)
    assert len(chosen) == len(labels) == 0


def test_a_piece_at_the_start_of_a_segment_does_not_join_the_segment_before() -> None:
    c = FIRST_CONTINUATION
    ids = np.array([VOCABULARY.cls, FIRST_WORD, VOCABULARY.sep, c, c + 1, VOCABULARY.sep])
    picks = [tuple(mask(ids, np.array([0, 6]), keys_of(1, n), np.array([2]), VOCABULARY, True)[1]) for n in range(50)]
    assert set(picks) == {(1,), (3, 4)}


def test_the_loss_without_context_is_that_of_bayes_rule_on_what_stands_at_the_place() -> None:
    rng, size = np.random.default_rng(0), 30
    train, valid = rng.integers(0, 50, size), rng.integers(0, 50, size)
    p, share = (train + 1) / (train.sum() + size), valid / valid.sum()
    # What stands there, given the true token: itself, any token by chance, or [MASK], which is the last column.
    shown = np.hstack([0.1 * np.eye(size) + 0.1 / size, np.full((size, 1), 0.8)])
    posterior = p[:, None] * shown / (p @ shown)
    assert context_free_loss(train, valid) == pytest.approx(-(share[:, None] * shown * np.log(posterior)).sum(), rel=1e-12)


def test_the_loss_without_context_is_below_the_entropy_since_a_tenth_is_kept() -> None:
    uniform = np.full(4096, 1000)
    assert 0.85 < context_free_loss(uniform, uniform) / math.log(4096) < 0.95
    never_seen = np.where(np.arange(4096) < 10, 0, 1000)
    assert context_free_loss(never_seen, uniform) > context_free_loss(uniform, uniform)


@given(LENGTHS, st.integers(0, 1000), st.lists(st.integers(0, 200), min_size=8, max_size=8), st.booleans())
def test_what_is_chosen_is_what_a_walk_in_the_order_of_luck_chooses(
    lengths: list[int], seed: int, wanted: list[int], whole_word: bool
) -> None:
    ids, starts = flat(lengths, seed)
    keys, counts = keys_of(len(lengths), seed), np.array(wanted[: len(lengths)])
    _, chosen, labels = mask(ids, starts, keys, counts, VOCABULARY, whole_word)
    assert chosen.tolist() == one_by_one(ids, starts, keys, counts, whole_word) and np.array_equal(labels, ids[chosen])


@pytest.mark.parametrize("whole_word", [False, True])
def test_what_a_lower_rate_predicts_a_higher_one_does_too_but_for_whole_words(whole_word: bool) -> None:
    lengths = [40] * 200
    ids, starts = flat(lengths, 0)
    chosen = [
        set(mask(ids, starts, keys_of(200), predictions(np.array(lengths), rate, 0), VOCABULARY, whole_word)[1].tolist())
        for rate in (0.15, 0.2, 0.3)
    ]
    assert all((few <= many) != whole_word for few, many in pairwise(chosen))
