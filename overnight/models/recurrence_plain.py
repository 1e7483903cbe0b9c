"""The pointwise part of a step of recurrence.py in torch's operations: for every type and device.

Shapes: B sequences, H width, G columns of a table row: W_x x + b (4H, in the order i, f, g, o), and for the multiplicative LSTM W_mx x (H).
Products and gates are of the type that matrices multiply, cell states and tables of the type of arithmetic: fp32, or float64.
On a GPU the additions to the gradient of the table have no fixed order; in recurrence_kernels.py they have.
"""

from __future__ import annotations

import torch
from torch import Tensor


def modulate(table: Tensor, rows_B: Tensor, product: Tensor, u: Tensor, m: Tensor) -> None:
    """Compute m = mx ∘ u, and u kept.

    Args:
        table: (R, G).
        rows_B: the table row of each sequence.
        product: u = W_mh h (B, H).
        u, m: written.
    """
    u.copy_(product)
    m.copy_(product * table[rows_B, -u.shape[1] :])


def cell(table: Tensor, rows_B: Tensor, product: Tensor, before: Tensor, gates: Tensor, c: Tensor, h: Tensor) -> None:
    """Compute the gates, c and h from the product with m.

    Args:
        table, rows_B: as above.
        product: W_h m (B, 4H).
        before: c of the step before (B, H).
        gates, c, h: written: (B, 4H), (B, H), (B, H).
    """
    z = product + table[rows_B, : product.shape[1]]
    i, f, g, o = z.chunk(4, 1)
    i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
    torch.add(f * before, i * g, out=c)
    h.copy_(o * torch.tanh(c))
    torch.cat((i, f, g, o), 1, out=z)
    gates.copy_(z)


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
    """Compute dz from the gradients of h and c; dc becomes that of the step before.

    Args:
        grad_table: gradient of the table, to which dz is added.
        rows_B, gates, before, c: as above.
        grad_h, grad_c: gradients of h and c from the loss (B, H), if there are any.
        back_h, dc: gradients of h and c from the next step (B, H); dc becomes that from this one.
        dz: written (B, 4H).
    """
    i, f, g, o = gates.to(c.dtype).chunk(4, 1)
    dh = back_h.to(c.dtype)
    if grad_h is not None:
        dh = dh + grad_h
    if grad_c is not None:
        dc += grad_c
    tanh_c = torch.tanh(c)
    dc += dh * o * (1 - tanh_c**2)
    whole = torch.cat((dc * g * i * (1 - i), dc * before * f * (1 - f), dc * i * (1 - g**2), dh * tanh_c * o * (1 - o)), 1)
    dc *= f
    dz.copy_(whole)
    grad_table[:, : whole.shape[1]].index_add_(0, rows_B, whole)


def modulate_backward(table: Tensor, grad_table: Tensor, rows_B: Tensor, u: Tensor, dm: Tensor, du: Tensor, m: Tensor) -> None:
    """Compute du, and m again, from the gradient of m; that of mx is added to the gradient of the table.

    Args:
        table, grad_table, rows_B: as above.
        u: as kept (B, H).
        dm: (B, H).
        du, m: written (B, H).
    """
    mx, table_dtype = table[rows_B, -u.shape[1] :], table.dtype
    m.copy_(u * mx)
    du.copy_(dm * mx)
    grad_table[:, -u.shape[1] :].index_add_(0, rows_B, dm.to(table_dtype) * u.to(table_dtype))
