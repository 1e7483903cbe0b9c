"""The steps of lamb.py, lans.py and lars.py for a GPU, in Triton: the kernels only fuse their equations, over all tensors of a batch.

A tensor is split into chunks, one for each program of a kernel. What must be known of a whole tensor is added chunk by chunk in a fixed
order: a step gives the same bits each time. Nothing waits for the device, and a step can be captured in a CUDA graph after a first one.
The kernels find the tensors by tables of their addresses, which lie on the device and are written when a tensor has moved.

Bytes for each fp32 parameter: LAMB and LANS read x, g, m, v and write m, v (24), then read x, m, v, LANS also g, and write x (16 and 20);
LARS reads x, g, v and writes x, v (20). A norm reads its tensor (4).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

try:
    import triton  # type: ignore[import-not-found,import-untyped]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped]
except ImportError as error:
    raise ImportError("fused = True on a GPU needs Triton: `pip install triton`, or leave fused out") from error

if TYPE_CHECKING:
    from overnight.optim.batch import Batch

CHUNK = tl.constexpr(16384)
"""Elements of a program."""
BLOCK = tl.constexpr(1024)
"""Elements it holds at once: four for each of its threads."""
# Products and sums are rounded one by one, so both passes of LAMB and LANS find the same directions.
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# Tables of addresses by what they hold; the oldest go first. What a captured graph reads stays as long as the process.
_tables: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}
_TABLES = 256
_captured: list[Any] = []


class Layout(NamedTuple):
    """How n tensors are split into C chunks."""

    chunks: Tensor
    """The tensor of each chunk, and which of its chunks it is (C, 2)."""
    firsts: Tensor
    """The first chunk of each tensor, and C (n + 1)."""
    sizes: Tensor
    """Elements of each tensor (n)."""


def step(
    kind: str,
    batch: Batch,
    xs: list[Tensor],
    copies: list[Tensor],
    moments: list[list[Tensor]],
    scalars: Any,
    step_sizes: Callable[..., tuple[tuple[Tensor, ...], Tensor]],
) -> Tensor:
    """Take a step of n contiguous tensors, in place; returns the trust ratios (n).

    Args:
        kind: `lamb`, `lans` or `lars`.
        batch: gradients (of one type: fp32, bf16 or fp16), settings, and over which processes each tensor is sharded.
        xs: parameters in fp32, or their master copies.
        copies: the 16-bit parameters of which xs are the masters; empty where there are none.
        moments: fp32 tensors, in the order of the equations.
        scalars: the values of the step, each for every tensor (n) or one for all.
        step_sizes: how far to go, from the norms; as in :class:`Layerwise`.

    Raises:
        RuntimeError: while a CUDA graph is captured, before a first step.
    """
    group, where, n = batch.group, _layout(xs), len(xs)
    s = type(scalars)(*(_for_each(v, n, xs[0].device) for v in scalars))
    tensors = [_addresses(parts) for parts in (xs, batch.grads, *moments)]
    copied = _addresses(copies) if copies else tensors[0]
    kinds = {"GRAD": _TYPES[batch.grads[0].dtype], "COPY": _TYPES[copies[0].dtype] if copies else None}
    if kind == "lars":
        _, trust = step_sizes(s, None, group)
        settings = float(group["momentum"]), float(group["weight_decay"])
        _launch(_lars, where, _rows(s), *tensors, copied, *settings, NESTEROV=bool(group["nesterov"]), **kinds)
        return trust.float()
    lans, trust_ratio = kind == "lans", bool(group["trust_ratio"])
    settings = float(group["eps"]), float(group["weight_decay"])
    partial = torch.empty(len(where.chunks), 3 if lans else 2, dtype=torch.float64, device=xs[0].device)
    _launch(_move_moments, where, _rows(s), *tensors, partial, *settings, LANS=lans, ADAPT=trust_ratio, GRAD=kinds["GRAD"])
    found, trust = step_sizes(s, _whole(partial, where, batch.shards).unbind(1) if trust_ratio else None, group)
    _launch(_move, where, _rows((*s, *found)), *tensors, copied, *settings, LANS=lans, **kinds)
    return trust.float()


def norms(xs: list[Tensor], shards: Sequence[Any] = ()) -> Tensor:
    """Return L2 norms of whole tensors of one type in fp32 (n), from this process's contiguous parts.

    Args:
        xs: the parts; fp32, bf16 or fp16.
        shards: process groups over which each tensor is sharded.
    """
    where = _layout(xs)
    partial = torch.empty(len(where.chunks), 1, dtype=torch.float64, device=xs[0].device)
    _launch(_square, where, _addresses(xs), partial, KIND=_TYPES[xs[0].dtype])
    return _whole(partial, where, shards)[:, 0].float()


def _whole(partial: Tensor, where: Layout, shards: Sequence[Any]) -> Tensor:
    """Return norms (n, K), float64, from sums of squares of the chunks (C, K)."""
    n, k = len(where.sizes), partial.shape[1]
    squares = torch.empty(n, k, dtype=torch.float64, device=partial.device)
    with torch.cuda.device_of(partial):
        _total[(n, k)](where.firsts, partial, squares, **_OPTIONS)
    for shard in shards:
        dist.all_reduce(squares, group=shard)
    return squares.sqrt()


def _launch(kernel: Any, where: Layout, *args: Any, **flags: Any) -> None:
    """Run a kernel on all chunks; of a small tensor that is sharded over many processes, this one may have none."""
    if len(where.chunks):
        with torch.cuda.device_of(where.chunks):
            kernel[(len(where.chunks),)](where.chunks, where.sizes, *args, **flags, **_OPTIONS)


def _for_each(value: Tensor | float, n: int, device: torch.device) -> Tensor:
    """Return a value for each of n tensors (n), float64."""
    return value.double().expand(n) if isinstance(value, Tensor) else torch.full((n,), value, dtype=torch.float64, device=device)


def _rows(columns: Sequence[Tensor]) -> Tensor:
    """Return the values of each tensor beside each other (n, K), fp32."""
    return torch.stack(tuple(columns), 1).float()


def _layout(xs: list[Tensor]) -> Layout:
    where = _make_layout(tuple(map(Tensor.numel, xs)), xs[0].device)
    if _capturing(xs[0].device):
        _captured.append(where)
    return where


@functools.lru_cache(maxsize=64)
def _make_layout(sizes: tuple[int, ...], device: torch.device) -> Layout:
    if _capturing(device):
        raise RuntimeError("a step was captured before a first one of the same tensors: take one step, then capture")
    with torch.device("cpu"):  # whatever torch.set_default_device says
        counts = torch.tensor([-(-size // CHUNK.value) for size in sizes])
        firsts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        tensors = torch.repeat_interleave(torch.arange(len(sizes)), counts)
        chunks = torch.stack([tensors, torch.arange(len(tensors)) - firsts[tensors]], 1)
        return Layout(*(_upload(table, device) for table in (chunks, firsts, torch.tensor(sizes))))


def _addresses(xs: list[Tensor]) -> Tensor:
    """Return where n tensors are (n)."""
    key = xs[0].device, tuple(map(Tensor.data_ptr, xs))
    if _capturing(key[0]):
        if key not in _tables:
            # Into the graph itself, as arguments of its kernels: from the host it would be read again at each replay.
            table = torch.zeros(len(xs), dtype=torch.int64, device=key[0])
            torch._foreach_add_(table.unbind(), key[1])
            return table
        _captured.append(_tables[key])
    if key not in _tables:
        if len(_tables) == _TABLES:
            del _tables[next(iter(_tables))]
        _tables[key] = _upload(torch.tensor(key[1], device="cpu"), key[0])
    return _tables[key]


def _upload(table: Tensor, device: torch.device) -> Tensor:
    # torch keeps pinned memory that is freed until it has been copied.
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# The kernels. `part` 0 are the whole blocks of aligned tensors, which are read and written four numbers at a time; 1 is what is left.


@triton.jit
def _chunk(chunks: tl.tensor, sizes: tl.tensor, aligned: tl.tensor) -> tl.tensor:
    """Return where the chunk of this program begins, where its whole blocks end, and where it ends."""
    here = chunks + 2 * tl.program_id(0)
    first = tl.load(here + 1) * CHUNK
    last = tl.minimum(first + CHUNK, tl.load(sizes + tl.load(here)))
    whole = first + (last - first) // BLOCK * BLOCK
    return first, tl.where(aligned, whole, first), last


@triton.jit
def _read(address: tl.tensor, at: tl.tensor, last: tl.tensor, KIND: tl.constexpr, WHOLE: tl.constexpr) -> tl.tensor:
    """Return a block of a tensor in fp32; 0 beyond its end."""
    if WHOLE:
        values = tl.load(tl.multiple_of(address.to(tl.pointer_type(KIND)), 16) + at)
    else:
        values = tl.load(address.to(tl.pointer_type(KIND)) + at, mask=at < last, other=0.0)
    return values.to(tl.float32)


@triton.jit
def _write(address: tl.tensor, at: tl.tensor, last: tl.tensor, values: tl.tensor, KIND: tl.constexpr, WHOLE: tl.constexpr) -> None:
    """Write a block of a tensor."""
    if WHOLE:
        tl.store(tl.multiple_of(address.to(tl.pointer_type(KIND)), 16) + at, values.to(KIND))
    else:
        tl.store(address.to(tl.pointer_type(KIND)) + at, values.to(KIND), mask=at < last)


@triton.jit
def _above_0(eps: tl.tensor, new1: tl.tensor) -> tl.tensor:
    """Return eps, and where it is 0 something above for a tensor that is left alone: 0/0 is NaN, also at a rate of 0."""
    return tl.where((eps < 1e-37) & (new1 == 0.0), 1.0, eps)


@triton.jit
def _update_direction(
    x: tl.tensor, g: tl.tensor, m: tl.tensor, v: tl.tensor, correct1: tl.tensor, correct2: tl.tensor, eps: tl.tensor, decay: tl.tensor
) -> tl.tensor:
    """Return r, which is LAMB's u, and c."""
    d = tl.sqrt_rn(v * correct2) + eps
    r = tl.div_rn(m * correct1, d) + decay * x
    c = tl.div_rn(g, d) + decay * x
    return r, c


@triton.jit
def _squares(x: tl.tensor) -> tl.tensor:
    """Return x² in float64: in fp32 those of numbers below 1e-19 and above 1e19 are 0 and infinite."""
    return x.to(tl.float64) * x.to(tl.float64)


@triton.jit
def _move_moments(
    chunks: tl.tensor,
    sizes: tl.tensor,
    numbers: tl.tensor,
    xs: tl.tensor,
    gs: tl.tensor,
    ms: tl.tensor,
    vs: tl.tensor,
    partial: tl.tensor,
    eps: tl.tensor,
    decay: tl.tensor,
    LANS: tl.constexpr,
    ADAPT: tl.constexpr,
    GRAD: tl.constexpr,
) -> None:
    """Move m and v, and to adapt add up the squares of x, r and c; numbers: new1, new2, correct1, correct2, lr, scale."""
    chunk = tl.program_id(0)
    tensor = tl.load(chunks + 2 * chunk)
    x_at, g_at, m_at, v_at = tl.load(xs + tensor), tl.load(gs + tensor), tl.load(ms + tensor), tl.load(vs + tensor)
    first, whole, last = _chunk(chunks, sizes, (x_at | g_at | m_at | v_at) % 16 == 0)
    row = numbers + 6 * tensor
    new1, new2, correct1, correct2, scale = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 5)
    eps = _above_0(eps, new1)
    xx = tl.zeros([BLOCK], tl.float64)
    rr = tl.zeros([BLOCK], tl.float64)
    cc = tl.zeros([BLOCK], tl.float64)
    for part in tl.static_range(2):
        for start in range(whole if part else first, last if part else whole, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = _read(x_at, at, last, tl.float32, part == 0)
            g = _read(g_at, at, last, GRAD, part == 0) * scale
            m = _read(m_at, at, last, tl.float32, part == 0)
            v = _read(v_at, at, last, tl.float32, part == 0)
            m += new1 * (g - m)
            v += new2 * (g * g - v)
            _write(m_at, at, last, m, tl.float32, part == 0)
            _write(v_at, at, last, v, tl.float32, part == 0)
            if ADAPT:
                r, c = _update_direction(x, g, m, v, correct1, correct2, eps, decay)
                xx += _squares(x)
                rr += tl.where(at < last, _squares(r), 0.0)  # beyond the end it is 0/0 where eps is 0
                cc += tl.where(at < last, _squares(c), 0.0)
    if ADAPT:
        sums = partial + (3 if LANS else 2) * chunk
        tl.store(sums, tl.sum(xx))
        tl.store(sums + 1, tl.sum(rr))
        if LANS:
            tl.store(sums + 2, tl.sum(cc))


@triton.jit
def _move(
    chunks: tl.tensor,
    sizes: tl.tensor,
    numbers: tl.tensor,
    xs: tl.tensor,
    gs: tl.tensor,
    ms: tl.tensor,
    vs: tl.tensor,
    copies: tl.tensor,
    eps: tl.tensor,
    decay: tl.tensor,
    LANS: tl.constexpr,
    GRAD: tl.constexpr,
    COPY: tl.constexpr,
) -> None:
    """Move x; numbers: as before, and the step sizes of r and c."""
    tensor = tl.load(chunks + 2 * tl.program_id(0))
    x_at, g_at, m_at, v_at, copy_at = (
        tl.load(xs + tensor),
        tl.load(gs + tensor),
        tl.load(ms + tensor),
        tl.load(vs + tensor),
        tl.load(copies + tensor),
    )
    first, whole, last = _chunk(chunks, sizes, (x_at | g_at | m_at | v_at | copy_at) % 16 == 0)
    row = numbers + (8 if LANS else 7) * tensor
    correct1, correct2, scale, rate_r = tl.load(row + 2), tl.load(row + 3), tl.load(row + 5), tl.load(row + 6)
    eps = _above_0(eps, tl.load(row))
    for part in tl.static_range(2):
        for start in range(whole if part else first, last if part else whole, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = _read(x_at, at, last, tl.float32, part == 0)
            m = _read(m_at, at, last, tl.float32, part == 0)
            v = _read(v_at, at, last, tl.float32, part == 0)
            if LANS:
                g = _read(g_at, at, last, GRAD, part == 0) * scale
                r, c = _update_direction(x, g, m, v, correct1, correct2, eps, decay)
                x -= rate_r * r + tl.load(row + 7) * c
            else:
                u, _ = _update_direction(x, m, m, v, correct1, correct2, eps, decay)
                x -= rate_r * u
            _write(x_at, at, last, x, tl.float32, part == 0)
            if COPY is not None:
                _write(copy_at, at, last, x, COPY, part == 0)


@triton.jit
def _lars(
    chunks: tl.tensor,
    sizes: tl.tensor,
    numbers: tl.tensor,
    xs: tl.tensor,
    gs: tl.tensor,
    vs: tl.tensor,
    copies: tl.tensor,
    momentum: tl.tensor,
    decay: tl.tensor,
    NESTEROV: tl.constexpr,
    GRAD: tl.constexpr,
    COPY: tl.constexpr,
) -> None:
    """Move v and x; numbers: keep, inside, outside, trust, scale."""
    tensor = tl.load(chunks + 2 * tl.program_id(0))
    x_at, g_at, v_at, copy_at = tl.load(xs + tensor), tl.load(gs + tensor), tl.load(vs + tensor), tl.load(copies + tensor)
    first, whole, last = _chunk(chunks, sizes, (x_at | g_at | v_at | copy_at) % 16 == 0)
    row = numbers + 5 * tensor
    keep, inside, outside, scale = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 4)
    for part in tl.static_range(2):
        for start in range(whole if part else first, last if part else whole, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = _read(x_at, at, last, tl.float32, part == 0)
            g = _read(g_at, at, last, GRAD, part == 0) * scale
            v = _read(v_at, at, last, tl.float32, part == 0)
            d = inside * (g + decay * x)
            v = keep * v + d
            x -= outside * (d + momentum * v if NESTEROV else v)
            _write(v_at, at, last, v, tl.float32, part == 0)
            _write(x_at, at, last, x, tl.float32, part == 0)
            if COPY is not None:
                _write(copy_at, at, last, x, COPY, part == 0)


@triton.jit
def _square(chunks: tl.tensor, sizes: tl.tensor, xs: tl.tensor, partial: tl.tensor, KIND: tl.constexpr) -> None:
    """Add up the squares of each chunk."""
    chunk = tl.program_id(0)
    x_at = tl.load(xs + tl.load(chunks + 2 * chunk))
    first, whole, last = _chunk(chunks, sizes, x_at % 16 == 0)
    xx = tl.zeros([BLOCK], tl.float64)
    for part in tl.static_range(2):
        for start in range(whole if part else first, last if part else whole, BLOCK):
            x = _read(x_at, start + tl.arange(0, BLOCK), last, KIND, part == 0)
            xx += _squares(x)
    tl.store(partial + chunk, tl.sum(xx))


@triton.jit
def _total(firsts: tl.tensor, partial: tl.tensor, totals: tl.tensor) -> None:
    """Add up the chunks of each tensor, from (C, K) to (n, K), in float64."""
    tensor, which, width = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    first, last = tl.load(firsts + tensor), tl.load(firsts + tensor + 1)
    sums = tl.zeros([BLOCK], tl.float64)
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        sums += tl.load(partial + at * width + which, mask=at < last, other=0.0)
    tl.store(totals + tensor * width + which, tl.sum(sums))
