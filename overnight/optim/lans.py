"""LANS (Zheng et al. 2020, arXiv 2006.13484, algorithm 2): LAMB on normalized gradients, with a Nesterov-like second term.

For each tensor x with gradient g, at its t-th step (g̃ = g where |g| = 0):

    g̃ = g / |g|
    m ← β1·m + (1−β1)·g̃          m̂ = m / (1−β1^t)
    v ← β2·v + (1−β2)·g̃²         v̂ = v / (1−β2^t)
    r = m̂ / (√v̂ + eps) + wd·x
    c = g̃ / (√v̂ + eps) + wd·x
    x ← x − lr · |x| · ( β1·r/|r| + (1−β1)·c/|c| )     (|x|/|r| and |x|/|c| are 1 where a norm is 0)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from overnight.optim import native
from overnight.optim.checks import AMOUNT, BETAS, Rule
from overnight.optim.lamb import Scalars, decay, denominator
from overnight.optim.layerwise import Layerwise, Params
from overnight.optim.tensor_list import Tensors, ratio


def lans(x: Tensors, g: Tensors, m: Tensors, v: Tensors, s: Scalars, group: Mapping[str, Any]) -> tuple[Tensors, Tensors]:
    """Move the moments of a list of tensors; returns r and c.

    Args:
        x: parameters.
        g: normalized gradients.
        m, v: moments.
        s: values of the step.
        group: settings of :class:`Lans`.
    """
    m.lerp_(g, s.new1)
    v.lerp_(g.mul(g), s.new2)
    d = denominator(v, s, group["eps"])
    r = m.mul(s.correct1).div_(d).add_(x, alpha=group["weight_decay"])
    c = g.div(d).add_(x, alpha=group["weight_decay"])
    return r, c


def step_sizes(s: Scalars, norms: Sequence[Tensor] | None, group: Mapping[str, Any]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return lr·β1·|x|/|r| and lr·(1−β1)·|x|/|c|, and the trust ratio |x|/|r| of the first (each (n)).

    Args:
        s: values of the step.
        norms: |x|, |r| and |c| (each (n)); None for no trust ratios.
        group: settings of :class:`Lans`.
    """
    trust_r = trust_c = torch.ones_like(s.lr)
    if norms is not None:
        trust_r, trust_c = ratio(norms[0], norms[1]), ratio(norms[0], norms[2])
    beta1 = group["betas"][0]
    return (s.lr * beta1 * trust_r, s.lr * (1 - beta1) * trust_c), trust_r


class Lans(Layerwise):
    """Large-batch accelerated LAMB: gradients are normalized tensor by tensor, so it needs no clipping.

    Args:
        params: tensors, (name, tensor) pairs, or groups that may set any of the settings below, `check_finite` excepted.
        lr: learning rate, a number or a tensor of one.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: wd, decoupled.
        trust_ratio: use the trust ratios; False leaves both terms as they are.
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
    update_direction = staticmethod(lans)
    step_sizes = staticmethod(step_sizes)
    rules: ClassVar[dict[str, Rule]] = {"eps": AMOUNT, "betas": BETAS}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        trust_ratio: bool = True,
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
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "trust_ratio": trust_ratio},
            max_grad_norm=None,
            maximize=maximize,
            foreach=foreach,
            fused=fused,
            capturable=capturable,
            check_finite=check_finite,
            skip_zero_grad=skip_zero_grad,
        )

    def scalars(self, group: dict[str, Any], t: Tensor, live: Tensor, norms: Tensor, scale: Any, x_norms: Callable[[], Tensor]) -> Scalars:
        """Return the values of a step, as LAMB's, but `scale` also divides by |g|; arguments as in :meth:`Lamb.scalars`."""
        beta1, beta2 = group["betas"]
        new1, correct1 = decay(beta1, t, live)
        new2, correct2 = decay(beta2, t, live)
        # As large as float32 holds it: 0 times infinity would be NaN.
        return Scalars(new1, new2, correct1, correct2, group["lr"] * live, scale / norms.clamp(min=torch.finfo(torch.float32).tiny))

    def native(self, xs: list[Tensor], gs: list[Tensor], moments: list[list[Tensor]], table: Tensor, group: dict[str, Any]) -> Tensor:
        """Take the step by native.c; returns the trust ratios (n)."""
        return native.adaptive("lans", xs, gs, moments[0], moments[1], table, group, self.scratch(xs))
