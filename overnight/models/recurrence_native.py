"""The pointwise part of a step on a CPU: recurrence.c. The functions are those of recurrence_plain.py."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from overnight import native

_SOURCE = Path(__file__).with_name("recurrence.c")
_DEFINES = {torch.float32: ("REAL=float",), torch.bfloat16: ("REAL=float", "BF16"), torch.float64: ("REAL=double", "DOUBLE")}
"""By the type of what is multiplied by matrices."""


@functools.cache
def available(dtype: torch.dtype) -> bool:
    """Return whether recurrence.c can be used here for a type; builds it if need be."""
    try:
        return dtype in _DEFINES and library(dtype) is not None
    except native.NoCompiler:
        return False


def library(dtype: torch.dtype) -> ctypes.CDLL:
    """Return recurrence.c for a type.

    Raises:
        NoCompiler: where there is none.
    """
    return native.library(_SOURCE, *_DEFINES[dtype])


@functools.cache
def _function(dtype: torch.dtype, name: str, tables: int, tensors: int) -> Callable[..., None]:
    """Return a function of recurrence.c; with the types of its arguments ctypes takes plain numbers, which is fast."""
    found = getattr(library(dtype), name)
    found.argtypes = [ctypes.c_long, ctypes.c_long, *[ctypes.c_void_p] * tables, ctypes.c_long, *[ctypes.c_void_p] * tensors]
    found.restype = None
    return found  # type: ignore[no-any-return]


def _call(name: str, like: Tensor, table: tuple[Tensor, ...], *tensors: Tensor | None) -> None:
    """Call a function of recurrence.c.

    Args:
        like: a matrix (B, H) of the type of the library.
        table: matrices (R, G) with rows for the batch.
        tensors: the rest.
    """
    assert all(x is None or x.is_contiguous() for x in (*table, *tensors))
    function = _function(like.dtype, name, len(table), len(tensors))
    addresses = [None if x is None else x.data_ptr() for x in tensors]
    function(*like.shape, *[x.data_ptr() for x in table], table[0].shape[1], *addresses)


def modulate(table: Tensor, rows_B: Tensor, product: Tensor, u: Tensor, m: Tensor) -> None:
    """Compute m = mx ∘ u, and u kept."""
    _call("modulate", u, (table,), rows_B, product, u, m)


def cell(table: Tensor, rows_B: Tensor, product: Tensor, before: Tensor, gates: Tensor, c: Tensor, h: Tensor) -> None:
    """Compute the gates, c and h from the product with m."""
    _call("cell", h, (table,), rows_B, product, before, gates, c, h)


def cell_backward(
    grad_table: Tensor,
    rows_B: Tensor,
    gates: Tensor,
    before: Tensor,
    c: Tensor,
    grad_h: Tensor | None,
    grad_c: Tensor | None,
    back_h: Tensor,
    dc: Tensor,
    dz: Tensor,
) -> None:
    """Compute dz from the gradients of h and c; dc becomes that of the step before."""
    _call("cell_backward", dz[:, : c.shape[1]], (grad_table,), rows_B, gates, before, c, grad_h, grad_c, back_h, dc, dz)


def modulate_backward(table: Tensor, grad_table: Tensor, rows_B: Tensor, u: Tensor, dm: Tensor, du: Tensor, m: Tensor) -> None:
    """Compute du, and m again, from the gradient of m."""
    _call("modulate_backward", u, (table, grad_table), rows_B, u, dm, du, m)
