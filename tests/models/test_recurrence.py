"""The window by hand is the recurrence by autograd, step by step, in float64."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from overnight.models import recurrence, recurrence_native, recurrence_plain
from overnight.models.recurrence import Workspace, multiplier, recur, weight_gradient
from overnight.native import NoCompiler, library

ARGUMENTS = ("table", "rows", "w_mh", "w_h", "h", "c")
native = pytest.mark.skipif(not recurrence_native.available(torch.float64), reason="needs a C compiler")
WAYS = [pytest.param(recurrence_native, marks=native, id="native"), pytest.param(recurrence_plain, id="plain")]


def by_autograd(table: Tensor, rows_TB: Tensor, w_mh: Tensor | None, w_h: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The equations, step by step."""
    hs, cs, width = [], [], h.shape[1]
    for rows_B in rows_TB:
        x = table[rows_B]
        m = h if w_mh is None else x[:, 4 * width :] * (h @ w_mh.t())
        i, f, g, o = (x[:, : 4 * width] + m @ w_h.t()).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        hs.append(h)
        cs.append(c)
    return torch.stack(hs), torch.stack(cs)


def drawn(steps: int, batch: int, width: int, rows: int, multiplicative: bool, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Arguments of a window."""
    generator = torch.Generator().manual_seed(steps + 10 * batch + 100 * width)

    def numbers(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()

    return {
        "table": numbers(rows, (5 if multiplicative else 4) * width),
        "rows": torch.randint(rows, (steps, batch), generator=generator),
        "w_mh": numbers(width, width, scale=width**-0.5) if multiplicative else None,
        "w_h": numbers(4 * width, width, scale=width**-0.5),
        "h": numbers(batch, width, scale=0.5),
        "c": numbers(batch, width),
    }


def with_gradients(function: Any, arguments: dict[str, Any], which: str, *more: Any) -> dict[str, Tensor]:
    """States, and gradients of a weighted sum of h, of c, or of both."""
    h, c = function(*(arguments[name] for name in ARGUMENTS), *more)
    weights = torch.randn(h.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    total = sum((x.double() * weights.roll(at)).sum() for at, (name, x) in enumerate({"h": h, "c": c}.items()) if name in which)
    wanted = {name: x for name, x in arguments.items() if isinstance(x, Tensor) and x.requires_grad}
    states = {"h_T": h.detach().clone(), "c_T": c.detach().clone()}  # the backward pass ends their use
    grads = torch.autograd.grad(total, list(wanted.values()))  # type: ignore[arg-type]
    return {**states, **dict(zip(wanted, grads, strict=True))}


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        error = float((found[name].double() - value.double()).norm()) / max(float(value.double().norm()), 1e-30)
        assert error <= tolerance, f"{name} is off by {error:.2g}"


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(recurrence, "_pointwise", lambda table, dtype: request.param)
    return request.param


@pytest.mark.parametrize("multiplicative", [True, False])
@pytest.mark.parametrize("which", ["h", "c", "hc"])
def test_a_window_is_that_of_autograd_over_the_steps(way: ModuleType, multiplicative: bool, which: str) -> None:
    arguments = drawn(11, 3, 300, 5, multiplicative)
    wanted = with_gradients(by_autograd, arguments, which)
    assert_near(with_gradients(recur, arguments, which, torch.float64), wanted, 1e-12)


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 40), st.integers(1, 9), st.booleans(), st.sampled_from(["h", "c", "hc"]))
def test_windows_of_all_sizes(steps: int, batch: int, width: int, rows: int, multiplicative: bool, which: str) -> None:
    arguments = drawn(steps, batch, width, rows, multiplicative)
    wanted = with_gradients(by_autograd, arguments, which)
    assert_near(with_gradients(recur, arguments, which, torch.float64), wanted, 1e-12)
    narrow = {name: x.detach().float().requires_grad_() if x is not None and x.is_floating_point() else x for name, x in arguments.items()}
    assert_near(with_gradients(recur, narrow, which, torch.float32), wanted, 3e-5)


@pytest.mark.parametrize("multiplicative", [True, False])
def test_gradients_are_those_of_finite_differences(way: ModuleType, multiplicative: bool) -> None:
    arguments = drawn(3, 2, 4, 3, multiplicative)
    floats = [name for name in ARGUMENTS if arguments[name] is not None and name != "rows"]

    def function(*values: Tensor) -> tuple[Tensor, Tensor]:
        return recur(**_renamed(arguments | dict(zip(floats, values, strict=True))), dtype=torch.float64)

    assert torch.autograd.gradcheck(function, [arguments[name] for name in floats])


def _renamed(arguments: dict[str, Any]) -> dict[str, Any]:
    return {{"rows": "rows_TB", "h": "h_BH", "c": "c_BH"}.get(name, name): value for name, value in arguments.items()}


# h and the gradient that comes back are rounded at every step, so the error grows with the window; autocast's is as large.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 0.02), (torch.float16, 0.003)])
@pytest.mark.parametrize("multiplicative", [True, False])
def test_narrow_types_are_as_near_as_their_rounding(way: ModuleType, multiplicative: bool, dtype: torch.dtype, tolerance: float) -> None:
    if way is recurrence_native and dtype == torch.float16:
        pytest.skip("recurrence.c has no fp16")
    arguments = drawn(16, 5, 96, 20, multiplicative, torch.float32)
    wide = {name: x.detach().double().requires_grad_() if x is not None and x.is_floating_point() else x for name, x in arguments.items()}
    wanted = with_gradients(by_autograd, wide, "hc")
    found = with_gradients(recur, arguments, "hc", dtype)
    assert found["h_T"].dtype == dtype and found["c_T"].dtype == torch.float32, "cell states are fp32"
    assert all(x.dtype == torch.float32 for name, x in found.items() if name != "h_T"), "gradients are fp32"
    assert_near(found, wanted, tolerance)


def test_without_gradients_the_states_are_the_same_and_nothing_is_kept(way: ModuleType) -> None:
    arguments = drawn(12, 2, 16, 4, True, torch.float32)
    values = [arguments[name] for name in ARGUMENTS]
    wanted = recur(*values, torch.float32)
    workspace = Workspace()
    with torch.no_grad():
        found = recur(*values, torch.float32, workspace)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)) and not found[0].requires_grad
    assert not workspace.free


def test_memory_that_is_used_again_changes_no_bit() -> None:
    workspace, arguments = Workspace(), [drawn(9, 2, 16, 4, True, torch.float32), drawn(9, 2, 16, 4, True, torch.float32)]
    arguments[1]["rows"] = arguments[1]["rows"].flip(0)
    alone = [with_gradients(recur, a, "hc", torch.float32) for a in arguments]
    again = [with_gradients(recur, a, "hc", torch.float32, workspace) for a in [*arguments, *arguments]]
    for found, wanted in zip(again, [*alone, *alone], strict=True):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert sorted(len(free) for free in workspace.free.values()) == [2, 2, 3], "gates and dz; h and c; u, du and m"


def test_windows_under_way_do_not_share_memory() -> None:
    workspace, arguments = Workspace(), drawn(9, 2, 16, 4, True, torch.float32)
    wanted = with_gradients(recur, arguments, "h", torch.float32)
    with_gradients(recur, arguments, "h", torch.float32, workspace)
    first = recur(*(arguments[name] for name in ARGUMENTS), torch.float32, workspace)
    with_gradients(recur, drawn(9, 2, 16, 4, True, torch.float32) | {"c": arguments["h"]}, "h", torch.float32, workspace)
    weights = torch.randn(first[0].shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    (grad,) = torch.autograd.grad((first[0].double() * weights).sum(), [arguments["w_h"]])
    assert torch.equal(grad, wanted["w_h"])


def test_a_second_backward_pass_over_memory_given_back_is_refused() -> None:
    arguments = drawn(3, 2, 8, 4, True)
    h, _ = recur(*(arguments[name] for name in ARGUMENTS), torch.float64, Workspace())
    h.sum().backward(retain_graph=True)
    with pytest.raises(AssertionError, match="one backward pass"):
        h.sum().backward()


def test_a_window_of_another_size_frees_the_memory_of_the_last() -> None:
    workspace, like = Workspace(), torch.empty(0)
    held = workspace.take(like, torch.float32, 3, 4)
    workspace.give(held)
    assert workspace.take(like, torch.float32, 3, 4) is held
    workspace.give(held)
    workspace.take(like, torch.float32, 5, 4)
    assert not workspace.free


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("times", [1, 100])
def test_products_and_weight_gradients_are_products(dtype: torch.dtype, times: int) -> None:
    x, w = torch.randn(5, 33).to(dtype), torch.randn(7, 33).to(dtype)
    tolerance = 0.02 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(multiplier(w, 5, times)(x).double(), x.double() @ w.double().t(), rtol=tolerance, atol=10 * tolerance)
    grad = torch.randn(5, 7).to(dtype)
    back = multiplier(w.t(), 5, times)(grad)
    torch.testing.assert_close(back.double(), grad.double() @ w.double(), rtol=tolerance, atol=10 * tolerance)
    torch.testing.assert_close(weight_gradient(grad, x).double(), grad.double().t() @ x.double(), rtol=tolerance, atol=10 * tolerance)


def activate(x: Tensor, found: Tensor) -> None:
    """Sigmoids and hyperbolic tangents into the rows of `found`."""
    function = recurrence_native.library(torch.float32).activations
    function.argtypes = [ctypes.c_long, *[ctypes.c_void_p] * 3]
    function(len(x), *(y.data_ptr() for y in (x, *found)))


@native
def test_sigmoid_and_tanh_in_fp32_are_right_to_a_millionth() -> None:
    x = torch.cat([torch.linspace(-90, 90, 200_001), torch.logspace(-30, 1, 5001), -torch.logspace(-30, 1, 5001), torch.zeros(1)])
    found = torch.empty(2, len(x))
    activate(x, found)
    wide = x.double()
    # Below -87 a sigmoid is no normal number of fp32.
    normal = x > -87
    assert float((found[0] / torch.sigmoid(wide) - 1)[normal].abs().max()) < 1e-6
    assert float((found[1] - torch.tanh(wide)).div(torch.tanh(wide).abs().clamp(min=1e-37)).abs().max()) < 1e-6
    assert float(found[0].max()) <= 1 and float(found[1].abs().max()) <= 1
    odd = torch.tensor([math.nan, math.inf, -math.inf] * 8)
    found = torch.empty(2, len(odd))
    activate(odd, found)
    assert found[:, ::3].isnan().all(), "NaN is not hidden"
    assert found[0, 1] == 1 and float(found[0, 2]) < 1e-37 and found[1, 1] == 1 and found[1, 2] == -1


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_pointwise_part_does_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    """Rows of the table are met several times in a batch."""
    ends, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            generator = torch.Generator().manual_seed(0)

            def numbers(*shape: int, generator: torch.Generator = generator, kind: torch.dtype = dtype) -> Tensor:
                return torch.randn(shape, generator=generator).to(kind)

            batch, width = 16, 1000
            rows, grad_table = torch.randint(4, (batch,), generator=generator), torch.zeros(4, 5 * width)
            dc, dz = numbers(batch, width, kind=torch.float32), torch.empty(batch, 4 * width, dtype=dtype)
            cells = [numbers(batch, width, kind=torch.float32) for _ in range(2)]
            recurrence_native.cell_backward(
                grad_table, rows, numbers(batch, 4 * width), *cells, numbers(batch, width), None, numbers(batch, width), dc, dz
            )
            ends.append((grad_table, dc, dz))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in ends[1:] for a, b in zip(ends[0], other, strict=True))


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_ways_round_to_nearly_the_same_numbers(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, found = drawn(1, 4, 64, 6, True, torch.float32), []
    for module in (recurrence_native, recurrence_plain):
        monkeypatch.setattr(recurrence, "_pointwise", lambda table, dtype, module=module: module)
        found.append(with_gradients(recur, arguments, "hc", dtype))
    assert_near(found[0], found[1], 1e-6 if dtype == torch.float32 else 2e-3)


def test_without_a_compiler_torch_does_the_pointwise_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    caches = library, recurrence_native.available
    for cache in caches:
        cache.cache_clear()
    try:
        assert recurrence._pointwise(torch.zeros(1), torch.float32) is recurrence_plain
        assert recurrence._pointwise(torch.zeros(1), torch.float16) is recurrence_plain
    finally:
        for cache in caches:
            cache.cache_clear()


def test_a_compiler_that_fails_is_asked_once_not_in_each_window(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def failing(source: Path, *defines: str) -> None:
        asked.append(defines)
        raise NoCompiler("it fails")

    monkeypatch.setattr("overnight.native.library", failing)
    recurrence_native.available.cache_clear()
    try:
        assert {recurrence._pointwise(torch.zeros(1), torch.float32) for _ in range(3)} == {recurrence_plain}
    finally:
        recurrence_native.available.cache_clear()
    assert len(asked) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_in_float64_is_read_as_such_by_products_of_narrower_types(dtype: torch.dtype) -> None:
    arguments = drawn(4, 3, 16, 5, True)
    found = recur(**_renamed(arguments), dtype=dtype)
    wanted = recur(**_renamed(arguments), dtype=torch.float64)
    assert found[1].dtype == torch.float64
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0.0, atol=1e-5 if dtype == torch.float32 else 0.02)
