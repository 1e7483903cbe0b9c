"""Processes that hold the same values: checksums tell which one has drifted from the others."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from overnight.distributed.collectives import all_gather, host_names
from overnight.distributed.world import World
from overnight.errors import TrainingError, first_names

# Integers as wide as an element.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaMismatch(TrainingError):
    """The processes do not hold the same values."""

    event = "replica_mismatch"


def checksums(tensors: Iterable[Tensor]) -> Tensor:
    """Return the bits of each tensor added up as integers that wrap around (n, int64): any one bit that differs shows. Waits for no device."""
    return torch.stack([t.detach().view(_BITS[t.element_size()]).sum(dtype=torch.int64) for t in tensors])


def compare_replicas(model: torch.nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
    """Check that all processes hold the same bits in parameters, buffers and optimizer state. Tensors that FSDP2 shards are left out.

    Raises:
        ReplicaMismatch: in all processes, naming those that differ and the first tensors.
    """
    named = dict(model.state_dict())
    for group in optimizer.param_groups:
        for name, p in zip(group["param_names"], group["params"], strict=True):
            named |= {f"{name}/{entry}": value for entry, value in optimizer.state[p].items()}
    whole = {name: value for name, value in named.items() if isinstance(value, Tensor) and not hasattr(value, "placements")}
    if not whole:
        return
    by_device: dict[torch.device, list[str]] = {}
    for name, value in whole.items():
        by_device.setdefault(value.device, []).append(name)
    names = [name for names in by_device.values() for name in names]
    sums = all_gather(torch.cat([checksums(whole[name] for name in names).cpu() for names in by_device.values()]), world)
    # What most of them hold is right, and at a tie what the first one holds.
    usual = sums.mode(0).values
    usual = torch.where((sums == usual).sum(0) * 2 > world.size, usual, sums[0])
    wrong = sums != usual
    if wrong.any():
        ranks = wrong.any(1).nonzero().flatten().tolist()
        tensors = first_names([names[at] for at in wrong.any(0).nonzero().flatten().tolist()])
        who = ("processes " if len(ranks) > 1 else "process ") + ", ".join(map(str, ranks))
        raise ReplicaMismatch(
            f"{who} of {world.size} ({', '.join(host_names(world)[rank] for rank in ranks)}): values differ from those of the other processes: {tensors}"
        )
