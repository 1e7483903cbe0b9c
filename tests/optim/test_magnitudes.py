"""Norms, clipping and steps are right for numbers whose squares float32 cannot hold: from 1e-30 to 1e30."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from overnight.engine.loop import clip
from overnight.optim import native
from overnight.optim.layerwise import whole_norms
from overnight.optim.tensor_list import Tensors, total_norm
from tests.optim.problem import CLASSES, draw, fill, parameters

POWERS = st.floats(-30, 30)
# Longer than a stretch, and one element.
SHAPES = [(20000,), (1,), (7, 5)]


def scaled(power: float, share: float = 1.0) -> list[Tensor]:
    """Tensors of one magnitude, in part zeros."""
    found = [draw(*shape, seed=i) * 10.0**power for i, shape in enumerate(SHAPES)]
    for x in found:
        x.flatten()[int(len(x) * share) :] = 0.0
    return [x.float() for x in found]


def elsewhere(xs: list[Tensor]) -> Tensor:
    """As on a device that is not a CPU."""
    with mock.patch("torch.compiler.is_compiling", return_value=True):
        return Tensors(xs).norm()


@pytest.mark.parametrize(
    "way", [lambda xs: Tensors(xs).norm(), elsewhere, native.norms, whole_norms], ids=["lists", "gpu", "native", "whole"]
)
@given(POWERS, st.sampled_from([1.0, 0.1]))
@settings(max_examples=40, deadline=None)
def test_norms_are_those_of_float64(way: Any, power: float, share: float) -> None:
    xs = scaled(power, share)
    reference = torch.stack([x.double().norm() for x in xs])
    torch.testing.assert_close(way(xs).double(), reference, rtol=1e-6, atol=0)


@given(st.lists(POWERS, min_size=3, max_size=3), st.floats(-3, 3))
@settings(max_examples=40, deadline=None)
def test_clipping_is_by_the_norm_of_float64_whatever_the_tensors_are(powers: list[float], bound: float) -> None:
    params = [torch.zeros(shape) for shape in SHAPES]
    for p, power in zip(params, powers, strict=True):
        p.grad = (draw(*p.shape, seed=p.numel()) * 10.0**power).float()
    before = [p.grad.double() for p in params]
    exact = torch.cat([g.flatten() for g in before]).norm()
    norm = clip(params, 10.0**bound)
    torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        total_norm(whole_norms([p.grad for p in params])).double(), exact.clamp(max=10.0**bound), rtol=1e-5, atol=1e-45
    )


def end(name: str, fused: bool, dtype: torch.dtype, power: float, **rest: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters and trust ratios after three steps on gradients of one magnitude."""
    params = parameters(SHAPES, dtype)
    optimizer = CLASSES[name](params, lr=0.01, fused=fused, **rest)
    ratios: list[Tensor] = []
    for at in range(3):
        fill(params, at, 10.0**power)
        optimizer.step()
        ratios += [found.double() for _, found in optimizer.ratios]
    return [p.detach().double() for p in params], [torch.cat(ratios)]


@pytest.mark.parametrize("fused", [False, True])
@given(st.sampled_from([("lans", {}), ("lars", {"weight_decay": 0.0, "eps": 0.0}), ("lamb", {"max_grad_norm": 1e-3})]), POWERS)
@settings(max_examples=40, deadline=None)
def test_a_step_is_that_of_float64_whatever_the_size_of_the_gradient(fused: bool, case: tuple[str, dict[str, Any]], power: float) -> None:
    name, rest = case
    if name == "lamb":
        power = max(power, -3.0)  # its second moment holds squares
    ours, reference = end(name, fused, torch.float32, power, **rest), end(name, False, torch.float64, power, **rest)
    for found, exact in zip(ours, reference, strict=True):
        for a, b in zip(found, exact, strict=True):
            assert float((a - b).norm()) <= 3e-5 * float(b.norm())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("power", [-30, 30])
def test_trust_ratios_of_tiny_and_huge_parameters_are_right(fused: bool, power: int) -> None:
    found = []
    for dtype in (torch.float32, torch.float64):
        params = [(draw(*shape, seed=i) * 10.0**power).to(dtype) for i, shape in enumerate(SHAPES)]
        optimizer = CLASSES["lamb"](params, lr=0.01, weight_decay=0.0, fused=fused and dtype == torch.float32)
        fill(params, 0)
        optimizer.step()
        found.append(torch.cat([ratio for _, ratio in optimizer.ratios]).double())
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=0)


def test_a_gradient_of_zero_and_one_that_is_not_finite_are_what_they_are() -> None:
    for way in (lambda xs: Tensors(xs).norm(), elsewhere, native.norms):
        found = way([torch.zeros(20000), torch.tensor([float("nan")]), torch.tensor([float("inf"), 1.0])]).tolist()
        assert found[0] == 0.0 and found[1] != found[1] and found[2] == float("inf")


@pytest.mark.parametrize("name", list(CLASSES))
@pytest.mark.parametrize("fused", [False, True])
def test_a_finite_gradient_of_which_float32_cannot_hold_the_norm_is_refused_as_such(name: str, fused: bool) -> None:
    params = parameters(SHAPES, torch.float32)
    optimizer = CLASSES[name]([(f"layer.{i}", p) for i, p in enumerate(params)], check_finite=True, fused=fused)
    # A tensor's own norm is too large, and then that of two tensors whose own are not.
    for values, said in (((1.0, 1.0, 3e38), r"layer\.2"), ((1.0, 3.3e38, 3e37), "all tensors together")):
        for p, value in zip(params, values, strict=True):
            p.grad = torch.full_like(p, value)
        with pytest.raises(
            FloatingPointError, match=rf"^the norm of the gradient of {said} is more than torch\.float32 holds; scale the loss"
        ):
            optimizer.step()
    params[0].grad[5] = torch.nan  # type: ignore[index]
    with pytest.raises(FloatingPointError, match=r"^the gradient of layer\.0 is not finite"):
        optimizer.step()
    assert not optimizer.state
