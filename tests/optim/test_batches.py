"""Which tensors are stepped together, and that it changes no bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from overnight.optim import Lamb
from overnight.optim.layerwise import Layerwise
from overnight.optim.state import fit, fits
from tests.optim.problem import CLASSES, draw, fill, parameters

SHAPES: list[tuple[int, ...]] = [(5, 4), (3,), (4, 2), (6,), (2, 3)]


def trained(params: list[Tensor], optimizers: list[Layerwise]) -> list[Tensor]:
    """Return the parameters after some steps, in which one tensor has no gradient once."""
    for step in range(4):
        fill(params, step)
        if step == 2:
            params[0].grad = None
        for optimizer in optimizers:
            optimizer.step()
    return [p.detach().clone() for p in params]


@pytest.mark.parametrize("how", [{"fused": False}, {"foreach": False}, {}], ids=str)
@pytest.mark.parametrize("name", list(CLASSES))
def test_groups_with_the_same_settings_are_one_batch_and_give_the_bits_of_optimizers_of_their_own(name: str, how: dict[str, Any]) -> None:
    def grouped(params: list[Tensor]) -> list[dict[str, Any]]:
        decays = (0.1, 0.0, 0.1)
        return [{"params": params[i : i + 2], "weight_decay": decay} for i, decay in zip((0, 2, 4), decays, strict=True)]

    together, apart = parameters(SHAPES, torch.float32), parameters(SHAPES, torch.float32)
    one = CLASSES[name](grouped(together), lr=0.01, **how)
    found = trained(together, [one])
    assert [len(batch.params) for batch in one._gather()] == [3, 2]
    wanted = trained(apart, [CLASSES[name]([group], lr=0.01, **how) for group in grouped(apart)])
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    trusts = {id(p): float(ratio) for params, ratios in one.ratios for p, ratio in zip(params, ratios, strict=True)}
    assert set(trusts) == {id(p) for p in together}


def test_rates_in_tensors_are_the_same_setting_where_they_are_one_tensor() -> None:
    """To compare two would wait for the device."""
    params, rate = parameters(SHAPES), torch.tensor(0.01)
    fill(params, 0)
    shared = Lamb([{"params": params[:2]}, {"params": params[2:]}], lr=rate)
    assert len(shared._gather()) == 1
    two = Lamb([{"params": params[:2], "lr": rate}, {"params": params[2:], "lr": rate.clone()}])
    assert len(two._gather()) == 2


@pytest.mark.parametrize("first", [True, False])
def test_a_tensor_that_is_not_contiguous_has_a_batch_of_its_own_in_whichever_place(first: bool) -> None:
    strided = draw(4, 5, dtype=torch.float32).T.requires_grad_()
    others = parameters(SHAPES, torch.float32)
    params = [strided, *others] if first else [*others, strided]
    optimizer = Lamb(params, fused=True)
    fill(params, 0)
    assert {batch.backend: len(batch.params) for batch in optimizer._gather()} == {"lists": 1, "native": len(others)}
    for p in others:
        p.grad = None
    assert [batch.backend for batch in optimizer._gather()] == ["lists"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_states_that_fit_are_left_alone_and_others_are_seen(dtype: torch.dtype) -> None:
    params = parameters(SHAPES, dtype)
    moments = ("exp_avg", "exp_avg_sq")
    states: list[dict[str, Any]] = [{} for _ in params]
    assert not fits(states, params, moments)
    for state, p in zip(states, params, strict=True):
        fit(state, p, moments)
    assert fits(states, params, moments)
    before = [dict(state) for state in states]
    for state, p in zip(states, params, strict=True):
        fit(state, p, moments)
    assert all(state[name] is old[name] for state, old in zip(states, before, strict=True) for name in old)

    other = torch.float32 if dtype == torch.float64 else torch.float64
    for spoiled in (states[2]["exp_avg_sq"].to(other), states[2]["exp_avg_sq"].T.contiguous().T):
        assert not fits([*states[:2], {**states[2], "exp_avg_sq": spoiled}, *states[3:]], params, moments)
    for changed in {torch.float32, torch.bfloat16, torch.float64} - {dtype}:
        assert not fits(states, [p.detach().to(changed) for p in params], moments)
