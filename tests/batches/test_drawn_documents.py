"""Mixtures of documents of bytes: each equally often, in the shares that were asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.batches.drawn_documents import DocumentMixture
from overnight.batches.streams import Streams
from overnight.config import Mix
from overnight.corpus.shards import Shard
from overnight.errors import DataError
from tests.batches.test_streams import corpus, phase, rows, texts

SEED = (7, 0, 0)


def sources(**lengths: Sequence[int]) -> list[Shard]:
    """Documents of some lengths in one file each source."""
    return [
        replace(corpus(mine, seed=number, labels=True)[0], name=f"train-{name}-00000", source=name)
        for number, (name, mine) in enumerate(lengths.items())
    ]


def drawn(mixture: DocumentMixture, epochs: int) -> Counter[int]:
    return Counter(number for epoch in range(epochs) for number in mixture.epoch(epoch).numbers_D.tolist())


@given(st.integers(1, 30), st.integers(1, 30), st.floats(0.05, 20), st.integers(1, 12))
def test_every_document_of_a_source_is_read_equally_often(first: int, second: int, weight: float, epochs: int) -> None:
    mixture = DocumentMixture(sources(a=[20] * first, b=[20] * second), SEED, {"a": Mix(weight=1), "b": Mix(weight=weight)})
    read = drawn(mixture, epochs)
    for numbers in (range(first), range(first, first + second)):
        times = [read[number] for number in numbers]
        assert max(times) - min(times) <= 1


@given(st.floats(0.05, 20), st.integers(1, 12))
def test_the_share_of_a_source_is_off_by_one_document_at_most(weight: float, epochs: int) -> None:
    mixture = DocumentMixture(sources(a=[20] * 30, b=[20] * 10), SEED, {"a": Mix(weight=1), "b": Mix(weight=weight)})
    read = drawn(mixture, epochs)
    b = sum(read[number] for number in range(30, 40))
    # An epoch has as many bytes as there are: 40 documents.
    assert abs(b - weight / (1 + weight) * 40 * epochs) <= 1 and abs(read.total() - 40 * epochs) <= 1


def test_epochs_are_kept_exactly() -> None:
    mixture = DocumentMixture(sources(a=[20] * 7, b=[9] * 5), SEED, {"a": Mix(epochs=1), "b": Mix(epochs=3)})
    assert set(drawn(mixture, 1).items()) == {*((n, 1) for n in range(7)), *((n, 3) for n in range(7, 12))}


def streams(mixes: Mapping[str, Mix], **changes: object) -> Streams:
    found = replace(phase(batch=4, length=16, shards=8, label=1.0), **changes)  # type: ignore[arg-type]
    return Streams(sources(a=[30] * 20, b=[25] * 12), found, SEED, mixes)  # type: ignore[arg-type]


MIXES = {"a": Mix(weight=1), "b": Mix(weight=3)}


def test_a_step_read_at_once_is_the_one_that_iteration_reaches() -> None:
    walked = streams(MIXES)
    found = [walked.step(step) for step in range(60)]
    assert rows([streams(MIXES).step(59)]) == rows([found[59]])
    halves = [streams(MIXES, micro_batch_size=2).step(59, rank, 2) for rank in range(2)]
    assert sorted(each[1:] for each in rows(halves)) == sorted(each[1:] for each in rows([found[59]]))


def test_streams_read_the_documents_of_their_epoch_and_name_them() -> None:
    stream = streams({"a": Mix(epochs=1), "b": Mix(epochs=2)})
    windows = [row for step in range(400) for row in rows([stream.step(step)])]
    # All of some epochs: the bytes that are read next, by stream, from one fresh start to the next.
    groups: list[bytes] = []
    for number in range(4):
        for row in windows:
            if row[1] == number:
                if row[2]:
                    groups.append(b"")
                groups[-1] += row[3]
    every = b"|".join(groups)
    shards = sources(a=[30] * 20, b=[25] * 12)
    counts = [np.mean([every.count(text) for text in texts([shard])]) for shard in shards]
    assert counts[1] / counts[0] == pytest.approx(2, rel=0.05)
    found = stream.provenance(100, 1, 0)
    assert {str(each["shard"]) for each in found} <= {"train-a-00000", "train-b-00000"}
    assert stream.passes(stream.epoch_size())["b"] == pytest.approx((600 / 1200, 2))


def test_groups_are_counted_against_the_documents_that_an_epoch_has() -> None:
    stream = streams({"b": Mix(weight=1)}, num_document_groups=13)
    with pytest.raises(DataError, match="12 documents"):
        stream.step(0)
