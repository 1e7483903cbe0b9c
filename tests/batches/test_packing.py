"""Dealing sequences to micro-batches, and counting targets."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overnight.batches.packing import IGNORED, Batch, StepBatches, balance_by_length, moved
from overnight.batches.streams import ByteBatch


@given(st.integers(1, 8), st.integers(1, 12), st.data())
def test_bins_get_equal_counts_and_differ_by_at_most_the_longest_sequence(bins: int, each: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 512), min_size=bins * each, max_size=bins * each))
    dealt = balance_by_length(lengths, bins)
    assert [len(b) for b in dealt] == [each] * bins
    assert sorted(i for b in dealt for i in b) == list(range(len(lengths)))
    totals = [sum(lengths[i] for i in b) for b in dealt]
    assert max(totals) - min(totals) <= max(lengths) - min(lengths)
    assert all(lengths[a] >= lengths[b] for one in dealt for a, b in pairwise(one))


def test_evenly_spread_lengths_are_dealt_to_equal_sums() -> None:
    dealt = balance_by_length(list(range(1, 41)), 5)
    assert [sum(i + 1 for i in b) for b in dealt] == [164] * 5


def test_divisors_count_targets_over_the_micro_batches_but_not_the_ignored() -> None:
    def batch(mlm: list[int], nsp: list[int]) -> Batch:
        empty = torch.zeros(0, dtype=torch.long)
        return Batch(empty, empty, empty, empty, (), predicted_M=empty, targets={"mlm": torch.tensor(mlm), "nsp": torch.tensor(nsp)})

    step = StepBatches((batch([5, IGNORED, 0], [0, 1]), batch([IGNORED], [1])), tokens=9, sequences=3)
    assert step.divisors() == {"mlm": 2, "nsp": 3}


def test_a_number_that_is_the_mark_of_no_class_is_a_target_like_any_other() -> None:
    empty = torch.zeros(0, dtype=torch.long)
    scores = torch.tensor([float(IGNORED), 3.0, float(IGNORED)])
    step = StepBatches((Batch(empty, empty, empty, empty, (), targets={"label": scores}),), tokens=9, sequences=3)
    assert step.divisors() == {"label": 3}


def test_a_number_that_is_the_mark_of_ignored_ids_counts_as_any_other() -> None:
    # Labels in decibels or per cent are often -100, and their loss is in the sum.
    numbers = ByteBatch(
        torch.zeros(2, 3, dtype=torch.int64), torch.arange(2), torch.ones(2, dtype=torch.bool), {"label": torch.tensor([-100.0, 3.0])}
    )
    assert StepBatches((numbers,), 6, 2).divisors() == {"label": 2}


@pytest.mark.parametrize(("place", "pinned"), [("cpu", True), ("cuda", False)])
def test_only_what_lies_on_the_host_is_pinned_on_its_way_to_a_gpu(place: str, pinned: bool) -> None:
    class Stub:
        """A tensor at a place, whose copies say how they were made."""

        device = torch.device(place)

        def pin_memory(self) -> Any:
            return type("Pinned", (Stub,), {"was_pinned": True})()

        def to(self, device: torch.device, non_blocking: bool) -> tuple[torch.device, bool, bool]:
            return device, non_blocking, getattr(self, "was_pinned", False)

    stub: Any = Stub()
    assert moved(stub, torch.device("cuda")) == (torch.device("cuda"), True, pinned)
