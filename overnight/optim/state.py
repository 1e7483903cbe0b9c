"""The state of a parameter: 32-bit moments and master weights, laid out as the parameter is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

# Of these nothing need be asked that only others have, which takes Python longer than everything else about a small tensor.
_PLAIN = (Tensor, torch.nn.Parameter)


def state_dtype(p: Tensor) -> torch.dtype:
    """Return the type of the state of a parameter: float32, and float64 for float64."""
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def is_plain(x: Tensor) -> bool:
    """Return whether a tensor is whole in this process, not sharded over several."""
    return type(x) in _PLAIN or not hasattr(x, "device_mesh")


def local(x: Tensor) -> Tensor:
    """Return this process's part of a sharded tensor; any other tensor as it is."""
    if type(x) in _PLAIN:
        return x
    part: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return part


def local_parts(xs: Sequence[Tensor]) -> list[Tensor]:
    """Return this process's parts of sharded tensors, and other tensors as they are."""
    return list(xs) if set(map(type, xs)) <= set(_PLAIN) else [local(x) for x in xs]


def has_memory(x: Tensor) -> bool:
    """Return whether the numbers of a tensor of this process lie where its address says.

    A subclass that carries operations out itself may hold other tensors (a wrapper), or no numbers at all (a fake tensor).
    """
    kind: Any = type(x)
    return kind in _PLAIN or kind.__torch_dispatch__ is Tensor.__torch_dispatch__


def is_traced() -> bool:
    """Return whether operations are not carried out now, but compiled, or only asked for the shapes of their results (FakeTensorMode)."""
    return torch.compiler.is_compiling() or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def real_numbers(x: Tensor) -> Tensor:
    """Return the numbers of a tensor of this process that are not known to be 0, two for each complex one; of a plain tensor itself."""
    if x.layout == torch.sparse_coo:
        x = x.coalesce().values()
    elif x.layout != torch.strided:
        x = x.values()
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def is_sum(x: Tensor) -> bool:
    """Return whether each process has a term of a tensor, which is their sum (`Partial`)."""
    return any(placement.is_partial() for placement in getattr(x, "placements", ()))


def summed(x: Tensor) -> Tensor:
    """Return a tensor of which each process has a term with the sum in all of them; any other tensor as it is."""
    if not is_sum(x):
        return x
    from torch.distributed.tensor import Replicate

    of: Any = x
    total: Tensor = of.redistribute(placements=[Replicate() if placement.is_partial() else placement for placement in of.placements])
    return total


def fits(states: Sequence[dict[str, Any]], params: Sequence[Tensor], moments: Sequence[str]) -> bool:
    """Return whether :func:`fit` has nothing to do for parameters of one type; for many it takes Python less time to ask than to do it.

    False also for some that do fit, where they are not contiguous.
    """
    kind = state_dtype(params[0])
    names = [*moments] if params[0].dtype == kind else [*moments, "master"]
    if set(map(len, states)) != {1 + len(names)}:  # with the step
        return False
    tensors = local_parts([state[name] for name in names for state in states])
    return set(map(attrgetter("dtype"), tensors)) == {kind} and all(map(Tensor.is_contiguous, tensors))


def fit(state: dict[str, Any], p: Tensor, moments: Sequence[str]) -> None:
    """Make the state of a parameter, or make what there is fit a parameter that has changed its type or memory format since.

    The fused steps read parameter and state element by element as they lie in memory, where another layout would pair the wrong ones.

    Args:
        state: changed in place; empty before the first step.
        p: the parameter.
        moments: names of the tensors of its shape that it has.
    """
    kind = state_dtype(p)
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        state.update({name: torch.zeros_like(p, dtype=kind) for name in moments})
    if kind == p.dtype:
        state.pop("master", None)
    elif "master" not in state:
        state["master"] = p.detach().to(kind)
    contiguous = local(p).is_contiguous()
    for name, value in state.items():
        if name != "step" and (value.dtype != kind or (contiguous and not local(value).is_contiguous())):
            state[name] = laid_out(value, p)


def laid_out(value: Tensor, p: Tensor) -> Tensor:
    """Return a copy of a state tensor in the memory format of the parameter and the type of its state."""
    return torch.empty_like(p, dtype=state_dtype(p)).copy_(value)


def load(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], check: Callable[[Any], None], keep: Callable[[Any], None]) -> None:
    """Load a state as torch does, between the hooks that the optimizer has.

    Args:
        check: refuses a state, as the hooks before loading leave it, before anything is changed.
        keep: puts in place what torch has cast down of this state, before the hooks after loading.
    """
    given: list[Any] = []

    def before(_: torch.optim.Optimizer, state: Any) -> None:
        check(state)
        given.append(state)

    first = optimizer.register_load_state_dict_pre_hook(before)
    last = optimizer.register_load_state_dict_post_hook(lambda _: keep(given[-1]), prepend=True)
    try:
        torch.optim.Optimizer.load_state_dict(optimizer, state_dict)
    finally:
        first.remove()
        last.remove()


def saved_states(optimizer: torch.optim.Optimizer, state_dict: Any) -> Iterator[tuple[str, Tensor, dict[str, Any], dict[str, Any]]]:
    """Yield the name of each parameter, the parameter, its state in a saved state that has as many, and the saved settings of its group."""
    for mine, group in zip(named(optimizer.param_groups), state_dict["param_groups"], strict=True):
        for (name, p), number in zip(mine, group["params"], strict=True):
            yield name, p, state_dict["state"].get(number, {}), group


def same_counts(optimizer: torch.optim.Optimizer, state_dict: Any) -> bool:
    """Return whether a saved state has as many groups and parameters; where not, torch refuses it."""
    return [len(group["params"]) for group in state_dict["param_groups"]] == [len(group["params"]) for group in optimizer.param_groups]


def named(groups: Sequence[dict[str, Any]]) -> list[list[tuple[str, Tensor]]]:
    """Return the parameters of each group of an optimizer with their names; without them they go by their number in a state dict, over all groups."""
    found: list[list[tuple[str, Tensor]]] = []
    first = 0
    for group in groups:
        names = group.get("param_names") or [f"parameter {first + i}" for i in range(len(group["params"]))]
        found.append(list(zip(names, group["params"], strict=True)))
        first += len(names)
    return found


def check(state: dict[str, Any], p: Tensor, name: str, entries: Sequence[str], kind: str) -> None:
    """Check that a saved state is one of the optimizer and the parameter, or empty.

    Args:
        name: of the parameter.
        entries: what a state has, besides the `master` of a 16-bit parameter.
        kind: of the optimizer.

    Raises:
        ValueError: saying what it is instead.
    """
    if state and not set(entries) <= set(state) <= {"master", *entries}:
        raise ValueError(f"this is not the state of {kind}: {name} has {', '.join(sorted(state))}, not {', '.join(sorted(entries))}")
    for entry, value in state.items():
        if entry != "step" and value.shape != p.shape:
            raise ValueError(f"{name}: the state's {entry} has shape {tuple(value.shape)}, the parameter {tuple(p.shape)}")
