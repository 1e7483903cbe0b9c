"""The embeddings of BERT on a GPU, in Triton: look-ups, their sum, norm and dropout in one pass, and one back that adds nothing atomically.

The sum of the three look-ups is not kept: the backward pass looks up again. Of the segments, which are two, each program sums its rows up by itself; the
gradients of tokens and positions, where many rows meet, are left to torch (`index_add_`), which can be told to give the same bits each time.

Shapes: N tokens, D width.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped]
import triton.language as tl  # type: ignore[import-not-found,import-untyped]
from torch import Tensor

from overnight.models.layer_kernels import PROGRAMS, block_of, dropped_of, keep, launch, read, warps_of


def embed(
    tables: tuple[Tensor, Tensor, Tensor],
    places: tuple[Tensor, Tensor, Tensor],
    weight: Tensor,
    shift: Tensor,
    eps: float,
    dtype: torch.dtype,
    probability: float,
    seeds: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute dropout(LayerNorm(word + position + segment)).

    Args:
        tables: of words, positions and the two segments, fp32.
        places: the row of each token (N, int64) in each of them.
        weight, shift: (D), of the norm.
        dtype: of the result.
        seeds: int64 (1), where anything is dropped.

    Returns:
        (N, D); mean and reciprocal standard deviation of each row (2, N), fp32.
    """
    rows, width = len(places[0]), len(weight)
    out = torch.empty(rows, width, dtype=dtype, device=weight.device)
    stats = torch.empty(2, rows, dtype=torch.float32, device=weight.device)
    dropped, scale = dropped_of(probability)
    launch(_embed, (rows,), *tables, *places, weight, shift, seeds, out, stats, rows, width, eps, dropped, scale,
           DROP=dropped > 0, BLOCK=block_of(width), num_warps=warps_of(width))  # fmt: skip
    return out, stats


def embed_backward(
    grad: Tensor,
    stats: Tensor,
    tables: tuple[Tensor, Tensor, Tensor],
    places: tuple[Tensor, Tensor, Tensor],
    weight: Tensor,
    probability: float,
    seeds: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the sum of the look-ups (N, D), and those of weight, shift and the two segments (4, D), fp32 all."""
    (rows, width), (dropped, scale) = grad.shape, dropped_of(probability)
    found, programs = torch.empty(rows, width, dtype=torch.float32, device=grad.device), min(rows, PROGRAMS)
    sums = torch.empty(programs, 4, width, dtype=torch.float32, device=grad.device)
    launch(_embed_backward, (programs,), grad, *tables, *places, stats, weight, seeds, found, sums, rows, width, dropped, scale,
           DROP=dropped > 0, BLOCK=block_of(width), num_warps=warps_of(width))  # fmt: skip
    return found, sums.sum(0)


@triton.jit
def _looked_up(
    word: tl.tensor, position: tl.tensor, segment: tl.tensor, ids: tl.tensor, positions: tl.tensor, segments: tl.tensor, row: tl.tensor, width: tl.tensor, at: tl.tensor, there: tl.tensor
) -> tl.tensor:  # fmt: skip
    """Return the sum of the three rows of a token."""
    x = read(word + tl.load(ids + row) * width + at, there)
    return x + read(position + tl.load(positions + row) * width + at, there) + read(segment + tl.load(segments + row) * width + at, there)


@triton.jit
def _embed(
    word: tl.tensor,
    position: tl.tensor,
    segment: tl.tensor,
    ids: tl.tensor,
    positions: tl.tensor,
    segments: tl.tensor,
    weight: tl.tensor,
    shift: tl.tensor,
    seeds: tl.tensor,
    out: tl.tensor,
    stats: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    dropped: tl.tensor,
    scale: tl.tensor,
    DROP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there = at < width
    x = _looked_up(word, position, segment, ids, positions, segments, row, width, at, there)
    mean = tl.sum(x, 0) / width
    away = tl.where(there, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(away * away, 0) / width + eps)
    result = away * rstd * read(weight + at, there) + read(shift + at, there)
    if DROP:
        result = tl.where(keep(seeds, row, dropped, 0, BLOCK), result * scale, 0.0)
    tl.store(out + row * width + at, result, mask=there)
    tl.store(stats + row, mean)
    tl.store(stats + rows + row, rstd)


@triton.jit
def _embed_backward(
    grad: tl.tensor,
    word: tl.tensor,
    position: tl.tensor,
    segment: tl.tensor,
    ids: tl.tensor,
    positions: tl.tensor,
    segments: tl.tensor,
    stats: tl.tensor,
    weight: tl.tensor,
    seeds: tl.tensor,
    found: tl.tensor,
    sums: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    dropped: tl.tensor,
    scale: tl.tensor,
    DROP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Go back through the rows of a program."""
    program, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there = at < width
    w = read(weight + at, there)
    dw, dshift, first, second = (tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32))  # fmt: skip
    for row in range(program, rows, tl.num_programs(0)):
        g = read(grad + row * width + at, there)
        if DROP:
            g = tl.where(keep(seeds, row, dropped, 0, BLOCK), g * scale, 0.0)
        mean, rstd = tl.load(stats + row), tl.load(stats + rows + row)
        x = _looked_up(word, position, segment, ids, positions, segments, row, width, at, there)
        x = tl.where(there, (x - mean) * rstd, 0.0)
        wg = w * g
        dx = (wg - tl.sum(wg, 0) / width - x * (tl.sum(wg * x, 0) / width)) * rstd
        tl.store(found + row * width + at, dx, mask=there)
        dw += g * x
        dshift += g
        in_second = tl.load(segments + row) != 0
        first += tl.where(in_second, 0.0, dx)
        second += tl.where(in_second, dx, 0.0)
    into = sums + program * 4 * width + at
    tl.store(into, dw, mask=there)
    tl.store(into + width, dshift, mask=there)
    tl.store(into + 2 * width, first, mask=there)
    tl.store(into + 3 * width, second, mask=there)
