"""What an encoder computes on a CPU between its matrix products: encoder.c.

Shapes: N tokens of the flat batch, S sequences, T their padded length, H heads, E dimensions of a head, F width inside the feed-forward part.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from overnight import native

_SOURCE = Path(__file__).with_name("encoder.c")
_DEFINES: dict[torch.dtype, tuple[str, ...]] = {torch.float32: (), torch.bfloat16: ("BF16",)}


@functools.cache
def available(dtype: torch.dtype) -> bool:
    """Return whether encoder.c can be used here for activations of a type; builds it if need be."""
    try:
        return dtype in _DEFINES and native.library(_SOURCE, *_DEFINES[dtype]) is not None
    except native.NoCompiler:
        return False


@functools.cache
def _function(dtype: torch.dtype, name: str, *kinds: type) -> Callable[..., None]:
    found = getattr(native.library(_SOURCE, *_DEFINES[dtype]), name)
    found.argtypes, found.restype = kinds, None
    return found  # type: ignore[no-any-return]


def _call(name: str, dtype: torch.dtype, *values: int | float | Tensor | None) -> None:
    """Call a function of encoder.c with numbers and contiguous tensors."""
    kinds = (ctypes.c_long if isinstance(x, int) else ctypes.c_float if isinstance(x, float) else ctypes.c_void_p for x in values)
    assert all(x.is_contiguous() for x in values if isinstance(x, Tensor))
    _function(dtype, name, *kinds)(*(x.data_ptr() if isinstance(x, Tensor) else x for x in values))


def gated_gelu(x: Tensor) -> Tensor:
    """Return gelu(a) · b of the halves of (N, 2F)."""
    out = x.new_empty(len(x), x.shape[1] // 2)
    _call("gated_gelu", x.dtype, *out.shape, x, out)
    return out


def gated_gelu_backward(x: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of x."""
    out = torch.empty_like(x)
    _call("gated_gelu_backward", x.dtype, *grad.shape, x, grad, out)
    return out


def softmax(scores: Tensor, heads: int, mask: Tensor | None, size: int) -> None:
    """Turn products of queries and keys (S·H, T, T) into probabilities, in place.

    Args:
        mask: which places a query sees, (1 or S, 1, 1 or T, T); None is all.
        size: E, by whose root they are divided.
    """
    rows, length, _ = scores.shape
    steps = (0, 0) if mask is None else tuple(mask.stride(d) if mask.shape[d] > 1 else 0 for d in (0, 2))
    _call("softmax", scores.dtype, rows, heads, length, size**-0.5, mask, *steps, scores)


def softmax_backward(p: Tensor, grad: Tensor, size: int) -> None:
    """Turn the gradient of probabilities (S·H, T, T) into that of the products, in place."""
    _call("softmax_backward", p.dtype, p.shape[0] * p.shape[1], p.shape[2], size**-0.5, p, grad)


def to_heads(rows: Tensor, parts: int, heads: int, length: int, pad: Tensor | None, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """Return rows (N, P·H·E) with each head's together: (P, S, H, T, E), the first two of the parts turned by rotary positions.

    Args:
        pad: flat row of each padded place (S·T); None where they are alike.
        cos, sin: (N, 1, 1, E/2); None turns nothing.
    """
    sequences, size = (len(rows) if pad is None else len(pad)) // length, rows.shape[1] // parts // heads
    out = rows.new_empty(parts, sequences, heads, length, size)
    _call("to_heads", rows.dtype, *out.shape, pad, cos, sin, rows, out)
    return out


def to_rows(parts: Tensor, tokens: int, unpad: Tensor | None, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """Return (P, S, H, T, E) as rows (N, P·H·E), the inverse of :func:`to_heads`.

    Args:
        tokens: N.
        unpad: padded place of each row (N); None where they are alike.
        cos, sin: (N, 1, 1, E/2), by which the first two parts are turned back; None turns nothing.
    """
    count, sequences, heads, length, size = parts.shape
    out = parts.new_empty(tokens, count * heads * size)
    _call("to_rows", parts.dtype, count, tokens, sequences, heads, length, size, unpad, cos, sin, parts, out)
    return out


def spread(rows: Tensor, shape: Sequence[int], unpad: Tensor | None) -> Tensor:
    """Return rows (N, H·E) as (S, H, T, E), 0 at padding."""
    _, heads, length, size = shape
    out = rows.new_empty(*shape) if unpad is None else rows.new_zeros(*shape)
    _call("spread", rows.dtype, len(rows), heads, length, size, unpad, rows, out)
    return out
