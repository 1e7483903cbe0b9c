"""A window of the multiplicative LSTM or the LSTM, forward and backward by hand.

A layer, over steps t (Krause et al. 2016; Puri et al. 2018), for the LSTM with m_t = h_{t-1}:

    m_t = (W_mx x_t) ∘ (W_mh h_{t-1})
    i, f, g, o = split(W_x x_t + b + W_h m_t)
    c_t = σ(f) ∘ c_{t-1} + σ(i) ∘ tanh(g)
    h_t = σ(o) ∘ tanh(c_t)

The matrix products with x do not depend on a step before. They come in as rows of a table: one for each byte in the first layer, one for each
place of the window in the others. What is left is two matrix products and one pointwise pass a step, and as much in the backward pass, where
the gradient of a matrix is one product over all steps.

Shapes: T steps, B sequences, H width, R table rows, G = 5H (multiplicative) or 4H columns: W_x x + b, then W_mx x.
Kept for the backward pass: gates (4H), c, h and u = W_mh h, 7 values of H; autograd over the steps keeps about 11.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from overnight.machine import is_intel, why_no_triton
from overnight.models import layers, recurrence_native, recurrence_plain
from overnight.models.recurrence_graph import Graphs

try:  # Products with a weight in the layout of oneDNN's kernels: 1.2 to 1.3 times as fast as without for fp32, 1.4 to 1.8 times for bf16.
    _onednn = (
        (torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise) if torch.backends.mkldnn.is_available() else None
    )
    _ONEDNN_TYPES = [torch.float32, *([torch.bfloat16] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else [])]
except (AttributeError, RuntimeError):
    _onednn, _ONEDNN_TYPES = None, []
try:  # In MKL's layout, which on Intel's processors is another 1.05 to 1.2 times as fast for fp32, and slower on others.
    _mkl = (
        (torch.ops.mkl._mkl_reorder_linear_weight, torch.ops.mkl._mkl_linear) if torch.backends.mkl.is_available() and is_intel() else None
    )
except (AttributeError, RuntimeError):
    _mkl = None
# To lay a weight out costs as much as a few steps.
_PACKED_STEPS = 8


class Workspace:
    """Memory for windows of one size: each uses again what the one before has given back.

    For a CPU, where the first touch of new memory takes longer than the arithmetic done there; a GPU's allocator keeps memory itself.
    """

    def __init__(self) -> None:
        self.free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}

    def take(self, like: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
        """Return an uninitialized tensor on the device of another."""
        free = self.free.get((torch.Size(shape), dtype))
        if free:
            return free.pop()
        self.free.clear()
        return like.new_empty(shape, dtype=dtype)

    def give(self, *tensors: Tensor | None) -> None:
        """Take back what nobody uses any more."""
        for x in tensors:
            if x is not None and x.device.type == "cpu":
                self.free.setdefault((x.shape, x.dtype), []).append(x)

    def __deepcopy__(self, memo: object) -> Workspace:
        return Workspace()


def recur(
    table: Tensor,
    rows_TB: Tensor,
    w_mh: Tensor | None,
    w_h: Tensor,
    h_BH: Tensor,
    c_BH: Tensor,
    dtype: torch.dtype,
    workspace: Workspace | None = None,
    graphs: Graphs | None = None,
) -> tuple[Tensor, Tensor]:
    """Return all states of a window.

    Args:
        table: products with x (R, G), fp32 (or float64).
        rows_TB: the table row of each place (int64).
        w_mh: (H, H), or None for the LSTM.
        w_h: (4H, H).
        h_BH, c_BH: state before the window.
        dtype: type of the products; c and the arithmetic of the gates are of the type of the table.
        workspace: what is returned and kept for the backward pass lies there; that pass can then be made only once, and ends the use of both.
        graphs: capture the passes and replay them, on a GPU.

    Returns:
        h (T, B, H) in `dtype`, and c (T, B, H). Gradients go to all but the rows.
    """
    return _Window.apply(table, rows_TB, w_mh, w_h, h_BH, c_BH, dtype, workspace, graphs, torch.is_grad_enabled())


class _Window(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        table: Tensor,
        rows: Tensor,
        w_mh: Tensor | None,
        w_h: Tensor,
        h0: Tensor,
        c0: Tensor,
        dtype: torch.dtype,
        workspace: Workspace | None,
        graphs: Graphs | None,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        table, rows = table.contiguous(), rows.contiguous()
        w_mh, w_h = None if w_mh is None else w_mh.to(dtype), w_h.to(dtype)
        read = table, rows, w_mh, w_h, h0, c0
        if graphs is None:
            gates, u, h, c = _forward(workspace if keep and workspace is not None else Workspace(), keep, *read)
        else:
            gates, u, h, c = graphs.run(("forward", keep), partial(_forward, Workspace(), keep), *read)
        if keep:
            ctx.save_for_backward(table, rows, w_mh, w_h, gates, u, h, c)
            ctx.set_materialize_grads(False)
            ctx.workspace, ctx.graphs, ctx.spent = workspace, graphs, False
        return h[1:], c[1:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_h: Tensor | None, grad_c: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        assert not ctx.spent, "a window with a workspace has one backward pass"
        saved: tuple[Any, ...] = ctx.saved_tensors
        read: tuple[Any, ...] = *saved, *(None if grad is None else grad.contiguous() for grad in (grad_h, grad_c))
        if ctx.graphs is None:
            grad_table, *grads = _backward(ctx.workspace or Workspace(), *read)
        else:
            grad_table, *grads = ctx.graphs.run("backward", partial(_backward, Workspace()), *read)
        if ctx.workspace is not None:
            ctx.workspace.give(*saved[4:])  # gates, u, h, c
            ctx.spent = True
        return grad_table, None, *grads, None, None, None, None


def _forward(
    workspace: Workspace, keep: bool, table: Tensor, rows: Tensor, w_mh: Tensor | None, w_h: Tensor, h0: Tensor, c0: Tensor
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return gates and u of all steps, and h and c (T + 1) with those before the window; all from the workspace."""
    (steps, batch), width, dtype = rows.shape, w_h.shape[1], w_h.dtype
    pointwise, take = _pointwise(table, dtype), workspace.take
    h, c = take(table, dtype, steps + 1, batch, width), take(table, table.dtype, steps + 1, batch, width)
    h[0], c[0] = h0, c0
    # Without a backward pass one step's place serves all.
    kept = steps if keep else 1
    gates = take(table, dtype, kept, batch, 4 * width)
    u = None if w_mh is None else take(table, dtype, kept, batch, width)
    m = table.new_empty(batch, width, dtype=dtype)
    by_w_h, by_w_mh = multiplier(w_h, batch, steps), None if w_mh is None else multiplier(w_mh, batch, steps)
    # Taken apart at once: to index in each step takes longer.
    rows_t, h_t, c_t, gates_t, u_t = rows.unbind(), h.unbind(), c.unbind(), gates.unbind(), () if u is None else u.unbind()
    for t in range(steps):
        if by_w_mh is not None:
            pointwise.modulate(table, rows_t[t], by_w_mh(h_t[t]), u_t[t % kept], m)
        product = by_w_h(h_t[t] if by_w_mh is None else m)
        pointwise.cell(table, rows_t[t], product, c_t[t], gates_t[t % kept], c_t[t + 1], h_t[t + 1])
    return gates, u, h, c


def _backward(
    workspace: Workspace,
    table: Tensor,
    rows: Tensor,
    w_mh: Tensor | None,
    w_h: Tensor,
    gates: Tensor,
    u: Tensor | None,
    h: Tensor,
    c: Tensor,
    grad_h: Tensor | None,
    grad_c: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Return gradients of the table, w_mh, w_h, and of h and c before the window, in the type of the table."""
    steps, batch, width = len(gates), h.shape[1], h.shape[2]
    pointwise, table_dtype, take = _pointwise(table, h.dtype), table.dtype, workspace.take
    # The gradient of each step's rows is added to that of the table, or kept and added after the last step.
    adds = not hasattr(pointwise, "table_gradient")
    grad_table = torch.zeros_like(table) if adds else None
    kept = take(gates, gates.dtype, steps, batch, 4 * width if adds else table.shape[1])
    dz, dc = kept[..., : 4 * width], torch.zeros_like(c[0])
    du, m = (None, h[:-1]) if u is None else (take(u, u.dtype, *u.shape) for _ in range(2))
    by_w_h, by_w_mh = multiplier(w_h.t(), batch, steps), None if w_mh is None else multiplier(w_mh.t(), batch, steps)
    back_h = torch.zeros_like(h[0])
    rows_t, gates_t, c_t, dz_t, kept_t = rows.unbind(), gates.unbind(), c.unbind(), dz.unbind(), kept.unbind()
    u_t, du_t, m_t, grad_h_t, grad_c_t = (_steps(x, steps) for x in (u, du, m, grad_h, grad_c))
    for t in reversed(range(steps)):
        grad_rows = grad_table if adds else kept_t[t]
        pointwise.cell_backward(grad_rows, rows_t[t], gates_t[t], c_t[t], c_t[t + 1], grad_h_t[t], grad_c_t[t], back_h, dc, dz_t[t])
        back_h = by_w_h(dz_t[t])
        if by_w_mh is not None:
            pointwise.modulate_backward(table, grad_rows, rows_t[t], u_t[t], back_h, du_t[t], m_t[t])
            back_h = by_w_mh(du_t[t])
    if not adds:
        grad_table = pointwise.table_gradient(rows, kept, len(table))
    grad_w_h = weight_gradient(dz.flatten(0, 1), m.reshape(-1, width))
    grad_w_mh = None if du is None else weight_gradient(du.view(-1, width), h[:-1].view(-1, width))
    workspace.give(kept, du, m if du is not None else None)
    return grad_table, None if grad_w_mh is None else grad_w_mh.to(table_dtype), grad_w_h.to(table_dtype), back_h.to(table_dtype), dc


def _steps(x: Tensor | None, count: int) -> Sequence[Any]:
    """Return what a step has of a tensor by time, or None for each."""
    return [None] * count if x is None else x.unbind()


def _pointwise(table: Tensor, dtype: torch.dtype) -> ModuleType:
    """Return the module with the pointwise part."""
    # C takes a table of fp32, but for products in float64.
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    if table.device.type == "cpu" and table.dtype == arithmetic and recurrence_native.available(dtype):
        return recurrence_native
    if table.device.type == "cuda" and table.dtype == torch.float32 and (kernels := _kernels()) is not None:
        return kernels
    return recurrence_plain


@functools.cache
def _kernels() -> ModuleType | None:
    """Return recurrence_kernels.py, where Triton works; to look for it takes longer than a step."""
    if why_no_triton():
        return None
    from overnight.models import recurrence_kernels

    return recurrence_kernels


def multiplier(weight: Tensor, rows: int, times: int) -> Callable[[Tensor], Tensor]:
    """Return x -> x W^T, for several products with one weight.

    Args:
        weight: (out, in), of the type of x.
        rows: of x.
        times: products to come.
    """
    if weight.device.type == "cpu" and times >= _PACKED_STEPS:
        if _mkl is not None and weight.dtype == torch.float32:
            (lay_out, multiply), plain = _mkl, weight.contiguous()
            laid = lay_out(plain, rows)
            return lambda x: multiply(x, laid, plain, None, rows)
        if _onednn is not None and weight.dtype in _ONEDNN_TYPES:
            reorder, linear = _onednn
            packed = reorder(weight if weight.is_contiguous() else layers.transpose(weight.t()), rows)
            return lambda x: linear(x, packed, None, "none", [], "")
    transposed = weight.t()
    return lambda x: x @ transposed


def weight_gradient(grad_NO: Tensor, x_NI: Tensor) -> Tensor:
    """Return grad^T x, in the type of both (O, I)."""
    if grad_NO.device.type == "cpu" and grad_NO.dtype == torch.bfloat16:
        # With a transposed left operand the product takes twice as long. The smaller of the two is copied.
        return (x_NI.t().contiguous() @ grad_NO).t()
    return layers.weight_gradient(grad_NO, x_NI, grad_NO.dtype)
