"""LAMB (You et al. 2019, arXiv 1904.00962, algorithm 2), with the NVLAMB and clipped-ratio variants.

For each tensor x with gradient g, at its t-th step:

    m ← β1·m + (1−β1)·g          m̂ = m / (1−β1^t)
    v ← β2·v + (1−β2)·g²         v̂ = v / (1−β2^t)
    u = m̂ / (√v̂ + eps) + wd·x
    x ← x − lr · |x|/|u| · u     (the ratio is 1 where a norm is 0)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from overnight.optim import native
from overnight.optim.checks import AMOUNT, BETAS, Rule
from overnight.optim.layerwise import Layerwise, Params
from overnight.optim.tensor_list import Tensors, ratio

# Below it an eps may be 0 in float32.
_LEAST_EPS = 1e-37


class Scalars(NamedTuple):
    """The values of a step: for each tensor (n), or one for all."""

    new1: Any
    """1−β1, and 0 for a tensor that is left alone."""
    new2: Any
    """1−β2, and 0 for a tensor that is left alone."""
    correct1: Any
    """1 / (1−β1^t)."""
    correct2: Any
    """1 / (1−β2^t)."""
    lr: Any
    scale: Any
    """Of the gradient: clipping, and the sign."""


def lamb(x: Tensors, g: Tensors, m: Tensors, v: Tensors, s: Scalars, group: Mapping[str, Any]) -> tuple[Tensors]:
    """Move the moments of a list of tensors; returns u.

    Args:
        x: parameters.
        g: gradients.
        m, v: moments.
        s: values of the step.
        group: settings of :class:`Lamb`.
    """
    m.lerp_(g, s.new1)
    v.lerp_(g.mul(g), s.new2)
    d = denominator(v, s, group["eps"])
    return (m.mul(s.correct1).div_(d).add_(x, alpha=group["weight_decay"]),)


def step_sizes(s: Scalars, norms: Sequence[Tensor] | None, group: Mapping[str, Any]) -> tuple[tuple[Tensor], Tensor]:
    """Return lr · |x|/|u|, and the trust ratio |x|/|u| (each (n)).

    Args:
        s: values of the step.
        norms: |x| and |u| (each (n)); None for no trust ratio.
        group: settings of :class:`Lamb`.
    """
    trust = torch.ones_like(s.lr) if norms is None else ratio(norms[0], norms[1])
    if norms is not None and group["max_trust_ratio"] is not None:
        trust = trust.clamp(max=group["max_trust_ratio"])
    return (s.lr * trust,), trust


class Lamb(Layerwise):
    """Layer-wise adaptive moments for batch training.

    Args:
        params: tensors, (name, tensor) pairs, or groups that may set any of the settings below, `max_grad_norm` and `check_finite` excepted.
        lr: learning rate, a number or a tensor of one.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: wd, decoupled.
        bias_correction: divide the moments by 1−β^t.
        trust_ratio: use the trust ratio |x|/|u|; False is the plain Adam step, as NVIDIA takes for biases and norms.
        max_trust_ratio: upper bound of the ratio (LAMBC), or None.
        max_grad_norm: first scale all gradients of all groups so that their common norm is at most this (NVLAMB), or None.
        maximize: go up the gradient.
        foreach: False steps the tensors one by one.
        fused: True steps by the equations compiled for the CPU, or by the kernels for a GPU; False by lists of tensors, None by the fastest that is there. The same values to rounding.
        capturable: always so; accepted as torch's optimizers do. Capturing a graph needs a tensor as `lr`.
        check_finite: refuse a step with a NaN or infinite gradient, at the price of waiting once for the device.
        skip_zero_grad: leave a tensor whose gradient is exactly 0 alone; else it shrinks by up to lr·|x| a step where it decays.

    State: `step`, `exp_avg`, `exp_avg_sq`, and for 16-bit parameters `master`, all fp32 (fp64 for fp64 tensors).

    Raises:
        ValueError: naming the setting that is out of range.
    """

    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    update_direction = staticmethod(lamb)
    step_sizes = staticmethod(step_sizes)
    rules: ClassVar[dict[str, Rule]] = {
        "eps": AMOUNT,
        "betas": BETAS,
        "max_trust_ratio": Rule(lambda clip: clip is None or clip > 0, "above 0, or None for no bound"),
    }

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        bias_correction: bool = True,
        trust_ratio: bool = True,
        max_trust_ratio: float | None = None,
        max_grad_norm: float | None = None,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = True,
        check_finite: bool = False,
        skip_zero_grad: bool = True,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "bias_correction": bias_correction,
                "trust_ratio": trust_ratio,
                "max_trust_ratio": max_trust_ratio,
            },
            max_grad_norm=max_grad_norm,
            maximize=maximize,
            foreach=foreach,
            fused=fused,
            capturable=capturable,
            check_finite=check_finite,
            skip_zero_grad=skip_zero_grad,
        )

    def scalars(self, group: dict[str, Any], t: Tensor, live: Tensor, norms: Tensor, scale: Any, x_norms: Callable[[], Tensor]) -> Scalars:
        """Return the values of a step.

        Args:
            t: steps of each tensor, this one included, at least 1 (n).
            live: 1, and 0 for a tensor that is left alone (n).
            norms: |g| (n).
            scale: of the gradient.
            x_norms: measures |x| (n).
        """
        beta1, beta2 = group["betas"]
        new1, correct1 = decay(beta1, t, live)
        new2, correct2 = decay(beta2, t, live)
        if not group["bias_correction"]:
            correct1 = correct2 = torch.ones_like(t)
        return Scalars(new1, new2, correct1, correct2, group["lr"] * live, scale)

    def native(self, xs: list[Tensor], gs: list[Tensor], moments: list[list[Tensor]], table: Tensor, group: dict[str, Any]) -> Tensor:
        """Take the step by native.c; returns the trust ratios (n)."""
        return native.adaptive("lamb", xs, gs, moments[0], moments[1], table, group, self.scratch(xs))


def denominator(v: Tensors, s: Scalars, eps: float) -> Tensors:
    """Return √v̂ + eps, and where eps is 0 something above 0 for a tensor that is left alone: 0/0 is NaN, also at a rate of 0."""
    d = v.mul(s.correct2).sqrt_().add_(eps)
    return d if eps >= _LEAST_EPS else d.add_(Tensors((s.new1 == 0).to(s.new1.dtype).unbind()))


def decay(beta: float, t: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight of the new value of a moment, and its bias correction 1/(1−β^t), for each tensor (n).

    Args:
        beta: decay.
        t: steps, at least 1.
        live: 1, and 0 for a tensor that is left alone.
    """
    return (1 - beta) * live, (1 - beta**t).reciprocal()
