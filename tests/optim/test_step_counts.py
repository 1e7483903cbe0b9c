"""The steps of each tensor are counted, those of a batch in one tensor, of which the counts of the state are views."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from overnight.optim import Lamb
from overnight.optim.layerwise import Layerwise
from tests.optim.problem import CLASSES, parameters


@pytest.mark.parametrize("how", [{"fused": False}, {}])
@pytest.mark.parametrize("name", list(CLASSES))
def test_steps_are_counted_together_whichever_tensors_have_a_gradient(name: str, how: dict[str, Any]) -> None:
    """As they would be one by one, also where others step in between, a copy goes its own way, or a state is loaded."""
    params = parameters(dtype=torch.float32)
    optimizer = CLASSES[name](params, lr=0.01, **how)

    def step(these: list[Tensor], optimizer: Layerwise = optimizer) -> None:
        for p in params:
            p.grad = torch.ones_like(p) if any(p is one for one in these) else None
        optimizer.step()

    def counts(optimizer: Layerwise = optimizer) -> list[int]:
        return [int(optimizer.state[p]["step"]) if p in optimizer.state else 0 for p in params]

    first, rest = params[:2], params[2:]
    wanted = [0] * len(params)
    for these in (params, params, first, rest, rest, params, first, params):
        step(these)
        wanted = [count + any(p is one for one in these) for count, p in zip(wanted, params, strict=True)]
        assert counts() == wanted
    other = CLASSES[name](params, lr=0.01, **how)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(params, other)
    assert counts(other) == [count + 1 for count in wanted] and counts() == wanted


@pytest.mark.parametrize("how", [{"fused": False}, {}])
def test_the_counts_of_a_batch_share_one_tensor(how: dict[str, Any]) -> None:
    params = parameters(dtype=torch.float32)
    optimizer = Lamb(params, **how)
    for _ in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert len({optimizer.state[p]["step"].untyped_storage().data_ptr() for p in params}) == 1
    assert all(optimizer.state[p]["step"].shape == () for p in params)
