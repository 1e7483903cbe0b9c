"""What an encoder computes on a CPU between its matrix products: encoder.c.

Shapes: N tokens of the flat batch, F width inside the feed-forward part, M predicted positions, V vocabulary.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
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


def _call(name: str, dtype: torch.dtype, *values: int | float | Tensor) -> None:
    """Call a function of encoder.c with numbers and contiguous tensors."""
    kinds = (ctypes.c_long if isinstance(x, int) else ctypes.c_float if isinstance(x, float) else ctypes.c_void_p for x in values)
    assert all(x.is_contiguous() for x in values if isinstance(x, Tensor))
    _function(dtype, name, *kinds)(*(x.data_ptr() if isinstance(x, Tensor) else x for x in values))


def dropout(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return x · mask · scale.

    Args:
        mask: bool, of the shape of x.
    """
    out = torch.empty_like(x)
    _call("dropout", x.dtype, x.numel(), scale, mask, x, out)
    return out


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


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of x (N, K) in 8 bits, and the scale of each: int8 (N, K), fp32 (N)."""
    out, scales = x.new_empty(x.shape, dtype=torch.int8), x.new_empty(len(x), dtype=torch.float32)
    _call("quantize", x.dtype, *x.shape, x, out, scales)
    return out, scales


def dequantize(sums: Tensor, rows: Tensor, columns: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return sums · rows · columns + bias in a type.

    Args:
        sums: int32 (N, M).
        rows: scales, fp32 (N).
        columns, bias: fp32 (M).
    """
    out = sums.new_empty(sums.shape, dtype=dtype)
    _call("dequantize", dtype, *sums.shape, sums, rows, columns, bias, out)
    return out


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each row of (M, V), fp32, and turn the logits into their gradients, in place.

    Args:
        labels: ids (M), integers; a negative one is that of a row that counts for nothing.

    Raises:
        IndexError: when a label is none of the V ids: C would write outside of its row.
    """
    if len(labels) and (highest := int(labels.max())) >= logits.shape[1]:
        raise IndexError(f"label {highest} is not below {logits.shape[1]}, the number of ids")
    losses = logits.new_empty(len(logits), dtype=torch.float32)
    _call("cross_entropy", logits.dtype, *logits.shape, labels.to(torch.int64).contiguous(), logits, losses)
    return losses


def transpose(x: Tensor) -> Tensor:
    """Return the transpose of x (N, K), fp32, contiguous: three to six times as fast as torch's copy."""
    out = x.new_empty(x.shape[1], x.shape[0])
    _call("transpose", x.dtype, *x.shape, x, out)
    return out
