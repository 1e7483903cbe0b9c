"""Streams: every byte once an epoch, each stream on end, and the same whatever the processes, the micro-batch and the step begun at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight.batches import concat_documents
from overnight.batches.concat_documents import Documents, Joined
from overnight.batches.order import key, order
from overnight.batches.packing import IGNORED, Sizes, StepBatches
from overnight.batches.streams import VALIDATION_STREAMS, Streams
from overnight.config import BytePhase, Phase
from overnight.corpus.shards import Shard
from overnight.errors import ConfigError, DataError

SEED = (7, 0, 0)


def corpus(lengths: Sequence[int], files: int = 1, labels: bool = False, seed: int = 0) -> list[Shard]:
    """Documents of random bytes in some files; every third has no label."""
    rng = np.random.default_rng(seed)
    found = []
    for number, part in enumerate(np.array_split(np.array(lengths, np.int64), files)):
        values = rng.normal(size=len(part)).astype(np.float32)
        values[::3] = np.nan
        text = rng.integers(0, 256, part.sum()).astype(np.uint8)
        starts = np.concatenate([[0], np.cumsum(part)])
        found.append(Shard(f"train-{number:05d}", text, starts, np.arange(len(part) + 1), values if labels else None))
    return found


def texts(shards: list[Shard]) -> list[bytes]:
    return [s.tokens[a:b].tobytes() for s in shards for a, b in pairwise(s.sentence_starts)]


def values(shards: list[Shard]) -> np.ndarray:
    return np.concatenate([shard.labels for shard in shards if shard.labels is not None])


def phase(batch: int = 4, length: int = 8, shards: int = 0, micro: int = 4, label: float = 0.0, reshuffle: bool = True) -> Phase:
    return BytePhase(
        100,
        batch,
        seq_len=length,
        num_document_groups=shards or batch,
        micro_batch_size=min(micro, batch),
        label_weight=label,
        reshuffle=reshuffle,
    )


def rows(steps: Sequence[StepBatches]) -> list[tuple[int, int, bool, bytes, bytes, tuple[tuple[int, float], ...]]]:
    """What the steps hold, row by row: step, stream, fresh, inputs up to the fill, predicted bytes, places and values of labels."""
    found = []
    for number, step in enumerate(steps):
        for batch in step.micro:
            ends: list[tuple[int, float]] = []
            if batch.ends_K is not None:
                ends = list(zip(batch.ends_K.tolist(), batch.targets["label"].tolist(), strict=True))
                assert [end for end, _ in ends] == sorted(batch.ends_K.tolist())
            width = batch.ids_BT.shape[1]
            for row, (stream, ids, fresh, byte) in enumerate(
                zip(batch.streams.tolist(), batch.ids_BT.tolist(), batch.fresh_B.tolist(), batch.targets["byte"].tolist(), strict=True)
            ):
                predicted = [target for target in byte if target != IGNORED]
                assert byte == predicted + [IGNORED] * (width - len(predicted))
                mine = tuple((end % width, label) for end, label in ends if end // width == row)
                inputs = min(width, len(predicted) + 1)
                assert not any(ids[inputs:])
                found.append((number, stream, fresh, bytes(ids[:inputs]), bytes(predicted), mine))
    return found


def naive(shards: list[Shard], given_phase: Phase, steps: int, seed: tuple[int, ...] = SEED) -> list[list[tuple[bool, bytes, bytes]]]:
    """Each stream read by a cursor that walks on: fresh, inputs, predicted bytes of its windows."""
    documents, batch, length = texts(shards), given_phase.global_batch_size, given_phase.seq_len
    strings: list[bytes] = []

    def add_epoch() -> None:
        epoch = len(strings) // given_phase.num_document_groups if given_phase.reshuffle else 0
        order_key = key(*seed, 2, epoch)
        whole = b"".join(documents[i] for i in order(np.arange(len(documents)), len(documents), order_key))
        bounds = Joined(Documents(shards), order_key, given_phase.num_document_groups).starts_S.tolist()
        assert bounds[0] == 0 and bounds[-1] == len(whole)
        strings.extend(whole[a:b] for a, b in pairwise(bounds))

    streams = []
    for stream in range(batch):
        windows: list[tuple[bool, bytes, bytes]] = []
        number = stream
        while len(windows) < steps:
            while number >= len(strings):
                add_epoch()
            text = strings[number]
            windows += [(at == 0, text[at : at + length], text[at + 1 : at + 1 + length]) for at in range(0, len(text), length)]
            number += batch
        streams.append(windows[:steps])
    return streams


LENGTHS = st.lists(st.integers(1, 40), min_size=6, max_size=30)
PHASES = st.builds(phase, st.integers(1, 5), st.integers(1, 17), st.integers(5, 6), st.just(1), reshuffle=st.booleans())


@settings(max_examples=40)
@given(LENGTHS, PHASES, st.integers(1, 3))
def test_steps_are_those_of_streams_that_walk_on(lengths: list[int], given_phase: Phase, files: int) -> None:
    shards = corpus(lengths, files)
    streams = Streams(shards, given_phase, SEED)
    steps = [streams.step(n) for n in range(12)]
    expected = naive(shards, given_phase, 12)
    assert [(f, i, p) for _, _, f, i, p, _ in rows(steps)] == [expected[stream][n] for n in range(12) for stream in range(len(expected))]
    for n, step in enumerate(steps):
        assert step.tokens == step.divisors()["byte"] == sum(len(stream[n][2]) for stream in expected)
        assert step.sequences == given_phase.global_batch_size
        windows = [len(stream[n][1]) for stream in expected]
        assert step.sizes == Sizes(sum(windows), sum(read * read for read in windows), step.tokens, 0)
        assert {batch.ids_BT.shape for batch in step.micro} == {(1, given_phase.seq_len)}


@settings(max_examples=40)
@given(LENGTHS, PHASES)
def test_any_step_is_reached_at_once(lengths: list[int], given_phase: Phase) -> None:
    shards = corpus(lengths)
    walked = Streams(shards, given_phase, SEED)
    steps = [walked.step(n) for n in range(30)]
    for n in (29, 0, 17):
        assert rows([Streams(shards, given_phase, SEED).step(n)]) == rows([steps[n]]) == rows([walked.step(n)])


def test_what_is_passed_over_is_as_many_windows_of_each_stream() -> None:
    passing, plain = (Streams(corpus([9, 30, 14, 70, 5, 22]), phase(), SEED) for _ in range(2))
    passing.passed_over = 8
    assert rows([passing.step(n) for n in range(9)]) == rows([plain.step(n) for n in range(2, 11)])
    assert passing.provenance(5, 1, 0) == plain.provenance(7, 1, 0)


@settings(max_examples=40)
@given(LENGTHS, st.integers(0, 3), st.booleans())
def test_an_epoch_reads_every_document_once_whole_and_in_another_order(lengths: list[int], extra: int, reshuffle: bool) -> None:
    shards = corpus(lengths)
    shards_of_epoch = 3 + extra
    given_phase = phase(3, 5, shards_of_epoch, reshuffle=reshuffle)
    streams = naive(shards, given_phase, 3 * sum(lengths))  # the first test compares it with Streams
    # Shards in the order of their numbers, each stream's windows put together again.
    strings: dict[int, bytes] = {}
    for stream, windows in enumerate(streams):
        number = stream - 3
        for fresh, inputs, predicted in windows:
            number += 3 * fresh
            strings[number] = strings.get(number, b"") + (inputs[:1] if fresh else b"") + predicted
    orders = []
    for epoch in range(2):
        found = b"".join(strings[epoch * shards_of_epoch + s] for s in range(shards_of_epoch))
        numbers = order(np.arange(len(lengths)), len(lengths), key(*SEED, 2, epoch * reshuffle)).tolist()
        assert sorted(numbers) == list(range(len(lengths)))
        assert found == b"".join(texts(shards)[i] for i in numbers)
        orders.append(numbers)
    assert reshuffle or orders[0] == orders[1]


@given(LENGTHS, st.integers(1, 40), st.integers(0, 2**64 - 1))
def test_shards_are_cut_between_documents_and_nearly_equal(lengths: list[int], most: int, order_key: int) -> None:
    shards = min(most, len(lengths))
    cut = Joined(Documents(corpus(lengths)), order_key, shards)
    ends = np.cumsum([0, *np.array(lengths)[order(np.arange(len(lengths)), len(lengths), order_key)]])
    assert set(cut.starts_S) <= set(ends) and len(cut.starts_S) == shards + 1
    assert (np.diff(cut.starts_S) > 0).all() and cut.starts_S[-1] == sum(lengths)
    # Each cut is within half of the longest document of its place, unless documents are so few that it had to move.
    if len(lengths) >= 4 * shards and min(lengths) * 4 > max(lengths):
        places = np.arange(shards + 1) * sum(lengths) / shards
        assert np.abs(cut.starts_S - places).max() <= max(lengths) / 2


def test_the_documents_are_ordered_in_blocks_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = Documents(corpus(list(range(1, 200)), 3))
    whole = Joined(documents, 5, 10)
    monkeypatch.setattr(concat_documents, "_BLOCK", 7)
    blocks = Joined(documents, 5, 10)
    assert (whole._starts == blocks._starts).all() and (whole.starts_S == blocks.starts_S).all()


@given(LENGTHS, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.integers(0, 25))
def test_processes_and_micro_batches_do_not_change_the_bytes(lengths: list[int], world: int, micro: int, n: int) -> None:
    shards = corpus(lengths, labels=True)
    given_phase = phase(4, 6, 5, label=0.5)
    whole = Streams(shards, given_phase, SEED).step(n)
    cut = replace(given_phase, micro_batch_size=micro)
    parts = [Streams(shards, cut, SEED).step(n, rank, world) for rank in range(world)]
    assert rows([whole]) == [(0, *row[1:]) for part in parts for row in rows([part])]
    assert all((part.tokens, part.sequences) == (whole.tokens, 4) for part in parts)
    for rank, part in enumerate(parts):
        assert torch.cat([batch.streams for batch in part.micro]).tolist() == list(Streams(shards, cut, SEED).stream_numbers(rank, world))
        assert all(len(batch.streams) == min(micro, 4 // world) for batch in part.micro)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 20), min_size=6, max_size=15), PHASES)
def test_labels_stand_at_the_last_byte_of_their_documents(lengths: list[int], given_phase: Phase) -> None:
    shards = corpus(lengths, files=2, labels=True)
    streams = Streams(shards, replace(given_phase, label_weight=0.1, num_document_groups=6, reshuffle=False), SEED)
    found: list[tuple[int, int, float]] = []  # shard, place in it, label
    at: dict[int, tuple[int, int]] = {}
    for n in count():
        for _, stream, fresh, inputs, _, ends in rows([streams.step(n)]):
            number, before = at.get(stream, (stream - given_phase.global_batch_size, 0))
            if fresh:
                number, before = number + given_phase.global_batch_size, 0
            found += [(number, before + place, label) for place, label in ends]
            at[stream] = (number, before + len(inputs))
        if min(number for number, _ in at.values()) >= 6:
            break
    numbers = order(np.arange(len(lengths)), len(lengths), key(*SEED, 2, 0))
    ends_D = np.cumsum(np.array(lengths)[numbers])
    bounds = Joined(streams.documents, key(*SEED, 2, 0), 6).starts_S
    expected = {
        (shard := int(np.searchsorted(bounds, end - 1, side="right")) - 1, int(end - 1 - bounds[shard]), float(label))
        for end, label in zip(ends_D, values(shards)[numbers], strict=True)
        if not np.isnan(label)
    }
    seen = [row for row in found if row[0] < 6]
    assert sorted(seen) == sorted(expected)


def test_without_the_auxiliary_objective_there_are_no_labels() -> None:
    (batch,) = Streams(corpus([9] * 8, labels=True), phase(), SEED).step(0).micro
    assert batch.ends_K is None and set(batch.targets) == {"byte"}
    (batch,) = Streams(corpus([9] * 8, labels=True), phase(length=4, label=1.0), SEED).step(0).micro
    assert batch.ends_K is not None and len(batch.ends_K) == 0 and batch.targets["label"].dtype == torch.float32


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 20))
def test_a_whole_split_is_read_once_in_streams_that_begin_fresh(lengths: list[int], length: int) -> None:
    shards = corpus(lengths)
    streams = Streams(shards, phase(length=length), SEED)
    walk = streams.whole()
    found: dict[int, bytes] = {}
    for n, stream, fresh, inputs, predicted, _ in rows(walk):
        assert fresh == (n == 0) and ((stream not in found) == fresh)
        found[stream] = found.get(stream, inputs[:1]) + predicted
    assert list(found) == list(range(min(VALIDATION_STREAMS, len(lengths))))
    numbers = order(np.arange(len(lengths)), len(lengths), key(*SEED, 2, 0))
    assert b"".join(found.values()) == b"".join(texts(shards)[i] for i in numbers)
    assert sum(step.tokens for step in walk) == sum(lengths) - len(found)
    assert all(step.sequences == len(step.micro[0].streams) and step.tokens == step.divisors()["byte"] for step in walk)


def test_validation_windows_are_the_first_of_the_whole_and_the_same_every_time() -> None:
    shards = corpus([50] * 60)
    streams = Streams(shards, phase(length=10), SEED)
    whole = streams.whole()
    held = streams.validation_steps(40)  # 16 streams: three steps
    assert len(held) == 3 and rows(held) == rows(whole[:3]) == rows(Streams(shards, phase(length=10), SEED).validation_steps(40))
    assert len(streams.validation_steps(10**9)) == len(whole) and rows([held[-1]]) == rows([whole[2]])
    assert {stream for _, stream, *_ in rows(held)} == set(range(16))
    with pytest.raises(IndexError):
        held[3]


@pytest.mark.parametrize(("count", "steps"), [(9, 3), (10, 4), (12, 6), (15, 9), (99, 9)])
def test_a_validation_reads_as_many_windows_as_are_asked_for_also_where_streams_end_early(count: int, steps: int) -> None:
    streams = Streams(corpus([30, 30, 90]), phase(length=10), SEED)  # 3, 3 and 9 windows
    held = streams.validation_steps(count)
    assert len(held) == steps and sum(step.sequences for step in held) == min(count, 15)


def test_random_groups_are_some_of_a_thousand_or_of_as_many_as_there_are_documents() -> None:
    many = Streams(corpus([20] * 5000), phase(), SEED).random_groups()
    assert sum(step.tokens for step in many) == 16 * (5 * 20 - 1)
    few = Streams(corpus([20] * 30), phase(), SEED).random_groups(4)
    assert sum(step.tokens for step in few) == 4 * 19
    assert sum(step.tokens for step in Streams(corpus([20] * 3), phase(), SEED).random_groups()) == 3 * 19


def test_streams_are_neighbors_and_refused_where_they_cannot_be_dealt() -> None:
    streams = Streams(corpus([9] * 20), phase(12, micro=2), SEED)
    assert [streams.stream_numbers(rank, 3) for rank in range(3)] == [range(4), range(4, 8), range(8, 12)]
    with pytest.raises(ConfigError, match="global_batch_size = 12: cannot be split for 5 processes"):
        streams.step(0, world=5)


def test_fewer_documents_than_shards_are_refused_with_a_way_out() -> None:
    shards = corpus([9] * 20)
    default = Streams(shards, BytePhase(9, 8, seq_len=8, micro_batch_size=8), SEED)
    with pytest.raises(
        DataError, match=r"holds 20 documents .* split into 1,000 groups .* set the phase's `num_document_groups` to 8 .* to 20, or add"
    ):
        default.step(0)
    with pytest.raises(DataError, match=r"lower global_batch_size and `num_document_groups` of the phase to 20 at most, or add documents"):
        Streams(shards, phase(32), SEED).stream_numbers()
    # What is for validation need not be as much.
    assert len(default.validation_steps(16)) == 1 and default.epoch_size() == 23


def test_word_pieces_are_refused() -> None:
    (shard,) = corpus([9] * 8)
    with pytest.raises(DataError, match=r"train-00000 holds WordPiece tokens, not bytes; .* data\.tokenizer = bytes"):
        Streams([replace(shard, tokens=shard.tokens.astype(np.uint16))], phase(), SEED)


def test_a_corpus_without_labels_is_refused_where_they_are_needed() -> None:
    with pytest.raises(DataError, match=r"label_weight = 0\.5, but the corpus was prepared without data\.label"):
        Streams(corpus([9] * 8), phase(label=0.5), SEED)


def test_seeds_and_phases_have_orders_of_their_own() -> None:
    shards = corpus([9] * 40)
    firsts = {
        Streams(shards, phase(shards=8), seed).step(0).micro[0].ids_BT.numpy().tobytes() for seed in ((0, 0, 0), (0, 1, 0), (0, 0, 1))
    }
    assert len(firsts) == 3


@given(LENGTHS, st.sampled_from([(1, 2), (2, 1), (2, 2), (4, 1)]), st.integers(0, 9), st.integers(1, 3), st.booleans())
def test_the_provenance_of_a_micro_batch_is_its_streams_and_the_documents_its_windows_begin_in(
    lengths: list[int], cut: tuple[int, int], step: int, files: int, reshuffle: bool
) -> None:
    (world, micro), shards = cut, corpus(lengths, files)
    streams = Streams(shards, phase(4, 8, micro=micro, reshuffle=reshuffle), SEED)
    documents = {(shard.name, row): text for shard in shards for row, text in enumerate(texts([shard]))}
    for rank in range(world):
        for at, batch in enumerate(streams.step(step, rank, world).micro):
            found = streams.provenance(step, world, at * world + rank)
            assert [place["stream"] for place in found] == batch.streams.tolist()
            for place, ids in zip(found, batch.ids_BT.tolist(), strict=True):
                text = documents[str(place["shard"]), int(place["row"])]
                assert any(bytes(ids).startswith(text[start : start + 8]) for start in range(len(text)))
                assert 0 <= int(place["epoch"]) <= 2 * step + 2


@pytest.mark.parametrize("label", [0.0, 0.5])
def test_the_longest_micro_batch_is_laid_out_as_those_of_the_stream_and_full(label: float) -> None:
    streams = Streams(corpus([400] * 8, labels=True), phase(length=40, micro=2, label=label), SEED)
    (ours, theirs) = streams.longest(2), streams.step(0).micro[0]
    for a, b in ((vars(ours), vars(theirs)), (ours.targets, theirs.targets)):
        kinds = [{name: (t.dtype, t.is_contiguous()) for name, t in tensors.items() if isinstance(t, torch.Tensor)} for tensors in (a, b)]
        assert kinds[0] == kinds[1] and a.keys() == b.keys()
    assert ours.ids_BT.shape == theirs.ids_BT.shape == ours.targets["byte"].shape == (2, 40)
    assert not (ours.targets["byte"] == IGNORED).any() and ours.ids_BT.max() < 256
    assert ours.ends_K is None if label == 0 else ours.ends_K is not None and ours.ends_K.tolist() == [39, 79]
    torch.manual_seed(1)
    assert torch.equal(streams.longest(2).ids_BT, ours.ids_BT)
