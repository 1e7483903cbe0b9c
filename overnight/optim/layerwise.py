"""What Lars, Lamb and Lans have in common: everything around their equations.

A step gathers the tensors that have a gradient by group, device, type and sharding, measures |g| of each, and hands the lists to the
optimizer's equations. No number is read back from the device, so a step costs no synchronization and can be compiled or captured.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from operator import is_
from typing import Any, ClassVar

import torch
from torch import Tensor

from overnight.errors import first_names
from overnight.optim import native
from overnight.optim.batch import Batch, buckets, groups_of, make_batches, same_settings, split
from overnight.optim.checks import BOUND, NO_MATRIX, Rule, check_setting, check_settings, check_tensors
from overnight.optim.offload import offloaded, on_device
from overnight.optim.state import (
    check,
    fit,
    fits,
    laid_out,
    load,
    local,
    local_parts,
    named,
    real_numbers,
    same_counts,
    saved_states,
    state_dtype,
    summed,
)
from overnight.optim.tensor_list import Tensors, total_norm

# Around them torch has a wrapper for compiled code, of which they are no part here: it imports the compiler, which takes as long as importing torch.
_add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
_zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)

# Batches whose counts of steps are kept together.
_COUNTS = 64
Params = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]


@dataclass
class StepStats:
    """What a step reports. Outside the optimizer, since torch.compile drops what a compiled step writes to an optimizer's own attributes."""

    grad_norm: Tensor | None = None
    ratios: list[tuple[list[Tensor], Tensor]] = field(default_factory=list)


class Layerwise(torch.optim.Optimizer, ABC):
    """A torch optimizer whose step depends on the norms of whole tensors.

    After a step, also a compiled one, `grad_norm` is the norm of all gradients before clipping (a scalar tensor, None before the first step)
    and `ratios` lists (parameters, their trust ratios): both are left on the device.

    Args:
        params: tensors, (name, tensor) pairs, or groups that may set any of the settings.
        defaults: settings of a group.
        max_grad_norm: first scale all gradients of all groups so that their common norm is at most this; None for no clipping.
        maximize: go up the gradient.
        foreach: False steps the tensors one by one.
        fused: True steps by the equations compiled for the CPU, or by the kernels for a GPU; False by lists of tensors, None by the fastest that is there. The same values to rounding.
        capturable: always so; accepted as torch's optimizers do. Capturing a graph needs a tensor as `lr`.
        check_finite: refuse a step with a NaN or infinite gradient, at the price of waiting once for the device.
        skip_zero_grad: leave a tensor whose gradient is exactly 0 alone.
    """

    moments: ClassVar[tuple[str, ...]]
    """Names of the state tensors, in the order the equations take them."""
    measures: ClassVar[bool] = True
    """Whether the norms of the directions decide how far it moves."""
    rules: ClassVar[dict[str, Rule]] = {}
    """What its settings besides lr and weight_decay must be."""

    def __init__(
        self,
        params: Params,
        defaults: dict[str, Any],
        *,
        max_grad_norm: float | None,
        maximize: bool,
        foreach: bool | None,
        fused: bool | None,
        capturable: bool,
        check_finite: bool,
        skip_zero_grad: bool,
    ) -> None:
        check_setting("max_grad_norm", max_grad_norm, BOUND)
        if foreach is False and fused:
            raise ValueError("fused = True: contradicts foreach = False")
        self.max_grad_norm = max_grad_norm
        self.check_finite = check_finite
        self._stats = StepStats()
        # As a copy has them: __getstate__.
        self._scratch: Tensor | None = None
        self._counts: dict[int, tuple[Tensor, list[Tensor]]] = {}
        defaults = {**defaults, "maximize": maximize, "foreach": foreach, "fused": fused, "skip_zero_grad": skip_zero_grad}
        defaults |= {"capturable": capturable, "optimizer": type(self).__name__}
        super().__init__(params, defaults)  # type: ignore[arg-type]

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy takes with it; torch's leaves out what it does not know."""
        return {**super().__getstate__(), **{name: getattr(self, name) for name in ("max_grad_norm", "check_finite")}} | {
            "_stats": StepStats(),
            "_scratch": None,
            "_counts": {},
        }

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm of all gradients before clipping, of the last step (a scalar tensor, on the device); None before the first."""
        return self._stats.grad_norm

    @property
    def ratios(self) -> list[tuple[list[Tensor], Tensor]]:
        """(parameters, their trust ratios (n)) of the last step."""
        return self._stats.ratios

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does, with the settings and the tensors checked.

        Raises:
            ValueError: naming the setting or the tensor.
        """
        for name in ("max_grad_norm", "check_finite"):
            if name in param_group:
                raise ValueError(f"{name} = {param_group[name]}: is over all groups; give it to the optimizer, not to a group")
        settings = {**self.defaults, **param_group}
        check_settings(settings, self.rules)
        check_setting("lr", settings["lr"], NO_MATRIX)
        _add_param_group(self, param_group)
        try:
            check_tensors(named(self.param_groups)[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients as torch does."""
        _zero_grad(self, set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every tensor that has a gradient; `p.grad` is left as it was.

        Args:
            closure: computes the loss and the gradients again, and returns the loss.

        Raises:
            FloatingPointError: with `check_finite`, naming the tensor; nothing is changed.
            ImportError: with `fused = True` on a GPU, without Triton.
            RuntimeError: for a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batches = self._gather()
        self._stats.ratios = []
        if not batches:
            return loss
        _measure(batches)
        device = batches[0].norms.device
        self._stats.grad_norm = grad_norm = total_norm(torch.cat([batch.norms.to(device) for batch in batches]))
        if self.check_finite:
            self._refuse_non_finite(batches, grad_norm)
        clip = None if self.max_grad_norm is None else torch.clamp(grad_norm / self.max_grad_norm, min=1.0).reciprocal()
        for batch in batches:
            with on_device(self.state, batch.params) if offloaded(batch.group) else nullcontext():
                self._step(batch, clip)
        return loss

    def _gather(self) -> list[Batch]:
        alike: list[tuple[dict[str, Any], list[tuple[str, Tensor]]]] = []
        for group, tensors in zip(self.param_groups, named(self.param_groups), strict=True):
            if not isinstance(group["lr"], Tensor) and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"lr = {group['lr']}: a captured graph would use this number for ever; give a tensor on the device")
            for first, more in alike:
                if same_settings(first, group, self.defaults):
                    more += tensors
                    break
            else:
                alike.append((group, tensors))
        batches = [batch for group, tensors in alike for batch in make_batches(group, tensors)]
        return [part for batch in batches for part in (split(batch) if offloaded(batch.group) else [batch])]

    def _refuse_non_finite(self, batches: list[Batch], grad_norm: Tensor) -> None:
        if torch.isfinite(grad_norm):
            return
        bad: list[str] = []
        large: list[str] = []
        for batch in batches:
            over = [i for i, norm in enumerate(batch.norms.tolist()) if not math.isfinite(norm)]
            exact = Tensors([batch.grads[i].double() for i in over], batch.shards).norm().tolist() if over else []
            for i, norm in zip(over, exact, strict=True):
                (large if math.isfinite(norm) else bad).append(batch.names[i])
        what = (
            f"the gradient of {first_names(bad)} is not finite"
            if bad
            else f"the norm of the gradient of {first_names(large) or 'all tensors together'} is more than {grad_norm.dtype} holds; scale the loss down"
        )
        raise FloatingPointError(f"{what}: the step was refused, parameters and state are as before")

    def _step(self, batch: Batch, clip: Tensor | None) -> None:
        """Take one step of the tensors of a batch."""
        group = batch.group
        states = [self.state[p] for p in batch.params]
        if not fits(states, batch.params, self.moments):
            for p, state in zip(batch.params, states, strict=True):
                fit(state, p, self.moments)
        moments = [local_parts([state[name] for state in states]) for name in self.moments]
        xs = local_parts([state["master"] for state in states] if "master" in states[0] else batch.params)
        # Scalars are made in float64: 1 - 0.999^t has few digits in float32.
        live = (batch.norms != 0).double() if group["skip_zero_grad"] else torch.ones_like(batch.norms, dtype=torch.float64)
        steps = self._counted(states, live)
        scale: Tensor | float = -1.0 if group["maximize"] else 1.0
        if clip is not None:
            scale = scale * clip.to(live.device)
        t = steps.double().clamp(min=1)
        scalars = self.scalars(group, t, live, batch.norms.double(), scale, lambda: norms_of(batch, xs))
        apply = {"native": self._apply_native, "kernels": self._apply_kernels}.get(batch.backend, self._apply)
        self._stats.ratios.append((batch.params, apply(batch, xs, moments, scalars)))
        if "master" in states[0] and batch.backend != "kernels":
            torch._foreach_copy_(local_parts(batch.params), xs)
        if batch.backend != "lists":  # which autograd sees: a graph that kept the old values must not go back through the new ones
            torch.autograd.graph.increment_version(batch.params)

    def _counted(self, states: list[dict[str, Any]], live: Tensor) -> Tensor:
        """Count a step of each tensor that is not left alone; returns the counts (n).

        Those of a batch are views of one tensor, so that adding to them takes one kernel of a GPU instead of one for each.
        """
        steps = [state["step"] for state in states]
        if torch.compiler.is_compiling():
            torch._foreach_add_(steps, live.to(steps[0].dtype).unbind())
            return torch.stack(steps)
        together, views = self._counts.get(id(steps[0]), (live, []))
        if len(views) != len(steps) or not all(map(is_, views, steps)):
            # Of the kind of `live`: a wrapper of two tensors would be added twice to a plain one.
            together = torch.stack(steps) + 0 * live.to(steps[0].dtype)
            views = list(together.unbind())
            for state, view in zip(states, views, strict=True):
                state["step"] = view
            if len(self._counts) >= _COUNTS:  # of batches that are no more
                self._counts = {}
            self._counts[id(views[0])] = together, views
        together.add_(live)
        return together

    def _apply(self, batch: Batch, xs: list[Tensor], moments: list[list[Tensor]], scalars: Any) -> Tensor:
        """Apply the equations over lists of tensors; returns the trust ratios (n)."""
        group, trusts = batch.group, []
        for here in buckets(xs, batch):
            s = type(scalars)(*(v if isinstance(v, float) else v.expand_as(batch.norms)[here].to(batch.norms.dtype) for v in scalars))
            x, g, *rest = (Tensors(parts[here], batch.shards) for parts in (xs, batch.grads, *moments))
            if not isinstance(s.scale, float) or s.scale != 1.0:
                g = g.mul(s.scale)
            found = type(self).update_direction(x, g, *rest, s, group)
            norms = [t.norm() for t in (x, *found)] if self.measures and group["trust_ratio"] else None
            step_sizes, trust = type(self).step_sizes(s, norms, group)
            for update, step_size in zip(found, step_sizes, strict=True):
                x.sub_(update.mul(step_size))
            trusts.append(trust)
        return torch.cat(trusts)

    def _apply_native(self, batch: Batch, xs: list[Tensor], moments: list[list[Tensor]], scalars: Any) -> Tensor:
        """Apply them by native.c."""
        table = torch.stack([torch.as_tensor(v, device="cpu").expand_as(batch.norms) for v in scalars], 1).to(batch.norms.dtype)
        return self.native(xs, batch.grads, moments, table, batch.group)

    def _apply_kernels(self, batch: Batch, xs: list[Tensor], moments: list[list[Tensor]], scalars: Any) -> Tensor:
        """Apply them by kernels.py, which writes 16-bit parameters too."""
        from overnight.optim import kernels

        copies = local_parts(batch.params) if batch.params[0].dtype != xs[0].dtype else []
        return kernels.step(type(self).update_direction.__name__, batch, xs, copies, moments, scalars, type(self).step_sizes)

    # The equations, which each optimizer has to give; native.c and kernels.py have them again.

    @abstractmethod
    def scalars(self, group: dict[str, Any], t: Tensor, live: Tensor, norms: Tensor, scale: Any, x_norms: Callable[[], Tensor]) -> Any:
        """Return the values of a step: a named tuple of (n) or of one for all, with `scale`."""

    @staticmethod
    @abstractmethod
    def update_direction(*tensors: Any, **more: Any) -> tuple[Any, ...]:
        """Return where tensors go, from (x, g, moments..., scalars, group); it changes the moments."""

    @staticmethod
    @abstractmethod
    def step_sizes(s: Any, norms: Sequence[Tensor] | None, group: Any) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return how far they go in each direction, and the trust ratio (each (n)), from the norms of x and the directions."""

    @abstractmethod
    def native(self, xs: list[Tensor], gs: list[Tensor], moments: list[list[Tensor]], table: Tensor, group: dict[str, Any]) -> Tensor:
        """Take the whole step by native.c, from a row of the numbers for each tensor (n, K); returns the trust ratios (n)."""

    def scratch(self, xs: list[Tensor]) -> Tensor:
        """Return room for two directions of the longest tensor (2, N), kept: fresh memory at each step would cost as much as the step."""
        need = max(x.numel() for x in xs)
        if self._scratch is None or self._scratch.dtype != xs[0].dtype or self._scratch.shape[1] < need:
            self._scratch = xs[0].new_empty(2, need)
        return self._scratch

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of a state, where torch keeps the tensors that it is given; state of 16-bit parameters stays fp32, where torch casts it down.

        Raises:
            ValueError: for the state of another optimizer, or of tensors of other shapes; nothing is changed.
        """
        here = [{name: group[name] for name in ("foreach", "fused")} for group in self.param_groups]

        def keep(saved: dict[str, Any]) -> None:
            for group, ours in zip(self.param_groups, here, strict=True):
                group.update(ours)  # How this machine steps, not the one that saved.
            for _, p, state, _ in saved_states(self, saved):
                for name, value in state.items():
                    if name == "step":
                        self.state[p][name] = torch.as_tensor(value).to(p.device, torch.float32, copy=True)
                    else:  # in the parameter's memory layout, whatever that of the saved one was
                        self.state[p][name] = laid_out(value, p)

        load(self, state_dict, self._check_state, keep)

    def _check_state(self, state_dict: dict[str, Any]) -> None:
        if not same_counts(self, state_dict):
            return
        kind = type(self).__name__
        for name, p, state, group in saved_states(self, state_dict):
            if group.get("optimizer") != kind:
                raise ValueError(f"this is not the state of {kind} but of {group.get('optimizer', 'another optimizer')}")
            check(state, p, name, ("step", *self.moments), kind)


def _measure(batches: list[Batch]) -> None:
    """Measure the gradients of batches; those that are alike together, since a call takes the host of a GPU as long as many tensors do."""
    alike: dict[Any, list[Batch]] = {}
    for batch in batches:
        grad = batch.grads[0]
        alike.setdefault((batch.backend, grad.device, grad.dtype, *batch.shards), []).append(batch)
    for these in alike.values():
        norms = norms_of(these[0], [grad for batch in these for grad in batch.grads])
        for batch, part in zip(these, norms.split([len(batch.grads) for batch in these]), strict=True):
            batch.norms = part


def norms_of(batch: Batch, parts: list[Tensor]) -> Tensor:
    """Return the L2 norms of whole tensors (n), from this process's parts of them."""
    if batch.backend == "kernels":
        from overnight.optim import kernels

        return kernels.norms(parts, batch.shards)
    return native.norms(parts) if batch.backend == "native" else Tensors(parts, batch.shards).norm()


def whole_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return L2 norms of whole tensors (n), float32 or wider, also where each process holds a part; waits for no device."""
    alike: dict[Any, list[int]] = {}
    tensors = [summed(x) for x in tensors]
    parts = [real_numbers(local(x.detach())) for x in tensors]
    for i, (x, part) in enumerate(zip(tensors, parts, strict=True)):
        alike.setdefault((x.device, state_dtype(part), tuple(groups_of(x))), []).append(i)
    norms: list[Tensor] = [torch.empty(0)] * len(tensors)
    for (_, kind, shards), numbers in alike.items():
        found = Tensors([parts[i].to(kind) for i in numbers], shards).norm()
        for i, norm in zip(numbers, found.unbind(), strict=True):
            norms[i] = norm
    return torch.stack(norms) if norms else torch.empty(0)
