"""Order and random words: permutations, uniform, the same however they are asked for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.batches.order import key, mix, order, random_words

KEYS = st.integers(0, 2**64 - 1)


def chi_square(counts: np.ndarray) -> float:
    """Of a uniform distribution, in standard deviations from its mean."""
    expected, freedom = counts.sum() / counts.size, counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


@given(st.integers(1, 3000), KEYS)
def test_order_is_a_bijection_for_any_count_and_key(count: int, order_key: int) -> None:
    assert np.array_equal(np.sort(order(np.arange(count), count, order_key)), np.arange(count))


@given(st.integers(1, 2**40), KEYS, st.lists(st.integers(0, 2**40), min_size=1, max_size=20))
def test_order_of_a_part_is_the_part_of_the_order(count: int, order_key: int, wanted: list[int]) -> None:
    index = np.array(wanted) % count
    together = order(index, count, order_key)
    assert np.array_equal(together, [int(order(np.array(i), count, order_key)) for i in index])
    assert together.dtype == np.int64 and (together >= 0).all() and (together < count).all()
    assert np.array_equal(order(index[None], count, order_key), together[None])


@given(st.integers(1, 2**40), KEYS, st.lists(st.integers(0, 2**40), min_size=1, max_size=20))
def test_an_order_is_the_same_without_a_compiler(count: int, order_key: int, wanted: list[int]) -> None:
    index = np.array(wanted) % count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("overnight.batches.order._library", lambda: None)
        plain = order(index, count, order_key)
    assert np.array_equal(order(index, count, order_key), plain)


def test_a_key_gives_the_order_that_it_always_gave() -> None:
    # A run that is resumed by another version goes on in its order.
    assert order(np.arange(8), 8, key(1, 2, 3)).tolist() == [7, 5, 0, 4, 6, 1, 2, 3]
    assert order(2**33 + np.arange(3), 2**34 + 5, key(1, 2, 3)).tolist() == [12977246857, 12898360630, 2332761941]


def test_another_key_is_another_order() -> None:
    first = order(np.arange(1000), 1000, key(0, 1, 2))
    assert not np.array_equal(first, np.arange(1000))
    for other in (key(0, 1, 3), key(1, 1, 2), key(0, 2, 1), key(0, 1)):
        # Two random permutations agree at one place on average.
        assert (order(np.arange(1000), 1000, other) == first).sum() < 10


@pytest.mark.parametrize("count", [2, 3, 4, 5, 7, 16, 17, 100])
def test_every_item_is_as_likely_at_the_first_and_the_last_place(count: int) -> None:
    draws = np.array([order(np.array([0, count - 1]), count, key(9, seed)) for seed in range(40 * count + 400)])
    for place in draws.T:
        assert chi_square(np.bincount(place, minlength=count)) < 5


def test_neighbors_are_not_kept_together() -> None:
    steps = np.diff(order(np.arange(10_000), 10_000, 7))
    assert (np.abs(steps) == 1).mean() < 0.002
    assert abs(np.corrcoef(np.arange(10_000), order(np.arange(10_000), 10_000, 7))[0, 1]) < 0.05


def test_an_index_outside_is_our_mistake() -> None:
    for index, count in (([5], 5), ([-1], 5), ([0], 0)):
        with pytest.raises(AssertionError):
            order(np.array(index), count, 0)


def test_random_words_are_uniform_and_depend_on_both_counters() -> None:
    words = random_words(np.full(100_000, key(3), np.uint64), np.arange(100_000))
    for shift in (0, 8, 24, 56):
        assert abs(chi_square(np.bincount((words >> np.uint64(shift)).astype(np.uint8), minlength=256))) < 5
    assert len(np.unique(words)) == len(words)
    by_key = random_words(np.arange(100_000, dtype=np.uint64), np.zeros(1))
    assert abs(chi_square(np.bincount(by_key.astype(np.uint8), minlength=256))) < 5
    assert not np.isin(by_key, words).any()


def test_neighboring_words_are_independent() -> None:
    words = random_words(np.full(65_536, 5, np.uint64), np.arange(65_536))
    pairs = (words[:-1] >> np.uint64(60)) * np.uint64(16) + (words[1:] >> np.uint64(60))
    assert abs(chi_square(np.bincount(pairs.astype(np.int64), minlength=256))) < 5


@given(st.lists(st.integers(0, 2**64 - 1), max_size=5))
def test_a_key_is_the_mix_of_its_counters_one_by_one(counters: list[int]) -> None:
    word = np.zeros(1, np.uint64)
    for counter in counters:
        word = mix(word ^ np.uint64(counter))
    assert key(*counters) == int(word[0])
    assert 0 <= key(*counters) < 2**64


def test_keys_of_small_counters_do_not_collide() -> None:
    keys = {key(*counters) for counters in np.ndindex(12, 12, 12)} | {key(a, b) for a, b in np.ndindex(12, 12)}
    assert len(keys) == 12**3 + 12**2


def test_mix_is_that_of_splitmix64() -> None:
    # The first outputs of SplitMix64 seeded with 0, as published with java.util.SplittableRandom.
    golden = 0x9E3779B97F4A7C15
    states = np.array([0, golden, (2 * golden) % 2**64], np.uint64)
    assert [hex(w) for w in mix(states).tolist()] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]
