"""Cross-entropy over a large vocabulary without keeping, or passing more than needed over, the logits.

Shapes: M predicted positions, D width, V vocabulary. The gradient of the logits is made in place of them in the forward pass: on a CPU by encoder.c
(without a C compiler slice by slice, while it is in the cache), on a GPU by vocabulary_kernels.py; the three products run over all rows at once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from overnight.batches.packing import IGNORED
from overnight.machine import why_no_triton
from overnight.models import encoder_native
from overnight.models.layers import _product, eager_cpu, weight_gradient
from overnight.models.weight_copies import copy_of

# Logits that are held at once where there is no gradient: half a GB, in fp32 and once more in the softmax.
_LOGITS = 1 << 26
# Slices of at most this many logits (4 MB in fp32) stay in the cache between the softmax and its gradient.
_SLICE = 1 << 20


@dataclass
class TiedGradient:
    """Where the decoder leaves the gradient of a table that it shares with the embeddings, which add theirs to it in place: their backward pass comes after its.

    One for each forward pass. Autograd would fill a second gradient of the whole table, and add the two.
    """

    left: Tensor | None = None

    def take(self, table: Tensor) -> Tensor:
        """Return what was left, else zeros."""
        found, self.left = self.left, None
        return torch.zeros_like(table) if found is None else found


def tied_rows(ids_N: Tensor, table_VD: Tensor, tied: TiedGradient) -> Tensor:
    """Return rows of a table (N, D), on a CPU, whose gradient is added to the decoder's."""
    return _TiedRows.apply(ids_N, table_VD, tied)  # type: ignore[no-any-return]


class _TiedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor, tied: TiedGradient) -> Tensor:
        ctx.save_for_backward(ids, table)
        ctx.tied = tied
        return F.embedding(ids, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:  # type: ignore[override]
        ids, table = ctx.saved_tensors
        # What each token adds is summed by itself first, as autograd would, for the same bits.
        found, places = torch.unique(ids, return_inverse=True)
        sums = torch.ops.aten.embedding_dense_backward(grad.contiguous(), places, len(found), -1, False)
        return None, ctx.tied.take(table).index_add_(0, found, sums), None


def vocabulary_loss(
    x_MD: Tensor, weight_VD: Tensor, bias_V: Tensor, labels_M: Tensor, count_correct: bool, tied: TiedGradient | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return summed cross-entropy of softmax(x W^T + b), and how many rows have their label on top.

    Args:
        x_MD: decoder input.
        weight_VD, bias_V: decoder, fp32.
        labels_M: ids; rows labeled -100 count for nothing.
        count_correct: also count; one more pass over the logits.
        tied: of a forward pass whose embeddings take the gradient of the weight from it.

    Returns:
        loss: fp32 scalar. correct: int64 scalar or None.
    """
    if not count_correct and eager_cpu(x_MD) and torch.is_grad_enabled():
        return _VocabularyLoss.apply(x_MD, weight_VD, bias_V, labels_M, tied), None
    if not count_correct and torch.is_grad_enabled() and _has_kernel(x_MD.device) and not torch.compiler.is_compiling():
        return _VocabularyLossOnGpu.apply(x_MD, weight_VD, bias_V, labels_M, tied), None
    # An evaluation keeps nothing for a backward pass; it must not take more memory than the training whose micro-batches fit.
    rows = max(1, _LOGITS // len(weight_VD))
    if not torch.is_grad_enabled() and len(x_MD) > rows:
        parts = zip(x_MD.split(rows), labels_M.split(rows), strict=True)
        found = [vocabulary_loss(x, weight_VD, bias_V, labels, count_correct) for x, labels in parts]
        losses, counts = zip(*found, strict=True)
        return torch.stack(losses).sum(), torch.stack(counts).sum() if count_correct else None
    logits = F.linear(x_MD, weight_VD.to(x_MD.dtype), bias_V.to(x_MD.dtype)).float()
    loss = F.cross_entropy(logits, labels_M, reduction="sum", ignore_index=IGNORED)
    return loss, (logits.argmax(-1) == labels_M).sum() if count_correct else None


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, tied: TiedGradient | None) -> Tensor:
        w = copy_of(weight, x.dtype)
        logits = _product(x, w, bias.to(x.dtype))
        if encoder_native.available(logits.dtype):
            total = encoder_native.cross_entropy(logits, labels).sum(dtype=torch.float64)
        else:
            total = _in_place(logits, labels)
        ctx.save_for_backward(x, w, logits)
        ctx.weight_dtype, ctx.tied = weight.dtype, tied
        return total.float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, w, grad = ctx.saved_tensors
        kind = ctx.weight_dtype
        # The scale is applied to the small results, in fp32, where it cannot underflow.
        grad_w = weight_gradient(grad, x, kind).mul_(upstream)
        grad_x, grad_b = _product(grad, w.t()).mul_(upstream), grad.sum(0).to(kind).mul_(upstream)
        if ctx.tied is None:
            return grad_x, grad_w, grad_b, None, None
        ctx.tied.left = grad_w
        return grad_x, None, grad_b, None, None


def _in_place(logits: Tensor, labels: Tensor) -> Tensor:
    """Return summed cross-entropy (float64), and turn the logits into their gradients, in place."""
    total = torch.zeros((), dtype=torch.float64)
    used = labels != IGNORED
    step = max(1, _SLICE // logits.shape[1])
    for at in range(0, len(labels), step):
        part, label, use = logits[at : at + step], labels[at : at + step], used[at : at + step]
        log_p = torch.log_softmax(part, -1, dtype=torch.float32)
        at_label = label.clamp(min=0)[:, None]
        total -= log_p.gather(1, at_label).squeeze(1)[use].sum(dtype=torch.float64)
        grad = log_p.exp_()
        grad.scatter_add_(1, at_label, torch.full_like(at_label, -1, dtype=torch.float32))
        if not bool(use.all()):
            grad *= use[:, None]
        part.copy_(grad)
    return total


@functools.cache
def _has_kernel(device: torch.device) -> bool:
    """Return whether vocabulary_kernels.py can be used on a device."""
    return device.type == "cuda" and not why_no_triton() and torch.cuda.get_device_capability(device) >= (8, 0)


class _VocabularyLossOnGpu(torch.autograd.Function):
    """The same with Triton's kernel, which also adds the bias, in fp32; gradients of the decoder are fp32 as the product adds them up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, tied: TiedGradient | None) -> Tensor:
        from overnight.models.vocabulary_kernels import cross_entropy

        w = copy_of(weight, x.dtype)
        logits = x @ w.t()
        losses = cross_entropy(logits, bias.contiguous(), labels.contiguous(), IGNORED)
        ctx.save_for_backward(x, w, logits)
        ctx.weight_dtype, ctx.tied = weight.dtype, tied
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, w, grad = ctx.saved_tensors
        # On the smaller factor; in fp16 it could underflow there.
        early = x.dtype != torch.float16
        grad_w = weight_gradient(grad, (x * upstream).to(x.dtype) if early else x, ctx.weight_dtype)
        if not early:
            grad_w.mul_(upstream)
        grad_b = grad.sum(0, dtype=torch.float32).mul_(upstream).to(ctx.weight_dtype)
        grad_x = (grad @ w).mul_(upstream)
        if ctx.tied is None:
            return grad_x, grad_w, grad_b, None, None
        ctx.tied.left = grad_w
        return grad_x, None, grad_b, None, None
