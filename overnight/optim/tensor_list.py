"""Lists of tensors with the arithmetic of one tensor, so that equations are written once and run batched.

torch's `_foreach` functions do the work: on a GPU, one launch for many tensors. A vector of n numbers beside a list of n tensors
stands for one number for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overnight.optim.state import has_memory, is_traced

# Numbers that are squared and added in their own precision.
_STRETCH = 1 << 14
# Below this norm, squares of float32 values that are 0 or have lost digits (those of numbers under 1e-19) may count.
_LEAST = 1e-10


class Tensors:
    """n tensors that are added, multiplied and measured together.

    Args:
        parts: the tensors, or this process's parts of them.
        shards: process groups over which each tensor is sharded; empty for whole tensors.
    """

    def __init__(self, parts: Sequence[Tensor], shards: Sequence[Any] = ()) -> None:
        self.parts, self.shards = list(parts), shards

    def _like(self, parts: Sequence[Tensor]) -> Tensors:
        return Tensors(parts, self.shards)

    def mul(self, other: Tensors | Tensor | float) -> Tensors:
        """Return self · other."""
        return self._like(torch._foreach_mul(self.parts, _each(other)))

    def div(self, other: Tensors) -> Tensors:
        """Return self / other."""
        return self._like(torch._foreach_div(self.parts, other.parts))

    def mul_(self, other: Tensors | Tensor | float) -> Tensors:
        """Set self ← self · other and return it."""
        torch._foreach_mul_(self.parts, _each(other))
        return self

    def div_(self, other: Tensors) -> Tensors:
        """Set self ← self / other and return it."""
        torch._foreach_div_(self.parts, other.parts)
        return self

    def add_(self, other: Tensors | float, alpha: float = 1.0) -> Tensors:
        """Set self ← self + alpha · other and return it."""
        if isinstance(other, Tensors):
            torch._foreach_add_(self.parts, other.parts, alpha=alpha)
        else:
            torch._foreach_add_(self.parts, other * alpha)
        return self

    def lerp_(self, other: Tensors, weight: Tensor) -> Tensors:
        """Set self ← (1 − weight) · self + weight · other, with a weight for each (n), and return it."""
        if torch.compiler.is_compiling():  # which takes a list of weights for one number
            return self.add_(self._like(torch._foreach_sub(other.parts, self.parts)).mul_(weight))
        torch._foreach_lerp_(self.parts, other.parts, weight.unbind())
        return self

    def sub_(self, other: Tensors) -> Tensors:
        """Set self ← self − other and return it."""
        torch._foreach_sub_(self.parts, other.parts)
        return self

    def sqrt_(self) -> Tensors:
        """Set self ← √self and return it."""
        torch._foreach_sqrt_(self.parts)
        return self

    def norm(self) -> Tensor:
        """Return L2 norm of every whole tensor (n), wherever its parts are; waits for no device.

        Right from 1e-30 to 1e30 in float32, whose squares would be 0 and infinite.
        """
        if self.parts[0].device.type == "cpu" and has_memory(self.parts[0]) and not is_traced():
            norms = _cpu_norms(self.parts)
        else:
            norms = torch.stack(torch._foreach_norm(self.parts, dtype=torch.float64)).to(self.parts[0].dtype)
        if not self.shards:
            return norms
        squares = norms.double().square()
        for group in self.shards:
            dist.all_reduce(squares, group=group)
        return squares.sqrt().to(norms.dtype)


def total_norm(norms: Tensor) -> Tensor:
    """Return L2 norm of all tensors together (a scalar), from that of each (n)."""
    return torch.linalg.vector_norm(norms, dtype=torch.float64).to(norms.dtype)


def _cpu_norms(xs: Sequence[Tensor]) -> Tensor:
    norms = torch.stack([_cpu_norm(x) for x in xs])
    for i, norm in enumerate(norms.tolist()):
        if not _LEAST <= norm < math.inf:
            squares = [part.dot(part) for part in (part.double() for part in xs[i].reshape(-1).split(_STRETCH))]
            norms[i] = torch.stack(squares).sum().sqrt()
    return norms


def _cpu_norm(x: Tensor) -> Tensor:
    # torch's own norm adds float32 values in few lanes: of 24 M normal numbers it is 1e-3 off, and takes three times as long.
    flat = x.reshape(-1)
    if len(flat) <= _STRETCH:
        return flat.dot(flat).sqrt()
    return torch.stack([part.dot(part) for part in flat.split(_STRETCH)]).double().sum().sqrt().to(x.dtype)


def _each(other: Tensors | Tensor | float) -> Any:
    if isinstance(other, Tensors):
        return other.parts
    return other.unbind() if isinstance(other, Tensor) and other.ndim else other


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """Return a/b, and 1 where either is 0 (any shape)."""
    return torch.where(torch.minimum(a, b) > 0, a / b, 1.0)
