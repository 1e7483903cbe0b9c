"""Batches of a model at work hold every sequence once, small ones have few shapes, and few kernels are kept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overnight.batches import few_shapes
from overnight.batches.few_shapes import by_tokens, filled_up, rounded_up
from overnight.batches.packing import Batch
from overnight.models import layers
from tests.conftest import ROOT

PAD = 7


def flat(lengths: list[int]) -> Batch:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids, zeros = torch.arange(100, 100 + sum(lengths)), torch.zeros(sum(lengths), dtype=torch.int64)
    return Batch(ids, torch.cat([torch.arange(n) for n in lengths]), zeros, torch.from_numpy(starts), tuple(lengths))


@given(st.lists(st.integers(1, 600), max_size=80), st.integers(1, 700))
def test_every_sequence_is_in_one_batch_with_those_of_like_length_and_no_batch_is_too_large(lengths: list[int], tokens: int) -> None:
    parts = list(by_tokens(lengths, tokens))
    order = [int(place) for part in parts for place in part]
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[place] for place in order] == sorted(lengths, reverse=True)
    for part in parts:
        own = [lengths[place] for place in part]
        assert len(own) == 1 or (sum(own) <= tokens and len(own) * max(own) <= 2 * tokens)


@given(st.integers(1, 1 << 20))
def test_a_rounded_size_is_at_most_a_seventh_larger_and_is_rounded_to_itself(count: int) -> None:
    size = rounded_up(count)
    assert count <= size < count * 8 / 7 + 1 and rounded_up(size) == size


def test_there_are_eight_sizes_in_an_octave() -> None:
    assert [len({rounded_up(count) for count in range((1 << n) + 1, (2 << n) + 1)}) for n in range(3, 13)] == [8] * 10


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_a_filled_batch_begins_with_its_own_and_all_its_sizes_are_rounded(lengths: list[int]) -> None:
    batch = flat(lengths)
    filled = filled_up(batch, PAD)
    own, tokens = len(lengths), sum(lengths)
    for size in (len(filled.ids_N), len(filled.lengths)):
        assert size == rounded_up(size, 8 if tokens <= 1024 else 32)
    assert filled.longest == rounded_up(filled.longest)
    # Of a large batch hardly more is computed.
    assert tokens <= 1024 or len(filled.ids_N) <= 1.1 * tokens
    assert filled.lengths[:own] == tuple(lengths) and filled.longest >= max(lengths)
    assert all(1 <= more <= max(lengths) for more in filled.lengths[own:])  # positions that the encoder has
    assert filled.starts.tolist() == [0, *np.cumsum(filled.lengths)]
    assert torch.equal(filled.ids_N[:tokens], batch.ids_N) and set(filled.ids_N[tokens:].tolist()) <= {PAD}
    assert torch.equal(filled.positions_N, torch.cat([torch.arange(n) for n in filled.lengths]))
    assert len(filled.segments_N) == len(filled.ids_N) and not filled.segments_N[tokens:].any()


def test_single_texts_of_all_lengths_have_few_shapes() -> None:
    shapes = {(len(b.ids_N), len(b.lengths), b.longest) for b in (filled_up(flat([n]), PAD) for n in range(2, 513))}
    # 511 lengths; of each of 56 sizes one where a sequence fills it up, and one where nothing is missing.
    assert len(shapes) <= 2 * len({rounded_up(n) for n in range(2, 513)}) == 110


def test_batches_of_natural_lengths_have_few_shapes() -> None:
    lengths = np.random.default_rng(0).geometric(1 / 20, 40_000) + 2
    shapes: Counter[tuple[int, int]] = Counter()
    added = 0
    for first in range(0, len(lengths), 4096):
        window = lengths[first : first + 4096]
        for place in by_tokens(window, 4096):
            batch = flat(window[place].tolist())
            filled = filled_up(batch, PAD)
            shapes[len(filled.ids_N), len(filled.lengths)] += 1
            added += len(filled.ids_N) - len(batch.ids_N)
    tokens = Counter[int]()
    for (count, _), times in shapes.items():
        tokens[count] += times
    assert shapes.total() > 200 and added < 0.02 * lengths.sum()
    assert len(tokens) < 20 and tokens.most_common(1)[0][1] > 0.7 * shapes.total()


def test_memory_is_given_back_once_in_32768_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(few_shapes, "release_free_memory", lambda: given.append(0))
    monkeypatch.setattr(few_shapes, "_answered", 0)
    for _ in range(100):
        few_shapes.give_memory_back(4096)
    assert given == [0] * 12


PRODUCTS = """
import torch
from overnight.batches import few_shapes
from overnight.batches.few_shapes import keep_few_kernels
from overnight.models import layers
keep_few_kernels()
layers.prefers_mkl = lambda: False  # else MKL multiplies
weight = torch.ones(8, 8)
with torch.no_grad():
    for rows in 2 * list(range(2, 302)):
        layers.linear(torch.ones(rows, 8), weight)
"""


@pytest.mark.skipif(layers._onednn_linear is None, reason="this torch has no oneDNN")
@pytest.mark.parametrize(("given", "made"), [({}, 600), ({"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1000", "LRU_CACHE_CAPACITY": "1000"}, 300)])
def test_the_kernel_of_a_shape_is_forgotten_when_256_others_have_come_unless_the_environment_says_more(
    given: dict[str, str], made: int
) -> None:
    environment = {name: value for name, value in os.environ.items() if "CACHE_CAPACITY" not in name} | given
    done = subprocess.run(
        [sys.executable, "-c", PRODUCTS], capture_output=True, text=True, cwd=ROOT, env={**environment, "ONEDNN_VERBOSE": "2"}, check=True
    )
    assert sum("create:cache_miss" in line and "inner_product" in line for line in done.stdout.splitlines()) == made
