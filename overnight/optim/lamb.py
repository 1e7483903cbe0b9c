"""LAMB (You et al. 2019, arXiv 1904.00962, algorithm 2), with the NVLAMB and clipped-ratio variants.

For each tensor x with gradient g, at its t-th step:

    m ← β1·m + (1−β1)·g          m̂ = m / (1−β1^t)
    v ← β2·v + (1−β2)·g²         v̂ = v / (1−β2^t)
    u = m̂ / (√v̂ + eps) + wd·x
    x ← x − lr · |x|/|u| · u     (the ratio is 1 where a norm is 0)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

Params = Iterable[Tensor] | Iterable[dict[str, Any]]


class Lamb(torch.optim.Optimizer):
    """Layer-wise adaptive moments for batch training.

    Args:
        params: tensors, or groups that may set any of the settings below.
        lr: learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: wd, decoupled.
        bias_correction: divide the moments by 1−β^t.
        adapt: use the trust ratio |x|/|u|; False is the plain Adam step, as NVIDIA takes for biases and norms.
        trust_clip: upper bound of the ratio (LAMBC), or None.
        max_grad_norm: first scale all gradients of all groups so that their common norm is at most this (NVLAMB), or None.

    Moments are fp32 (fp64 for fp64 tensors). A tensor whose gradient is None is not touched; one whose gradient is exactly 0 still
    decays, and at LAMB's ratio that is by up to lr·|x| a step.

    Raises:
        ValueError: naming the setting that is out of range.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        bias_correction: bool = True,
        adapt: bool = True,
        trust_clip: float | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm = {max_grad_norm}: must be above 0, or None for no clipping")
        self.max_grad_norm = max_grad_norm
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "adapt": adapt,
            "trust_clip": trust_clip,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, with the settings checked."""
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but the moments beside 16-bit parameters stay fp32, where torch casts them down."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, p in zip(numbers, (p for group in self.param_groups for p in group["params"]), strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    self.state[p][name] = value.to(p.device, _wide(p))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every tensor that has a gradient; `p.grad` is left as it was."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = self._grad_scale()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    kind = torch.float64 if p.dtype == torch.float64 else torch.float32
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p, dtype=kind)
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=kind)
                state["step"] += 1
                grad = p.grad.to(state["exp_avg"].dtype)
                lamb_step(p, grad if scale is None else grad * scale, state["exp_avg"], state["exp_avg_sq"], state["step"], group)
        return loss

    def _grad_scale(self) -> Tensor | None:
        """1 / max(1, |g| / max_grad_norm), with |g| over all tensors of all groups."""
        if self.max_grad_norm is None:
            return None
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not grads:
            return None
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g, dtype=_wide(g)) for g in grads]))
        return 1 / torch.clamp(norm / self.max_grad_norm, min=1.0)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _check(group: dict[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        if not 0 <= float(group[name]) < float("inf"):
            raise ValueError(f"{name} = {group[name]}: must be finite and 0 or more")
    if not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(f"betas = {group['betas']}: each must be 0 or more and below 1")
    if group["trust_clip"] is not None and not group["trust_clip"] > 0:
        raise ValueError(f"trust_clip = {group['trust_clip']}: must be above 0, or None")


def lamb_step(p: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: int, group: dict[str, Any]) -> None:
    """One LAMB step of one tensor, in place, without waiting for the device.

    Args:
        p: parameter x.
        grad: g, in the type of the moments.
        m, v: moments, updated.
        step: t, from 1.
        group: settings.
    """
    beta1, beta2 = group["betas"]
    m.lerp_(grad, 1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    corrected = group["bias_correction"]
    update = v.sqrt().div_((1 - beta2**step) ** 0.5 if corrected else 1.0).add_(group["eps"])
    update = torch.div(m, update, out=update)
    if corrected:
        update.div_(1 - beta1**step)
    x = p.to(m.dtype)
    update.add_(x, alpha=group["weight_decay"])
    if group["adapt"]:
        norm_x, norm_u = torch.linalg.vector_norm(x), torch.linalg.vector_norm(update)
        ratio = torch.where((norm_x > 0) & (norm_u > 0), norm_x / norm_u, torch.ones_like(norm_x))
        if group["trust_clip"] is not None:
            ratio = ratio.clamp(max=group["trust_clip"])
        update.mul_(ratio)
    p.add_(update.to(p.dtype), alpha=-group["lr"])
