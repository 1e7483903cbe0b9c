"""Pairs of a text and a corrupted part of it, and the label of each of their tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overnight.batches import matching
from overnight.batches.batch_size import pad_to_multiple
from overnight.batches.order import mix, random_words
from overnight.batches.packing import IGNORED, Batch
from tests.batches.test_loader import SHARDS, VOCABULARY, of_steps, samples

SHARE = 0.4
SPECIAL = VOCABULARY.is_special


def stream(**changes: object):  # type: ignore[no-untyped-def]
    return samples(**{"nsp": False, "token_matching": SHARE, "max_predictions_per_seq": 0, **changes})  # type: ignore[arg-type]


def parts(batch: Batch) -> list[tuple[list[int], list[int], list[int]]]:
    """Of each sequence of a batch: ids, segments and labels."""
    columns = [batch.ids_N, batch.segments_N, batch.targets["match"]]
    return [tuple(column[start:end].tolist() for column in columns) for start, end in zip(batch.starts[:-1], batch.starts[1:], strict=True)]  # type: ignore[misc]


@pytest.mark.parametrize("length", [8, 9, 10, 64, 65, 66])
def test_a_share_of_the_sequences_is_pairs_of_a_text_and_half_as_long_a_part_of_it(length: int) -> None:
    found = stream(seq_len=length, global_batch_size=2000, micro_batch_size=2000)
    epochs, numbers, _, rows, _ = found.step_samples(0)
    _, before = found.rows(epochs, numbers)
    pairs = matching.is_matching(rows)
    assert 0.35 < pairs.mean() < 0.45
    assert np.array_equal(rows[~pairs], before[~pairs]) and not matching.is_matching(before).any()
    first, second = (rows[pairs, end] - rows[pairs, end - 1] for end in (1, 3))
    assert (rows[pairs, 0] == before[pairs, 0]).all() and second.min() >= 1
    # At most one token less than half, where one more would be too long.
    assert ((first // 2 - second >= 0) & (first // 2 - second <= 1)).all() and (second == first // 2)[first < first.max()].all()
    lengths = found.lengths(rows)
    assert (lengths[pairs] == first + second + 3).all() and lengths.max() == length
    assert lengths[pairs].max() == length, "so that most batches keep their size"


def test_the_second_text_is_tokens_of_the_first_in_their_order_of_which_three_tenths_are_others() -> None:
    keys, sizes = np.arange(200, dtype=np.uint64), np.full(200, 500)
    places, corrupted, others, of = matching.second_texts(np.full(200, 80), np.full(200, 40), keys, sizes)
    assert len(places) == 200 * 40 and (np.diff(places.reshape(200, 40)) > 0).all(), "in order, none twice"
    assert places.min() >= 0 and places.max() < 80 and len({tuple(row) for row in places.reshape(200, 40).tolist()}) == 200
    assert len(corrupted) / len(places) == pytest.approx(0.3, abs=0.02) and (np.diff(corrupted) > 0).all()
    assert np.array_equal(of, corrupted // 40) and len(set(np.bincount(of).tolist())) > 5
    assert others.min() >= 0 and others.max() < 500 and len(np.unique(others)) > 450


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 29), st.integers(0, 2**64 - 1), st.integers(1, 2**33)), min_size=1, max_size=8)
)
def test_a_second_text_is_the_same_whatever_pairs_are_made_with_it(pairs: list[tuple[int, int, int, int]]) -> None:
    """One after the other: the tokens with the best luck, in order, and those of bad luck replaced."""
    first, key, size = (np.array([pair[i] for pair in pairs], kind) for i, kind in ((0, np.int64), (2, np.uint64), (3, np.int64)))
    counts = np.array([1 + less % length for length, less, *_ in pairs])
    kept, corrupted, others, of = matching.second_texts(first, counts, key, size)
    begin = 0
    for number, (length, count) in enumerate(zip(first.tolist(), counts.tolist(), strict=True)):
        here, own = slice(number, number + 1), mix(key[number : number + 1])
        luck = random_words(key[here], np.arange(length) * 4 + 3)
        assert kept[begin : begin + count].tolist() == sorted(np.argsort(luck)[:count].tolist())
        bad = random_words(own, np.arange(count) * 2) < 0.3 * 2.0**64
        assert (corrupted[of == number] - begin).tolist() == np.flatnonzero(bad).tolist()
        assert others[of == number].tolist() == [int(word) % int(size[number]) for word in random_words(own, np.arange(count) * 2 + 1)[bad]]
        begin += count


def test_a_label_says_the_segment_and_whether_the_other_has_the_token_as_it_stands_there() -> None:
    labeled = 0
    for step in range(4):
        for batch in stream().step(step).micro:
            assert batch.targets["match"].shape == batch.ids_N.shape
            for ids, segments, labels in parts(batch):
                if 1 not in segments:
                    assert set(labels) == {IGNORED}
                    continue
                sides = [{token for token, side in zip(ids, segments, strict=True) if side == segment} for segment in (0, 1)]
                expected = [
                    IGNORED if SPECIAL[token] else 2 * side + (token in sides[1 - side]) for token, side in zip(ids, segments, strict=True)
                ]
                assert labels == expected
                labeled += len(labels)
    assert labeled > 1000


def test_the_texts_are_those_of_the_shard_but_for_what_is_masked_and_replaced() -> None:
    found = stream(token_matching=1.0, global_batch_size=32, micro_batch_size=32)
    epochs, numbers, shards, rows, _ = found.step_samples(0)
    batch = found.batch(epochs, numbers, shards, rows)
    assert batch.predicted_M is not None
    true = batch.ids_N.clone()
    true[batch.predicted_M] = batch.targets["mlm"]
    for i, (number, row) in enumerate(zip(shards, rows, strict=True)):
        ids, tokens = true[batch.starts[i] : batch.starts[i + 1]].tolist(), SHARDS[number].tokens
        split = 1 + row[1] - row[0]
        assert ids[0] == VOCABULARY.cls and ids[split] == ids[-1] == VOCABULARY.sep
        assert ids[1:split] == tokens[row[0] : row[1]].tolist() and len(ids) == split + 2 + row[3] - row[2]


def test_the_share_falls_after_so_many_steps_and_those_before_stay_as_they_are() -> None:
    falling = stream(token_matching_steps=3, final_token_matching=0.1, global_batch_size=400, micro_batch_size=400)
    constant = stream(global_batch_size=400, micro_batch_size=400)
    for step in range(6):
        found, whole = (matching.is_matching(each.step_samples(step).rows) for each in (falling, constant))
        if step < 3:
            assert np.array_equal(found, whole) and found.mean() == pytest.approx(SHARE, abs=0.1)
        else:
            assert not (found & ~whole).any() and found.mean() == pytest.approx(0.1, abs=0.06)
    ended = stream(token_matching_steps=3).step(3).micro[0]
    assert (ended.targets["match"] == IGNORED).all() and not ended.segments_N.any()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_step_is_the_same_pairs_however_it_is_cut(world: int) -> None:
    whole = stream(micro_batch_size=16).step(5)
    shares = [stream(micro_batch_size=2).step(5, rank, world) for rank in range(world)]
    assert of_steps(*shares) == of_steps(whole)
    totals = [share.divisors() for share in shares]
    assert {name: sum(total[name] for total in totals) for name in totals[0]} == whole.divisors()
    labels = [sorted(label for batch in step.micro for label in batch.targets["match"].tolist()) for step in (whole, *shares)]
    assert labels[0] == sorted(label for share in labels[1:] for label in share)


def test_a_stream_that_is_filled_up_has_no_label_in_the_fill() -> None:
    found = stream()
    multiple = pad_to_multiple(found.phase, 4)
    filled, plain = (found.step(2, pad_to_multiple=size) for size in (multiple, 0))
    for more, less in zip(filled.micro, plain.micro, strict=True):
        count = len(less.ids_N)
        assert len(more.ids_N) > count and torch.equal(more.targets["match"][:count], less.targets["match"])
        assert (more.targets["match"][count:] == IGNORED).all() and more.targets["match"].shape == more.ids_N.shape


def test_without_a_share_nothing_is_labelled_and_nothing_else_changes() -> None:
    batch = samples(nsp=False).step(0).micro[0]
    assert "match" not in batch.targets and not batch.segments_N.any()
