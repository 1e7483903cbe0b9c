"""LARS (You et al. 2017, arXiv 1708.03888, algorithm 1): momentum at a rate of its own for every tensor.

For each tensor x with gradient g:

    λ = η·|x| / (|g| + wd·|x| + eps)     (1 where |x| or |g| is 0)
    v ← μ·v + lr·λ·(g + wd·x)
    x ← x − v                            (Nesterov: x ← x − μ·v − lr·λ·(g + wd·x), with the new v)

That is the paper, TensorFlow and MLPerf. Most PyTorch code keeps lr outside: v ← μ·v + λ·(g + wd·x), x ← x − lr·v, which is the
same only while lr is constant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from overnight.optim import native
from overnight.optim.checks import AMOUNT, POSITIVE, SHARE, Rule
from overnight.optim.layerwise import Layerwise, Params
from overnight.optim.tensor_list import Tensors


class Scalars(NamedTuple):
    """The values of a step: for each tensor (n), or one for all."""

    keep: Any
    """μ, and 1 for a tensor that is left alone."""
    inside: Any
    """What multiplies g + wd·x in the momentum: lr·λ, or λ; 0 for a tensor that is left alone."""
    outside: Any
    """What multiplies the momentum in the update: 1, or lr; 0 for a tensor that is left alone."""
    trust: Any
    """λ."""
    scale: Any
    """Of the gradient: clipping, and the sign."""


def lars(x: Tensors, g: Tensors, v: Tensors, s: Scalars, group: Mapping[str, Any]) -> tuple[Tensors]:
    """Move the momentum of a list of tensors; returns the direction: the new momentum, or Nesterov's.

    Args:
        x: parameters.
        g: gradients.
        v: momentum.
        s: values of the step.
        group: settings of :class:`Lars`.
    """
    d = g.mul(s.inside).add_(x.mul(s.inside).mul_(group["weight_decay"]))
    v.mul_(s.keep).add_(d)
    return (d.add_(v, alpha=group["momentum"]) if group["nesterov"] else v,)


def step_sizes(s: Scalars, norms: Sequence[Tensor] | None, group: Mapping[str, Any]) -> tuple[tuple[Tensor], Tensor]:
    """Return what multiplies the direction, and λ (each (n)).

    Args:
        s: values of the step.
        norms: not used: λ is known before.
        group: settings of :class:`Lars`.
    """
    return (s.outside,), s.trust


class Lars(Layerwise):
    """Layer-wise adaptive rate scaling of SGD with momentum.

    Args:
        params: tensors, (name, tensor) pairs, or groups that may set any of the settings below, `max_grad_norm` and `check_finite` excepted.
        lr: learning rate, a number or a tensor of one; of the order of 1 to 30, since λ is small.
        momentum: μ.
        weight_decay: wd, part of the gradient.
        trust_coefficient: η.
        eps: added to the denominator of λ.
        trust_ratio: use λ; False is SGD with momentum (λ = 1), as for biases and norms.
        nesterov: Nesterov's momentum.
        lr_in_momentum: the paper's form, lr inside the momentum; False is that of most PyTorch code.
        max_grad_norm: first scale all gradients of all groups so that their common norm is at most this, or None.
        maximize: go up the gradient.
        foreach: False steps the tensors one by one.
        fused: True steps by the equations compiled for the CPU, or by the kernels for a GPU; False by lists of tensors, None by the fastest that is there. The same values to rounding.
        capturable: always so; accepted as torch's optimizers do. Capturing a graph needs a tensor as `lr`.
        check_finite: refuse a step with a NaN or infinite gradient, at the price of waiting once for the device.
        skip_zero_grad: leave a tensor whose gradient is exactly 0 alone; else its momentum continues and it decays.

    State: `step`, `momentum_buffer`, and for 16-bit parameters `master`, all fp32 (fp64 for fp64 tensors).

    Raises:
        ValueError: naming the setting that is out of range.
    """

    moments: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    update_direction = staticmethod(lars)
    step_sizes = staticmethod(step_sizes)
    measures: ClassVar[bool] = False
    rules: ClassVar[dict[str, Rule]] = {"momentum": SHARE, "trust_coefficient": POSITIVE, "eps": AMOUNT}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        trust_coefficient: float = 1e-3,
        eps: float = 0.0,
        trust_ratio: bool = True,
        nesterov: bool = False,
        lr_in_momentum: bool = True,
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
                "momentum": momentum,
                "weight_decay": weight_decay,
                "trust_coefficient": trust_coefficient,
                "eps": eps,
                "trust_ratio": trust_ratio,
                "nesterov": nesterov,
                "lr_in_momentum": lr_in_momentum,
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
        """Return the values of a step, λ among them; arguments as in :meth:`Lamb.scalars`."""
        trust, lr = torch.ones_like(norms), group["lr"]
        if group["trust_ratio"]:
            norm_x, norm_g = x_norms().double(), norms * abs(scale)
            bound = norm_g + group["weight_decay"] * norm_x + group["eps"]
            trust = torch.where((norm_x > 0) & (norm_g > 0), group["trust_coefficient"] * norm_x / bound, trust)
        inside, outside = (lr * trust, 1.0) if group["lr_in_momentum"] else (trust, lr)
        return Scalars(1 - (1 - group["momentum"]) * live, inside * live, outside * live, trust, scale)

    def native(self, xs: list[Tensor], gs: list[Tensor], moments: list[list[Tensor]], table: Tensor, group: dict[str, Any]) -> Tensor:
        """Take the step by native.c; returns λ (n)."""
        native.lars(xs, gs, moments[0], table, group)
        return table[:, Scalars._fields.index("trust")]
