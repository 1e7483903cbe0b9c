"""What the papers promise of a step, for settings and gradients of any size."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight.optim import Lamb, Lans, Lars
from tests.optim.problem import CLASSES, draw, fill, parameters, run

BETAS = st.sampled_from([(0.9, 0.999), (0.6, 0.9), (0.0, 0.0)])
fused = pytest.mark.parametrize("fused", [False, True])


@fused
@settings(max_examples=30)
@given(lr=st.floats(1e-4, 0.1), decay=st.floats(0, 0.3), corrected=st.booleans(), betas=BETAS)
def test_lamb_moves_an_adapted_tensor_by_lr_times_its_norm(fused: bool, lr: float, decay: float, corrected: bool, betas: Any) -> None:
    for before, after in pairwise(run(Lamb, 5, lr=lr, weight_decay=decay, bias_correction=corrected, betas=betas, fused=fused)):
        for x, y in zip(before, after, strict=True):
            assert math.isclose(float((y - x).norm()), lr * float(x.norm()), rel_tol=1e-9)


@fused
@settings(max_examples=30)
@given(lr=st.floats(1e-4, 0.1), decay=st.floats(0, 0.3), betas=BETAS)
def test_lans_moves_an_adapted_tensor_by_at_most_lr_times_its_norm(fused: bool, lr: float, decay: float, betas: Any) -> None:
    for before, after in pairwise(run(Lans, 5, lr=lr, weight_decay=decay, betas=betas, fused=fused)):
        for x, y in zip(before, after, strict=True):
            assert float((y - x).norm()) <= lr * float(x.norm()) * (1 + 1e-9)


@settings(max_examples=30)
@given(name=st.sampled_from(["lamb", "lans"]), scale=st.floats(1e-3, 1e6), which=st.integers(0, 3), fused=st.booleans())
def test_lamb_and_lans_do_not_see_the_scale_of_the_gradient_of_any_one_tensor(name: str, scale: float, which: int, fused: bool) -> None:
    ends = []
    for factor in (1.0, scale):
        params = parameters()
        optimizer = CLASSES[name](params, lr=0.01, eps=0.0, fused=fused)
        for step in range(5):
            fill(params, step)
            params[which].grad *= factor  # type: ignore[operator]
            optimizer.step()
        ends.append([p.detach() for p in params])
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-12)


@settings(max_examples=30)
@given(scale=st.floats(1e-3, 1e6), coefficient=st.floats(1e-4, 0.1))
def test_lars_without_decay_does_not_see_the_scale_of_the_gradient(scale: float, coefficient: float) -> None:
    ends = [run(Lars, scale=s, lr=0.5, weight_decay=0.0, trust_coefficient=coefficient)[-1] for s in (1.0, scale)]
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-12)


@settings(max_examples=20)
@given(lr=st.floats(1e-3, 0.1), momentum=st.floats(0, 0.99), decay=st.floats(0, 0.1), nesterov=st.booleans(), inside=st.booleans())
def test_lars_without_trust_ratio_is_torchs_sgd(lr: float, momentum: float, decay: float, nesterov: bool, inside: bool) -> None:
    params, others = parameters(), parameters()
    ours = Lars(params, lr=lr, momentum=momentum, weight_decay=decay, nesterov=nesterov, lr_in_momentum=inside, trust_ratio=False)
    theirs = torch.optim.SGD(others, lr=lr, momentum=momentum, weight_decay=decay, nesterov=nesterov and momentum > 0)
    for step in range(5):
        for ps, optimizer in ((params, ours), (others, theirs)):
            fill(ps, step)
            optimizer.step()
    torch.testing.assert_close(params, others, rtol=1e-10, atol=1e-12)


def test_lr_inside_and_outside_the_momentum_are_the_same_while_lr_is_constant_and_only_then() -> None:
    def end(inside: bool, rates: list[float]) -> torch.Tensor:
        p = draw(5, 4).requires_grad_()
        optimizer = Lars([p], lr_in_momentum=inside)
        for step, lr in enumerate(rates):
            optimizer.param_groups[0]["lr"] = lr
            p.grad = draw(5, 4, seed=9 + step)
            optimizer.step()
        return p.detach()

    torch.testing.assert_close(end(True, [1.0] * 5), end(False, [1.0] * 5), rtol=1e-12, atol=0)
    assert (end(True, [1.0, 2.0, 4.0]) - end(False, [1.0, 2.0, 4.0])).norm() > 1e-4


def test_lamb_without_trust_ratio_and_decay_is_torchs_adam() -> None:
    params, others = parameters(), parameters()
    ours, adam = Lamb(params, lr=0.01, weight_decay=0.0, trust_ratio=False), torch.optim.Adam(others, lr=0.01, eps=1e-6)
    for step in range(5):
        for ps, optimizer in ((params, ours), (others, adam)):
            fill(ps, step)
            optimizer.step()
    torch.testing.assert_close(params, others, rtol=1e-12, atol=1e-14)


@fused
def test_the_clipped_ratio_bounds_the_step_and_a_large_bound_does_nothing(fused: bool) -> None:
    free, bound, loose = (run(Lamb, 1, lr=0.01, max_trust_ratio=clip, fused=fused) for clip in (None, 0.01, 1e9))
    for i, x in enumerate(free[0]):
        assert float((free[1][i] - x).norm()) > float((bound[1][i] - x).norm()) > 0
    torch.testing.assert_close(loose, free, rtol=0, atol=0)


@pytest.mark.parametrize("name", list(CLASSES))
def test_a_tensor_of_zeros_starts_to_move(name: str) -> None:
    p = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    p.grad = torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)
    CLASSES[name]([p], lr=0.1, weight_decay=0.0).step()
    # LANS' two terms are each the sign (to eps) and the normalized gradient over its size.
    assert p[0] < 0 < p[1] and p[2] == 0 and torch.isfinite(p).all()
