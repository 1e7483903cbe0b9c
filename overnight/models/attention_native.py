"""Attention on a CPU in one pass over each sequence, without padding and without keeping scores: attention.c, or attention_bf16.c where the
processor multiplies tiles of bf16.

Shapes: N tokens of the flat batch, S sequences, T their padded length, H heads, E dimensions of a head.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from overnight import native

_SOURCE, _TILES = (Path(__file__).with_name(name) for name in ("attention.c", "attention_bf16.c"))
_LONG, _POINTER, _FLOAT = ctypes.c_long, ctypes.c_void_p, ctypes.c_float
_INPUTS = [*[_LONG] * 4, *[_POINTER] * 4, *[_LONG] * 2, ctypes.c_uint64, _LONG, _FLOAT]
_ARGUMENTS = {"attend": [*_INPUTS, *[_POINTER] * 2], "attend_backward": [*_INPUTS, *[_POINTER] * 3]}


@functools.cache
def available(dtype: torch.dtype) -> bool:
    """Return whether attention can be computed in C here for activations of a type; builds it if need be."""
    try:
        return dtype in (torch.float32, torch.bfloat16) and _library(dtype) is not None
    except native.NoCompiler:
        return False


@functools.cache
def _library(dtype: torch.dtype) -> ctypes.CDLL:
    if dtype == torch.float32:
        return native.library(_SOURCE)
    tiles = native.optional_library(_TILES)  # which a compiler that builds the other may not know
    return tiles if tiles is not None and tiles.prepare() else native.library(_SOURCE, "BF16")


@functools.cache
def _function(library: ctypes.CDLL, name: str) -> Callable[..., int]:
    found = getattr(library, name)
    found.argtypes, found.restype = _ARGUMENTS[name], ctypes.c_int
    return found  # type: ignore[no-any-return]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        heads: int,
        starts: Tensor,
        longest: int,
        window: tuple[int, int],
        dropping: tuple[int, int, float],
        cos: Tensor | None,
        sin: Tensor | None,
    ) -> Tensor:
        qkv = qkv.contiguous()
        numbers = len(starts) - 1, heads, qkv.shape[1] // 3 // heads, longest
        out, sums = _attend(qkv, numbers, starts, window, dropping, cos, sin)
        ctx.save_for_backward(qkv, starts, cos, sin, sums)
        ctx.rest = numbers, window, dropping
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        qkv, starts, cos, sin, sums = ctx.saved_tensors
        numbers, window, dropping = ctx.rest
        out = torch.empty_like(qkv)
        _run("attend_backward", qkv, numbers, (starts, qkv, cos, sin), window, dropping, grad.contiguous(), sums, out)
        return out, *[None] * 7


def _attend(
    qkv: Tensor,
    numbers: tuple[int, ...],
    starts: Tensor,
    window: tuple[int, int],
    dropping: tuple[int, int, float],
    cos: Tensor | None,
    sin: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return what is attended to (N, H·E), and the logarithm of each softmax's sum (N, H)."""
    out, sums = qkv.new_empty(len(qkv), qkv.shape[1] // 3), qkv.new_empty(len(qkv), numbers[1], dtype=torch.float32)
    _run("attend", qkv, numbers, (starts, qkv, cos, sin), window, dropping, out, sums)
    return out, sums


def _run(
    name: str,
    like: Tensor,
    numbers: tuple[int, ...],
    read: tuple[Tensor | None, ...],
    window: tuple[int, int],
    dropping: tuple[int, int, float],
    *more: Tensor,
) -> None:
    assert all(x.is_contiguous() for x in (*read, *more) if x is not None)
    pointers = [None if x is None else x.data_ptr() for x in read]
    if not _function(_library(like.dtype), name)(*numbers, *pointers, *window, *dropping, *(x.data_ptr() for x in more)):
        raise MemoryError("no memory for the scores of a block of queries")


def attention(
    qkv: Tensor,
    heads: int,
    starts: Tensor,
    longest: int,
    window: tuple[int, int],
    dropping: tuple[int, int, float],
    turns: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Return softmax attention within each sequence: (N, H·E).

    Args:
        qkv: (N, 3·H·E), queries, keys and values side by side.
        heads: H.
        starts: offset of each sequence and the end of the last, which is N (S + 1).
        longest: at least the length of each.
        window: tokens before and behind it that one sees; -1 is all.
        dropping: from :func:`dropping`.
        turns: cosine and sine of rotary positions, (N, 1, 1, E/2) each.
    """
    cos, sin = turns or (None, None)
    if not torch.is_grad_enabled():
        numbers = len(starts) - 1, heads, qkv.shape[1] // 3 // heads, longest
        return _attend(qkv.contiguous(), numbers, starts.int(), window, dropping, cos, sin)[0]
    return _Attention.apply(qkv, heads, starts.int(), longest, window, dropping, cos, sin)  # type: ignore[no-any-return]


def dropping(probability: float) -> tuple[int, int, float]:
    """Return a seed from torch's generator, the value below which a weight's 32 random bits (signed) drop it, and what the others are multiplied by."""
    if not probability:
        return 0, -(2**31), 1.0
    seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_(-(2**63), None)) % 2**64
    dropped = min(round(probability * 2**32), 2**32 - 1)
    return seed, dropped - 2**31, 2**32 / (2**32 - dropped)


def keep_mask(heads: int, length: int, seed: int, dropped: int) -> Tensor:
    """Return which weights attention.c keeps: (S·H, T, T). Arithmetic of 64 and 32 bits wraps around, as there.

    Args:
        heads: S·H.
        length: T.
        seed, dropped: from :func:`dropping`.
    """

    def mixed(x: Tensor, shift: int, factor: int) -> Tensor:
        return (x ^ _shifted(x, shift)) * _signed(factor, 64)

    place = (torch.arange(heads)[:, None] << 32) + torch.arange(1, length + 1)
    x = mixed(mixed(place * _signed(0x9E3779B97F4A7C15, 64) + _signed(seed, 64), 30, 0xBF58476D1CE4E5B9), 27, 0x94D049BB133111EB)
    key = x ^ _shifted(x, 31)
    low, high = key.to(torch.int32)[..., None], _shifted(key, 32).to(torch.int32)[..., None]
    bits = torch.arange(length, dtype=torch.int32) ^ low
    bits ^= _shifted(bits, 16)
    bits *= _signed(0x7FEB352D, 32)
    bits ^= high
    bits ^= _shifted(bits, 15)
    bits *= _signed(0x846CA68B, 32)
    bits ^= _shifted(bits, 16)
    return bits >= dropped


def _signed(x: int, size: int) -> int:
    """Return an unsigned number as the signed one of the same bits."""
    return x - 2**size if x >= 2 ** (size - 1) else x


def _shifted(x: Tensor, by: int) -> Tensor:
    """Return bits moved to the right, with zeros behind them."""
    return (x >> by) & ((1 << (x.element_size() * 8 - by)) - 1)
