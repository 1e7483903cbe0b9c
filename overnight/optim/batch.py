"""The tensors that an optimizer steps together, and what steps them."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from overnight.machine import why_no_triton
from overnight.optim import native
from overnight.optim.offload import chunks
from overnight.optim.state import has_memory, is_traced, local, state_dtype

# Elements that are stepped together. On a CPU the intermediate results of a bucket should stay in its cache; on a GPU the bound is
# their memory. Tensors that are sharded are one bucket, so that all their norms take one collective.
_BUCKET = {"cpu": 1 << 18}
_DEFAULT_BUCKET = 1 << 26
# What Triton supports.
_TRITON_CAPABILITY = (8, 0)


@dataclass
class Batch:
    """The tensors of one group that have a gradient and share device, type and sharding (n of them)."""

    group: dict[str, Any]
    shards: Sequence[Any]
    """Process groups over which each tensor is sharded."""
    backend: str
    """What steps them: `lists`, `native` or `kernels`."""
    names: list[str] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    """This process's parts, in the type of the state; the kernels read any type."""
    norms: Tensor = field(default_factory=lambda: torch.empty(0))
    """|g| of the whole tensors (n)."""


def split(batch: Batch) -> list[Batch]:
    """Return the parts of a batch whose state can be brought to the device at once."""
    return [replace(batch, names=batch.names[here], params=batch.params[here], grads=batch.grads[here]) for here in chunks(batch.params)]


def buckets(xs: list[Tensor], batch: Batch) -> Iterator[slice]:
    """Yield stretches of a batch that are stepped together."""
    limit = 0 if batch.group["foreach"] is False else math.inf if batch.shards else _BUCKET.get(xs[0].device.type, _DEFAULT_BUCKET)
    start = size = 0
    for i, x in enumerate(xs):
        if i > start and size + x.numel() > limit:
            yield slice(start, i)
            start, size = i, 0
        size += x.numel()
    yield slice(start, len(xs))


def backend_of(p: Tensor, grad: Tensor, group: dict[str, Any]) -> str:
    """Return what steps a tensor: `native` on a CPU, `kernels` on a GPU, `lists` where they do not take it.

    Args:
        group: `fused` True asks for the first two and False for lists; None takes what is there, unless `foreach` says how.
    """
    return "lists" if by_lists(group) else fastest(p, grad, group["fused"])


def by_lists(group: dict[str, Any]) -> bool:
    """Return whether a group is stepped by lists of tensors, whatever its tensors are: asked once for all of them."""
    fused = group["fused"]
    return fused is False or (fused is None and group["foreach"] is not None) or is_traced()


def fastest(p: Tensor, grad: Tensor, fused: bool | None) -> str:
    """Return what steps a tensor of a group that is not stepped by lists; arguments as in :func:`backend_of`."""
    x, g = local(p), local(grad)
    # What lies in memory must be the numbers: not their negatives, as of the imaginary part of a conjugate, nor nothing, as of a zero
    # that autograd did not write out.
    if not (has_memory(x) and has_memory(g)) or not x.is_contiguous() or g.is_neg() or g._is_zerotensor():
        return "lists"
    if p.device.type == "cpu":
        takes = not hasattr(p, "device_mesh") and grad.is_contiguous()
    else:
        takes = p.device.type == "cuda" and state_dtype(p) == torch.float32
    if not takes or (fused is None and why_lists(p.device)):
        return "lists"
    return "native" if p.device.type == "cpu" else "kernels"


@functools.cache
def why_lists(device: torch.device) -> str:
    """Return why LAMB, LANS and LARS step lists of tensors on a device unless they are told otherwise; empty where they have a faster way."""
    if device.type == "cpu":
        return native.why_not()
    if device.type != "cuda":
        return f"there are no kernels for a device of type {device.type}"
    if why := why_no_triton():
        return why
    capability = torch.cuda.get_device_capability(device)
    return "" if capability >= _TRITON_CAPABILITY else "Triton needs compute capability 8.0, this GPU has {}.{}".format(*capability)


def groups_of(x: Tensor) -> list[Any]:
    """Return the process groups over which a tensor is sharded: those of the dimensions of its mesh along which it is not replicated.

    Not `is_shard()`: the placement of what tensor parallelism and FSDP2 both shard (`_StridedShard`) answers False.
    """
    mesh, placements = getattr(x, "device_mesh", None), getattr(x, "placements", ())
    return [mesh.get_group(i) for i, placement in enumerate(placements) if not placement.is_replicate()] if mesh is not None else []
