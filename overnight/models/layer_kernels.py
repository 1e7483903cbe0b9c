"""What a layer of BERT computes on a GPU between its matrix products and attention, in Triton: each stretch one pass over its tensors.

    norm            h = x + dropout(y + bias), LayerNorm(h)      reads x, y, writes h and the result
    norm_backward   the gradients of x and y, and the sums for weight and bias of the norm and for the bias
    gelu            gelu(y + bias)
    gelu_backward   the gradient of y in place of that of the result, and the sum for the bias
    joined          gradients of queries, keys and values side by side, and their sum for the bias

Which elements dropout keeps follows from a seed and their places (Philox; Salmon et al. 2011), so nothing of it is stored. Sums over rows are added
up block by block in a fixed order: equal runs give the same bits. The arithmetic is fp32, tensors are bf16, fp16 or fp32. Nothing waits for the device.

Shapes: N rows (tokens), D width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped]
import triton.language as tl  # type: ignore[import-not-found,import-untyped]
from torch import Tensor

# Programs that share the rows where sums over rows are taken: four for each multiprocessor of the largest GPU, and few enough that adding their sums up costs nothing.
PROGRAMS = 512
# Rows and columns that a program holds at once, and the programs that share the rows of a block of columns.
_ROWS, _COLUMNS, _SHARES = 16, 256, 64


def dropped_of(probability: float) -> tuple[int, float]:
    """Return of how many of 65,536 values of 16 random bits the element is dropped, and what the others are multiplied by, as on a CPU (:func:`overnight.models.layers.keep_mask`)."""
    dropped = min(round(probability * 65536), 65535)
    return dropped, 65536 / (65536 - dropped)


def norm(
    x: Tensor | None,
    y: Tensor,
    bias: Tensor | None,
    weight: Tensor,
    shift: Tensor | None,
    eps: float,
    probability: float = 0.0,
    seeds: Tensor | None = None,
    which: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute LayerNorm(x + dropout(y + bias)).

    Args:
        x, y: (N, D); x None adds nothing.
        bias: (D), of y.
        weight, shift: (D), of the norm.
        probability: of dropout; 0 drops nothing.
        seeds: int64, of which number `which` is that of this dropout.

    Returns:
        what is normalized and the result, (N, D) each in the type of y; mean and reciprocal standard deviation of each row (2, N), fp32.
    """
    h, out, (rows, width) = torch.empty_like(y), torch.empty_like(y), y.shape
    stats = torch.empty(2, rows, dtype=torch.float32, device=y.device)
    dropped, scale = dropped_of(probability)
    launch(_norm, (rows,), x, y, bias, weight, shift, seeds, h, out, stats, rows, width, eps, dropped, scale,
            WHICH=which, DROP=dropped > 0, BLOCK=block_of(width), num_warps=warps_of(width))  # fmt: skip
    return h, out, stats


def norm_backward(
    grad: Tensor, h: Tensor, stats: Tensor, weight: Tensor, probability: float, seeds: Tensor | None, which: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of :func:`norm`.

    Args:
        grad: of the result (N, D).
        h, stats: as it returned them.

    Returns:
        of x, and of y (the same tensor where nothing is dropped), (N, D) each; those of weight, shift and bias, (3, D) fp32.
    """
    (rows, width), (dropped, scale) = h.shape, dropped_of(probability)
    dh = torch.empty_like(h)
    dy = torch.empty_like(h) if dropped else dh
    programs = min(rows, PROGRAMS)
    sums = torch.empty(programs, 3, width, dtype=torch.float32, device=h.device)
    launch(_norm_backward, (programs,), grad, h, stats, weight, seeds, dh, dy, sums, rows, width, dropped, scale,
            WHICH=which, DROP=dropped > 0, BLOCK=block_of(width), num_warps=warps_of(width))  # fmt: skip
    return dh, dy, sums.sum(0)


def gelu(y: Tensor, bias: Tensor) -> Tensor:
    """Return gelu(y + bias), exact (Hendrycks & Gimpel 2016), of (N, D) and (D)."""
    out, (rows, width) = torch.empty_like(y), y.shape
    grid = triton.cdiv(rows, _ROWS), triton.cdiv(width, _COLUMNS)
    launch(_gelu, grid, y, bias, out, rows, width, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4)
    return out


def gelu_backward(grad: Tensor, y: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of y, which takes the memory of `grad`, and of the bias (D), fp32."""
    rows, width = y.shape
    shares = min(_SHARES, triton.cdiv(rows, _ROWS))
    sums = torch.empty(shares, width, dtype=torch.float32, device=y.device)
    grid = triton.cdiv(width, _COLUMNS), shares
    launch(_gelu_backward, grid, grad, y, bias, sums, rows, width, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4)
    return grad, sums.sum(0)


def joined(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return three tensors (N, H, E) side by side (N, 3·D), and the sum over their rows (3·D), fp32."""
    rows, width = len(q), q.shape[1] * q.shape[2]
    out, shares = q.new_empty(rows, 3 * width), min(_SHARES, triton.cdiv(rows, _ROWS))
    sums = torch.empty(shares, 3 * width, dtype=torch.float32, device=q.device)
    grid = triton.cdiv(width, _COLUMNS), shares, 3
    parts = (part.contiguous() for part in (q, k, v))
    launch(_joined, grid, *parts, out, sums, rows, width, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4)
    return out, sums.sum(0)


def block_of(width: int) -> int:
    """Return how many places a program has for a row."""
    return max(8, triton.next_power_of_2(width))


def warps_of(width: int) -> int:
    """Warps of a program that holds a row: eight elements for each thread, as far as there are so many threads."""
    return min(16, max(1, block_of(width) // 256))


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Run a kernel on contiguous tensors and numbers; on a grid without programs nothing."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    assert all(x.is_contiguous() for x in tensors)
    if not all(grid):  # no rows
        return
    with torch.cuda.device_of(tensors[0]):
        # Products and sums are rounded one by one; the default is not the same in all versions of Triton.
        kernel[grid](*args, **constants, enable_fp_fusion=False)


# The kernels.


@triton.jit
def read(address: tl.tensor, there: tl.tensor) -> tl.tensor:
    """Return numbers in fp32, 0 where there are none."""
    return tl.load(address, mask=there, other=0.0).to(tl.float32)


@triton.jit
def keep(seeds: tl.tensor, row: tl.tensor, dropped: tl.tensor, WHICH: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """Return which elements of a row are kept: eight share four words of 32 bits, since one call of the generator costs as much as reading them."""
    a, b, c, d = tl.randint4x(tl.load(seeds + WHICH), (row * (BLOCK // 8) + tl.arange(0, BLOCK // 8)).to(tl.int32))
    words = tl.join(tl.join(a, b), tl.join(c, d))
    return tl.reshape(tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF), [BLOCK]) >= dropped


@triton.jit
def _norm(
    x: tl.tensor,
    y: tl.tensor,
    bias: tl.tensor,
    weight: tl.tensor,
    shift: tl.tensor,
    seeds: tl.tensor,
    h_: tl.tensor,
    out: tl.tensor,
    stats: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    dropped: tl.tensor,
    scale: tl.tensor,
    WHICH: tl.constexpr,
    DROP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Normalize a row."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there, here = at < width, row * width + at
    h = read(y + here, there)
    if bias is not None:
        h += read(bias + at, there)
    if DROP:
        h = tl.where(keep(seeds, row, dropped, WHICH, BLOCK), h * scale, 0.0)
    if x is not None:
        h += read(x + here, there)
    # What is kept is what is normalized, so that the backward pass is that of this one.
    stored = h.to(h_.dtype.element_ty)
    tl.store(h_ + here, stored, mask=there)
    h = stored.to(tl.float32)
    mean = tl.sum(h, 0) / width
    away = tl.where(there, h - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(away * away, 0) / width + eps)
    result = away * rstd * read(weight + at, there)
    if shift is not None:
        result += read(shift + at, there)
    tl.store(out + here, result, mask=there)
    tl.store(stats + row, mean)
    tl.store(stats + rows + row, rstd)


@triton.jit
def _norm_backward(
    grad: tl.tensor,
    h_: tl.tensor,
    stats: tl.tensor,
    weight: tl.tensor,
    seeds: tl.tensor,
    dh_: tl.tensor,
    dy_: tl.tensor,
    sums: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    dropped: tl.tensor,
    scale: tl.tensor,
    WHICH: tl.constexpr,
    DROP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Go back through the rows of a program: with x = (h - mean) / std, dh = (w g - mean(w g) - x mean(w g x)) / std."""
    program, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there = at < width
    w = read(weight + at, there)
    dw, dshift, dbias = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        here = row * width + at
        mean, rstd = tl.load(stats + row), tl.load(stats + rows + row)
        g = read(grad + here, there)
        x = tl.where(there, (read(h_ + here, there) - mean) * rstd, 0.0)
        wg = w * g
        dh = (wg - tl.sum(wg, 0) / width - x * (tl.sum(wg * x, 0) / width)) * rstd
        tl.store(dh_ + here, dh, mask=there)
        dw += g * x
        dshift += g
        if DROP:
            dh = tl.where(keep(seeds, row, dropped, WHICH, BLOCK), dh * scale, 0.0)
            tl.store(dy_ + here, dh, mask=there)
        dbias += dh
    into = sums + program * 3 * width + at
    tl.store(into, dw, mask=there)
    tl.store(into + width, dshift, mask=there)
    tl.store(into + 2 * width, dbias, mask=there)


@triton.jit
def _gelu(
    y: tl.tensor, bias: tl.tensor, out: tl.tensor, rows: tl.tensor, width: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr
) -> None:
    row, at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here, there = row[:, None] * width + at[None, :], (row < rows)[:, None] & (at < width)[None, :]
    x = read(y + here, there) + read(bias + at, at < width)[None, :]
    tl.store(out + here, x * (0.5 + 0.5 * tl.erf(x * 0.7071067811865476)), mask=there)


@triton.jit
def _gelu_backward(
    grad: tl.tensor, y: tl.tensor, bias: tl.tensor, sums: tl.tensor, rows: tl.tensor, width: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr
) -> None:  # fmt: skip
    """Go back through a block of columns of some of the rows: gelu'(x) = Phi(x) + x phi(x)."""
    at, share = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1).to(tl.int64)
    b = read(bias + at, at < width)[None, :]
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(share * ROWS, rows, tl.num_programs(1) * ROWS):
        row = start + tl.arange(0, ROWS)
        here, there = row[:, None] * width + at[None, :], (row < rows)[:, None] & (at < width)[None, :]
        x = read(y + here, there) + b
        slope = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476) + x * (0.3989422804014327 * tl.exp(-0.5 * x * x))
        dx = read(grad + here, there) * slope
        tl.store(grad + here, dx, mask=there)
        total += tl.sum(dx, 0)
    tl.store(sums + share * width + at, total, mask=at < width)


@triton.jit
def _joined(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, out: tl.tensor, sums: tl.tensor, rows: tl.tensor, width: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr
) -> None:  # fmt: skip
    at, share, part = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1).to(tl.int64), tl.program_id(2)
    given = q
    if part == 1:
        given = k
    if part == 2:
        given = v
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(share * ROWS, rows, tl.num_programs(1) * ROWS):
        row = start + tl.arange(0, ROWS)
        there = (row < rows)[:, None] & (at < width)[None, :]
        x = tl.load(given + row[:, None] * width + at[None, :], mask=there, other=0.0)
        tl.store(out + row[:, None] * (3 * width) + part * width + at[None, :], x, mask=there)
        total += tl.sum(x.to(tl.float32), 0)
    tl.store(sums + share * 3 * width + part * width + at, total, mask=at < width)
