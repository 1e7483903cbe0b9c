"""Attention within a window: against the formula, without NaN from padding, and by the kernel for variable lengths."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from overnight.models import attention as attend
from overnight.models.attention import Layout, attention, layout
from tests.models.sample import modern, random_batch, unseen

HEADS, WIDTH = 2, 8


def reference(qkv: Tensor, lengths: list[int], window: tuple[int, int]) -> Tensor:
    """Attention sequence by sequence, as the formula says; a token sees so many before and behind it, or all (-1)."""
    outs = []
    for part in qkv.split(lengths):
        q, k, v = part.view(len(part), 3, HEADS, -1).permute(1, 2, 0, 3)
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(unseen(len(part), window), float("-inf"))
        outs.append((torch.softmax(scores, -1) @ v).transpose(0, 1).reshape(len(part), -1))
    return torch.cat(outs)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(-1, 12), st.booleans(), st.booleans())
def test_attention_in_a_window_and_its_gradient_equal_the_formula(lengths: list[int], reach: int, causal: bool, compiled: bool) -> None:
    qkv = torch.randn(sum(lengths), 3 * WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight = torch.randn(sum(lengths), WIDTH, generator=torch.Generator().manual_seed(1))
    where = layout(random_batch(lengths, causal=causal), 0.0, torch.float32, reach)
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:  # what a GPU without the kernel for variable lengths computes
            patch.setattr(attend, "eager_cpu", lambda x: False)
        out, expected = attention(qkv, HEADS, where, 0.0), reference(qkv, lengths, (reach, 0 if causal else reach))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    (grad,), (expected_grad,) = (torch.autograd.grad((result * weight).sum(), qkv) for result in (out, expected))
    torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-5)
    assert where.mask is None or where.mask.any(-1).all(), "a place that sees none would be NaN"


def test_a_window_that_reaches_everywhere_is_none() -> None:
    batch = random_batch([9, 9, 9])
    assert vars(layout(batch, 0.0, torch.float32, 8)) == vars(layout(batch, 0.0, torch.float32))
    assert layout(batch, 0.0, torch.float32, 7).mask is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[1, 64], [64, 1, 3], [2] * 5, [1]])
def test_places_of_padding_beyond_every_window_make_no_nan(lengths: list[int], dtype: torch.dtype) -> None:
    model = modern(local_attention=4, global_attention_every=2).train()
    losses, _ = model.losses(random_batch(lengths, nsp=False), dtype)
    losses["mlm"].backward()
    assert losses["mlm"].isfinite() and all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.skipif(attend.find_varlen() is None, reason="this torch has no attention of variable lengths")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("reach", [-1, 0, 3])
def test_the_kernel_for_variable_lengths_is_called_by_its_own_signature(reach: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in computes what the kernel's documentation says, from arguments that the real one must take."""
    lengths, signature, calls = [7, 2, 5], inspect.signature(attend.find_varlen()), []

    def stand_in(*args: Any, **kwargs: Any) -> Tensor:
        given_ = signature.bind(*args, **kwargs)
        given_.apply_defaults()
        call = given_.arguments
        calls.append(call)
        starts = call["cu_seq_q"]
        assert starts is call["cu_seq_k"] and starts.dtype == torch.int32 and starts[0] == 0
        assert call["max_q"] == call["max_k"] == max(starts.diff().tolist()) and isinstance(call["max_q"], int)
        qkv = torch.stack((call["query"], call["key"], call["value"]), 1).flatten(1)
        return reference(qkv, starts.diff().tolist(), call["window_size"]).view_as(call["query"])

    monkeypatch.setattr(attend, "varlen_attn", stand_in)
    monkeypatch.setattr(attend, "eager_cpu", lambda x: False)
    batch = random_batch(lengths, causal=causal)
    qkv, padded = torch.randn(sum(lengths), 3 * WIDTH), layout(batch, 0.0, torch.float32, reach)
    where = Layout(batch.starts, max(lengths), varlen=True, window=padded.window)
    torch.testing.assert_close(attention(qkv, HEADS, where, 0.0), attention(qkv, HEADS, padded, 0.0))
    assert len(calls) == 1


@pytest.mark.skipif(attend.find_varlen() is None, reason="this torch has no attention of variable lengths")
def test_a_window_is_kept_where_lengths_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = random_batch([7, 2, 5])
    monkeypatch.setattr(attend, "why_padded", lambda *asked: "")
    local, everywhere = (layout(batch, 0.0, torch.bfloat16, reach) for reach in (2, 6))
    assert vars(local) == vars(Layout(batch.starts, 7, varlen=True, window=(2, 2)))
    assert vars(everywhere) == vars(Layout(batch.starts, 7, varlen=True, window=(-1, -1)))
