"""What processes exchange: sums, the greatest of their values, all of their rows, their errors, and facts that must be the same."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overnight import __version__
from overnight.config import Run, differences, to_tree
from overnight.distributed.world import World
from overnight.errors import ConfigError, UserError

# What a machine may have of its own: where things lie on it, and what none of the others waits for.
_OWN = (
    ("out",),
    ("data", "dir"),
    ("data", "cache"),
    ("data", "cache_gb"),
    ("data", "workers"),
    ("data", "scheduler"),
    ("evaluation",),
    ("finetune",),
    ("linear_probe",),
    ("compute", "threads"),
    ("logging", "tensorboard"),
    ("logging", "wandb_project"),
)


class ErrorOnOtherRank(UserError):
    """The same error in the processes that do not print it: without text, with its exit code."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.exit_code = code


@contextmanager
def raise_on_all_ranks(world: World) -> Iterator[None]:
    """Let all processes do something, or none: an error in one is raised in all, and printed by the first that has it.

    Raises:
        UserError, OSError: the error of this process.
        ErrorOnOtherRank: in its stead, where another process prints it.
    """
    error: UserError | OSError | None = None
    try:
        yield
    except (UserError, OSError) as caught:
        if world.size == 1:
            raise
        error = caught
    if world.size == 1:
        return
    codes = torch.zeros(world.size, dtype=torch.int64)
    codes[world.rank] = 0 if error is None else getattr(error, "exit_code", 1)
    failed = all_reduce_sum(codes, world).nonzero().flatten().tolist()
    if error is not None and failed[0] == world.rank:
        raise error
    if failed:
        raise ErrorOnOtherRank(int(codes[failed[0]])) from error


def assert_same_on_all_ranks(facts: Mapping[str, Any], world: World) -> None:
    """Check that all processes have the same facts, else each would wait for another step of the others, or train something else.

    Args:
        facts: nested plain values.

    Raises:
        ConfigError: naming what differs from the first process.
        ErrorOnOtherRank: in its stead, where another process prints it.
    """
    if world.size == 1:
        return
    mine = torch.tensor(list(json.dumps(facts, sort_keys=True).encode()), dtype=torch.uint8)
    length = torch.tensor(len(mine))
    dist.broadcast(length, 0)
    theirs = mine if world.main else torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(theirs, 0)
    with raise_on_all_ranks(world):
        if different := list(differences(json.loads(bytes(theirs.tolist())), json.loads(bytes(mine.tolist())))):
            lines = "\n  ".join(different)
            raise ConfigError(
                f"process {world.rank} does not have what process 0 has:\n  {lines}\nStart all with the same recipe, data and version"
            )


def shared_facts(run: Run, corpus: str, world: World) -> dict[str, Any]:
    """Return what the processes of a run must agree on before they begin.

    Args:
        corpus: fingerprint of the data.
    """
    tree = to_tree(run)
    for *parents, last in _OWN:
        node = tree
        for parent in parents:
            node = node[parent]
        node.pop(last, None)  # evaluation, finetune and linear_probe are of one family
    versions = {"overnight": __version__, "torch": torch.__version__}
    return {"recipe": tree, "data": corpus, "versions": versions, "device": world.device.type, "processes": world.size}


def all_reduce_sum(tensor: Tensor, world: World) -> Tensor:
    """Add up a tensor over the processes, in place."""
    if world.size > 1:
        dist.all_reduce(tensor)
    return tensor


def all_reduce_sums(numbers: Mapping[str, float], world: World) -> dict[str, float]:
    """Add up named values over the processes, all of which have the same names; waits for no device."""
    if world.size == 1:
        return dict(numbers)
    return dict(zip(numbers, all_reduce_sum(torch.tensor(list(numbers.values()), dtype=torch.float64), world).tolist(), strict=True))


def all_reduce_max(number: int, world: World) -> int:
    """Return the greatest of the processes' values; waits for no device."""
    if world.size == 1:
        return number
    found = torch.tensor(number)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def all_gather(tensor: Tensor, world: World) -> Tensor:
    """Return the tensors of all processes (world, ...), on the host; each must have the same shape."""
    mine = tensor.cpu()
    if world.size == 1:
        return mine[None]
    found = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(found, mine)
    return torch.stack(found)


def host_names(world: World) -> list[str]:
    """Return the names of the processes' machines (64 bytes of each)."""
    name = torch.zeros(64, dtype=torch.uint8)
    text = socket.gethostname().encode()[:64]
    name[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in all_gather(name, world).tolist()]
