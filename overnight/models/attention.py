"""Softmax attention within the sequences of a flat batch, and rotary positions; the fastest exact form depends on the device.

Shapes: N tokens of the flat batch, S sequences, T longest sequence, D width, H heads, E = D / H.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from overnight.batches.packing import Batch, moved
from overnight.models import attention_native
from overnight.models.layers import eager_cpu

varlen_attn: Any = None
"""torch's attention of variable lengths, once :func:`find_varlen` has found it."""

# What the function above calls: it takes dropout too, and has a gradient. Not part of torch's interface, so its arguments are looked at before it is used.
_flash = getattr(torch.ops.aten, "_flash_attention_forward", None)
_FLASH_ARGUMENTS = ("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask")
# Capabilities whose shared memory does not hold the backward pass of heads above 192.
_SMALL_MEMORY = ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))


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


def angles(positions_N: Tensor, size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the angles of rotary positions (Su et al. 2021, arXiv 2104.09864), fp32, (N, 1, 1, E/2) each.

    Args:
        size: E, dimensions of a head.
        theta: base of the wavelengths.
    """
    wavelengths = theta ** (torch.arange(0, size, 2, dtype=torch.float32, device=positions_N.device) / size)
    turns = (positions_N.float()[:, None] / wavelengths)[:, None, None]
    return turns.cos(), turns.sin()


def angle_table(length: int, size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return :func:`angles` of at least so many places from 0 on, on the CPU; they are kept."""
    return _angle_table(1 << (length - 1).bit_length(), size, theta)


@functools.lru_cache(maxsize=32)
def _angle_table(length: int, size: int, theta: float) -> tuple[Tensor, Tensor]:
    return angles(torch.arange(length, device="cpu"), size, theta)


def rotate(qkv: Tensor, heads: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Return queries and keys turned by the angles of their positions, first half of a head's dimensions with second half; values as they are.

    Args:
        qkv: (N, 3·D), queries, keys and values side by side.
        heads: H.
        cos, sin: from :func:`angles`.
    """
    parts = qkv.view(len(qkv), 3, heads, 2, -1)
    x, y = parts[:, :2, :, 0].float(), parts[:, :2, :, 1].float()
    turned = torch.stack((x * cos - y * sin, y * cos + x * sin), 3).to(qkv.dtype)
    return torch.cat((turned, parts[:, 2:]), 1).view_as(qkv)


@dataclass(frozen=True, eq=False)
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
    window: tuple[int, int] = (-1, -1)
    """Tokens before it and behind it that one sees; -1: all."""


def find_varlen() -> Any:
    """Return torch's attention of variable lengths, None where this torch has none; its import brings the compiler and takes longer than torch itself."""
    global varlen_attn
    if varlen_attn is None:
        with contextlib.suppress(ImportError):
            from torch.nn.attention.varlen import varlen_attn
    return varlen_attn


@functools.cache
def why_padded(device: torch.device, dtype: torch.dtype, size: int, dropout: float, training: bool) -> str:
    """Return why attention pads sequences to the longest; empty where the kernel for variable lengths (FlashAttention-2) takes them as they are.

    The limits are those of torch's checks (aten/src/ATen/native/transformers/cuda), where a kernel outside them raises an error.

    Args:
        dtype: of queries, keys and values.
        size: E, dimensions of a head.
        dropout: probability of dropping an attention weight.
        training: whether a gradient is wanted.
    """
    if device.type != "cuda":
        return "variable lengths need a GPU"
    if find_varlen() is None or not torch.backends.cuda.is_flash_attention_available():
        return "this torch has no attention of variable lengths"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the kernel takes bf16 and fp16, not {str(dtype).removeprefix('torch.')}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"the kernel needs compute capability 8.0, this GPU has {major}.{minor}"
    if size % 8 or size > 256:
        return f"the kernel takes heads of a multiple of 8 up to 256 dimensions, not {size}"
    if training and size > 192 and (major, minor) in _SMALL_MEMORY:
        return f"with compute capability {major}.{minor} the kernel trains heads of up to 192 dimensions, not {size}"
    if dropout and not _takes_dropout():
        return "the kernel of this torch takes no dropout"
    return ""


def _takes_dropout() -> bool:
    names = tuple(argument.name for argument in _flash.default._schema.arguments) if _flash is not None else ()
    return names[: len(_FLASH_ARGUMENTS)] == _FLASH_ARGUMENTS


def how(device: torch.device, dtype: torch.dtype, size: int, dropout: float) -> str:
    """Return how attention sees the sequences of training, in words; as in :func:`why_padded`."""
    why = why_padded(device, dtype, size, dropout, True)
    return f"sequences padded to the longest of a micro-batch, since {why}" if why else "variable lengths, without padding (FlashAttention)"


def layout(batch: Batch, attention_dropout: float, dtype: torch.dtype, reach: int = -1, size: int = 64) -> Layout:
    """Decide once a batch how attention sees it.

    Variable-length attention where there is a kernel that takes them (:func:`why_padded`); else sequences padded to the longest.

    Args:
        reach: tokens to either side that one sees, in a causal batch of those before it; -1 is all.
        size: E, dimensions of a head.
    """
    device, longest = batch.ids_N.device, batch.longest or max(batch.lengths)
    reach = -1 if reach >= longest - 1 else reach
    window = before, after = reach, 0 if batch.causal else reach
    if not why_padded(device, dtype, size, attention_dropout, torch.is_grad_enabled()):
        return Layout(batch.starts, longest, varlen=True, window=window)
    near = None
    if max(window) >= 0:
        at = torch.arange(longest, device="cpu")
        back = at[:, None] - at
        near = ((back <= (longest if before < 0 else before)) & (-back <= (longest if after < 0 else after)))[None, None]
    if min(batch.lengths) == longest:
        return Layout(batch.starts, longest, False, mask=None if near is None else moved(near, device), window=window)
    # Made on the host, where the lengths are: the device need not be waited for.
    lengths, place = torch.tensor(batch.lengths, device="cpu")[:, None], torch.arange(longest, device="cpu")
    starts = torch.cumsum(lengths, 0) - lengths
    mask = place < lengths
    pad, unpad = (starts + torch.minimum(place, lengths - 1)).flatten(), mask.flatten().nonzero().squeeze(1)
    seen = mask[:, None, None, :]
    if near is not None:  # Padding sees all tokens, since a softmax over none would be NaN.
        seen = seen & (near | ~mask[:, None, :, None])
    return Layout(batch.starts, longest, False, moved(pad, device), moved(unpad, device), moved(seen, device), window)


def attention(qkv: Tensor, heads: int, where: Layout, probability: float, turns: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Return softmax attention within each sequence of a flat batch (Vaswani et al. 2017).

    Args:
        qkv: (N, 3·D), queries, keys and values side by side.
        heads: H.
        where: from :func:`layout`.
        probability: of dropping an attention weight; 0 outside training.
        turns: cosine and sine of rotary positions, from :func:`angles`.

    Returns:
        (N, D).
    """
    width = qkv.shape[1] // 3
    if eager_cpu(qkv) and attention_native.available(qkv.dtype):
        dropping = attention_native.dropping(probability)
        return attention_native.attention(qkv, heads, where.starts, where.longest, where.window, dropping, turns)
    if turns is not None:
        qkv = rotate(qkv, heads, *turns)
    if where.varlen:
        q, k, v = qkv.view(-1, 3, heads, width // heads).unbind(1)
        return _varlen(q, k, v, where, probability).reshape(-1, width)
    if where.pad is not None:
        # Padded places carry no gradient (their keys are masked, their outputs unused), so the inverse look-up is exact.
        qkv = _Rows.apply(qkv, where.pad, where.unpad)
    q, k, v = qkv.view(-1, where.longest, 3, heads, width // heads).permute(2, 0, 3, 1, 4).unbind(0)
    if probability and eager_cpu(qkv):
        out = _dropped_attention(q, k, v, where.mask, probability)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=where.mask, dropout_p=probability)
    out = out.transpose(1, 2).reshape(-1, width)
    return out if where.unpad is None else _Rows.apply(out, where.unpad, None)


def _varlen(q: Tensor, k: Tensor, v: Tensor, where: Layout, probability: float) -> Tensor:
    """Return attention within the sequences of a flat batch on a GPU: (N, H, E) each."""
    given = q, k, v, where.starts, where.starts, where.longest, where.longest
    if probability:
        return flash(q, k, v, where, probability)[0]
    # The lowest torch may not know windows, and BERT has none.
    near: dict[str, Any] = {"window_size": where.window} if max(where.window) >= 0 else {}
    return varlen_attn(*given, **near)


def flash(q: Tensor, k: Tensor, v: Tensor, where: Layout, probability: float) -> tuple[Tensor, ...]:
    """Return attention of variable lengths by the operator itself (N, H, E), and what its backward pass wants besides; it has a gradient of its own, too."""
    assert _flash is not None
    (before, after), given = where.window, (q, k, v, where.starts, where.starts, where.longest, where.longest)
    # Its generator is torch's, so recomputation drops the same weights. Causal by its window, and without a mask to look at.
    out, sums, generator, unused, _ = _flash(*given, probability, False, False, window_size_left=before, window_size_right=after)
    return out, sums, generator, unused


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kept: Sequence[Tensor], where: Layout, probability: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values (N, H, E), from what :func:`flash` returned: its result and what it kept."""
    sums, generator, unused = kept
    (before, after), starts, longest = where.window, where.starts, where.longest
    given = (grad, q, k, v, out, sums, starts, starts, longest, longest, probability, False, generator, unused)
    return torch.ops.aten._flash_attention_backward(*given, window_size_left=before, window_size_right=after)  # type: ignore[no-any-return]


def _dropped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, probability: float) -> Tensor:
    """Return attention with dropped weights on a CPU, where torch's fused kernels have no dropout: (S, H, T, E) each."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    seed, dropped, scale = attention_native.dropping(probability)
    keep = attention_native.keep_mask(len(scores) * scores.shape[1], scores.shape[-1], seed, dropped).view_as(scores)
    return (torch.softmax(scores, -1) * keep) @ (v * scale)
