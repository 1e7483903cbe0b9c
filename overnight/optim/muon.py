"""Muon for matrices, AdamW for everything else, as one optimizer (torch has both; Jordan et al. 2024, kellerjordan.github.io/posts/muon)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from overnight.optim import muon_stacks
from overnight.optim.checks import AMOUNT, BETAS, SHARE, check_dense, check_settings, check_tensors
from overnight.optim.layerwise import Params
from overnight.optim.state import (
    check,
    laid_out,
    load,
    named,
    same_counts,
    saved_states,
    state_dtype,
)


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon on the groups with `muon` set and torch.optim.AdamW, fused, on the others.

    The update of a matrix is scaled to the size of AdamW's (Liu et al. 2025, arXiv 2502.16982), so that one learning rate and one decay
    serve both.

    Args:
        params: tensors, (name, tensor) pairs, or groups that may set any of the settings below.
        lr: learning rate of both.
        momentum: of Muon, with Nesterov's form.
        weight_decay: decoupled, of both.
        betas: decay of AdamW's moments.
        eps: of AdamW.
        muon: whether Muon steps the group; its tensors must have two dimensions.

    State: `momentum_buffer` for Muon; `step`, `exp_avg`, `exp_avg_sq` for AdamW; of a 16-bit parameter all in fp32, with a `master`, its weights in fp32.

    Raises:
        ValueError: naming the setting or the tensor.
    """

    # Of the class, so that a copy of the optimizer, which torch makes without it, makes its own.
    _parts: tuple[torch.optim.Optimizer, torch.optim.Optimizer] | None = None

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        muon: bool = True,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "betas": betas, "eps": eps, "muon": muon}
        super().__init__(params, defaults)  # type: ignore[arg-type]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does, with the settings and the tensors checked, and the groups made complete for the optimizer that steps them."""
        check_settings({**self.defaults, **param_group}, {"eps": AMOUNT, "momentum": SHARE, "betas": BETAS})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            tensors = named(self.param_groups)[-1]
            check_tensors(tensors)
            for name, p in tensors:
                if group["muon"] and p.ndim != 2:
                    raise ValueError(
                        f"muon = True: {name} has shape {tuple(p.shape)} and is no matrix; put it in a group with muon = False"
                    )
        except ValueError:
            self.param_groups.pop()
            raise
        # Their own defaults, such as the coefficients of Newton and Schulz. eps is AdamW's: Muon's own only guards a division.
        zero = torch.zeros(1, 1, device="cpu")  # whatever torch.set_default_device says
        part: torch.optim.Optimizer = (
            torch.optim.Muon([zero], adjust_lr_fn="match_rms_adamw") if group["muon"] else torch.optim.AdamW([zero], fused=True)
        )
        for name, value in part.defaults.items():
            group.setdefault(name, value)
        if group["muon"]:
            group["eps"] = part.defaults["eps"]
        self._parts = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every tensor that has a gradient.

        Args:
            closure: computes the loss and the gradients again, and returns the loss.

        Raises:
            RuntimeError: for a sparse gradient, naming its tensor; nothing is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._parts is None:
            zero = torch.zeros(1, 1, device="cpu")  # whatever torch.set_default_device says
            self._parts = torch.optim.Muon([zero]), torch.optim.AdamW([zero], fused=True)
        stepped = [(name, p, p.grad) for tensors in named(self.param_groups) for name, p in tensors if p.grad is not None]
        for name, _, grad in stepped:
            check_dense(name, grad)
        for _, p, _ in stepped:
            self._fit(p)
        stand_ins = {p: self._stand_in(p, grad) for _, p, grad in stepped if not p.dtype == grad.dtype == state_dtype(p)}
        states = {p: {name: x for name, x in self.state[p].items() if name != "master"} for _, p, _ in stepped}
        for part, muon in zip(self._parts, (True, False), strict=True):
            # The groups and the state are ours; loading a state replaces both.
            groups = [group for group in self.param_groups if group["muon"] == muon]
            part.param_groups = [{**group, "params": [stand_ins.get(p, p) for p in group["params"]]} for group in groups]
            part.state = defaultdict(dict, {stand_ins.get(p, p): state for p, state in states.items()})
            if muon and all(map(muon_stacks.takes, part.param_groups)):
                for group in part.param_groups:
                    muon_stacks.step(group, part.state)
                continue
            if not muon:
                for group in part.param_groups:
                    group["fused"] = all(_contiguous(p, part.state[p]) for p in group["params"] if p.grad is not None)
            part.step()
        for p, state in states.items():
            self.state[p].update(state)
        for p, stand_in in stand_ins.items():
            stand_in.grad = None
            if stand_in.dtype != p.dtype:
                self.state[p]["master"] = stand_in
                p.copy_(stand_in)
        return loss

    def _fit(self, p: Tensor) -> None:
        """Make the state of a parameter fit its type, which may have changed since the last step."""
        state, kind = self.state[p], state_dtype(p)
        if p.dtype == kind:
            state.pop("master", None)
        for name, value in state.items():
            if name != "step" and value.dtype != kind:
                state[name] = laid_out(value, p)

    def _stand_in(self, p: Tensor, grad: Tensor) -> Tensor:
        """Return what is stepped for a parameter that is not of the type of its state, or whose gradient is not: its master weights or its own, with the gradient in that type."""
        kind = state_dtype(p)
        stand_in: Tensor = p.detach() if p.dtype == kind else self.state[p].get("master", p.detach().to(kind))
        stand_in.grad = grad.to(kind)
        return stand_in

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of a state, where torch keeps the tensors that it is given; state of 16-bit parameters stays fp32, where torch casts it down.

        Raises:
            ValueError: for the state of another optimizer, of other groups or of tensors of other shapes; nothing is changed.
        """

        def keep(saved: dict[str, Any]) -> None:
            for _, p, state, _ in saved_states(self, saved):
                for name, value in state.items():
                    if name != "step" and _is_16_bit(p):
                        self.state[p][name] = laid_out(value, p)
                    else:  # torch keeps the tensors that it is given, which are another's
                        self.state[p][name] = torch.as_tensor(self.state[p][name]).clone()

        load(self, state_dict, self._check_state, keep)

    def _check_state(self, state_dict: dict[str, Any]) -> None:
        for group in state_dict["param_groups"]:
            if "muon" not in group:
                raise ValueError(f"this is not the state of Muon but of {group.get('optimizer', 'another optimizer')}")
        if not same_counts(self, state_dict):
            return
        for number, (mine, group) in enumerate(zip(self.param_groups, state_dict["param_groups"], strict=True)):
            if mine["muon"] != group["muon"]:
                raise ValueError(f"the state is of other groups: group {number} has muon = {group['muon']} there and {mine['muon']} here")
        for name, p, state, group in saved_states(self, state_dict):
            check(state, p, name, ("momentum_buffer",) if group["muon"] else ("step", "exp_avg", "exp_avg_sq"), "Muon")


def _is_16_bit(p: Tensor) -> bool:
    return state_dtype(p) != p.dtype


def _contiguous(p: Tensor, state: dict[str, Any]) -> bool:
    """Return whether torch's fused AdamW, which reads a parameter, its gradient and its moments as they lie in memory, finds the right numbers there."""
    assert p.grad is not None
    moments = (state.get(name, p) for name in ("exp_avg", "exp_avg_sq"))
    return not p.grad.is_neg() and all(x.is_contiguous() for x in (p, p.grad, *moments))
