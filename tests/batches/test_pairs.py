"""Pairs and segments: the rule of the original, example by example and in distribution."""

from __future__ import annotations

from functools import partial
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight.batches import pairs
from overnight.batches.pairs import plain_pairs, plain_segments, plan_pairs, plan_segments
from tests.batches.corpus import Documents, any_documents, book_like, shard

SEEDS = st.integers(0, 2**64 - 1)
LENGTHS = st.integers(8, 140)
SHARES = st.sampled_from([0.0, 0.1, 1.0])


def original(documents: Documents, length: int, short_seq_prob: float, rng: Random) -> list[tuple[int, int, int]]:
    """Lengths of A and B before they are cut, and is_random, as `create_instances_from_document` does it token by token.

    Written from its description; the short target is drawn for each example instead of each document, as here.
    """
    found = []
    for number, document in enumerate(documents):
        chunk: list[int] = []
        i = 0
        target = rng.randint(2, length - 3) if rng.random() < short_seq_prob else length - 3
        while i < len(document):
            chunk.append(document[i])
            if i == len(document) - 1 or sum(chunk) >= target:
                split = rng.randint(1, len(chunk) - 1) if len(chunk) >= 2 else 1
                a, is_random = sum(chunk[:split]), 0
                if len(chunk) == 1 or rng.random() < 0.5:
                    is_random, b = 1, 0
                    other = rng.choice([n for n in range(len(documents)) if n != number] or [number])
                    for sentence in documents[other][rng.randint(0, len(documents[other]) - 1) :]:
                        b += sentence
                        if b >= target - a:
                            break
                    i -= len(chunk) - split
                else:
                    b = sum(chunk[split:])
                found.append((a, b, is_random))
                chunk = []
                target = rng.randint(2, length - 3) if rng.random() < short_seq_prob else length - 3
            i += 1
    return found


def one_by_one(a: int, b: int, room: int) -> tuple[int, int]:
    """`truncate_seq_pair`: the longer loses a token, B at a tie, until both fit."""
    while a + b > room:
        if a > b:
            a -= 1
        else:
            b -= 1
    return a, b


@settings(max_examples=150)
@given(any_documents(), LENGTHS, SHARES, SEEDS)
def test_both_segments_are_whole_within_one_document_and_fit(documents: Documents, length: int, short: float, seed: int) -> None:
    corpus = shard(documents)
    bounds = corpus.sentence_starts[corpus.document_sentences]
    plan = plan_pairs(corpus, length, short, seed)
    assert plan.dtype == np.int32 and plan.shape[1] == pairs.COLUMNS and len(plan) >= len(documents)
    a_start, a_end, b_start, b_end, is_random = plan.T
    assert (a_end > a_start).all() and (b_end > b_start).all()
    assert (a_end - a_start + b_end - b_start + 3 <= length).all()
    of_a, of_b = np.searchsorted(bounds, a_start, "right"), np.searchsorted(bounds, b_start, "right")
    assert (a_end <= bounds[of_a]).all() and (b_end <= bounds[of_b]).all()
    assert np.isin(is_random, (0, 1)).all()
    assert (of_a[is_random == 0] == of_b[is_random == 0]).all() and (a_end <= b_start)[is_random == 0].all()
    if len(documents) > 1:
        assert (of_a != of_b)[is_random == 1].all()


@settings(max_examples=150)
@given(any_documents(), SHARES, SEEDS)
def test_without_truncation_every_sentence_is_in_one_a_or_true_b_and_b_goes_on_from_a(
    documents: Documents, short: float, seed: int
) -> None:
    # So long that nothing is cut: a chunk is at most its target and the longest sentence.
    corpus, length = shard(documents), 10_000
    plan = plan_pairs(corpus, length, short, seed)
    times = np.zeros(len(corpus.tokens), int)
    starts = set(corpus.sentence_starts.tolist())
    for a_start, a_end, b_start, b_end, is_random in plan.tolist():
        assert {a_start, a_end, b_start, b_end} <= starts
        times[a_start:a_end] += 1
        if not is_random:
            assert b_start == a_end
            times[b_start:b_end] += 1
    assert (times == 1).all()


@settings(max_examples=60)
@given(any_documents(), st.integers(8, 60), SEEDS)
def test_examples_follow_one_another_also_where_segments_are_cut(documents: Documents, length: int, seed: int) -> None:
    plan = plan_pairs(shard(documents), length, 0.1, seed)
    assert (plan[1:, pairs.A_START] >= plan[:-1, pairs.A_END]).all()
    true = np.flatnonzero(plan[:-1, pairs.IS_RANDOM] == 0)
    assert (plan[true + 1, pairs.A_START] >= plan[true, pairs.B_END]).all()


def test_true_pairs_that_are_cut_lie_on_both_sides_of_a_sentence_boundary() -> None:
    corpus = shard(book_like(1, 30))
    plan = plan_pairs(corpus, 64, 0.1, 5)
    true = plan[plan[:, pairs.IS_RANDOM] == 0]
    boundary = corpus.sentence_starts[np.searchsorted(corpus.sentence_starts, true[:, pairs.A_END], "left")]
    assert len(true) > 100
    assert (boundary <= true[:, pairs.B_START]).all()


def test_half_of_the_pairs_are_random_and_a_lone_sentence_always_is() -> None:
    # Sentences of 10 tokens: no chunk of 125 tokens has one sentence only, but at the end of a document.
    corpus = shard([[10] * 400 for _ in range(50)])
    share = plan_pairs(corpus, 128, 0.0, 3)[:, pairs.IS_RANDOM]
    assert abs(share.mean() - 0.5) < 4 * 0.5 / np.sqrt(len(share))
    assert plan_pairs(shard([[200] * 30] * 5), 128, 0.1, 4)[:, pairs.IS_RANDOM].all()
    assert plan_pairs(shard([[5]] * 9), 128, 0.1, 4)[:, pairs.IS_RANDOM].all()


def test_the_random_document_and_its_first_sentence_are_uniform() -> None:
    documents = [[10] * 40 for _ in range(5)]
    corpus = shard(documents)
    rows = np.concatenate([plan_pairs(corpus, 128, 0.0, seed) for seed in range(200)])
    rows = rows[rows[:, pairs.IS_RANDOM] == 1]
    of_a, of_b = rows[:, pairs.A_START] // 400, rows[:, pairs.B_START] // 400
    counts = np.zeros((5, 5))
    np.add.at(counts, (of_a, of_b), 1)
    assert (np.diag(counts) == 0).all()
    expected = counts.sum(1, keepdims=True) / 4
    off = ~np.eye(5, dtype=bool)
    assert (np.abs(counts - expected)[off] < 5 * np.sqrt(np.broadcast_to(expected, (5, 5))[off])).all()
    first = np.bincount(rows[:, pairs.B_START] % 400 // 10, minlength=40)
    assert first.min() > 0 and np.abs(first - first.mean()).max() < 5 * np.sqrt(first.mean())


def test_a_corpus_of_one_document_takes_b_from_itself() -> None:
    plan = plan_pairs(shard([[10] * 100]), 64, 0.1, 1)
    assert (plan[:, pairs.IS_RANDOM] == 1).any() and (plan[:, pairs.B_END] <= 1000).all()


@pytest.mark.parametrize(("length", "short"), [(32, 0.1), (128, 0.1), (128, 0.0), (64, 1.0)])
def test_matches_the_original_in_distribution(length: int, short: float) -> None:
    documents = book_like(11, 400)
    plan = plan_pairs(shard(documents), length, short, 2)
    theirs = original(documents, length, short, Random(3))
    a, b = (plan[:, end] - plan[:, start] for start, end in ((pairs.A_START, pairs.A_END), (pairs.B_START, pairs.B_END)))
    cut = np.array([one_by_one(a, b, length - 3) for a, b, _ in theirs])
    is_random = np.array([r for _, _, r in theirs])
    assert abs(len(plan) - len(theirs)) < 0.04 * len(theirs)
    for ours, other in (
        (a, cut[:, 0]),
        (b, cut[:, 1]),
        (a + b, cut.sum(1)),
        (a == b, cut[:, 0] == cut[:, 1]),
        (plan[:, pairs.IS_RANDOM], is_random),
        ((a + b)[plan[:, pairs.IS_RANDOM] == 0], cut.sum(1)[is_random == 0]),
    ):
        error = np.sqrt(np.var(ours) / len(ours) + np.var(other) / len(other))
        assert abs(np.mean(ours) - np.mean(other)) < 5 * error + 1e-9
        # The whole distribution: Kolmogorov-Smirnov at about 1 in 10,000.
        grid = np.union1d(ours, other)
        distance = np.abs(
            np.searchsorted(np.sort(ours), grid, "right") / len(ours) - np.searchsorted(np.sort(other), grid, "right") / len(other)
        ).max()
        assert distance < 2.2 * np.sqrt(1 / len(ours) + 1 / len(other))


def test_short_targets_are_a_tenth_of_the_examples_and_uniform() -> None:
    # One-token sentences that nearly never end a document: an example is exactly its target.
    corpus = shard([[1] * 200_000, [1] * 200_000])
    plan = plan_pairs(corpus, 35, 0.1, 1)
    whole = plan[plan[:, pairs.IS_RANDOM] == 0]
    totals = whole[:, pairs.B_END] - whole[:, pairs.A_START]
    assert totals.min() == 2 and totals.max() == 32
    counts = np.bincount(totals, minlength=33)[2:]
    short = len(totals) * 0.1 / 31
    assert np.abs(counts[:-1] - short).max() < 5 * np.sqrt(short)
    assert abs(1 - counts[-1] / len(totals) - 0.1 * 30 / 31) < 0.01
    a = whole[:, pairs.A_END] - whole[:, pairs.A_START]
    always = plan_pairs(corpus, 35, 1.0, 1)
    always = always[always[:, pairs.IS_RANDOM] == 0]
    assert np.unique(always[:, pairs.B_END] - always[:, pairs.A_START]).tolist() == list(range(2, 33))
    full = np.bincount(a[totals == 32], minlength=32)[1:32]
    assert np.abs(full - full.mean()).max() < 5 * np.sqrt(full.mean())


@given(st.integers(1, 400), st.integers(1, 400), st.integers(5, 500))
def test_truncation_in_closed_form_equals_one_token_at_a_time(a: int, b: int, room: int) -> None:
    excess = max(0, a + b - room)
    cut = pairs._tokens_off_a(a, b, excess)
    assert (a - cut, b - (excess - cut)) == one_by_one(a, b, room)


@given(st.integers(0, 1000), st.integers(0, 300), st.integers(0, 300), SEEDS)
def test_truncation_drops_the_count_from_both_ends(start: int, kept: int, cut: int, seed: int) -> None:
    new_start, new_end = pairs._truncate(start, start + kept + cut, cut, Random(seed))
    assert start <= new_start and new_end <= start + kept + cut and new_end - new_start == kept


def test_truncation_takes_the_front_half_of_the_time() -> None:
    fronts = [pairs._truncate(0, 20, 10, Random(seed))[0] for seed in range(2000)]
    assert abs(np.mean(fronts) - 5) < 0.2 and abs(np.var(fronts) - 2.5) < 0.4


def test_the_plan_depends_on_the_seed_only_and_another_seed_is_another() -> None:
    corpus = shard(book_like(3, 20))
    for make in (plan_pairs, plan_segments):
        assert np.array_equal(make(corpus, 64, 0.1, 8), make(corpus, 64, 0.1, 8))
        assert not np.array_equal(make(corpus, 64, 0.1, 8)[:50], make(corpus, 64, 0.1, 9)[:50])


@settings(max_examples=100)
@given(any_documents(), LENGTHS, SHARES, SEEDS)
def test_segments_cover_every_token_once_within_documents(documents: Documents, length: int, short: float, seed: int) -> None:
    corpus = shard(documents)
    plan = plan_segments(corpus, length, short, seed)
    a_start, a_end, b_start, b_end, is_random = plan.T
    assert np.array_equal(np.concatenate([np.arange(s, e) for s, e in zip(a_start, a_end, strict=True)]), np.arange(len(corpus.tokens)))
    assert (a_end - a_start + 2 <= length).all() and (a_end > a_start).all()
    assert (b_start == b_end).all() and not is_random.any()
    assert np.isin(corpus.sentence_starts[corpus.document_sentences][:-1], a_start).all()


def test_segments_fill_the_length_but_for_the_short_ones_and_the_ends() -> None:
    plan = plan_segments(shard([[7] * 1000]), 66, 0.0, 0)
    sizes = plan[:, pairs.A_END] - plan[:, pairs.A_START]
    assert (sizes[:-1] == 64).all()


@settings(max_examples=100)
@given(any_documents(), LENGTHS, SHARES, SEEDS)
def test_segments_of_whole_sentences_cover_every_token_and_end_with_a_sentence_or_full(
    documents: Documents, length: int, short: float, seed: int
) -> None:
    corpus = shard(documents)
    plan = plan_segments(corpus, length, short, seed, whole_sentences=True)
    starts, ends = plan[:, pairs.A_START], plan[:, pairs.A_END]
    assert np.array_equal(np.concatenate([np.arange(s, e) for s, e in zip(starts, ends, strict=True)]), np.arange(len(corpus.tokens)))
    full = ends - starts == length - 2
    assert (ends - starts <= length - 2).all() and (full | np.isin(ends, corpus.sentence_starts)).all()
    assert np.isin(corpus.sentence_starts[corpus.document_sentences][:-1], starts).all()


def test_a_segment_of_whole_sentences_holds_as_many_as_its_length() -> None:
    # Of 62 tokens: two sentences of 30, one of 50 that the next one of 20 does not fit behind, and one of 100 in two parts, the second with what follows.
    plan = plan_segments(shard([[30, 30, 50, 20, 20, 100, 15, 10]]), 64, 0.0, 0, whole_sentences=True)
    assert plan[:, pairs.A_END].tolist() == [60, 110, 150, 212, 265, 275]


def test_short_segments_of_whole_sentences_are_one_sentence_at_least() -> None:
    corpus = shard(book_like(2, 40))
    plan = plan_segments(corpus, 128, 1.0, 3, whole_sentences=True)
    one = np.diff(corpus.sentence_starts)
    sizes = plan[:, pairs.A_END] - plan[:, pairs.A_START]
    assert sizes.min() >= min(one.min(), 126) and sizes.mean() < 0.7 * 126


def test_a_corpus_without_documents_has_an_empty_plan() -> None:
    for make in (plan_pairs, plan_segments):
        assert make(shard([]), 64, 0.1, 0).shape == (0, pairs.COLUMNS)


@pytest.mark.skipif(pairs._library() is None, reason="no C compiler")
@settings(max_examples=200)
@given(any_documents(0), st.integers(5, 2100), st.sampled_from([0.0, 0.1, 0.5, 1.0]), SEEDS)
def test_c_gives_the_plan_of_python_example_by_example(documents: Documents, length: int, short: float, seed: int) -> None:
    corpus = shard(documents)
    sentences = partial(plan_segments, whole_sentences=True), partial(plain_segments, whole_sentences=True)
    for fast, plain in ((plan_pairs, plain_pairs), (plan_segments, plain_segments), sentences):
        assert np.array_equal(fast(corpus, length, short, seed), plain(corpus, length, short, seed))


@pytest.mark.skipif(pairs._library() is None, reason="no C compiler")
@pytest.mark.parametrize("length", [32, 128, 512])
def test_c_gives_the_plan_of_python_also_where_long_sentences_are_cut(length: int) -> None:
    # Up to thousands of tokens are cut from a sentence, a bit each.
    corpus = shard([*book_like(2, 60), *book_like(3, 5, mean=1500)])
    assert np.array_equal(plan_pairs(corpus, length, 0.1, 9), plain_pairs(corpus, length, 0.1, 9))


def test_without_a_compiler_the_plan_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = shard(book_like(1, 30))
    makes = (plan_pairs, plan_segments, partial(plan_segments, whole_sentences=True))
    made = [make(corpus, 64, 0.1, 5) for make in makes]
    monkeypatch.setattr(pairs, "_library", lambda: None)
    assert all(np.array_equal(make(corpus, 64, 0.1, 5), plan) for make, plan in zip(makes, made, strict=True))
