"""Linear maps in 8 bits on a CPU, of a network that is trained no more.

Weights have a scale for each output, activations one for each token, found as they come (symmetric, 127 steps to either side), and the sums of the
products are exact. So these products of a text do not depend on the others of its batch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from overnight.errors import ConfigError
from overnight.models import encoder_native

_STEPS = 127


@dataclass(frozen=True)
class Int8Weight:
    """A weight in 8 bits, and the bias."""

    steps: Tensor
    """int8 (in, out)."""
    scales: Tensor
    """fp32 (out)."""
    bias: Tensor
    """fp32 (out)."""


def quantized(weight: Tensor, bias: Tensor | None) -> Int8Weight:
    """Return a weight (out, in) in 8 bits, each output with its own scale.

    Raises:
        ConfigError: where this CPU does not multiply 8 bits exactly.
    """
    if not is_exact():
        raise ConfigError("precision = int8: this processor or build of torch does not multiply 8 bits exactly; take bf16 or fp32")
    scales = weight.detach().float().abs().amax(1).clamp_min(1e-30) / _STEPS
    steps = (weight.detach().float() / scales[:, None]).round_().to(torch.int8)
    # A copy: a transposed matrix of one row counts as contiguous with strides that torch's product misreads.
    turned = torch.empty(steps.shape[::-1], dtype=torch.int8, device=steps.device).copy_(steps.t())
    return Int8Weight(turned, scales, torch.zeros_like(scales) if bias is None else bias.detach().float())


def int8_product(x: Tensor, weight: Int8Weight) -> Tensor:
    """Return x @ weight.T + bias in the type of x (N, in), whose rows are rounded to 8 bits."""
    if not len(x):
        return x.new_empty(0, len(weight.scales))
    if encoder_native.available(x.dtype):
        steps, rows = encoder_native.quantize(x.contiguous())
        return encoder_native.dequantize(torch._int_mm(steps, weight.steps), rows, weight.scales, weight.bias, x.dtype)
    most = x.float().abs().amax(1, keepdim=True)
    # A number divided by a tensor is a product with its reciprocal in torch, which is rounded twice.
    steps = (x.float() * torch.where(most > 0, torch.full_like(most, _STEPS).div_(most), 0.0)).round_().to(torch.int8)
    return (torch._int_mm(steps, weight.steps).float() * (most / _STEPS * weight.scales) + weight.bias).to(x.dtype)


@functools.cache
def is_exact() -> bool:
    """Return whether the product of the largest numbers is right: without instructions for 8 bits some libraries let sums overflow in 16."""
    try:
        for sign in (1, -1):
            a = torch.full((4, 256), _STEPS, dtype=torch.int8, device="cpu")
            b = torch.full((256, 16), sign * _STEPS, dtype=torch.int8, device="cpu")
            if not (torch._int_mm(a, b) == sign * 256 * _STEPS**2).all():
                return False
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True
