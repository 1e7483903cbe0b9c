"""Linear maps, dropout and attention, against autograd and torch's own."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from overnight.models import attention as attend
from overnight.models import encoder_native, layers
from overnight.models.attention import Layout, attention, layout
from overnight.models.layers import dropout, gated_gelu, keep_mask, layer_norm, linear
from overnight.models.weight_copies import copy_of, kept_copies
from tests.models.sample import random_batch


def doubles(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("bias", [True, False])
def test_linear_passes_gradcheck(bias: bool) -> None:
    inputs = (doubles(5, 4), doubles(3, 4, seed=1), doubles(3, seed=2) if bias else None)
    assert torch.autograd.gradcheck(linear, inputs)


@pytest.mark.parametrize("mkl", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "inner", "outer"), [(1, 1, 1), (7, 5, 3), (130, 64, 192), (33, 192, 64)])
def test_linear_equals_torch_and_its_gradients_have_the_type_of_the_weight(
    dtype: torch.dtype, rows: int, inner: int, outer: int, mkl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "prefers_mkl", lambda: mkl)
    x, weight, bias = (doubles(*shape, seed=seed).detach().float() for seed, shape in enumerate([(rows, inner), (outer, inner), (outer,)]))
    results = []
    for apply in (linear, F.linear):
        leaves = [x.to(dtype).clone().requires_grad_(), weight.clone().requires_grad_(), bias.clone().requires_grad_()]
        given_ = leaves if apply is linear else [leaf.to(dtype) for leaf in leaves]
        out = apply(*given_)
        # A gradient that is not contiguous, as attention gives.
        (out.t().contiguous().t() * torch.linspace(-1, 1, outer).to(dtype)).sum().backward()
        results.append([out.detach(), *[leaf.grad for leaf in leaves]])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 70),
    st.integers(1, 70),
    st.integers(1, 70),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.booleans(),
)
def test_the_gradient_of_a_weight_is_a_contiguous_product_on_any_processor(
    rows: int, outer: int, inner: int, dtype: torch.dtype, mkl: bool
) -> None:
    grad, x = doubles(rows, outer).detach().to(dtype), doubles(rows, inner, seed=1).detach().to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "prefers_mkl", lambda: mkl)
        found = layers.weight_gradient(grad, x, dtype)
    assert found.dtype == dtype and found.is_contiguous()
    exact = grad.double().t() @ x.double()
    error = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(found.double(), exact, rtol=0.0, atol=error * float(exact.abs().max()))


def test_linear_needs_no_gradient_of_its_input() -> None:
    x, weight, bias = torch.randn(3, 4), torch.randn(2, 4, requires_grad=True), torch.randn(2)
    linear(x, weight, bias).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(2, 4))
    assert x.grad is None and bias.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layer_norm_keeps_its_statistics_in_fp32(dtype: torch.dtype) -> None:
    # Far from zero, 16-bit statistics would lose everything.
    x, weight, bias = (torch.randn(6, 64) + 50).to(dtype), torch.rand(64), torch.randn(64)
    exact = F.layer_norm(x.double(), (64,), weight.double(), bias.double(), 1e-12)
    out = layer_norm(x, weight, bias)
    assert out.dtype == dtype
    torch.testing.assert_close(
        out.double(), exact, rtol=1e-4 if dtype == torch.float32 else 8e-3, atol=1e-3 if dtype == torch.float32 else 1e-2
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradients_of_a_norms_weights_are_added_up_in_fp32_and_all_else_is_as_in_torch(dtype: torch.dtype, bias: bool) -> None:
    # The mean of the gradient is what a sum of 16 bits loses: behind some hundred rows it grows no more.
    x, grad = doubles(4096, 64).detach().to(dtype), (0.1 * doubles(4096, 64, seed=1).detach() + 0.05).to(dtype)
    scale, shift = 1 + 0.1 * doubles(64, seed=2).detach(), doubles(64, seed=3).detach()

    def learned(kind: torch.dtype, norm: Callable[..., Tensor], parameters: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        given = [x.to(kind), scale.to(parameters), *([shift.to(parameters)] if bias else [])]
        leaves = [value.requires_grad_() for value in given]
        out = norm(leaves[0], *leaves[1:])
        return out, list(torch.autograd.grad(out, leaves, grad.to(kind)))

    def torchs(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.layer_norm(x, (64,), weight, bias, 1e-12)

    out, found = learned(dtype, lambda x, weight, bias=None: layer_norm(x, weight, bias), torch.float32)
    expected, (expected_x, *_) = learned(dtype, torchs, torch.float32)
    _, exact = learned(torch.float64, torchs, torch.float64)
    assert torch.equal(out, expected) and torch.equal(found[0], expected_x)
    for mine, true in zip(found[1:], exact[1:], strict=True):
        assert mine.dtype == torch.float32 and (mine - true).norm() < 1e-5 * true.norm()


def test_a_norm_whose_weights_are_frozen_only_passes_the_gradient_on() -> None:
    x, weight = doubles(9, 8).detach().bfloat16(), torch.ones(8)
    with torch.no_grad():
        assert torch.equal(layer_norm(x, weight, None), F.layer_norm(x, (8,), weight, None, 1e-12))
    x.requires_grad_()
    layer_norm(x, weight, None).float().square().sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0 and weight.grad is None


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9, 1e-3])
def test_dropout_keeps_the_right_share_at_every_lane_and_scales_it(probability: float) -> None:
    torch.manual_seed(0)
    count = 400_000
    kept = dropout(torch.ones(count // 100, 100), probability, True).flatten()
    scale = 1 / (1 - round(probability * 65536) / 65536)
    torch.testing.assert_close(kept.unique(), torch.tensor([0.0, scale]))
    for lane in range(4):
        share = (kept[lane::4] != 0).double().mean().item()
        assert abs(share - (1 - probability)) < 5 * (probability * (1 - probability) / (count / 4)) ** 0.5 + 1e-5
    assert abs(kept.double().mean().item() - 1) < 5 * (probability / (1 - probability) / count) ** 0.5


def test_the_streams_of_a_random_word_are_uniform_and_independent() -> None:
    torch.manual_seed(0)
    masks = torch.stack([keep_mask(torch.Size([40_000]), share)[0] for share in (0.5,) * 8]).view(8, -1, 4)
    joint = (masks * torch.tensor([1, 2, 4, 8])).sum(-1).flatten()
    counts = torch.bincount(joint, minlength=16).double()
    assert ((counts - counts.mean()).abs() < 5 * counts.mean().sqrt()).all()
    # Thresholds over the whole range of the 16 bits.
    for share in (1 / 65536, 0.01, 0.25, 0.75, 0.99):
        torch.manual_seed(1)
        mask, _ = keep_mask(torch.Size([1_000_000]), share)
        assert abs(1 - mask.double().mean().item() - share) < 5 * (share / 1e6) ** 0.5


@settings(max_examples=50)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.floats(0, 1, exclude_max=True))
def test_a_mask_has_the_shape_asked_for_and_a_finite_scale(shape: list[int], probability: float) -> None:
    mask, scale = keep_mask(torch.Size(shape), probability)
    assert list(mask.shape) == shape and 1 <= scale <= 65536 and (probability > 1e-5 or mask.all())


def test_dropout_passes_its_mask_to_the_gradient() -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 40, requires_grad=True)
    out = dropout(x, 0.3, True)
    out.backward(torch.full_like(out, 2.0))
    torch.testing.assert_close(x.grad, torch.where(out == 0, 0.0, 2 * out.detach() / x.detach()))
    assert 0.2 < (x.grad == 0).double().mean() < 0.4
    assert dropout(x, 0.3, False) is x and dropout(x, 0.0, True) is x


def test_dropout_is_reproducible_from_the_seed() -> None:
    x, found = torch.ones(10, 10), []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        found.append(dropout(x, 0.5, True))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_rows_by_index_pass_gradcheck() -> None:
    x, index = doubles(6, 3), torch.tensor([4, 0, 5])
    assert torch.autograd.gradcheck(lambda x: attend._Rows.apply(x, index, None), (x,))
    # With an inverse, places that repeat a row must not carry a gradient: here they are dropped again.
    pad, unpad = torch.tensor([0, 1, 2, 2, 3, 4, 5, 5]), torch.tensor([0, 1, 2, 4, 5, 6])
    keep = torch.tensor([1, 1, 1, 0, 1, 1, 1, 0], dtype=torch.float64)[:, None]
    assert torch.autograd.gradcheck(lambda x: (attend._Rows.apply(x, pad, unpad) ** 2) * keep, (x,))


def reference(qkv: Tensor, heads: int, lengths: tuple[int, ...]) -> Tensor:
    """Attention sequence by sequence, as the formula says."""
    outs = []
    for part in qkv.split([length for length in lengths if length]):
        q, k, v = part.view(len(part), 3, heads, -1).permute(1, 2, 0, 3)
        weights = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1)
        outs.append((weights @ v).transpose(0, 1).reshape(len(part), -1))
    return torch.cat(outs)


@pytest.mark.parametrize("lengths", [(8, 8, 8), (8, 3, 5), (1,), (1, 2, 1), (5, 7, 0, 0), (4, 4, 0)])
@pytest.mark.parametrize("dropped", [False, True], ids=["sdpa", "own"])
def test_attention_and_its_gradient_equal_the_formula(lengths: tuple[int, ...], dropped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if dropped:  # Our own attention with a mask that keeps all.
        monkeypatch.setattr(attend.attention_native, "dropping", lambda probability: (0, -(2**31), 1.0))
    heads, width = 2, 6
    batch = random_batch(lengths)
    where = layout(batch, 0.5 if dropped else 0.0, torch.float64)
    qkv = doubles(sum(lengths), 3 * width)
    weight = doubles(sum(lengths), width, seed=1).detach()
    out = attention(qkv, heads, where, 0.5 if dropped else 0.0)
    expected = reference(qkv, heads, lengths)
    torch.testing.assert_close(out, expected)
    (grad,) = torch.autograd.grad((out * weight).sum(), qkv)
    (expected_grad,) = torch.autograd.grad((expected * weight).sum(), qkv)
    torch.testing.assert_close(grad, expected_grad)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=7))
def test_padding_and_unpadding_are_inverse(lengths: list[int]) -> None:
    where = layout(random_batch(lengths), 0.0, torch.float32)
    if where.pad is None:
        assert len(set(lengths)) == 1 and where.unpad is None and where.mask is None
        return
    assert where.unpad is not None and where.mask is not None
    assert torch.equal(where.pad[where.unpad], torch.arange(sum(lengths)))
    assert where.mask.shape == (len(lengths), 1, 1, max(lengths)) and where.mask.sum() == sum(lengths)
    # Padding repeats a row of its own sequence.
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    assert torch.equal(owner[where.pad].view(len(lengths), -1), torch.arange(len(lengths))[:, None].expand(-1, max(lengths)))


def test_attention_dropout_keeps_the_mean() -> None:
    torch.manual_seed(0)
    qkv = doubles(10, 12).detach()
    where = layout(random_batch([6, 4] * 4000), 0.2, torch.float64)
    mean = attention(qkv.repeat(4000, 1), 2, where, 0.2).view(4000, 10, 4).mean(0)
    torch.testing.assert_close(mean, reference(qkv, 2, (6, 4)), rtol=0.0, atol=0.05)


def test_copies_of_weights_are_kept_for_a_step_but_not_of_what_each_micro_batch_makes_anew() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    with kept_copies():
        assert copy_of(weight, torch.bfloat16) is copy_of(weight, torch.bfloat16)
        joined = torch.cat([weight, weight])
        copies = [copy_of(joined, torch.bfloat16) for _ in range(2)]
        assert copies[0] is not copies[1] and torch.equal(copies[0], joined.detach().to(torch.bfloat16))
        gone = weakref.ref(joined)
        del joined
        assert gone() is None


@pytest.mark.parametrize("name", ["linear", "dropout", "gated_gelu", "attention"])
def test_a_second_derivative_is_refused_where_there_is_none(name: str) -> None:
    if name in ("gated_gelu", "attention") and not encoder_native.available(torch.float32):
        pytest.skip("torch's own, which has one")
    x, weight = torch.randn(4, 48, requires_grad=True), torch.randn(8, 48, requires_grad=True)
    functions: dict[str, Callable[[], Tensor]] = {
        "linear": lambda: linear(x, weight),
        "dropout": lambda: dropout(x, 0.1, True),
        "gated_gelu": lambda: gated_gelu(x),
        "attention": lambda: attention(x, 2, Layout(torch.tensor([0, 4]), 4, False), 0.0),
    }
    (first,) = torch.autograd.grad(functions[name]().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.square().sum().backward()
