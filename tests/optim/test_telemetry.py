"""What is measured around a step is what the step did, whatever the optimizer, and nothing is read from the device meanwhile."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from overnight.optim import Lamb, Lans, Lars, Muon
from overnight.optim.telemetry import Snapshot, rounded
from tests.optim.problem import draw

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "lamb": Lamb,
    "lans": Lans,
    "lars": Lars,
    "adamw": torch.optim.AdamW,
    "muon": Muon,
}
MATRICES = ["0.weight", "1.weight", "3.weight"]


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 2)).to(dtype)


def make(name: str, model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    """An optimizer that adapts the matrices of a network, or steps them by Muon."""
    key = "muon" if name == "muon" else "trust_ratio"
    parts = [[(n, p) for n, p in model.named_parameters() if (n in MATRICES) == inside] for inside in (True, False)]
    flags = [{} if name == "adamw" else {key: inside} for inside in (True, False)]
    return OPTIMIZERS[name]([{"params": part, **flag} for part, flag in zip(parts, flags, strict=True)], **settings)


def fill(model: nn.Module, seed: int = 1) -> None:
    for i, p in enumerate(model.parameters()):
        p.grad = draw(*p.shape, seed=seed + i, dtype=p.dtype)


class Readings(TorchDispatchMode):
    """Counts the numbers that are read from a device within it."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_norms_are_those_of_weight_gradient_and_change(name: str) -> None:
    model = network()
    optimizer = make(name, model, lr=0.01)
    for step in range(3):
        fill(model, 10 * step)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        snapshot = Snapshot(optimizer)
        optimizer.step()
        rows = snapshot.after().rows(digits=17)
        assert rows.keys() == before.keys()
        for n, p in model.named_parameters():
            wanted = [float(x.norm()) for x in (before[n], grads[n], p.detach() - before[n])]
            assert rows[n][:3] == pytest.approx(wanted, rel=1e-12), n
            assert rows[n][2] > 0  # type: ignore[operator]


def test_an_adapted_tensor_of_lamb_moves_by_lr_times_its_norm_and_has_the_ratio_that_makes_it_so() -> None:
    model = network()
    optimizer = make("lamb", model, lr=0.01, weight_decay=0.0)
    fill(model)
    snapshot = Snapshot(optimizer)
    optimizer.step()
    rows = snapshot.after().rows(digits=17)
    for name in MATRICES:
        weight, _, update, ratio = rows[name]
        assert weight and ratio and update == pytest.approx(0.01 * weight, rel=1e-12)
        # At the first step the direction is the sign of the gradient, up to eps.
        size = dict(model.named_parameters())[name].numel()
        assert ratio == pytest.approx(weight / math.sqrt(size), rel=1e-4)


def test_a_ratio_is_given_where_one_applies_only() -> None:
    model = network()
    for name in OPTIMIZERS:
        optimizer = make(name, model)
        fill(model)
        snapshot = Snapshot(optimizer)
        optimizer.step()
        given_to = {n for n, row in snapshot.after().rows().items() if row[3] is not None}
        layerwise = name in ("lamb", "lans", "lars")
        assert given_to == (set(MATRICES) if layerwise else set()), name


def test_what_a_16_bit_parameter_lost_to_rounding_is_no_update() -> None:
    p = nn.Parameter(torch.ones(100, dtype=torch.bfloat16))
    optimizer = Lamb([("p", p)], lr=1e-4, weight_decay=0.0)
    p.grad = torch.ones_like(p)
    snapshot = Snapshot(optimizer)
    optimizer.step()
    assert snapshot.after().rows()["p"] == [10.0, 10.0, 0.0, pytest.approx(1.0, rel=1e-4)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_is_read_before_the_rows(name: str) -> None:
    model = network(torch.float32)
    optimizer = make(name, model)
    counts = []
    for measured in (False, False, True):  # the first step makes the state
        fill(model)
        with Readings() as readings:
            snapshot = Snapshot(optimizer) if measured else None
            optimizer.step()
            norms = snapshot.after() if snapshot else None
        counts.append(readings.count)
    assert counts[2] == counts[1]
    assert norms is not None
    assert norms.table.shape == (7, 4) and len(norms.rows()) == 7


def test_tensors_without_a_gradient_are_left_out_and_those_without_a_name_go_by_their_number() -> None:
    a, b, c = (nn.Parameter(draw(3, seed=i)) for i in range(3))
    optimizer = Lars([{"params": [a, b]}, {"params": [c]}], lr=0.1)
    a.grad, c.grad = torch.zeros(3, dtype=torch.float64), draw(3, seed=9)
    snapshot = Snapshot(optimizer)
    optimizer.step()
    rows = snapshot.after().rows()
    assert list(rows) == ["parameter 0", "parameter 2"]
    assert rows["parameter 0"][1:3] == [0.0, 0.0]


def test_an_optimizer_without_any_gradient_has_no_rows() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    snapshot = Snapshot(optimizer)
    optimizer.step()
    assert snapshot.after().rows() == {}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_diverged_gradient_shows_as_it_is(bad: float) -> None:
    p = nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.SGD([("p", p)], lr=0.1)
    p.grad = torch.full((2, 2), bad)
    snapshot = Snapshot(optimizer)
    optimizer.step()
    weight, gradient, update, ratio = snapshot.after().rows()["p"]
    assert weight == 2.0 and ratio is None
    assert all(x is not None and not math.isfinite(x) for x in (gradient, update))


@given(st.floats(allow_nan=False), st.integers(1, 17))
def test_rounding_keeps_the_digits_it_says(value: float, digits: int) -> None:
    near = rounded(value, digits)
    if math.isfinite(value):
        assert rounded(near, digits) == near
        # Relative to the smallest normal number below, where digits run out.
        assert abs(near - value) <= 0.5001 * 10.0 ** (1 - digits) * max(abs(value), 2.3e-308) or math.isinf(near)
    else:
        assert near == value


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_measuring_does_not_change_the_step(name: str) -> None:
    ends = []
    for measured in (False, True):
        model = network()
        optimizer = make(name, model)
        for step in range(3):
            fill(model, 10 * step)
            snapshot = Snapshot(optimizer) if measured else None
            optimizer.step()
            if snapshot:
                snapshot.after()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*ends)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_complex_number_counts_by_its_absolute_value(dtype: torch.dtype) -> None:
    p = torch.tensor([3 + 4j], dtype=dtype, requires_grad=True)
    p.grad = torch.tensor([6 + 8j], dtype=dtype).conj()
    optimizer = torch.optim.SGD([p], lr=0.5)
    before = Snapshot(optimizer)
    optimizer.step()
    assert before.after().rows() == {"parameter 0": [5.0, 10.0, 5.0, None]}


def test_a_sparse_gradient_is_measured_by_the_sums_that_it_stands_for() -> None:
    table = nn.Embedding(7, 2, sparse=True)
    table(torch.tensor([1, 1, 5])).sum().backward()
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    before = Snapshot(optimizer)
    optimizer.step()
    (_, gradient, update, _) = before.after().rows()["parameter 0"]
    assert gradient == update == rounded(math.sqrt(2 * 2**2 + 2 * 1**2))
