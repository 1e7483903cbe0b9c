"""The pointwise part of a step on a GPU, in Triton: the functions are those of recurrence_plain.py, each one launch.

Products and gates are fp32, bf16 or fp16; the arithmetic, tables and cell states are fp32. Nothing waits for the device.

The gradient of the table is not added up step by step: sequences that meet the same row would need atomic additions, whose order, and with
it the last bits, is another in each run. A step writes the gradients of its rows beside each other instead, in the type of the products; 4
of their 5 H are dz, which is kept for the products anyway. `table_gradient` adds them after the last step, row by row in the order of the
places. A product with a one-hot matrix would do so only where rows are few, and would carry one row's NaN into all.

Shapes: T steps, B sequences, H width, R table rows, G = 5H or 4H columns of one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped]
import triton.language as tl  # type: ignore[import-not-found,import-untyped]
from torch import Tensor

from overnight.models.layer_kernels import read

BLOCK = tl.constexpr(512)
"""Columns of a program: four for each of its threads."""
# Products and sums are rounded one by one; the default is not the same in all versions of Triton.
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


def modulate(table: Tensor, rows_B: Tensor, product: Tensor, u: Tensor, m: Tensor) -> None:
    """Compute m = mx ∘ u, and u kept."""
    _launch(_modulate, u, table, rows_B, product, u, m, table.shape[1])


def cell(table: Tensor, rows_B: Tensor, product: Tensor, before: Tensor, gates: Tensor, c: Tensor, h: Tensor) -> None:
    """Compute the gates, c and h from the product with m."""
    _launch(_cell, h, table, rows_B, product, before, gates, c, h, table.shape[1])


def cell_backward(
    grad_rows_BG: Tensor,
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
    """Compute dz from the gradients of h and c; dc becomes that of the step before.

    Args:
        grad_rows_BG: gradients of the rows of this step, of which dz are the first 4H columns.
    """
    assert dz.data_ptr() == grad_rows_BG.data_ptr()
    _launch(_cell_backward, c, gates, before, c, grad_h, grad_c, back_h, dc, grad_rows_BG, grad_rows_BG.shape[1])


def modulate_backward(table: Tensor, grad_rows_BG: Tensor, rows_B: Tensor, u: Tensor, dm: Tensor, du: Tensor, m: Tensor) -> None:
    """Compute du, and m again, from the gradient of m; that of mx into the last H columns of `grad_rows_BG`."""
    _launch(_modulate_backward, u, table, grad_rows_BG, rows_B, u, dm, du, m, table.shape[1])


def table_gradient(rows_TB: Tensor, grad_rows_TBG: Tensor, rows: int) -> Tensor:
    """Return the gradient of the table (R, G), fp32: the sum of the gradients of each row's places, in the order of time and batch.

    Args:
        rows_TB: the table row of each place.
        grad_rows_TBG: as written by the steps.
        rows: R.
    """
    columns = grad_rows_TBG.shape[2]
    found, order = torch.sort(rows_TB.flatten(), stable=True)
    firsts = torch.searchsorted(found, torch.arange(rows + 1, device=found.device))
    total = torch.empty(rows, columns, dtype=torch.float32, device=found.device)
    # Of places without a row in common, as in the layers above the first, there is one at a time to read.
    places = 16 if len(order) >= 16 * rows else 1
    block = 2048 // places
    with torch.cuda.device_of(total):
        grid = rows, triton.cdiv(columns, block)
        _sum_places[grid](order, firsts, grad_rows_TBG, total, columns, PLACES=places, COLUMNS=block, **_OPTIONS)
    return total


def _launch(kernel: Any, like_BH: Tensor, *args: Any) -> None:
    """Run a kernel on all sequences and units; H is its last argument."""
    assert all(x.is_contiguous() for x in args if isinstance(x, Tensor))
    batch, width = like_BH.shape
    with torch.cuda.device_of(like_BH):
        kernel[(batch, triton.cdiv(width, BLOCK.value))](*args, width, **_OPTIONS)


# The kernels. A program has a block of units of one sequence.


@triton.jit
def _units(width: tl.tensor) -> tl.tensor:
    """Return the sequence of a program, its units, and which of them there are."""
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return tl.program_id(0).to(tl.int64), at, at < width


@triton.jit
def _sigmoid(x: tl.tensor) -> tl.tensor:
    e = tl.exp(-tl.abs(x))  # at most 1, so nothing overflows
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    """Return tanh to a millionth: 1 - e^-2|x| would lose the digits of a small x, for which this is the polynomial of Cephes (Moshier 1989)."""
    e, s = tl.exp(-2.0 * tl.abs(x)), x * x
    p = (((-5.70498872745e-3 * s + 2.06390887954e-2) * s - 5.37397155531e-2) * s + 1.33314422036e-1) * s - 3.33332819422e-1
    far = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.625, x + x * s * p, tl.where(x < 0, -far, far))


@triton.jit
def _modulate(
    table: tl.tensor, rows: tl.tensor, product: tl.tensor, u_: tl.tensor, m_: tl.tensor, columns: tl.tensor, width: tl.tensor
) -> None:
    b, at, there = _units(width)
    here = b * width + at
    u = read(product + here, there)
    mx = read(table + tl.load(rows + b) * columns + (columns - width) + at, there)
    tl.store(u_ + here, u, mask=there)
    tl.store(m_ + here, u * mx, mask=there)


@triton.jit
def _cell(
    table: tl.tensor,
    rows: tl.tensor,
    product: tl.tensor,
    before: tl.tensor,
    gates: tl.tensor,
    c_: tl.tensor,
    h_: tl.tensor,
    columns: tl.tensor,
    width: tl.tensor,
) -> None:
    b, at, there = _units(width)
    here, z, x = b * width + at, product + 4 * b * width + at, table + tl.load(rows + b) * columns + at
    i = _sigmoid(read(z, there) + read(x, there))
    f = _sigmoid(read(z + width, there) + read(x + width, there))
    g = _tanh(read(z + 2 * width, there) + read(x + 2 * width, there))
    o = _sigmoid(read(z + 3 * width, there) + read(x + 3 * width, there))
    c = f * read(before + here, there) + i * g
    gate = gates + 4 * b * width + at
    tl.store(gate, i, mask=there)
    tl.store(gate + width, f, mask=there)
    tl.store(gate + 2 * width, g, mask=there)
    tl.store(gate + 3 * width, o, mask=there)
    tl.store(c_ + here, c, mask=there)
    tl.store(h_ + here, o * _tanh(c), mask=there)


@triton.jit
def _cell_backward(
    gates: tl.tensor,
    before: tl.tensor,
    c_: tl.tensor,
    grad_h: tl.tensor,
    grad_c: tl.tensor,
    back_h: tl.tensor,
    dc_: tl.tensor,
    grad_rows: tl.tensor,
    columns: tl.tensor,
    width: tl.tensor,
) -> None:
    b, at, there = _units(width)
    here, gate = b * width + at, gates + 4 * b * width + at
    i, f = read(gate, there), read(gate + width, there)
    g, o = read(gate + 2 * width, there), read(gate + 3 * width, there)
    dh, dc = read(back_h + here, there), read(dc_ + here, there)
    if grad_h is not None:
        dh += read(grad_h + here, there)
    if grad_c is not None:
        dc += read(grad_c + here, there)
    tanh_c = _tanh(read(c_ + here, there))
    dc += dh * o * (1.0 - tanh_c * tanh_c)
    dz = grad_rows + b * columns + at
    tl.store(dz, dc * g * i * (1.0 - i), mask=there)
    tl.store(dz + width, dc * read(before + here, there) * f * (1.0 - f), mask=there)
    tl.store(dz + 2 * width, dc * i * (1.0 - g * g), mask=there)
    tl.store(dz + 3 * width, dh * tanh_c * o * (1.0 - o), mask=there)
    tl.store(dc_ + here, dc * f, mask=there)


@triton.jit
def _modulate_backward(
    table: tl.tensor,
    grad_rows: tl.tensor,
    rows: tl.tensor,
    u_: tl.tensor,
    dm_: tl.tensor,
    du_: tl.tensor,
    m_: tl.tensor,
    columns: tl.tensor,
    width: tl.tensor,
) -> None:
    b, at, there = _units(width)
    here, last = b * width + at, columns - width + at
    u, dm = read(u_ + here, there), read(dm_ + here, there)
    mx = read(table + tl.load(rows + b) * columns + last, there)
    tl.store(m_ + here, u * mx, mask=there)
    tl.store(du_ + here, dm * mx, mask=there)
    tl.store(grad_rows + b * columns + last, dm * u, mask=there)


@triton.jit
def _sum_places(
    order: tl.tensor,
    firsts: tl.tensor,
    grad_rows: tl.tensor,
    total: tl.tensor,
    columns: tl.tensor,
    PLACES: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Add up a block of columns of one row of the table."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first, last = tl.load(firsts + row), tl.load(firsts + row + 1)
    sums = tl.zeros([PLACES, COLUMNS], tl.float32)
    for start in range(first, last, PLACES):
        i = start + tl.arange(0, PLACES)
        place = tl.load(order + i, mask=i < last, other=0)
        sums += read(grad_rows + place[:, None] * columns + at[None, :], (i < last)[:, None] & (at < columns)[None, :])
    tl.store(total + row * columns + at, tl.sum(sums, 0), mask=at < columns)
