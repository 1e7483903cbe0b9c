"""The batch warm-up: a line in portions, and sums that need no walk over the steps."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.batches.batch_size import batch_size, micro_batch, micro_batch_sizes, sequences_before
from overnight.config import BatchWarmup, BertPhase, Phase
from overnight.errors import ConfigError


@st.composite
def warming(draw: st.DrawFn) -> Phase:
    initial, portions = draw(st.integers(1, 50)), draw(st.integers(2, 40))
    warmup = draw(st.integers(1, 200))
    return BertPhase(
        warmup + draw(st.integers(1, 50)), initial * portions, batch_warmup=BatchWarmup(initial, warmup), micro_batch_size=initial
    )


@given(warming())
def test_the_batch_grows_on_a_line_by_portions_from_the_initial_to_the_global_batch(phase: Phase) -> None:
    initial, steps = phase.batch_warmup.initial_batch_size, phase.batch_warmup.steps
    sizes = [batch_size(phase, step) for step in range(phase.steps)]
    assert sizes[0] == initial and set(sizes[steps:]) == {phase.global_batch_size} and sizes[steps - 1] < phase.global_batch_size
    assert all(a <= b for a, b in pairwise(sizes)) and all(size % initial == 0 for size in sizes)
    for step, size in enumerate(sizes[:steps]):
        line = initial + (phase.global_batch_size - initial) * step / steps
        assert line - initial < size <= line + 1e-9 * line


@given(warming())
def test_the_sequences_before_a_step_are_the_sum_of_the_batches_before_it(phase: Phase) -> None:
    sizes = [batch_size(phase, step) for step in range(phase.steps + 5)]
    assert [sequences_before(phase, step) for step in range(phase.steps + 6)] == [0, *accumulate(sizes)]


def test_without_a_warm_up_every_step_has_the_global_batch() -> None:
    phase = BertPhase(10, 48)
    assert {batch_size(phase, step) for step in range(10)} == {48}
    assert [sequences_before(phase, step) for step in (0, 1, 10**9)] == [0, 48, 48 * 10**9]


def test_the_published_batch_is_summed_at_once() -> None:
    phase = BertPhase(3_519, 98_304, batch_warmup=BatchWarmup(512, 1_000), micro_batch_size=128)
    # A line from 512 to 98,304, rounded down to portions of 512: half a portion less on average.
    assert sequences_before(phase, 1_000) == pytest.approx(1_000 * (98_304 + 512 - 512) / 2, rel=1e-2)
    assert sequences_before(phase, 3_519) == sequences_before(phase, 1_000) + 2_519 * 98_304


@given(warming(), st.integers(1, 64), st.data())
def test_a_micro_batch_is_the_most_below_the_setting_that_divides_the_batch(phase: Phase, setting: int, data: st.DataObject) -> None:
    setting = max(n for n in range(1, setting + 1) if phase.global_batch_size % n == 0)
    phase = BertPhase(phase.steps, phase.global_batch_size, batch_warmup=phase.batch_warmup, micro_batch_size=setting)
    step = data.draw(st.integers(0, phase.steps - 1))
    found, batch = micro_batch(phase, step), batch_size(phase, step)
    assert batch % found == 0 and found <= setting
    assert all(batch % n for n in range(found + 1, min(setting, batch) + 1))
    if step >= phase.batch_warmup.steps or batch % setting == 0:
        assert found == min(setting, batch)


def test_batches_that_processes_cannot_share_equally_are_refused() -> None:
    phase = BertPhase(10, 24, batch_warmup=BatchWarmup(6, 5), micro_batch_size=4)
    assert [micro_batch(phase, step, world=2) for step in (0, 5)] == [3, 4]
    with pytest.raises(ConfigError, match=r"batch_warmup\.initial_batch_size = 2: cannot be split for 3 processes"):
        micro_batch(BertPhase(10, 24, batch_warmup=BatchWarmup(2, 5), micro_batch_size=4), 0, world=3)


def test_one_that_is_still_to_be_found_counts_as_the_least_and_what_it_can_be_cuts_the_share() -> None:
    phase = BertPhase(10, 24, batch_warmup=BatchWarmup(6, 5), micro_batch_size=0)
    assert [micro_batch(phase, step, world=2) for step in (0, 5)] == [1, 1]
    assert micro_batch_sizes(phase) == [1, 2, 3, 4, 6, 8, 12, 24] and micro_batch_sizes(phase, world=2) == [1, 2, 3, 4, 6, 12]
    with pytest.raises(ConfigError, match="cannot be split for 5 processes"):
        micro_batch(phase, 0, world=5)
