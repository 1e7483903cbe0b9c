"""Attention of variable lengths: when it is taken, and a CPU's reference in the kernel's place, forward, backward and with dropout.

The kernel itself needs a GPU: what is tested is everything around it, with the arguments of its own schema.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from overnight.models import attention as attend
from overnight.models.attention import Layout, attention, how, layout, why_padded
from tests.models.sample import pretraining, random_batch, unseen

HEADS, WIDTH, P = 2, 16, 0.3
CUDA = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Sets what the GPU that is not there can do."""
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)

    def capable(major: int, minor: int) -> None:
        why_padded.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))

    capable(9, 0)
    yield capable
    why_padded.cache_clear()


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CHOICES = [
    # capability, type, size of a head, dropout, training; why not
    ((9, 0), BF16, 64, 0.0, True, ""),
    ((9, 0), BF16, 64, 0.1, True, ""),
    ((9, 0), FP16, 64, 0.1, True, ""),
    ((9, 0), FP16, 64, 0.0, False, ""),
    ((10, 0), BF16, 128, 0.1, True, ""),
    ((8, 0), BF16, 256, 0.1, True, ""),
    ((8, 6), BF16, 192, 0.1, True, ""),
    ((8, 6), BF16, 256, 0.0, False, ""),
    ((9, 0), FP32, 64, 0.0, True, "the kernel takes bf16 and fp16, not float32"),
    ((9, 0), torch.float64, 64, 0.0, False, "the kernel takes bf16 and fp16, not float64"),
    ((7, 0), FP16, 64, 0.0, False, "the kernel needs compute capability 8.0, this GPU has 7.0"),
    ((7, 5), FP16, 64, 0.1, True, "the kernel needs compute capability 8.0, this GPU has 7.5"),
    ((9, 0), BF16, 47, 0.0, False, "the kernel takes heads of a multiple of 8 up to 256 dimensions, not 47"),
    ((9, 0), BF16, 264, 0.0, False, "the kernel takes heads of a multiple of 8 up to 256 dimensions, not 264"),
    ((8, 6), BF16, 200, 0.0, True, "with compute capability 8.6 the kernel trains heads of up to 192 dimensions, not 200"),
    ((12, 0), BF16, 256, 0.1, True, "with compute capability 12.0 the kernel trains heads of up to 192 dimensions, not 256"),
]


@pytest.mark.parametrize(("capability", "dtype", "size", "dropout", "training", "why"), CHOICES)
def test_what_decides_between_variable_lengths_and_padding(
    capability: tuple[int, int], dtype: torch.dtype, size: int, dropout: float, training: bool, why: str, gpu: Any
) -> None:
    gpu(*capability)
    assert why_padded(CUDA, dtype, size, dropout, training) == why


def test_a_cpu_an_older_torch_and_one_whose_kernel_is_another_pad(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_padded(torch.device("cpu"), BF16, 64, 0.0, True) == "variable lengths need a GPU"
    monkeypatch.setattr(attend, "_FLASH_ARGUMENTS", ("query", "key", "value", "something else"))
    assert why_padded(CUDA, BF16, 64, 0.1, True) == "the kernel of this torch takes no dropout" and not why_padded(
        CUDA, BF16, 64, 0.0, True
    )
    gpu(9, 0)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert why_padded(CUDA, BF16, 64, 0.0, True) == "this torch has no attention of variable lengths"


def test_the_choice_is_told_with_its_reason(gpu: Any) -> None:
    assert how(CUDA, BF16, 64, 0.1) == "variable lengths, without padding (FlashAttention)"
    assert how(CUDA, FP32, 64, 0.1) == "sequences padded to the longest of a micro-batch, since the kernel takes bf16 and fp16, not float32"


def test_heads_that_the_kernel_cannot_train_are_padded_in_training_only(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(8, 6)
    batch = random_batch([5, 3])
    with FakeTensorMode():  # A tensor without numbers stands for one on a GPU.
        there = dataclasses.replace(batch, ids_N=torch.empty(8, dtype=torch.long, device="cuda"))
    monkeypatch.setattr(attend, "moved", lambda tensor, device: tensor)
    assert not layout(there, 0.0, BF16, size=256).varlen and layout(there, 0.0, BF16, size=192).varlen
    with torch.no_grad():
        assert layout(there, 0.0, BF16, size=256).varlen


def keeps(sequences: int, longest: int, probability: float) -> Tensor:
    """Which weights dropout keeps, of each sequence: (S, H, T, T)."""
    return torch.rand(sequences, HEADS, longest, longest, generator=torch.Generator().manual_seed(7)) >= probability


def kernel(schema: Any, keep: Tensor, calls: list[dict[str, Any]]) -> Any:
    """What the kernel computes, sequence by sequence, from arguments that its schema must take; it drops what `keep` says."""

    def flash(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        names = [argument.name for argument in schema.arguments]
        assert len(args) <= len(names) and set(kwargs) <= set(names[len(args) :])
        call = {argument.name: argument.default_value for argument in schema.arguments} | dict(zip(names, args, strict=False)) | kwargs
        calls.append(call)
        q, k, v, starts = call["query"], call["key"], call["value"], call["cum_seq_q"]
        assert starts is call["cum_seq_k"] and starts.dtype == torch.int32 and call["max_q"] == call["max_k"] and not call["is_causal"]
        outs = []
        for number, (first, last) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
            size, (a, b, c) = last - first, (x[first:last].transpose(0, 1) for x in (q, k, v))
            window = call["window_size_left"], call["window_size_right"]
            scores = (a @ b.transpose(1, 2) * q.shape[-1] ** -0.5).masked_fill(unseen(size, window), float("-inf"))
            weights = torch.softmax(scores, -1) * keep[number, :, :size, :size] / (1 - call["dropout_p"])
            outs.append((weights @ c).transpose(0, 1))
        return torch.cat(outs), q, q, q, q

    return flash


def padded_reference(qkv: Tensor, where: Layout, keep: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Our own padded attention with the same weights dropped."""
    monkeypatch.setattr(attend.attention_native, "dropping", lambda probability: (0, 0, 1 / (1 - P)))
    monkeypatch.setattr(attend.attention_native, "keep_mask", lambda *numbers: keep)
    monkeypatch.setattr(attend, "eager_cpu", lambda x: True)
    return attention(qkv, HEADS, where, P)


@settings(max_examples=15)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.sampled_from([-1, 2]), st.booleans())
def test_with_dropout_it_equals_padded_attention_forward_and_backward(lengths: list[int], reach: int, causal: bool) -> None:
    batch, keep = random_batch(lengths, causal=causal), keeps(len(lengths), max(lengths), P)
    qkv = torch.randn(sum(lengths), 3 * WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    weight = torch.randn(sum(lengths), WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    calls: list[dict[str, Any]] = []
    padded = layout(batch, P, torch.float64, reach)
    window = padded.window
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend, "_flash", kernel(torch.ops.aten._flash_attention_forward.default._schema, keep, calls))
        patch.setattr(attend, "eager_cpu", lambda x: False)
        ours = attention(qkv, HEADS, Layout(batch.starts, max(lengths), varlen=True, window=window), P)
        theirs = padded_reference(qkv, padded, keep, patch)
    assert [call["dropout_p"] for call in calls] == [P] and (calls[0]["window_size_left"], calls[0]["window_size_right"]) == window
    torch.testing.assert_close(ours, theirs)
    (grad,), (expected,) = (torch.autograd.grad((out * weight).sum(), qkv) for out in (ours, theirs))
    torch.testing.assert_close(grad, expected)


def test_training_drops_by_the_kernel_and_evaluation_does_not(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole encoder on variable lengths: with dropout by what takes it, without by torch's public function, and equal to padding there."""
    net, batch = pretraining(attention_dropout=P), random_batch([7, 3, 5])
    expected = net.eval().encoder(batch)
    calls: list[dict[str, Any]] = []
    public: list[Any] = []
    schema = torch.ops.aten._flash_attention_forward.default._schema
    signature = inspect.signature(attend.find_varlen())

    def without(*args: Any, **kwargs: Any) -> Tensor:
        call = signature.bind(*args, **kwargs).arguments
        public.append(call)
        every = torch.ones(3, 1, 7, 7, dtype=torch.bool)
        given_ = (*(call[name] for name in ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k")), 0.0, False, False)
        return kernel(schema, every, [])(*given_, window_size_left=-1, window_size_right=-1)[0]

    monkeypatch.setattr(attend, "varlen_attn", without)
    monkeypatch.setattr(attend, "_flash", kernel(schema, torch.ones(3, 1, 7, 7, dtype=torch.bool), calls))
    monkeypatch.setattr(attend, "eager_cpu", lambda x: False)
    monkeypatch.setattr(attend, "why_padded", lambda *asked: "")
    torch.testing.assert_close(net.encoder(batch), expected, rtol=1e-4, atol=1e-4)
    assert len(public) == 3 and not calls
    net.train().encoder(batch).sum().backward()
    assert len(public) == 3 and [call["dropout_p"] for call in calls] == [P] * 3
    assert all(p.grad is not None for name, p in net.encoder.named_parameters())
