"""Mixtures of sources: shares as they were asked for, every document equally often, any position at once."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overnight.batches.loader import Samples
from overnight.batches.mixture import Interleave, MixedSamples, mixture, shares
from overnight.config import BertPhase, Data, Mix, TextSource
from overnight.errors import DataError
from tests.batches.corpus import any_documents, book_like, shard, words
from tests.batches.test_loader import equal, of_steps

VOCABULARY = words()
PHASE = BertPhase(steps=100, global_batch_size=16, seq_len=64, micro_batch_size=4, max_predictions_per_seq=10)
SHARDS = [
    shard(book_like(1, 12), "train-books-00000.arrow", source="books"),
    shard(book_like(2, 6), "train-books-00001.arrow", source="books"),
    shard(book_like(3, 5), "train-web-00000.arrow", source="web"),
    shard(book_like(4, 3), "train-code-00000.arrow", source="code"),
]
WEIGHTS = {"books": Mix(weight=6), "web": Mix(weight=3), "code": Mix(weight=1)}


def mixed(mixes: Mapping[str, Mix] = WEIGHTS, cache: Path | None = None, **changes: object) -> MixedSamples:
    return MixedSamples(SHARDS, VOCABULARY, dataclasses.replace(PHASE, **changes), (7, 0, 0), cache, mixes)  # type: ignore[arg-type]


def weights(most: int = 8) -> st.SearchStrategy[list[float]]:
    return st.lists(st.floats(0.001, 1000), min_size=1, max_size=most).map(lambda found: [each / sum(found) for each in found])


@given(weights(), st.integers(0, 4_000_000_000))
def test_the_share_of_a_source_is_never_off_by_more_than_its_bound(asked: list[float], position: int) -> None:
    counts, k = Interleave(asked).counts(position), len(asked)
    bound = (1 + sum(1 / i for i in range(1, k - 1))) / 2
    assert sum(counts) == position and min(counts) >= 0
    # 2^-31 is to what shares are rounded, at each cut.
    assert max(abs(count - share * position) for count, share in zip(counts, asked, strict=True)) <= bound + k * position * 2.0**-31


@given(weights(3), st.integers(0, 1_000_000))
def test_of_three_sources_none_is_off_by_one_sequence(asked: list[float], position: int) -> None:
    assert max(abs(count - share * position) for count, share in zip(Interleave(asked).counts(position), asked, strict=True)) < 1


@given(weights(), st.integers(0, 3_000_000_000))
def test_each_source_is_read_in_its_own_order_without_a_gap(asked: list[float], start: int) -> None:
    stream = Interleave(asked)
    sources, places = stream.locate(np.arange(start, start + 500))
    before = stream.counts(start)
    for source in range(len(asked)):
        mine = places[sources == source]
        assert np.array_equal(mine, before[source] + np.arange(len(mine)))


@given(weights(), st.lists(st.integers(0, 4_000_000_000), min_size=1, max_size=20))
def test_a_position_is_found_alone_as_among_others(asked: list[float], positions: list[int]) -> None:
    stream = Interleave(asked)
    together = np.stack(stream.locate(np.array(positions)))
    alone = np.concatenate([np.stack(stream.locate(np.array([position]))) for position in positions], axis=1)
    assert np.array_equal(together, alone)


@given(any_documents(2), any_documents(2), st.floats(0.05, 0.95), st.integers(1, 300))
def test_every_example_of_a_source_is_read_equally_often(first: list[list[int]], second: list[list[int]], share: float, count: int) -> None:
    shards = [shard(first, "a", source="a"), shard(second, "b", source="b")]
    phase = dataclasses.replace(PHASE, nsp=False, short_seq_prob=0.0, seq_len=16)
    mixes = {"a": Mix(weight=share), "b": Mix(weight=1 - share)}
    stream = MixedSamples(shards, VOCABULARY, phase, (3, 0, 0), None, mixes)
    epochs, samples = stream.locate(np.arange(count))
    numbers, rows = stream.rows(epochs, samples)
    read = Counter(zip(numbers.tolist(), map(tuple, rows.tolist()), strict=True))
    for number, part in enumerate(stream.parts.values()):
        (plan,) = part._load(0)
        times = [read[number, tuple(row)] for row in plan.tolist()]
        assert max(times) - min(times) <= 1


def test_a_step_read_at_once_is_the_one_that_iteration_reaches() -> None:
    reached = mixed()
    for step in range(12):
        found = reached.step(step)
    assert all(equal(a, b) for a, b in zip(mixed().step(11).micro, found.micro, strict=True))


def test_neither_processes_nor_micro_batches_change_what_a_step_reads() -> None:
    whole = of_steps(mixed().step(5))
    assert whole == of_steps(*(mixed(micro_batch_size=2).step(5, rank, 2) for rank in range(2)))
    assert whole.total() == 16


def test_a_source_is_read_in_the_same_order_whatever_the_others_are() -> None:
    def books(mixes: Mapping[str, Mix]) -> list[tuple[int, ...]]:
        stream = mixed(mixes)
        epochs, samples = stream.locate(np.arange(60))
        numbers, rows = stream.rows(epochs, samples)
        return [tuple(row) for number, row in zip(numbers, rows.tolist(), strict=True) if stream.shards[number].source == "books"]

    alone, third = books({"books": Mix(weight=1)}), books({"books": Mix(weight=1), "web": Mix(weight=2)})
    assert len(alone) == 60 and third == alone[:20]


def test_epochs_read_a_source_so_many_times_while_another_is_read_once() -> None:
    stream = mixed({"books": Mix(epochs=1), "web": Mix(epochs=3), "code": Mix(epochs=2)})
    once = sum(mix.epochs * stream.parts[name].epoch_size() for name, mix in stream.mixes.items())
    counts = stream.interleave().counts(int(once))
    sizes = [part.epoch_size() for part in stream.parts.values()]
    assert counts == [sizes[0], 3 * sizes[1], 2 * sizes[2]]
    assert {name: round(passes, 6) for name, (_, passes) in stream.passes(int(once)).items()} == {"books": 1, "web": 3, "code": 2}


def test_plans_of_the_cache_give_the_same_batches(tmp_path: Path) -> None:
    found = [mixed(cache=tmp_path).step(9) for _ in range(2)]
    assert of_steps(found[0]) == of_steps(found[1]) == of_steps(mixed().step(9))
    assert len(list(tmp_path.iterdir())) >= len(SHARDS)


def test_provenance_names_the_sample_of_its_source() -> None:
    stream = mixed()
    found = [each for number in range(4) for each in stream.provenance(3, 1, number)]
    sizes = {name: part.epoch_size() for name, part in stream.parts.items()}
    assert len(found) == 16 and {str(each["shard"]).split("-")[1] for each in found} == {"books", "web", "code"}
    assert all(0 <= int(each["sample"]) < 2 * sizes[str(each["shard"]).split("-")[1]] for each in found)


def test_masks_of_two_sources_differ_where_their_samples_have_the_same_number() -> None:
    same = book_like(9, 8)
    shards = [shard(same, "a", source="a"), shard(same, "b", source="b")]
    stream = MixedSamples(shards, VOCABULARY, PHASE, (7, 0, 0), None, {"a": Mix(), "b": Mix()})
    epochs, samples = np.zeros(2, np.int64), np.array([5, 5 + (1 << 40)])
    numbers, rows = stream.rows(epochs, samples)
    rows[1], numbers[1] = rows[0], numbers[0]
    a, b = (stream.batch(epochs[i : i + 1], samples[i : i + 1], numbers[i : i + 1], rows[i : i + 1]) for i in range(2))
    assert a.lengths == b.lengths and not torch.equal(a.ids_N, b.ids_N)


def test_validation_reads_every_example_once_each_micro_batch_of_one_source() -> None:
    valid = Samples(SHARDS, VOCABULARY, PHASE, (7, 0, 1))
    plain = Samples([dataclasses.replace(each, source="") for each in SHARDS], VOCABULARY, PHASE, (7, 0, 1))
    steps = list(valid.whole())
    assert of_steps(*steps) == of_steps(*plain.whole())
    assert {step.source for step in steps} == {"books", "web", "code"} == set(steps[0].sources)
    assert all(step.sources == () for step in plain.whole())


def test_a_source_without_a_document_left_is_refused() -> None:
    with pytest.raises(DataError, match=r"data.sources.talk: no document is left to train on"):
        mixed({**WEIGHTS, "talk": Mix(weight=1)})


def test_which_sources_a_phase_reads_is_said_by_its_mixture_or_by_the_data() -> None:
    names = {name: TextSource(paths=["x"]) for name in ("books", "web", "code")}
    assert list(mixture(Data(sources=names), PHASE)) == ["books", "web", "code"]
    some = {**names, "web": TextSource(paths=["x"], weight=2.0)}
    assert list(mixture(Data(sources=some), PHASE)) == ["web"]
    own = dataclasses.replace(PHASE, mixture={"code": Mix(weight=1), "books": Mix(weight=3)})
    assert shares(mixture(Data(sources=some), own), {}) == {"books": 0.75, "code": 0.25}
    assert mixture(Data(), PHASE) == {}
