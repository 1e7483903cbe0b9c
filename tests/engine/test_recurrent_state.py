"""The carried state of a byte model: each stream has its own, a step that is done again begins from the same one, and NaN stays in its stream."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from overnight.batches.streams import ByteBatch
from overnight.distributed.world import World
from overnight.engine.recurrent_state import RecurrentState
from overnight.errors import DataError

SHAPE = (2, 2, 3)


def batch(*streams: int) -> ByteBatch:
    ids = torch.zeros(len(streams), 4, dtype=torch.int64)
    return ByteBatch(ids, torch.tensor(streams), torch.zeros(len(streams), dtype=torch.bool))


def states(*values: float) -> Tensor:
    """A state of one number for each row."""
    return torch.stack([torch.full(SHAPE, float(value)) for value in values])


def numbers(carry: RecurrentState, *streams: int) -> list[float]:
    entered = carry.enter(batch(*streams)).state_B
    assert entered is not None and entered.shape == (len(streams), *SHAPE)
    return entered[:, 0, 0, 0].tolist()


def test_each_stream_meets_its_own_state_again_in_any_micro_batch() -> None:
    carry = RecurrentState(range(4, 8), SHAPE)
    assert numbers(carry, 4, 5, 6, 7) == [0, 0, 0, 0]
    carry.leave(batch(4, 5), states(1, 2))
    carry.leave(batch(6, 7), states(3, 4))
    carry.commit()
    assert numbers(carry, 7, 4) == [4, 1]
    carry.leave(batch(5, 6), states(8, 9))
    carry.commit()
    assert numbers(carry, 4, 5, 6, 7) == [1, 8, 9, 4]


def test_a_step_that_is_done_again_begins_from_the_same_state() -> None:
    carry = RecurrentState(range(2), SHAPE)
    carry.leave(batch(0, 1), states(1, 2))
    carry.commit()
    carry.leave(batch(0, 1), states(5, math.nan))
    assert numbers(carry, 0, 1) == [1, 2]
    carry.drop()
    carry.commit()
    assert numbers(carry, 0, 1) == [1, 2] and carry.broken() == []


def test_a_state_that_is_not_finite_is_zeroed_in_its_streams_and_told_once() -> None:
    carry = RecurrentState(range(10, 14), SHAPE)
    after = states(1, 2, 3, 4)
    after[1, 1, 0, 2], after[3, 0, 1, 1] = math.nan, -math.inf
    carry.leave(batch(10, 11, 12, 13), after)
    carry.commit()
    assert numbers(carry, 10, 11, 12, 13) == [1, 0, 3, 0]
    assert carry.broken() == [11, 13] and carry.broken() == []


def test_the_whole_state_is_dealt_again_by_stream() -> None:
    one = RecurrentState(range(4), SHAPE)
    one.leave(batch(0, 1, 2, 3), states(1, 2, 3, 4))
    one.commit()
    whole = one.whole()
    assert whole[:, 0, 0, 0].tolist() == [1, 2, 3, 4]
    second = RecurrentState(range(2, 4), SHAPE, World(1, 2))
    second.load(whole)
    assert numbers(second, 2, 3) == [3, 4]


@pytest.mark.parametrize("shape", [(3, *SHAPE), (5, *SHAPE), (4, 1, 2, 3)])
def test_the_state_of_other_streams_or_another_network_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="the carried state of the checkpoint is of"):
        RecurrentState(range(4), SHAPE).load(torch.zeros(shape))
