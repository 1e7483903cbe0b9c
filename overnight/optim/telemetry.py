"""Norms of every tensor around an optimizer step: weight, gradient, update and trust ratio.

    before = Snapshot(optimizer)     # gradients are there, not yet clipped
    optimizer.step()
    norms = before.after()           # on the device
    norms.rows()                     # read: {"encoder.word.weight": [|x|, |g|, |Δx|, ratio], ...}

The update is measured, after − before, so it is right for every optimizer. A measured step costs a copy of the parameters and a
pass for each norm; nothing is read from the device before `rows`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from overnight.optim.layerwise import whole_norms
from overnight.optim.state import named


@dataclass(frozen=True)
class Norms:
    """What one step did to its n tensors."""

    names: list[str]
    table: Tensor
    """|x| before the step, |g| before clipping, |Δx|, and the trust ratio, NaN where none applies: (n, 4), on the device."""

    def rows(self, digits: int = 5) -> dict[str, list[float | None]]:
        """Return the table as plain numbers by tensor; waits for the device.

        Args:
            digits: significant ones that are kept.

        Returns:
            name → its four numbers; None for a trust ratio that does not apply.
        """
        rows: dict[str, list[float | None]] = {}
        for name, (*norms, ratio) in zip(self.names, self.table.tolist(), strict=True):
            rows[name] = [*(rounded(norm, digits) for norm in norms), None if math.isnan(ratio) else rounded(ratio, digits)]
        return rows


class Snapshot:
    """The parameters of an optimizer that have a gradient, as they are before its step.

    Args:
        optimizer: made from (name, tensor) pairs; without names a tensor goes by its number. One with a list `ratios`, as the
            layer-wise ones have, also gives the trust ratio of the groups that it adapts.
    """

    @torch.no_grad()
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._names: list[str] = []
        self._params: list[Tensor] = []
        self._adapted: list[bool] = []
        gradients: list[Tensor] = []
        for group, tensors in zip(optimizer.param_groups, named(optimizer.param_groups), strict=True):
            for name, p in tensors:
                if p.grad is not None and p.numel():
                    self._names.append(name)
                    self._params.append(p)
                    self._adapted.append(bool(group.get("trust_ratio", False)))
                    gradients.append(p.grad)
        self._columns = [whole_norms(self._params), whole_norms(gradients)]
        self._before = [p.detach().clone() for p in self._params]

    @torch.no_grad()
    def after(self) -> Norms:
        """Return the norms, once the optimizer has stepped; only the first call is right, since it frees the copy."""
        for before, p in zip(self._before, self._params, strict=True):
            before.sub_(p.detach())
        updates = whole_norms(self._before)
        self._before.clear()
        ratios_of_groups: list[tuple[list[Tensor], Tensor]] = getattr(self._optimizer, "ratios", [])
        by_tensor = {id(p): ratio for params, ratios in ratios_of_groups for p, ratio in zip(params, ratios.unbind(), strict=True)}
        none = torch.full_like(updates, math.nan).unbind()
        ratios = [by_tensor.get(id(p), nan) if adapted else nan for p, adapted, nan in zip(self._params, self._adapted, none, strict=True)]
        last = torch.stack(ratios).to(updates) if ratios else updates
        return Norms(self._names, torch.stack([*self._columns, updates, last], 1))


def rounded(value: float, digits: int = 5) -> float:
    """Return a number with so many significant digits; NaN and infinity as they are."""
    return float(f"{value:.{digits}g}")
