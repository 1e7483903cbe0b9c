"""What encoder.c computes, against torch's own operations in float64 and autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from overnight.models import encoder_native
from overnight.models.attention import Layout, angles, attention, layout, rotate
from overnight.models.layers import gated_gelu
from tests.models.sample import random_batch

pytestmark = pytest.mark.skipif(not encoder_native.available(torch.float32), reason="there is no C compiler here")
# Of the largest value: what rounding to the type allows.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}
TYPES = pytest.mark.parametrize("dtype", TOLERANCE)


def near(value: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Assert that two tensors are alike but for rounding."""
    assert value.dtype == dtype
    torch.testing.assert_close(value.double(), expected.detach(), rtol=0.0, atol=TOLERANCE[dtype] * float(expected.detach().abs().max()))


def numbers(*shape: int, dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Return normal numbers that the type can hold."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@TYPES
@pytest.mark.parametrize(("rows", "inner"), [(1, 1), (7, 33), (64, 672)])
def test_gated_gelu_and_its_gradient_equal_torch_in_float64(rows: int, inner: int, dtype: torch.dtype) -> None:
    x, grad = numbers(rows, 2 * inner, dtype=dtype, scale=3.0), numbers(rows, inner, dtype=dtype, seed=1)
    exact = x.double().requires_grad_()
    a, b = exact.chunk(2, -1)
    expected = F.gelu(a) * b
    expected.backward(grad.double())
    mine = x.clone().requires_grad_()
    out = gated_gelu(mine)
    out.backward(grad)
    assert mine.grad is not None and exact.grad is not None and type(out.grad_fn).__name__ == "_GatedGeluBackward"
    near(out, expected, dtype)
    near(mine.grad, exact.grad, dtype)


def test_gated_gelu_is_right_far_from_zero_and_keeps_what_is_no_number() -> None:
    x = torch.tensor([[-1e4, -30.0, -6.0, 0.0, 6.0, 30.0, 1e4, float("nan")]]).t()
    out = gated_gelu(torch.cat([x, torch.ones_like(x)], 1))
    torch.testing.assert_close(out, F.gelu(x), rtol=1e-6, atol=1e-6, equal_nan=True)


def formula(qkv: Tensor, heads: int, where: Layout, lengths: list[int], window: int, turns: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return attention sequence by sequence, as the formula says."""
    if turns is not None:
        qkv = rotate(qkv, heads, *(x.double() for x in turns))
    outs = []
    for part in qkv.split(lengths):
        q, k, v = part.view(len(part), 3, heads, -1).permute(1, 2, 0, 3)
        at = torch.arange(len(part))
        far = (at[:, None] - at).abs() > (window if window >= 0 else len(part))
        weights = torch.softmax((q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(far, float("-inf")), -1)
        outs.append((weights @ v).transpose(0, 1).reshape(len(part), -1))
    return torch.cat(outs)


@TYPES
@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), window=st.sampled_from([-1, 1, 8]), turned=st.booleans())
def test_attention_and_its_gradient_equal_the_formula_in_float64(lengths: list[int], window: int, turned: bool, dtype: torch.dtype) -> None:
    heads, size, batch = 2, 8, random_batch(lengths)
    where = layout(batch, 0.0, dtype, window)
    turns = angles(batch.positions_N, size, 100.0) if turned else None
    qkv, grad = numbers(sum(lengths), 3 * heads * size, dtype=dtype), numbers(sum(lengths), heads * size, dtype=dtype, seed=1)
    exact, mine = qkv.double().requires_grad_(), qkv.clone().requires_grad_()
    expected, out = formula(exact, heads, where, lengths, window, turns), attention(mine, heads, where, 0.0, turns)
    assert type(out.grad_fn).__name__ == "_AttentionBackward"
    expected.backward(grad.double())
    out.backward(grad)
    assert mine.grad is not None and exact.grad is not None
    near(out, expected, dtype)
    near(mine.grad, exact.grad, dtype)


def test_the_result_does_not_depend_on_the_number_of_threads() -> None:
    batch, found = random_batch([33, 7, 40]), []
    qkv = numbers(80, 48, dtype=torch.bfloat16)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append((attention(qkv, 2, layout(batch, 0.0, qkv.dtype), 0.0), gated_gelu(qkv)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_without_a_compiler_torch_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = random_batch([20, 3, 9])
    qkv, where, turns = numbers(32, 48, dtype=torch.float32), layout(batch, 0.0, torch.float32, 4), angles(batch.positions_N, 8, 100.0)
    compiled = attention(qkv, 2, where, 0.0, turns), gated_gelu(qkv)
    monkeypatch.setattr(encoder_native, "available", lambda dtype: False)
    plain = attention(qkv, 2, where, 0.0, turns), gated_gelu(qkv)
    for a, b in zip(compiled, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
