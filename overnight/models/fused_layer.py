"""A layer of BERT on a GPU as one function with its gradient written out: matrix products, FlashAttention-2, and layer_kernels.py for all between them.

What torch.compile would make of the same layer reads and writes half as much again and takes twice the launches (docs/gpu.md). The differences: biases
of the products are added, and their gradients summed, by the kernels that read the tensor anyway; dropout stores no mask; gradients of weights are added up
and written in fp32 by the product; a gradient that joins a residual connection is added by the product.

Shapes: N tokens, D width, F inner width, H heads, E = D / H.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from overnight.machine import why_no_triton
from overnight.models.attention import Layout, flash, flash_backward, why_padded
from overnight.models.layers import weight_gradient
from overnight.models.vocabulary_loss import TiedGradient
from overnight.models.weight_copies import copy_of

# Programs of the norms hold a row.
_WIDEST = 8192
# The least compute capability that torch.compile makes kernels for.
_COMPILED = (7, 0)


@functools.cache
def why_not(device: torch.device, dtype: torch.dtype, width: int, heads: int, attention_dropout: float) -> str:
    """Return why a layer is not computed by this function; empty where it is.

    Args:
        dtype: of products and activations.
        width: D.
        heads: H.
        attention_dropout: probability of dropping an attention weight.
    """
    padded = why_padded(device, dtype, width // heads, attention_dropout, True)
    if padded:
        return padded
    if why := why_no_triton():
        return why
    return f"its kernels take a width of up to {_WIDEST}, not {width}" if width > _WIDEST else ""


def why_not_compiled(device: torch.device) -> str:
    """Return why torch.compile makes no kernels for a GPU; empty where it does, and for any other device."""
    if device.type != "cuda":
        return ""
    if why := why_no_triton():
        return why
    capability = torch.cuda.get_device_capability(device)
    return "" if capability >= _COMPILED else "torch.compile needs compute capability 7.0, this GPU has {}.{}".format(*capability)


def fused_layer(layer: Any, x_ND: Tensor, where: Layout) -> Tensor:
    """Return what a :class:`overnight.models.bert.Layer` computes, (N, D), of 16-bit activations on variable lengths."""
    p, attention_p = (layer.dropout, layer.attention_dropout) if layer.training else (0.0, 0.0)
    # Drawn on the device, so that recomputation draws them again.
    seeds = torch.randint(2**62, (2,), device=x_ND.device) if p else None
    parts = (layer.qkv, layer.out, layer.norm1, layer.up, layer.down, layer.norm2)
    weights = (tensor for part in parts for tensor in (part.weight, part.bias))
    return _FusedLayer.apply(x_ND, layer.heads, where, (p, attention_p, layer.norm1.eps), seeds, *weights)  # type: ignore[no-any-return]


class _FusedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: int, where: Layout, rates: tuple[float, float, float], seeds: Tensor | None, *weights: Tensor) -> Tensor:  # type: ignore[override]  # fmt: skip
        from overnight.models import layer_kernels as kernels

        w_qkv, b_qkv, w_out, b_out, g1, s1, w_up, b_up, w_down, b_down, g2, s2 = weights
        (p, attention_p, eps), x = rates, x.contiguous()
        matrices = [copy_of(w, x.dtype) for w in (w_qkv, w_out, w_up, w_down)]
        qkv = torch.addmm(copy_of(b_qkv, x.dtype), x, matrices[0].t())
        mixed, *attended = flash(*_heads(qkv, heads), where, attention_p)
        h1, x1, stats1 = kernels.norm(x, mixed.flatten(1) @ matrices[1].t(), b_out, g1, s1, eps, p, seeds, 0)
        inner = x1 @ matrices[2].t()
        active = kernels.gelu(inner, b_up)
        h2, out, stats2 = kernels.norm(x1, active @ matrices[3].t(), b_down, g2, s2, eps, p, seeds, 1)
        ctx.save_for_backward(x, qkv, mixed, *attended, h1, x1, stats1, inner, active, h2, stats2, seeds, g1, b_up, g2, *matrices)
        ctx.heads, ctx.where, ctx.rates, ctx.attended, ctx.kinds = heads, where, rates, len(attended), [w.dtype for w in weights]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        from overnight.models import layer_kernels as kernels

        x, qkv, mixed, *rest = ctx.saved_tensors
        attended, rest = rest[: ctx.attended], rest[ctx.attended :]
        h1, x1, stats1, inner, active, h2, stats2, seeds, g1, b_up, g2, *matrices = rest
        w_qkv, w_out, w_up, w_down = matrices
        p, attention_p, _ = ctx.rates
        dx1, dy, sums2 = kernels.norm_backward(grad.contiguous(), h2, stats2, g2, p, seeds, 1)
        dw_down = weight_gradient(dy, active, torch.float32)
        d_inner, db_up = kernels.gelu_backward(dy @ w_down, inner, b_up)
        dw_up = weight_gradient(d_inner, x1, torch.float32)
        dx1 = torch.addmm(dx1, d_inner, w_up)
        dx, dy, sums1 = kernels.norm_backward(dx1, h1, stats1, g1, p, seeds, 0)
        dw_out = weight_gradient(dy, mixed.flatten(1), torch.float32)
        d_mixed = (dy @ w_out).view_as(mixed)
        parts = flash_backward(d_mixed, *_heads(qkv, ctx.heads), mixed, attended, ctx.where, attention_p)
        d_qkv, db_qkv = kernels.joined(*parts)
        dw_qkv = weight_gradient(d_qkv, x, torch.float32)
        dx = torch.addmm(dx, d_qkv, w_qkv)
        grads = (dw_qkv, db_qkv, dw_out, sums1[2], sums1[0], sums1[1], dw_up, db_up, dw_down, sums2[2], sums2[0], sums2[1])
        return dx, None, None, None, None, *(g.to(kind) for g, kind in zip(grads, ctx.kinds, strict=True))


def fused_embedding(encoder: Any, places: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype, tied: TiedGradient) -> Tensor:
    """Return the embeddings (N, D) of a :class:`overnight.models.bert.Encoder`, after norm and dropout.

    Args:
        places: ids, positions and segments (N each).
        tied: in which a decoder may leave its gradient of the words.
    """
    p = encoder.dropout if encoder.training else 0.0
    seeds = torch.randint(2**62, (1,), device=places[0].device) if p else None
    weights = encoder.word.weight, encoder.position.weight, encoder.segment.weight, encoder.norm.weight, encoder.norm.bias
    return _FusedEmbedding.apply(places, tied, dtype, p, encoder.norm.eps, seeds, *weights)  # type: ignore[no-any-return]


class _FusedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, places: tuple[Tensor, Tensor, Tensor], tied: TiedGradient, dtype: torch.dtype, p: float, eps: float, seeds: Tensor | None, *weights: Tensor) -> Tensor:  # type: ignore[override]  # fmt: skip
        from overnight.models import embedding_kernels as kernels

        *tables, weight, shift = weights
        out, stats = kernels.embed((tables[0], tables[1], tables[2]), places, weight, shift, eps, dtype, p, seeds)
        ctx.save_for_backward(stats, seeds, *places, *tables, weight)
        ctx.p, ctx.tied = p, tied
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        from overnight.models import embedding_kernels as kernels

        stats, seeds, ids, positions, segments, word, position, segment, weight = ctx.saved_tensors
        tables, places = (word, position, segment), (ids, positions, segments)
        found, sums = kernels.embed_backward(grad.contiguous(), stats, tables, places, weight, ctx.p, seeds)
        d_word = ctx.tied.take(word).index_add_(0, ids, found.to(word.dtype))
        d_position = torch.zeros_like(position).index_add_(0, positions, found.to(position.dtype))
        return None, None, None, None, None, None, d_word, d_position, sums[2:], sums[0], sums[1]


def _heads(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of (N, 3·D) as views (N, H, E)."""
    q, k, v = qkv.view(len(qkv), 3, heads, -1).unbind(1)
    return q, k, v
