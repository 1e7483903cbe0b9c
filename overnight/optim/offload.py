"""The optimizer's state on the host: it is brought to the device chunk by chunk around a step (Rajbhandari et al. 2020, arXiv 1910.02054,
and Ren et al. 2021, arXiv 2101.06840, go further: they compute the step on the host).

Numbers are only copied, so a step gives the same bits. What it saves besides the activations is the state; what it costs is the way there and
back of all of it, once a step.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Elements of parameters whose state is on the device at once: 512 MB of two fp32 moments. A larger tensor is a chunk of its own.
_CHUNK = 1 << 26


def chunks(params: Sequence[Tensor]) -> Iterator[slice]:
    """Yield stretches of tensors whose state is brought together."""
    start = size = 0
    for i, p in enumerate(params):
        if i > start and size + p.numel() > _CHUNK:
            yield slice(start, i)
            start, size = i, 0
        size += p.numel()
    if params:
        yield slice(start, len(params))


@contextmanager
def on_device(state: MutableMapping[Tensor, dict[str, Any]], params: Sequence[Tensor]) -> Iterator[None]:
    """Copy the state of some parameters to their device; afterwards it is on the host, as changed, also what is new."""
    hosts = [{name: value for name, value in state[p].items() if moves(value) and value.device.type == "cpu"} for p in params]
    for p, host in zip(params, hosts, strict=True):
        for name, value in host.items():
            state[p][name] = value.to(p.device, non_blocking=True, copy=True)
    yield
    for p, host in zip(params, hosts, strict=True):
        for name, value in state[p].items():
            if moves(value):
                state[p][name] = host[name].copy_(value, non_blocking=True) if name in host else host_copy(value, value.device)
    if params and params[0].device.type == "cuda":
        # A checkpoint reads the host's memory without asking the device, and the next chunk needs this one's room.
        torch.cuda.synchronize(params[0].device)


def offload(optimizer: torch.optim.Optimizer) -> None:
    """Keep the state of an optimizer on the host from now on, between the steps; what there is of it goes there."""
    for group in optimizer.param_groups:
        group["offload"] = True
    for state in optimizer.state.values():
        for name, value in state.items():
            if moves(value) and value.device.type != "cpu":
                state[name] = host_copy(value, value.device)


def offloaded(group: dict[str, Any]) -> bool:
    """Return whether the state of a group lies on the host between the steps."""
    return bool(group.get("offload"))


def step_in_chunks(optimizer: torch.optim.Optimizer) -> None:
    """Step an optimizer that treats every tensor on its own (AdamW, Muon); a layer-wise one does it by itself, since it clips by all."""
    groups = optimizer.param_groups
    try:
        for group in groups:
            for here in chunks(group["params"]):
                optimizer.param_groups = [{key: x[here] if key in ("params", "param_names") else x for key, x in group.items()}]
                with on_device(optimizer.state, group["params"][here]):
                    optimizer.step()
    finally:
        optimizer.param_groups = groups


def moves(value: Any) -> bool:
    """Return whether a value moves to the host: moments do; counts are small, and wanted on the device."""
    return isinstance(value, Tensor) and value.ndim > 0


def host_copy(value: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the host of what a step needs on a device."""
    # Only between pinned memory and the device do copies run at the speed of the bus.
    return torch.empty_like(value, device="cpu", pin_memory=device.type == "cuda").copy_(value)
