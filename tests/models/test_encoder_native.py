"""What encoder.c, attention.c and attention_bf16.c compute, against torch's own operations in float64 and autograd."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from overnight import native
from overnight.batches.packing import IGNORED
from overnight.models import attention_native, encoder_native
from overnight.models.attention import Layout, angles, attention, layout, rotate
from overnight.models.layers import dropout, gated_gelu
from tests.models.sample import random_batch, unseen

pytestmark = pytest.mark.skipif(not encoder_native.available(torch.float32), reason="there is no C compiler here")
# Of the largest value: what rounding to the type allows.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}
TYPES = pytest.mark.parametrize("dtype", TOLERANCE)


def form(name: str) -> ctypes.CDLL:
    """Return a form of attention for bf16: attention.c, or attention_bf16.c by AMX or in plain loops."""
    source = Path(attention_native.__file__).with_name("attention.c" if name == "fp32 arithmetic" else "attention_bf16.c")
    library = native.library(source, *{"fp32 arithmetic": ("BF16",), "AMX": (), "plain loops": ("PORTABLE",)}[name])
    if name != "fp32 arithmetic" and not library.prepare():
        pytest.skip("this processor has no AMX")
    return library


@pytest.fixture(params=["fp32 arithmetic", "AMX", "plain loops"])
def each_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have attention for bf16 computed in each form."""
    library = form(request.param)
    monkeypatch.setattr(attention_native, "_library", lambda dtype: library)


def near(value: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Assert that two tensors are alike but for rounding."""
    assert value.dtype == dtype
    torch.testing.assert_close(value.double(), expected.detach(), rtol=0.0, atol=TOLERANCE[dtype] * float(expected.detach().abs().max()))


def numbers(*shape: int, dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Return normal numbers that the type can hold."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_default_type_and_device_of_torch_change_nothing(default: torch.dtype) -> None:
    def computed() -> list[Tensor]:
        losses = encoder_native.cross_entropy(logits.clone(), labels)
        steps, scales = encoder_native.quantize(logits)
        whole = encoder_native.dequantize(steps.int(), scales, one, one, torch.float32)
        torch.manual_seed(0)
        mixed = attention_native.attention(qkv, 2, starts, 9, (-1, -1), attention_native.dropping(0.2), None)
        return [losses, steps, scales, whole, mixed, *torch.autograd.grad(mixed.square().sum(), qkv), dropout(logits, 0.3, True)]

    logits, labels, one = numbers(5, 64, dtype=torch.float32), torch.tensor([3, 0, IGNORED, 63, 1]), torch.ones(64)
    qkv, starts = numbers(9, 3 * 32, dtype=torch.float32).requires_grad_(), torch.tensor([0, 9])
    expected = computed()
    try:
        torch.set_default_dtype(default)
        with torch.device("meta"):
            found = computed()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("defines", [(), ("PORTABLE",)], ids=["vectors", "plain loops"])
@given(shape=st.tuples(st.integers(0, 70), st.integers(0, 70)))
def test_a_transpose_has_every_number_in_its_place(defines: tuple[str, ...], shape: tuple[int, int]) -> None:
    x = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    out = torch.full((shape[1] * shape[0] + 1,), -1.0)
    transpose = native.library(Path(encoder_native.__file__).with_name("encoder.c"), *defines).transpose
    transpose.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    transpose(*shape, x.data_ptr(), out.data_ptr())
    assert torch.equal(out[:-1].view(shape[1], shape[0]), x.t()) and out[-1] == -1


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


@TYPES
@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 12_289])
def test_dropout_has_the_bits_of_torch(count: int, dtype: torch.dtype) -> None:
    x, mask = numbers(count, dtype=dtype), numbers(count, dtype=torch.float32, seed=1) > 0
    if count > 1:
        x[:2] = torch.tensor([float("nan"), float("inf")])
    found, expected = encoder_native.dropout(x, mask, 10 / 9), (x * mask).mul_(10 / 9)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0, equal_nan=True)


def test_gated_gelu_is_right_far_from_zero_and_keeps_what_is_no_number() -> None:
    x = torch.tensor([[-1e4, -30.0, -6.0, 0.0, 6.0, 30.0, 1e4, float("nan")]]).t()
    out = gated_gelu(torch.cat([x, torch.ones_like(x)], 1))
    torch.testing.assert_close(out, F.gelu(x), rtol=1e-6, atol=1e-6, equal_nan=True)


def formula(
    qkv: Tensor, heads: int, where: Layout, lengths: list[int], window: tuple[int, int], turns: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Return attention sequence by sequence, as the formula says."""
    if turns is not None:
        qkv = rotate(qkv, heads, *(x.double() for x in turns))
    outs = []
    for part in qkv.split(lengths):
        q, k, v = part.view(len(part), 3, heads, -1).permute(1, 2, 0, 3)
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(unseen(len(part), window), float("-inf"))
        weights = torch.softmax(scores, -1)
        outs.append((weights @ v).transpose(0, 1).reshape(len(part), -1))
    return torch.cat(outs)


SHAPES = given(
    lengths=st.lists(st.one_of(st.integers(1, 40), st.integers(41, 150)), min_size=1, max_size=5),
    reach=st.sampled_from([-1, 1, 8, 70]),
    causal=st.booleans(),
    turned=st.booleans(),
    size=st.sampled_from([2, 6, 8, 64, 80, 130]),
)


@settings(max_examples=40, deadline=None)
@SHAPES
def test_attention_and_its_gradient_equal_the_formula_in_float64(
    lengths: list[int], reach: int, causal: bool, turned: bool, size: int
) -> None:
    assert_the_formula(lengths, reach, causal, turned, size, torch.float32)


@pytest.mark.usefixtures("each_form")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@SHAPES
def test_each_form_of_attention_for_bf16_equals_the_formula(lengths: list[int], reach: int, causal: bool, turned: bool, size: int) -> None:
    assert_the_formula(lengths, reach, causal, turned, size, torch.bfloat16)


def assert_the_formula(lengths: list[int], reach: int, causal: bool, turned: bool, size: int, dtype: torch.dtype) -> None:
    """Assert that attention and its gradient are those of the formula in float64."""
    heads, batch, window = 2, random_batch(lengths, causal=causal), (reach, 0 if causal else reach)
    where = layout(batch, 0.0, dtype, reach)
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


@pytest.mark.usefixtures("each_form")
@pytest.mark.parametrize("window", [(-1, -1), (20, 20), (-1, 0), (20, 0)])
def test_each_form_of_attention_for_bf16_drops_the_same_weights(window: tuple[int, int]) -> None:
    heads, size, lengths, drawn = 3, 10, [97, 97, 1], (12345, -(2**31) + 2**30, 4 / 3)
    starts = torch.tensor([0, 97, 194, 195], dtype=torch.int32)
    qkv, grad = numbers(195, 3 * heads * size, dtype=torch.bfloat16), numbers(195, heads * size, dtype=torch.bfloat16, seed=1)
    exact, mine = qkv.double().requires_grad_(), qkv.clone().requires_grad_()
    keep = attention_native.keep_mask(3 * heads, 97, *drawn[:2]).double().view(3, heads, 97, 97) * drawn[2]
    parts = []
    for part, kept in zip(exact.split(lengths), keep, strict=True):
        length = len(part)
        q, k, v = part.view(length, 3, heads, size).permute(1, 2, 0, 3)
        scores = (q @ k.transpose(-1, -2) / size**0.5).masked_fill(unseen(length, window), -math.inf)
        parts.append((torch.softmax(scores, -1) * kept[:, :length, :length] @ v).transpose(0, 1).reshape(length, -1))
    expected, out = torch.cat(parts), attention_native.attention(mine, heads, starts, 97, window, drawn, None)
    expected.backward(grad.double())
    out.backward(grad)
    assert mine.grad is not None and exact.grad is not None
    near(out, expected, torch.bfloat16)
    near(mine.grad, exact.grad, torch.bfloat16)


@pytest.mark.usefixtures("each_form")
def test_each_form_of_attention_for_bf16_keeps_what_is_no_number_in_its_own_sequence() -> None:
    qkv = numbers(65, 48, dtype=torch.bfloat16)
    qkv[2] = float("nan")
    mine, where = qkv.requires_grad_(), layout(random_batch([5, 60]), 0.0, qkv.dtype)
    out = attention(mine, 2, where, 0.0)
    out.sum().backward()
    assert out[:5].isnan().all() and out[5:].isfinite().all()
    assert mine.grad is not None and mine.grad[:5].isnan().any(1).all() and mine.grad[5:].isfinite().all()


def test_bf16_is_multiplied_by_amx_where_it_can_be_and_else_read_as_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = attention_native._library.__wrapped__
    monkeypatch.setattr(native, "optional_library", lambda source: None)  # a compiler without AMX
    assert chosen(torch.bfloat16) is form("fp32 arithmetic")
    monkeypatch.undo()
    assert chosen(torch.bfloat16) is form("AMX")


@pytest.mark.usefixtures("each_form")
def test_products_of_torch_are_the_same_after_attention_as_before() -> None:
    a, b = numbers(64, 96, dtype=torch.bfloat16), numbers(96, 80, dtype=torch.bfloat16, seed=1)
    qkv, before = numbers(80, 48, dtype=torch.bfloat16), a @ b
    for _ in range(3):
        attention(qkv, 2, layout(random_batch([33, 7, 40]), 0.0, qkv.dtype), 0.0)
        assert torch.equal(a @ b, before)


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


def test_attention_takes_offsets_of_any_integer_type() -> None:
    qkv, batch = numbers(80, 48, dtype=torch.float32), random_batch([33, 7, 40])
    where = layout(batch, 0.0, qkv.dtype)
    assert torch.equal(attention(qkv, 2, where, 0.0), attention(qkv, 2, replace(where, starts=where.starts.long()), 0.0))


def test_without_a_compiler_torch_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = random_batch([20, 3, 9])
    qkv, grad, turns = (
        numbers(32, 48, dtype=torch.float32),
        numbers(32, 16, dtype=torch.float32, seed=1),
        angles(batch.positions_N, 8, 100.0),
    )

    def found() -> list[Tensor]:
        torch.manual_seed(5)
        outs = [gated_gelu(qkv), dropout(qkv, 0.2, True)]
        for window, probability, turned in ((4, 0.0, turns), (-1, 0.3, None), (-1, 0.0, None)):
            torch.manual_seed(7)
            mine = qkv.clone().requires_grad_()
            out = attention(mine, 2, layout(batch, probability, torch.float32, window), probability, turned)
            out.backward(grad)
            assert mine.grad is not None
            outs += [out.detach(), mine.grad]
        return outs

    compiled = found()
    for module in (encoder_native, attention_native):
        monkeypatch.setattr(module, "available", lambda dtype: False)
    for a, b in zip(compiled, found(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_attention_drops_the_right_share_of_weights_and_scales_the_others(probability: float) -> None:
    torch.manual_seed(0)
    length, heads = 96, 8
    seed, dropped, scale = attention_native.dropping(probability)
    keep = attention_native.keep_mask(heads, length, seed, dropped).double()
    near_mean = 5 * (probability * (1 - probability) / keep.numel()) ** 0.5
    assert abs(1 - keep.mean().item() - probability) < near_mean and scale == pytest.approx(1 / (1 - probability))
    # No two rows, columns or heads are alike: of any two, as many weights are dropped in both as chance says.
    for rows in (keep.flatten(0, 1), keep.transpose(1, 2).flatten(0, 1), keep.flatten(1)):
        both = (1 - rows) @ (1 - rows).t() / rows.shape[1]
        both = both[~torch.eye(len(both), dtype=torch.bool)]
        # Each pair is one draw of a binomial share.
        spread = (probability**2 * (1 - probability**2) / rows.shape[1]) ** 0.5
        assert (both - probability**2).abs().max() < 7 * spread + 1 / rows.shape[1]
        assert abs(both.mean() - probability**2) < 4 * near_mean


def test_attention_without_dropout_draws_nothing_and_with_it_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert attention_native.dropping(0.0) == (0, -(2**31), 1.0) and torch.equal(before, torch.get_rng_state())
    first = attention_native.dropping(0.5)
    torch.manual_seed(3)
    assert attention_native.dropping(0.5) == first != attention_native.dropping(0.5)


def test_what_is_no_number_reaches_its_own_sequence_only() -> None:
    batch, qkv = random_batch([5, 60]), numbers(65, 48, dtype=torch.float32)
    qkv[2] = float("nan")
    out = attention(qkv, 2, layout(batch, 0.0, qkv.dtype), 0.0)
    assert out[:5].isnan().all() and out[5:].isfinite().all()


@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 1), (5, 33), (9, 1000)])
@TYPES
def test_cross_entropy_and_its_gradient_equal_torch_in_float64(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    logits = numbers(rows, vocabulary, dtype=dtype, scale=4.0)
    labels = torch.arange(rows) * 7 % vocabulary
    labels[rows // 2 :: 3] = IGNORED
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, labels, reduction="none", ignore_index=IGNORED)
    expected.sum().backward()
    losses = encoder_native.cross_entropy(logits, labels)
    assert exact.grad is not None
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.double(), exact.grad, rtol=0.0, atol=TOLERANCE[dtype])


def test_cross_entropy_refuses_a_label_that_is_no_id_and_takes_any_integers() -> None:
    logits = numbers(3, 8, dtype=torch.float32)
    with pytest.raises(IndexError, match="label 8 is not below 8, the number of ids"):
        encoder_native.cross_entropy(logits, torch.tensor([1, 8, -100]))
    assert torch.equal(logits, numbers(3, 8, dtype=torch.float32)), "nothing was written"
    wanted = F.cross_entropy(logits, torch.tensor([1, 7, -100]), reduction="none")
    torch.testing.assert_close(encoder_native.cross_entropy(logits, torch.tensor([1, 7, -100], dtype=torch.int32)), wanted)


def test_cross_entropy_of_extreme_logits_is_finite_and_of_no_number_none() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [float("nan"), 0.0, 0.0], [-3e38, -3e38, -3e38]])
    losses = encoder_native.cross_entropy(logits, torch.tensor([1, 0, 2]))
    assert losses[0] == 2e4 and losses[1].isnan() and losses[2] == pytest.approx(math.log(3))
    assert logits[0].tolist() == [1, -1, 0] and logits[2].sum().abs() < 1e-6
