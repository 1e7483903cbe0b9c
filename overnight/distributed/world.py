"""The same training on many processes: which of them this is, and how it joins and leaves the others.

Every process takes its share of a step's micro-batches and the gradients are added, so a step is what one process would do, to rounding.
A process learns of the others from torchrun's environment; one that is alone opens no connection and adds up nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from overnight.config import Run
from overnight.display import plural
from overnight.distributed.wire import listening
from overnight.errors import ConfigError, UserError

# How long a process waits for the others: the longest that one may plan an epoch or write a checkpoint while the others do nothing.
TIMEOUT = timedelta(minutes=30)
# How long for the others to come at all. A launcher ends those that wait for one that has died; without one, nobody would.
JOIN = timedelta(minutes=5)
# Of an error of NCCL: what failed and where, the kind of error, and the last that NCCL noted, which has the cause.
_BACKEND_LINES = 6


@dataclass(frozen=True)
class World:
    """Which of how many processes this is, and where it computes."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def main(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0


def world_size() -> int:
    """Return how many processes the launcher started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def device_of(run: Run) -> torch.device:
    """Return the device a run trains on in this process.

    Raises:
        ConfigError: when it asks for a GPU that is not there, or there are more processes than GPUs.
    """
    wanted, count = run.compute.device, torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" and not count:
        raise ConfigError("compute.device = 'cuda': no GPU is visible to torch; use 'auto' or 'cpu'")
    if wanted == "cpu" or not count:
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if world_size() == 1:
        return torch.device("cuda")
    # torchrun and `launch` show all GPUs to each process. Others (srun --gpus-per-task=1) show each its own, which is then the first.
    if count == 1 and "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        return torch.device("cuda", 0)
    if local_rank >= count:
        raise ConfigError(
            f"LOCAL_RANK = {local_rank}: only {plural(count, 'GPU')} can be seen by torch; start at most {plural(count, 'process', 'processes')} on a machine"
        )
    return torch.device("cuda", local_rank)


def is_first() -> bool:
    """Return whether this process is alone, or the first of those that a launcher started: it says what all of them would."""
    return world_size() == 1 or os.environ.get("RANK", "0") == "0"


def seed(device: torch.device, number: int) -> None:
    """Seed torch's random numbers on this processor and a device; torch.manual_seed takes half a millisecond for devices that are not there."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(number)
    else:
        torch.manual_seed(number)


@contextmanager
def process_group(run: Run) -> Iterator[World]:
    """Join the processes that torchrun started, or be alone, and leave them at the end. A process group that is there already is used.

    Raises:
        ConfigError: when the launcher did not say which process this is.
        UserError: when another process was lost on the way.
    """
    if world_size() == 1:
        yield World(device=device_of(run))
        return
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(f"WORLD_SIZE = {world_size()}: without {', '.join(missing)}; start the processes with torchrun")
    rank = int(os.environ["RANK"])
    world = World(rank, world_size(), device_of(run))
    ours = not dist.is_initialized()
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if ours:
        _join(world)
    try:
        yield world
    except RuntimeError as error:
        if _lost(error):
            raise UserError(
                f"process {rank} lost another process; that process's message or the launcher's summary says why. The same command continues"
            ) from None
        if isinstance(error, dist.DistBackendError):
            raise UserError(
                f"process {rank} failed in communication between GPUs; the same command continues. {_backend_text(error)}\nWhere another process was "
                "lost first, its own message or the launcher's summary says why"
            ) from None
        raise
    # Not after an error: leaving may wait for processes that have gone, and the frames of the error hold DDP, which would then be the last to
    # hold the group. Dropping that waits for gloo's thread with the interpreter held, and the thread may need it to drop a tensor: the
    # process would never end. cli.command ends it with the group as it is.
    if ours:
        dist.destroy_process_group()


def _join(world: World) -> None:
    """Meet the other processes.

    Raises:
        UserError: when one of them did not come, or was lost on the way, or NCCL could not be set up.
    """
    # Small facts go between the hosts, over gloo, so that exchanging them does not wait for the devices.
    cuda = world.device.type == "cuda"
    backend, device = ("cpu:gloo,cuda:nccl", world.device) if cuda else ("gloo", None)
    try:
        store = _store(world)
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=TIMEOUT, device_id=device)
    except (RuntimeError, OSError) as error:
        if isinstance(error, dist.DistBackendError) and not _lost(error):
            raise UserError(f"process {world.rank} of {world.size} could not join the others. {_backend_text(error)}") from None
        if isinstance(error, RuntimeError) and not _lost(error):
            raise
        place, minutes = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", JOIN.total_seconds() / 60
        raise UserError(
            f"process {world.rank} of {world.size} did not find all others at {place} within {minutes:g} minutes, or lost one: see what they "
            "say, and start all of them again"
        ) from None


def _store(world: World) -> Any:
    """Return where the processes meet. torch's own listens at all addresses of the first process's machine; ours at the one that the others use."""
    host, port, here = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), os.environ.pop("OVERNIGHT_LISTEN_FD", "")
    fd = int(here) if here else None
    if fd is None and world.main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        found = listening(host, port)
        fd = found.detach() if found else None  # behind a translated address, which this machine does not know as its own
    if fd is None:
        return next(rendezvous("env://", timeout=JOIN))[0]
    return cast(Any, dist).TCPStore(host, port, world.size, True, JOIN, multi_tenant=True, master_listen_fd=fd)


def _lost(error: RuntimeError) -> bool:
    """Return whether an error says that another process has gone. Those of NCCL may, or have causes of their own, which only their text tells."""
    # gloo has no error of its own.
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo/transport")
    ours = isinstance(error, dist.DistError) and not isinstance(error, dist.DistBackendError)
    return ours or any(sign in str(error) for sign in signs)


def _backend_text(error: RuntimeError) -> str:
    """Return what NCCL said, without the frames of C++ behind it, and how it says more."""
    said = [line for line in str(error).partition("Exception raised from")[0].splitlines() if line.strip()]
    return "\n".join([*said[:_BACKEND_LINES], "NCCL_DEBUG=WARN in the environment has NCCL say more"])
