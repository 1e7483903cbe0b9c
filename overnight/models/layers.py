"""The few operations whose fastest exact form depends on the device: linear maps, norms, dropout, gated GELU.

On an AMD CPU with AVX-512 fp32 matrix products go through oneDNN, since torch's default product makes no use of it there, and dropout draws 16 random bits an
element instead of one call of the generator: torch's own costs 6 ns an element, half of a step of a small BERT.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from overnight.machine import prefers_mkl
from overnight.models import encoder_native, forward_native
from overnight.models.weight_copies import copy_of

try:  # The kernel that torch.compile's CPU backend calls; absent from builds without oneDNN.
    _onednn_linear = torch.ops.mkldnn._linear_pointwise if torch.backends.mkldnn.is_available() else None
except (AttributeError, RuntimeError):
    _onednn_linear = None


def eager_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _eager_16_bits(x: Tensor) -> bool:
    """Return whether a GPU's weight would be cast, by itself, to the type of x: torch.compile does it its own way."""
    return x.device.type == "cuda" and x.dtype in (torch.bfloat16, torch.float16) and not torch.compiler.is_compiling()


def _product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ w.T + bias of matrices, on a CPU by the faster of oneDNN and torch's own product."""
    # Of 16 bits torch asks oneDNN too, but first copies the bias into every row of the result.
    asked = (x.dtype == torch.float32 and not prefers_mkl()) or (bias is not None and _onednn_16_bits(x.dtype))
    if asked and x.device.type == "cpu" and _onednn_linear is not None:
        return _onednn_linear(x, w, bias, "none", [], "")
    return F.linear(x, w, bias)


@functools.cache
def _onednn_16_bits(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies in this type here."""
    return dtype == torch.bfloat16 and _onednn_linear is not None and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # type: ignore[no-any-return]


def packed(weight: Tensor) -> Tensor | None:
    """Return a weight (out, in) as it is laid out for its products, which else happens in each of them; None where nothing is gained by it.

    Of fp32 in the panels of forward.c, else as oneDNN does it for many rows, the best from 8 of them up.
    """
    if forward_native.takes(weight):
        return forward_native.panels(weight)
    if weight.device.type != "cpu" or _onednn_linear is None:
        return None
    if weight.dtype == torch.float32 or _onednn_16_bits(weight.dtype):
        return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 1024)  # type: ignore[no-any-return]
    return None


def packed_product(x: Tensor, w: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """Return x @ w.T + bias, without gradients.

    Args:
        x: (N, in).
        w: of :func:`packed`, in the type of x.
        bias: (out), in the type of x.
        outputs: out.
    """
    if not w.is_mkldnn:
        return forward_native.linear(x, w, bias, outputs)
    return _onednn_linear(x.contiguous(), w, bias, "none", [], "")  # type: ignore[misc, no-any-return]


def unpacked(w: Tensor, outputs: int, inputs: int) -> Tensor:
    """Return the weight (out, in) that :func:`packed` has laid out."""
    return (
        w.to_dense()
        if w.is_mkldnn
        else forward_native.linear(torch.eye(inputs, dtype=torch.float32, device="cpu"), w, None, outputs).t().contiguous()
    )


class _Linear(torch.autograd.Function):
    """A linear map in the type of its input, with the gradient of the weight in the type of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        w = copy_of(weight, x.dtype)
        ctx.save_for_backward(x, w)
        ctx.weight_dtype = weight.dtype
        return _product(x, w, None if bias is None else copy_of(bias, x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = _product(grad, w.t()) if ctx.needs_input_grad[0] else None
        grad_w = weight_gradient(grad, x, ctx.weight_dtype)
        # The sum accumulates in fp32 either way; asked for an fp32 result of 16 bits, torch would first copy all of it.
        grad_b = grad.sum(0).to(ctx.weight_dtype) if ctx.needs_input_grad[2] else None
        return grad_x, grad_w, grad_b


def weight_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return grad.T @ x, the gradient of a weight (out, in), in the type of the weight.

    Args:
        grad: (N, out).
        x: (N, in).
    """
    if x.device.type == "cuda" and x.dtype != torch.float32 and dtype == torch.float32:
        # The product adds up in fp32 and writes that: neither rounded to 16 bits nor cast afterwards.
        return torch.mm(grad.t(), x, out_dtype=torch.float32)
    if x.device.type != "cpu" or x.dtype != torch.float32 or _onednn_linear is None or prefers_mkl() or not len(x):
        return (grad.t() @ x).to(dtype)
    # oneDNN would first copy a left operand that is transposed, slowly: the smaller of the two.
    if x.shape[1] < grad.shape[1]:
        return transpose(_product(transpose(x), grad.t())).to(dtype)
    return _product(transpose(grad), x.t()).to(dtype)


def transpose(x: Tensor) -> Tensor:
    """Return the transpose of a matrix, contiguous."""
    if eager_cpu(x) and x.dtype == torch.float32 and x.is_contiguous() and encoder_native.available(x.dtype):
        return encoder_native.transpose(x)
    return x.t().contiguous()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias in the type of x, with gradients in the type of the weight.

    Args:
        x: (N, in).
        weight: (out, in), usually fp32.
        bias: (out).
    """
    if eager_cpu(x) or _eager_16_bits(x):
        if not torch.is_grad_enabled():  # a function of autograd costs as much as the product of a single text
            return _product(x, copy_of(weight, x.dtype), None if bias is None else copy_of(bias, x.dtype))
        return _Linear.apply(x, weight, bias)
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class _LayerNorm(torch.autograd.Function):
    """LayerNorm of 16 bits on a CPU. Its gradient in torch adds up those of weight and bias in 16 bits, where a sum of many rows grows no more: of 4,096 it was 6 % off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        out, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:  # type: ignore[override]
        x, weight, bias, mean, rstd = ctx.saved_tensors
        for_x, *for_parameters = ctx.needs_input_grad[:3]
        gradients, rest = torch.ops.aten.native_layer_norm_backward, (weight.shape, mean, rstd, weight, bias)
        grad_x = gradients(grad, x, *rest, [True, False, False])[0] if for_x else None
        if not any(for_parameters):
            return grad_x, None, None, None
        _, grad_w, grad_b = gradients(grad.float(), x.float(), *rest, [False, *for_parameters])
        return grad_x, grad_w, grad_b, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-12) -> Tensor:
    """Return LayerNorm with fp32 statistics; the result has the type of x, the gradients of weight and bias are added up in fp32."""
    # The CPU kernel takes 16-bit input with fp32 parameters as it is.
    if eager_cpu(x) and x.dtype in (torch.bfloat16, torch.float16) and torch.is_grad_enabled():
        return _LayerNorm.apply(x, weight, bias, eps)  # type: ignore[no-any-return]
    if x.dtype == torch.float32 or eager_cpu(x):
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    return F.layer_norm(x.float(), weight.shape, weight, bias, eps).to(x.dtype)


def keep_mask(shape: torch.Size, probability: float) -> tuple[Tensor, float]:
    """Return which elements dropout keeps on a CPU, and what to multiply them by.

    Four elements share a 64-bit word, so the probability is rounded to 1/65536; the scale belongs to the rounded one.
    """
    count = shape.numel()
    words = torch.empty(-(-count // 4), dtype=torch.int64, device="cpu").random_(-(2**63), None)
    dropped = min(round(probability * 65536), 65535)
    mask = words.view(torch.int16)[:count].view(shape) >= dropped - 32768
    return mask, 65536 / (65536 - dropped)


def _masked(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return x · mask · scale, with the same bits either way."""
    if encoder_native.available(x.dtype):
        return encoder_native.dropout(x.contiguous(), mask, scale)
    return (x * mask).mul_(scale)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return _masked(x, mask, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (mask,) = ctx.saved_tensors
        return _masked(grad, mask, ctx.scale), None, None


def dropout(x: Tensor, probability: float, training: bool) -> Tensor:
    """Return inverted dropout (Srivastava et al. 2014), drawn from torch's generator."""
    if not training or probability == 0.0:
        return x
    if eager_cpu(x):
        return _Dropout.apply(x, *keep_mask(x.shape, probability))
    return F.dropout(x, probability)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.rows, grad.shape[1]).index_add_(0, index, grad), None


def rows(x: Tensor, index: Tensor) -> Tensor:
    """Return rows of a matrix; torch's own gradient of it copies the whole once more."""
    return _Rows.apply(x, index)  # type: ignore[no-any-return]


class _GatedGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        return encoder_native.gated_gelu(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return encoder_native.gated_gelu_backward(x, grad.contiguous())


def gated_gelu(x: Tensor) -> Tensor:
    """Return gelu(a) · b, where a and b are the halves of the last dimension (Shazeer 2020, arXiv 2002.05202)."""
    if eager_cpu(x) and encoder_native.available(x.dtype):
        return _GatedGelu.apply(x) if torch.is_grad_enabled() else encoder_native.gated_gelu(x.contiguous())
    a, b = x.chunk(2, -1)
    return F.gelu(a) * b
