"""The equations compiled for this CPU: native.c."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overnight import native

_SOURCE = Path(__file__).with_name("native.c")
_REALS = {torch.float32: ("float", "sqrtf", ctypes.c_float), torch.float64: ("double", "sqrt", ctypes.c_double)}


def adaptive(
    kind: str, xs: list[Tensor], gs: list[Tensor], ms: list[Tensor], vs: list[Tensor], table: Tensor, group: dict[str, Any], scratch: Tensor
) -> Tensor:
    """Take a LAMB or LANS step of n contiguous tensors, in place; returns the trust ratios (n).

    Args:
        kind: `lamb` or `lans`.
        xs, gs, ms, vs: parameters, gradients and moments.
        table: the values of the step (n, 6).
        group: settings.
        scratch: (2, N) with N at least that of the longest tensor; overwritten.
    """
    real = _REALS[table.dtype][2]
    longest = scratch.shape[1]
    sums = scratch.new_empty(3 * (longest // 16384 + 1), dtype=torch.float64)
    trust = table.new_empty(len(xs))
    clip = group.get("max_trust_ratio")
    _library(table.dtype).adaptive(
        ctypes.c_int(kind == "lans"),
        ctypes.c_long(len(xs)),
        _sizes(xs),
        *(_addresses(tensors) for tensors in (xs, gs, ms, vs)),
        ctypes.c_void_p(table.data_ptr()),
        ctypes.c_int(group["trust_ratio"]),
        *(real(value) for value in (group["eps"], group["weight_decay"], group["betas"][0], float("inf") if clip is None else clip)),
        ctypes.c_void_p(scratch.data_ptr()),
        ctypes.c_long(longest),
        ctypes.c_void_p(sums.data_ptr()),
        ctypes.c_void_p(trust.data_ptr()),
    )
    return trust


def lars(xs: list[Tensor], gs: list[Tensor], vs: list[Tensor], table: Tensor, group: dict[str, Any]) -> None:
    """Take a LARS step of n contiguous tensors, in place.

    Args:
        xs, gs, vs: parameters, gradients and momentum.
        table: the values of the step (n, 5).
        group: settings.
    """
    real = _REALS[table.dtype][2]
    _library(table.dtype).lars(
        ctypes.c_long(len(xs)),
        _sizes(xs),
        *(_addresses(tensors) for tensors in (xs, gs, vs)),
        ctypes.c_void_p(table.data_ptr()),
        real(group["momentum"]),
        real(group["weight_decay"]),
        ctypes.c_int(group["nesterov"]),
    )


def norms(xs: list[Tensor]) -> Tensor:
    """Return L2 norms of contiguous tensors of one type (n)."""
    result = xs[0].new_empty(len(xs))
    sums = result.new_empty(sum(x.numel() // 16384 + 1 for x in xs), dtype=torch.float64)
    _library(result.dtype).norms(
        ctypes.c_long(len(xs)), _sizes(xs), _addresses(xs), ctypes.c_void_p(sums.data_ptr()), ctypes.c_void_p(result.data_ptr())
    )
    return result


def why_not() -> str:
    """Return why native.c cannot be used here, in one line; empty where it can. Builds it if need be."""
    try:
        _built(torch.float32)
    except native.NoCompiler as error:
        return " ".join(str(error).split())
    return ""


def _sizes(xs: Sequence[Tensor]) -> Any:
    return (ctypes.c_long * len(xs))(*[x.numel() for x in xs])


def _addresses(xs: Sequence[Tensor]) -> Any:
    return (ctypes.c_void_p * len(xs))(*[x.data_ptr() for x in xs])


def _library(dtype: torch.dtype) -> ctypes.CDLL:
    """Return the library for a type.

    Raises:
        NoCompiler: saying what is missing.
    """
    try:
        return _built(dtype)
    except native.NoCompiler as error:
        raise native.NoCompiler(f"fused = True on a CPU needs a C compiler, or leave fused out: {error}") from None


def _built(dtype: torch.dtype) -> ctypes.CDLL:
    name, root, _ = _REALS[dtype]
    return native.library(_SOURCE, f"REAL={name}", f"SQRT={root}")
