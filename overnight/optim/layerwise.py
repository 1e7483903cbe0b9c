"""What Lars, Lamb and Lans have in common: everything around their equations.

A step gathers the tensors that have a gradient by group, device, type and sharding, measures |g| of each, and hands the lists to the
optimizer's equations. No number is read back from the device, so a step costs no synchronisation and can be compiled or captured.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from overnight.optim import native
from overnight.optim.offload import brought, offloaded, pieces
from overnight.optim.state import check, fit, laid_out, local, wide
from overnight.optim.tensor_list import Tensors, total_norm

Params = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]

# Elements that are stepped together. On a CPU the intermediate results of a bucket should stay in its cache; on a GPU the bound is
# their memory. Tensors that are sharded are one bucket, so that all their norms take one collective.
_BUCKET = {"cpu": 1 << 18}
_BUCKET_ELSEWHERE = 1 << 26


@dataclass
class Batch:
    """The tensors of one group that have a gradient and share device, type and sharding (n of them)."""

    group: dict[str, Any]
    shards: Sequence[Any]
    """Process groups over which each tensor is cut."""
    way: str
    """What steps them: `lists`, `native` or `kernels`."""
    names: list[str] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    """This process's parts, in the type of the state; the kernels read any type."""
    norms: Tensor = field(default_factory=lambda: torch.empty(0))
    """|g| of the whole tensors (n)."""

    def norms_of(self, parts: list[Tensor]) -> Tensor:
        """L2 norms (n) of whole tensors, from this process's parts of them."""
        if self.way == "kernels":
            from overnight.optim import kernels

            return kernels.norms(parts, self.shards)
        return native.norms(parts) if self.way == "native" else Tensors(parts, self.shards).norm()


@dataclass
class Told:
    """What a step tells of itself. Beside the optimizer, since torch.compile drops what a compiled step writes to an optimizer's own attributes."""

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
        fused: compile the equations for the CPU, or use the kernels for a GPU; the same numbers, faster after the first step.
        capturable: always so; accepted as torch's optimizers do. Capturing a graph needs a tensor as `lr`.
        check_finite: refuse a step with a NaN or infinite gradient, at the price of waiting once for the device.
        skip_zero_grad: leave a tensor whose gradient is exactly 0 alone.
    """

    moments: ClassVar[tuple[str, ...]]
    """Names of the state tensors, in the order the equations take them."""
    measures: ClassVar[bool] = True
    """Whether the norms of the directions decide how far it moves."""
    ranges: ClassVar[dict[str, Callable[[Any], bool]]] = {}
    """Settings beside lr and weight_decay, and what they must satisfy."""

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
        if max_grad_norm is not None and not 0 < max_grad_norm < math.inf:
            raise ValueError(f"max_grad_norm = {max_grad_norm}: must be finite and above 0, or None for no clipping")
        if foreach is False and fused:
            raise ValueError("fused = True: contradicts foreach = False")
        self.max_grad_norm = max_grad_norm
        self.check_finite = check_finite
        self._told = Told()
        self._scratch: Tensor | None = None  # as a copy has them: __getstate__
        defaults = {**defaults, "maximize": maximize, "foreach": foreach, "fused": fused, "skip_zero_grad": skip_zero_grad}
        defaults |= {"capturable": capturable, "optimizer": type(self).__name__}
        super().__init__(params, defaults)  # type: ignore[arg-type]

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes with it; torch's leaves out what it does not know."""
        return {**super().__getstate__(), **{name: getattr(self, name) for name in ("max_grad_norm", "check_finite")}} | {
            "_told": Told(),
            "_scratch": None,
        }

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm of all gradients before clipping, of the last step (a scalar tensor, on the device); None before the first."""
        return self._told.grad_norm

    @property
    def ratios(self) -> list[tuple[list[Tensor], Tensor]]:
        """(parameters, their trust ratios (n)) of the last step."""
        return self._told.ratios

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, with the settings and the tensors checked.

        Raises:
            ValueError: naming the setting or the tensor.
        """
        for name in ("max_grad_norm", "check_finite"):
            if name in param_group:
                raise ValueError(f"{name} = {param_group[name]}: is over all groups; give it to the optimizer, not to a group")
        self._check_settings({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            for name, p in _named(self.param_groups[-1]):
                if not p.is_floating_point():
                    raise ValueError(f"{name} is {p.dtype}: only real floating-point tensors can be optimised")
        except ValueError:
            self.param_groups.pop()
            raise

    def _check_settings(self, group: dict[str, Any]) -> None:
        if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
            raise ValueError(f"lr has {group['lr'].numel()} elements: must be one number")
        for name in ("lr", "weight_decay"):
            if not 0 <= float(group[name]) < math.inf:
                raise ValueError(f"{name} = {group[name]}: must be finite and 0 or more")
        for name, holds in self.ranges.items():
            if not holds(group[name]):
                raise ValueError(f"{name} = {group[name]}: out of range")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every tensor that has a gradient; `p.grad` is left as it was.

        Args:
            closure: computes the loss and the gradients again, and returns the loss.

        Raises:
            FloatingPointError: with `check_finite`, naming the tensor; nothing is changed.
            ImportError: with `fused` on a GPU, without Triton.
            RuntimeError: for a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batches = self._gather()
        self._told.ratios = []
        if not batches:
            return loss
        for batch in batches:
            batch.norms = batch.norms_of(batch.grads)
        device = batches[0].norms.device
        self._told.grad_norm = grad_norm = total_norm(torch.cat([batch.norms.to(device) for batch in batches]))
        if self.check_finite:
            self._refuse_non_finite(batches, grad_norm)
        clip = None if self.max_grad_norm is None else 1 / torch.clamp(grad_norm / self.max_grad_norm, min=1.0)
        for batch in batches:
            with brought(self.state, batch.params) if offloaded(batch.group) else nullcontext():
                self._step(batch, clip)
        return loss

    def _gather(self) -> list[Batch]:
        batches: dict[Any, Batch] = {}
        for number, group in enumerate(self.param_groups):
            if not isinstance(group["lr"], Tensor) and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"lr = {group['lr']}: a captured graph would use this number for ever; give a tensor on the device")
            for name, p in _named(group):
                if p.grad is None or p.numel() == 0:
                    continue
                if p.grad.layout != torch.strided:
                    raise RuntimeError(f"{name} has a sparse gradient: use a dense one (sparse=False), or torch.optim.SparseAdam")
                mesh, placements = getattr(p, "device_mesh", None), getattr(p, "placements", ())
                grad: Any = p.grad
                if placements != getattr(grad, "placements", ()):
                    grad = grad.redistribute(mesh, placements)
                way = way_of(p, grad) if group["fused"] else "lists"
                key = (number, p.device, p.dtype, grad.dtype, mesh, placements, way)
                if key not in batches:
                    batches[key] = Batch(group, groups_of(p), way)
                batch = batches[key]
                batch.names.append(name)
                batch.params.append(p)
                batch.grads.append(local(grad).contiguous() if way == "kernels" else local(grad).to(wide(p)))
        return [piece for batch in batches.values() for piece in (_pieces(batch) if offloaded(batch.group) else [batch])]

    def _refuse_non_finite(self, batches: list[Batch], grad_norm: Tensor) -> None:
        if torch.isfinite(grad_norm):
            return
        bad = [name for batch in batches for name, norm in zip(batch.names, batch.norms.tolist(), strict=True) if not math.isfinite(norm)]
        listed = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "") if bad else "all tensors together"
        raise FloatingPointError(f"the gradient of {listed} is not finite: the step was refused, parameters and state are as before")

    def _step(self, batch: Batch, clip: Tensor | None) -> None:
        """One step of the tensors of a batch."""
        group = batch.group
        states = [self.state[p] for p in batch.params]
        for p, state in zip(batch.params, states, strict=True):
            fit(state, p, self.moments)
        moments = [[local(state[name]) for state in states] for name in self.moments]
        xs = [local(state.get("master", p)) for p, state in zip(batch.params, states, strict=True)]
        # Scalars are made in float64: 1 - 0.999^t has few digits in float32.
        norms = batch.norms.double()
        live = (norms != 0).double() if group["skip_zero_grad"] else torch.ones_like(norms)
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, live.to(steps[0].dtype).unbind())
        scale: Tensor | float = -1.0 if group["maximize"] else 1.0
        if clip is not None:
            scale = scale * clip.to(norms.device)
        scalars = self.scalars(group, torch.stack(steps).double(), live, norms, scale, lambda: batch.norms_of(xs))
        apply = {"native": self._apply_native, "kernels": self._apply_kernels}.get(batch.way, self._apply)
        self._told.ratios.append((batch.params, apply(batch, xs, moments, scalars)))
        if "master" in states[0] and batch.way != "kernels":
            torch._foreach_copy_([local(p) for p in batch.params], xs)

    def _apply(self, batch: Batch, xs: list[Tensor], moments: list[list[Tensor]], scalars: Any) -> Tensor:
        """The equations over lists of tensors; returns the trust ratios (n)."""
        group, trusts = batch.group, []
        for here in buckets(xs, batch):
            s = type(scalars)(*(v if isinstance(v, float) else v.expand_as(batch.norms)[here].to(batch.norms.dtype) for v in scalars))
            x, g, *rest = (Tensors(parts[here], batch.shards) for parts in (xs, batch.grads, *moments))
            if not isinstance(s.scale, float) or s.scale != 1.0:
                g = g.mul(s.scale)
            found = type(self).directions(x, g, *rest, s, group)
            norms = [t.norm() for t in (x, *found)] if self.measures and group["trust_ratio"] else None
            rates, trust = type(self).rates(s, norms, group)
            for direction, rate in zip(found, rates, strict=True):
                x.sub_(direction.mul(rate))
            trusts.append(trust)
        return torch.cat(trusts)

    def _apply_native(self, batch: Batch, xs: list[Tensor], moments: list[list[Tensor]], scalars: Any) -> Tensor:
        """The same, by native.c."""
        table = torch.stack([torch.as_tensor(v).expand_as(batch.norms) for v in scalars], 1).to(batch.norms.dtype)
        return self.native(xs, batch.grads, moments, table, batch.group)

    def _apply_kernels(self, batch: Batch, xs: list[Tensor], moments: list[list[Tensor]], scalars: Any) -> Tensor:
        """The same, by kernels.py, which writes 16-bit parameters too."""
        from overnight.optim import kernels

        copies = [local(p) for p in batch.params if p.dtype != xs[0].dtype]
        return kernels.step(type(self).directions.__name__, batch, xs, copies, moments, scalars, type(self).rates)

    # The equations, which each optimizer has to give; native.c and kernels.py have them again.

    @abstractmethod
    def scalars(self, group: dict[str, Any], t: Tensor, live: Tensor, norms: Tensor, scale: Any, x_norms: Callable[[], Tensor]) -> Any:
        """The numbers of a step: a named tuple of (n) or of one for all, with `scale`."""

    @staticmethod
    @abstractmethod
    def directions(x: Any, g: Any, *moments: Any) -> tuple[Any, ...]:
        """Where tensors go, from (x, g, moments..., scalars, group); it changes the moments."""

    @staticmethod
    @abstractmethod
    def rates(s: Any, norms: Sequence[Tensor] | None, group: Any) -> tuple[tuple[Tensor, ...], Tensor]:
        """How far they go in each direction, and the trust ratio (each (n)), from the norms of x and the directions."""

    @abstractmethod
    def native(self, xs: list[Tensor], gs: list[Tensor], moments: list[list[Tensor]], table: Tensor, group: dict[str, Any]) -> Tensor:
        """The whole step by native.c, from a row of the numbers for each tensor (n, K); returns the trust ratios (n)."""

    def scratch(self, xs: list[Tensor]) -> Tensor:
        """Room for two directions of the longest tensor (2, N), kept: fresh memory at each step would cost as much as the step."""
        need = max(x.numel() for x in xs)
        if self._scratch is None or self._scratch.dtype != xs[0].dtype or self._scratch.shape[1] < need:
            self._scratch = xs[0].new_empty(2, need)
        return self._scratch

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but state beside 16-bit parameters stays fp32, where torch casts it down.

        Raises:
            ValueError: for the state of another optimizer, or of tensors of other shapes; nothing is changed.
        """
        self._check_state(state_dict)
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, p in zip(numbers, (p for group in self.param_groups for p in group["params"]), strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if name == "step":
                    self.state[p][name] = torch.as_tensor(value).to(p.device, torch.float32, copy=True)
                else:  # in the parameter's memory layout, whatever that of the saved one was
                    self.state[p][name] = laid_out(value, p)

    def _check_state(self, state_dict: dict[str, Any]) -> None:
        ours, kind = self.param_groups, type(self).__name__
        groups = state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in ours]:
            return  # torch says it
        for group in groups:
            if group.get("optimizer") != kind:
                raise ValueError(f"this is not the state of {kind} but of {group.get('optimizer', 'another optimizer')}")
        for mine, group in zip(ours, groups, strict=True):
            for (name, p), number in zip(_named(mine), group["params"], strict=True):
                check(state_dict["state"].get(number, {}), p, name, self.moments, kind)


def _pieces(batch: Batch) -> list[Batch]:
    """A batch cut so that the state of each part can be brought to the device."""
    return [replace(batch, names=batch.names[here], params=batch.params[here], grads=batch.grads[here]) for here in pieces(batch.params)]


def buckets(xs: list[Tensor], batch: Batch) -> Iterator[slice]:
    """Stretches of a batch that are stepped together."""
    limit = 0 if batch.group["foreach"] is False else math.inf if batch.shards else _BUCKET.get(xs[0].device.type, _BUCKET_ELSEWHERE)
    start = size = 0
    for i, x in enumerate(xs):
        if i > start and size + x.numel() > limit:
            yield slice(start, i)
            start, size = i, 0
        size += x.numel()
    yield slice(start, len(xs))


def way_of(p: Tensor, grad: Tensor) -> str:
    """What steps a tensor where `fused` is set: `native` on a CPU, `kernels` on a GPU, `lists` where they do not take it."""
    if torch.compiler.is_compiling() or not local(p).is_contiguous():
        return "lists"
    if p.device.type == "cpu":
        return "native" if not hasattr(p, "device_mesh") and grad.is_contiguous() else "lists"
    return "kernels" if p.device.type == "cuda" and wide(p) == torch.float32 else "lists"


def groups_of(x: Tensor) -> list[Any]:
    """Process groups over which a tensor is cut: those of the dimensions of its mesh along which it is sharded, not replicated."""
    mesh, placements = getattr(x, "device_mesh", None), getattr(x, "placements", ())
    return [mesh.get_group(i) for i, placement in enumerate(placements) if placement.is_shard()] if mesh is not None else []


def whole_norms(tensors: Sequence[Tensor]) -> Tensor:
    """L2 norms of whole tensors (n), float32 or wider, also where each process holds a part; waits for no device."""
    alike: dict[Any, list[int]] = {}
    for i, x in enumerate(tensors):
        alike.setdefault((x.device, wide(x), tuple(groups_of(x))), []).append(i)
    norms: list[Tensor] = [torch.empty(0)] * len(tensors)
    for (_, kind, shards), numbers in alike.items():
        found = Tensors([local(tensors[i].detach()).to(kind) for i in numbers], shards).norm()
        for i, norm in zip(numbers, found.unbind(), strict=True):
            norms[i] = norm
    return torch.stack(norms) if norms else torch.empty(0)


def _named(group: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    names = group.get("param_names") or [f"parameter {i}" for i in range(len(group["params"]))]
    return zip(names, group["params"], strict=True)
