"""Cross-entropy over a vocabulary on a GPU, in Triton: the gradient of the logits is written in place of them, in the pass that computes the loss.

A program has a row: 30,528 logits of 16 bits are 61 kB, so that the second look at them finds most in the cache. The arithmetic is fp32.

Shapes: M rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped]
import triton.language as tl  # type: ignore[import-not-found,import-untyped]
from torch import Tensor

_COLUMNS = 4096


def cross_entropy(logits: Tensor, bias: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """Return -log softmax(logits + bias) at the label of each row (M), fp32; the logits become the gradient of its sum.

    Args:
        logits: (M, V), bf16, fp16 or fp32, without the bias.
        bias: (V), fp32.
        labels: (M), int64.
        ignored: label of rows whose loss and gradient are 0.
    """
    assert logits.is_contiguous() and bias.is_contiguous() and labels.is_contiguous()
    (rows, columns), losses = logits.shape, torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if rows:
        with torch.cuda.device_of(logits):
            _cross_entropy[(rows,)](logits, bias, labels, losses, columns, ignored, COLUMNS=_COLUMNS, num_warps=8, enable_fp_fusion=False)
    return losses


@triton.jit
def _cross_entropy(
    logits: tl.tensor, bias: tl.tensor, labels: tl.tensor, losses: tl.tensor, columns: tl.tensor, ignored: tl.tensor, COLUMNS: tl.constexpr
) -> None:
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    label = tl.load(labels + row)
    # The largest logit so far at each of the places of a block, and the sum of the exponentials below it (Milakov & Gimelshein 2018, arXiv 1805.02867).
    most, total = tl.full([COLUMNS], -1e38, tl.float32), tl.zeros([COLUMNS], tl.float32)
    at_label = 0.0
    for start in range(0, columns, COLUMNS):
        there = start + at < columns
        x = tl.load(logits + row * columns + start + at, mask=there, other=0.0).to(tl.float32) + tl.load(
            bias + start + at, mask=there, other=0.0
        )
        at_label += tl.sum(tl.where(there & (start + at == label), x, 0.0), 0)
        x = tl.where(there, x, -1e38)
        larger = tl.maximum(most, x)
        total = total * tl.exp(most - larger) + tl.where(there, tl.exp(x - larger), 0.0)
        most = larger
    top = tl.max(most, 0)
    log_sum = top + tl.log(tl.sum(total * tl.exp(most - top), 0))
    used = label != ignored
    tl.store(losses + row, tl.where(used, log_sum - at_label, 0.0))
    for start in range(0, columns, COLUMNS):
        there = start + at < columns
        place = logits + row * columns + start + at
        x = tl.load(place, mask=there, other=0.0).to(tl.float32) + tl.load(bias + start + at, mask=there, other=0.0)
        p = tl.exp(x - log_sum)
        tl.store(place, tl.where(used, tl.where(start + at == label, p - 1.0, p), 0.0), mask=there)
