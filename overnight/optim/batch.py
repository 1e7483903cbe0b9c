"""The tensors that an optimizer steps together, and what steps them."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from overnight.machine import why_no_triton
from overnight.optim import native
from overnight.optim.checks import check_dense
from overnight.optim.offload import chunks, offloaded
from overnight.optim.state import has_memory, is_plain, is_traced, local, state_dtype

# Elements that are stepped together. On a CPU the intermediate results of a bucket should stay in its cache; on a GPU the bound is
# their memory. Tensors that are sharded are one bucket, so that all their norms take one collective.
_BUCKET = {"cpu": 1 << 18}
_DEFAULT_BUCKET = 1 << 26
# What Triton supports.
_TRITON_CAPABILITY = (8, 0)


@dataclass
class Batch:
    """The tensors of one group, or of several with the same settings, that have a gradient and share device, type and sharding (n of them)."""

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


def same_settings(a: dict[str, Any], b: dict[str, Any], names: Iterable[str]) -> bool:
    """Return whether two groups have the same settings, so that their tensors are stepped as those of one."""

    def same(x: Any, y: Any) -> bool:
        return x is y or (type(x) is type(y) and not isinstance(x, Tensor) and bool(x == y))  # to compare tensors waits for the device

    return offloaded(a) == offloaded(b) and all(same(a.get(name), b.get(name)) for name in names)


def make_batches(group: dict[str, Any], tensors: Sequence[tuple[str, Tensor]]) -> list[Batch]:
    """Return the batches of a group, or of several with the same settings.

    What a step takes of Python are a few questions to each tensor: none is asked twice.

    Args:
        group: settings.
        tensors: names and parameters; those without a gradient or without elements are left out.

    Raises:
        RuntimeError: for a sparse gradient.
    """
    found: dict[Any, Batch] = {}
    lists, last, usual = by_lists(group), None, Batch(group, (), "lists")
    for name, p in tensors:
        grad: Any = p.grad
        if grad is None or p.numel() == 0:
            continue
        check_dense(name, grad)
        x, g, mesh, placements = p, grad, None, ()
        if not (is_plain(p) and is_plain(grad)):
            mesh, placements = getattr(p, "device_mesh", None), getattr(p, "placements", ())
            if placements != getattr(grad, "placements", ()):
                grad = grad.redistribute(mesh, placements)
            x, g = local(p), local(grad)
        device, dtype = p.device, p.dtype
        kind = device, dtype, g.dtype, mesh, placements
        if kind != last:  # to look up a batch takes longer than to compare
            backend = "lists" if lists else fastest(device, dtype, group["fused"], sharded=mesh is not None)
            last, usual = kind, found.setdefault((kind, backend), Batch(group, groups_of(p), backend))
        batch = usual
        if usual.backend != "lists" and not in_memory(x, g):
            batch = found.setdefault((kind, "lists"), Batch(group, usual.shards, "lists"))
        batch.names.append(name)
        batch.params.append(p)
        batch.grads.append(g.contiguous() if batch.backend == "kernels" else g.to(state_dtype(p)))
    return [batch for batch in found.values() if batch.params]


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
    if by_lists(group) or not in_memory(local(p), local(grad)):
        return "lists"
    return fastest(p.device, p.dtype, group["fused"], sharded=hasattr(p, "device_mesh"))


def by_lists(group: dict[str, Any]) -> bool:
    """Return whether a group is stepped by lists of tensors, whatever its tensors are: asked once for all of them."""
    fused = group["fused"]
    return fused is False or (fused is None and group["foreach"] is not None) or is_traced()


def in_memory(x: Tensor, g: Tensor) -> bool:
    """Return whether this process's parts of a tensor and its gradient can be read from their addresses; on a GPU a gradient is made contiguous.

    What lies in memory must be the numbers: not their negatives, as of the imaginary part of a conjugate, nor nothing, as of a zero that
    autograd did not write out.
    """
    if not (has_memory(x) and has_memory(g) and x.is_contiguous()):
        return False
    return (g.is_contiguous() or g.is_cuda) and not g.is_neg() and not g._is_zerotensor()


def fastest(device: torch.device, dtype: torch.dtype, fused: bool | None, *, sharded: bool) -> str:
    """Return what steps tensors that are :func:`in_memory`, of a group that is not stepped by lists; `fused` as in :func:`backend_of`."""
    cpu = device.type == "cpu"
    takes = not sharded if cpu else device.type == "cuda" and dtype != torch.float64
    if not takes or (fused is None and why_lists(device)):
        return "lists"
    return "native" if cpu else "kernels"


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
