"""Muon's step for a GPU, all matrices of one shape at once, where torch's own takes matrix after matrix, some thirty small kernels each; and for a CPU without bf16.

torch's own orthogonalizes in bf16 whatever the precision, which such a CPU emulates at a third of the rate of fp32. Where a device has no bf16 it is done in fp32.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from overnight.machine import BF16_CAPABILITY, has_bf16
from overnight.optim.state import is_plain

# Known before a step is compiled, which cannot look it up.
EMULATES_BF16 = not has_bf16()
# Bytes of the matrices that are taken at once, at most: the iteration needs five times their memory.
_AT_ONCE = {"cpu": 32 << 20, "cuda": 512 << 20}


def takes(group: dict[str, Any]) -> bool:
    """Return whether :func:`step` does a group: whole tensors on a GPU or a CPU without bf16, a rate that is a number, and the form of Muon that it knows."""
    known = group["adjust_lr_fn"] == "match_rms_adamw" and group["nesterov"] and not isinstance(group["lr"], Tensor)
    devices = ("cuda", "cpu") if EMULATES_BF16 else ("cuda",)
    return known and all(p.device.type in devices and is_plain(p) for p in group["params"] if p.grad is not None)


def step(group: dict[str, Any], state: dict[Tensor, dict[str, Tensor]]) -> None:
    """Do what torch.optim.Muon does with the matrices of a group that have a gradient, but for the order in which products add up.

    Args:
        group: as torch.optim.Muon has it.
        state: `momentum_buffer` of each matrix; made where there is none.
    """
    params = [p for p in group["params"] if p.grad is not None]
    if not params:
        return
    grads = [p.grad for p in params]
    for p in params:
        if "momentum_buffer" not in state[p]:
            state[p]["momentum_buffer"] = torch.zeros_like(p.grad, memory_format=torch.preserve_format)
    buffers = [state[p]["momentum_buffer"] for p in params]
    torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
    updates = torch._foreach_lerp(grads, buffers, group["momentum"])
    torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
    alike: dict[Any, list[int]] = defaultdict(list)
    for number, p in enumerate(params):
        alike[p.shape, p.dtype, p.device].append(number)
    for (shape, dtype, device), numbers in alike.items():
        precision = torch.float32 if _emulates_bf16(device) else torch.bfloat16
        amount = -group["lr"] * 0.2 * math.sqrt(max(shape))
        most = max(1, _AT_ONCE[device.type] // max(1, math.prod(shape) * precision.itemsize))
        for some in (numbers[first : first + most] for first in range(0, len(numbers), most)):
            stack = torch.stack([updates[number] for number in some]).to(precision)
            turned = orthogonalized(stack, group["ns_coefficients"], group["ns_steps"], group["eps"])
            moves = turned.to(dtype, memory_format=torch.contiguous_format)
            torch._foreach_add_([params[number] for number in some], moves.unbind(0), alpha=amount)


def _emulates_bf16(device: torch.device) -> bool:
    """Return whether a device of what :func:`takes` takes has no hardware for bf16."""
    if device.type == "cpu":
        return True
    found = torch.cuda.get_device_properties(device)  # which a step that is compiled may look up
    return (found.major, found.minor) < BF16_CAPABILITY


def orthogonalized(updates_KAB: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return matrices near their orthogonal factors, in their type, by the iteration of Newton and Schulz (Jordan et al. 2024).

    Args:
        updates_KAB: K matrices (A, B).
        coefficients: of x, of x·xᵀ·x and of (x·xᵀ)²·x.
        steps: iterations.
        eps: the least norm that a matrix is divided by.
    """
    a, b, c = coefficients
    tall = updates_KAB.shape[1] > updates_KAB.shape[2]
    x = updates_KAB.mT if tall else updates_KAB
    x = x / x.flatten(1).norm(dim=1).clamp(min=eps)[:, None, None]
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
