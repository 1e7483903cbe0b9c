"""The few operations whose fastest exact form depends on the device: linear maps, dropout, attention.

Shapes: N tokens of the flat batch, S sequences, T longest sequence, D width, H heads, E = D / H.
On a CPU fp32 matrix products go through oneDNN, which uses AVX-512 where torch's default product does not, and dropout draws 16 random
bits an element instead of one call of the generator: torch's own costs 6 ns an element, half of a step of a small BERT.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from overnight.batches.packing import Batch, moved

try:  # The kernel that torch.compile's CPU backend calls; absent from builds without oneDNN.
    _onednn_linear = torch.ops.mkldnn._linear_pointwise if torch.backends.mkldnn.is_available() else None
except (AttributeError, RuntimeError):
    _onednn_linear = None

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None  # type: ignore[assignment]


def _eager_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ w.T + bias of CPU matrices."""
    if x.dtype == torch.float32 and _onednn_linear is not None:
        return _onednn_linear(x, w, bias, "none", [], "")
    return F.linear(x, w, bias)


class _Linear(torch.autograd.Function):
    """A linear map in the type of its input, with the gradient of the weight in the type of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        w = weight.to(x.dtype)
        ctx.save_for_backward(x, w)
        ctx.weight_dtype = weight.dtype
        return _product(x, w, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = _product(grad, w.t()) if ctx.needs_input_grad[0] else None
        # oneDNN would first copy both transposed operands: torch's product reads them in place.
        grad_w = (grad.t() @ x).to(ctx.weight_dtype)
        # The sum accumulates in fp32 either way; asked for an fp32 result of 16 bits, torch would first copy all of it.
        grad_b = grad.sum(0).to(ctx.weight_dtype) if ctx.needs_input_grad[2] else None
        return grad_x, grad_w, grad_b


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias in the type of x, with gradients in the type of the weight.

    Args:
        x: (N, in).
        weight: (out, in), usually fp32.
        bias: (out).
    """
    if _eager_cpu(x):
        return _Linear.apply(x, weight, bias)
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-12) -> Tensor:
    """Return LayerNorm with fp32 statistics; the result has the type of x."""
    # The CPU kernel takes 16-bit input with fp32 parameters as it is.
    if x.dtype == torch.float32 or _eager_cpu(x):
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    return F.layer_norm(x.float(), weight.shape, weight, bias, eps).to(x.dtype)


def keep_mask(shape: torch.Size, probability: float) -> tuple[Tensor, float]:
    """Return which elements dropout keeps on a CPU, and what to multiply them by.

    Four elements share a 64-bit word, so the probability is rounded to 1/65536; the scale belongs to the rounded one.
    """
    count = shape.numel()
    words = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)
    dropped = min(round(probability * 65536), 65535)
    mask = words.view(torch.int16)[:count].view(shape) >= dropped - 32768
    return mask, 65536 / (65536 - dropped)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return (x * mask).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (mask,) = ctx.saved_tensors
        return (grad * mask).mul_(ctx.scale), None, None


def dropout(x: Tensor, probability: float, training: bool) -> Tensor:
    """Return inverted dropout (Srivastava et al. 2014), drawn from torch's generator."""
    if not training or probability == 0.0:
        return x
    if _eager_cpu(x):
        return _Dropout.apply(x, *keep_mask(x.shape, probability))
    return F.dropout(x, probability)


class _Rows(torch.autograd.Function):
    """Rows of x by an index, with a gradient that copies rows instead of adding them up one by one.

    With `inverse` (the place in the result of each row of x) the other places of the result must carry no gradient; without
    it the index must not repeat.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor | None) -> Tensor:
        ctx.save_for_backward(index, inverse)
        ctx.rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        index, inverse = ctx.saved_tensors
        if inverse is not None:
            return grad.index_select(0, inverse), None, None
        return grad.new_zeros(ctx.rows, grad.shape[1]).index_copy_(0, index, grad), None, None


class _Rotation(torch.autograd.Function):
    """Rotary positions on a CPU: what is not rotated is copied once, and nothing but the angles is kept."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        return _rotated(qkv, cos, sin, heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -sin, ctx.heads), None, None, None


def _rotated(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    out = qkv.clone()
    pairs = qkv.view(len(qkv), 3, heads, 2, -1)[:, :2]
    x, y = pairs[:, :, :, 0].float(), pairs[:, :, :, 1].float()
    turned = out.view(len(qkv), 3, heads, 2, -1)[:, :2]
    turned[:, :, :, 0] = (x * cos).addcmul_(y, sin, value=-1)
    turned[:, :, :, 1] = (y * cos).addcmul_(x, sin)
    return out


def angles(positions_N: Tensor, size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the angles of rotary positions (Su et al. 2021, arXiv 2104.09864), fp32, (N, 1, 1, E/2) each.

    Args:
        size: E, dimensions of a head.
        theta: base of the wavelengths.
    """
    wavelengths = theta ** (torch.arange(0, size, 2, dtype=torch.float32, device=positions_N.device) / size)
    turns = (positions_N.float()[:, None] / wavelengths)[:, None, None]
    return turns.cos(), turns.sin()


def rotate(qkv: Tensor, heads: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Return queries and keys turned by the angles of their positions, first half of a head's dimensions with second half; values as they are.

    Args:
        qkv: (N, 3·D), queries, keys and values side by side.
        heads: H.
        cos, sin: from :func:`angles`.
    """
    if _eager_cpu(qkv):
        return _Rotation.apply(qkv, cos, sin, heads)
    parts = qkv.view(len(qkv), 3, heads, 2, -1)
    x, y = parts[:, :2, :, 0].float(), parts[:, :2, :, 1].float()
    turned = torch.stack((x * cos - y * sin, y * cos + x * sin), 3).to(qkv.dtype)
    return torch.cat((turned, parts[:, 2:]), 1).view_as(qkv)


class _GatedGelu(torch.autograd.Function):
    """gelu(a) · b of two halves side by side on a CPU; only they are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        a, b = x.chunk(2, -1)
        return F.gelu(a).mul_(b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        a, b = x.chunk(2, -1)
        out = torch.empty_like(x)
        left, right = out.chunk(2, -1)
        torch.mul(F.gelu(a), grad, out=right)
        left.copy_(torch.ops.aten.gelu_backward(grad * b, a))
        return out


def gated_gelu(x: Tensor) -> Tensor:
    """Return gelu(a) · b, where a and b are the halves of the last dimension (Shazeer 2020, arXiv 2002.05202)."""
    if _eager_cpu(x):
        return _GatedGelu.apply(x)
    a, b = x.chunk(2, -1)
    return F.gelu(a) * b


@dataclass(frozen=True)
class Layout:
    """How the flat tokens of a batch are seen by attention."""

    starts: Tensor
    longest: int
    varlen: bool
    pad: Tensor | None = None
    """Flat row of each padded place (S·T); padding repeats a row of its own sequence. None where every sequence has length T."""
    unpad: Tensor | None = None
    """Padded place of each flat row (N)."""
    mask: Tensor | None = None
    """Which padded places a token sees: (S, 1, 1, T), (1, 1, T, T) or (S, 1, T, T). None: all."""
    window: int = -1
    """Tokens to either side that one sees; -1: all."""


def layout(batch: Batch, attention_dropout: float, dtype: torch.dtype, window: int = -1) -> Layout:
    """Decide once a batch how attention sees it.

    Variable-length attention where there is a kernel for it (a GPU, 16 bits, no dropout of probabilities, which the kernel
    lacks); else sequences padded to the longest.

    Args:
        window: tokens to either side that one sees; -1 is all.
    """
    device, longest = batch.ids_N.device, batch.longest or max(batch.lengths)
    if window >= longest - 1:
        window = -1
    if varlen_attn is not None and device.type == "cuda" and attention_dropout == 0.0 and dtype != torch.float32:
        return Layout(batch.starts, longest, varlen=True, window=window)
    near = None
    if window >= 0:
        at = torch.arange(longest)
        near = ((at[:, None] - at).abs() <= window)[None, None]
    if min(batch.lengths) == longest:
        return Layout(batch.starts, longest, False, mask=None if near is None else moved(near, device), window=window)
    # Made on the host, where the lengths are: the device need not be waited for.
    lengths, place = torch.tensor(batch.lengths)[:, None], torch.arange(longest)
    starts = torch.cumsum(lengths, 0) - lengths
    mask = place < lengths
    pad, unpad = (starts + torch.minimum(place, lengths - 1)).flatten(), mask.flatten().nonzero().squeeze(1)
    seen = mask[:, None, None, :]
    if near is not None:  # Padding sees all tokens, since a softmax over none would be NaN.
        seen = seen & (near | ~mask[:, None, :, None])
    return Layout(batch.starts, longest, False, moved(pad, device), moved(unpad, device), moved(seen, device), window)


def attention(qkv: Tensor, heads: int, where: Layout, probability: float) -> Tensor:
    """Return softmax attention within each sequence of a flat batch (Vaswani et al. 2017).

    Args:
        qkv: (N, 3·D), queries, keys and values side by side.
        heads: H.
        where: from :func:`layout`.
        probability: of dropping an attention weight; 0 outside training.

    Returns:
        (N, D).
    """
    width = qkv.shape[1] // 3
    if where.varlen:
        q, k, v = qkv.view(-1, 3, heads, width // heads).unbind(1)
        seen = (where.window, where.window)
        out = varlen_attn(q, k, v, where.starts, where.starts, where.longest, where.longest, window_size=seen)
        return out.reshape(-1, width)  # type: ignore[union-attr]
    if where.pad is not None:
        # Padded places carry no gradient (their keys are masked, their outputs unused), so the inverse look-up is exact.
        qkv = _Rows.apply(qkv, where.pad, where.unpad)
    if not probability and _eager_cpu(qkv) and where.longest <= _MATERIALIZED[qkv.element_size()]:
        out = _Attention.apply(qkv, heads, where.longest, where.mask)
    else:
        q, k, v = qkv.view(-1, where.longest, 3, heads, width // heads).permute(2, 0, 3, 1, 4).unbind(0)
        if probability and _eager_cpu(qkv):
            out = _dropped_attention(q, k, v, where.mask, probability)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=where.mask, dropout_p=probability)
        out = out.transpose(1, 2).reshape(-1, width)
    return out if where.unpad is None else _Rows.apply(out, where.unpad, None)


# Longest sequences (tokens) for which all scores are kept, by the bytes of an element: batched products of oneDNN take a fifth of the time of
# torch's own kernel at 128 tokens in bf16, half at 512; in fp32 they lose beyond 256.
_MATERIALIZED = {2: 1024, 4: 256}


class _Attention(torch.autograd.Function):
    """Attention without dropout on a CPU by batched products; the probabilities are kept."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int, longest: int, mask: Tensor | None) -> Tensor:
        size = qkv.shape[1] // 3 // heads
        # (3, S, H, T, E): the products want each head's rows together.
        parts = qkv.view(-1, longest, 3, heads, size).permute(2, 0, 3, 1, 4).contiguous()
        q, k, v = parts.flatten(1, 2)
        scores = torch.bmm(q, k.transpose(1, 2)).mul_(size**-0.5)
        if mask is not None:
            scores.view(-1, heads, longest, longest).masked_fill_(~mask, float("-inf"))
        p = torch.softmax(scores, -1)
        ctx.save_for_backward(parts, p)
        return _beside(torch.bmm(p, v).view(1, -1, heads, longest, size))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        parts, p = ctx.saved_tensors
        _, sequences, heads, longest, size = parts.shape
        q, k, v = parts.flatten(1, 2)
        grad = grad.view(sequences, longest, heads, size).transpose(1, 2).reshape(-1, longest, size)
        out = torch.empty_like(parts)
        grad_q, grad_k, grad_v = out.flatten(1, 2)
        torch.bmm(p.transpose(1, 2), grad, out=grad_v)
        scores = torch.ops.aten._softmax_backward_data(torch.bmm(grad, v.transpose(1, 2)), p, -1, p.dtype).mul_(size**-0.5)
        torch.bmm(scores, k, out=grad_q)
        torch.bmm(scores.transpose(1, 2), q, out=grad_k)
        return _beside(out), None, None, None


def _beside(parts: Tensor) -> Tensor:
    """Return (P, S, H, T, E) as rows of tokens: (S·T, P·H·E)."""
    return parts.permute(1, 3, 0, 2, 4).reshape(parts.shape[1] * parts.shape[3], -1)


def _dropped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, probability: float) -> Tensor:
    """Return attention with dropped weights on a CPU, where torch's fused kernels have no dropout: (S, H, T, E) each."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    keep, scale = keep_mask(scores.shape, probability)
    return (torch.softmax(scores, -1) * keep) @ (v * scale)
