"""The same training on many processes: who is there, what is added up between them, and how errors end all of them.

Every process takes its share of a step's micro-batches and the gradients are added, so a step is what one process would do, to rounding.
A process learns of the others from torchrun's environment; one that is alone opens no connection and adds up nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from overnight import __version__
from overnight.config import BertPhase, Run, differences, to_tree
from overnight.distributed.wire import listening
from overnight.errors import ConfigError, UserError
from overnight.models.bert import BertForPretraining
from overnight.models.bytes import ByteModel

# How long a process waits for the others: the longest that one may plan an epoch or write a checkpoint while the others do nothing.
TIMEOUT = timedelta(minutes=30)
# How long for the others to come at all. A launcher ends those that wait for one that has died; without one, nobody would.
JOIN = timedelta(minutes=5)
# What a machine may have of its own: where things lie on it, and what none of the others waits for.
_OWN = (
    ("out",),
    ("data", "dir"),
    ("data", "workers"),
    ("finetune",),
    ("linear_probe",),
    ("compute", "threads"),
    ("logging", "tensorboard"),
    ("logging", "wandb_project"),
)

_REDUCE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Type in which gradients are added up between processes, by `distributed.grad_reduce_dtype`."""


@dataclass(frozen=True)
class World:
    """Which of how many processes this is, and where it computes."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Its number on its machine."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def main(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0


class ErrorOnOtherRank(UserError):
    """The same error in the processes that do not print it: without text, with its exit code."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.exit_code = code


def world_size() -> int:
    """How many processes the launcher started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def device_of(run: Run) -> torch.device:
    """The device a run trains on in this process.

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
    if local_rank >= count:
        raise ConfigError(
            f"LOCAL_RANK = {local_rank}: only {count} GPUs are visible to torch; start at most {count} processes on a machine"
        )
    return torch.device("cuda", local_rank)


@contextmanager
def process_group(run: Run) -> Iterator[World]:
    """Within it, this process is one of those that torchrun started, or alone. A process group that is there already is used.

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
    world = World(rank, world_size(), int(os.environ["LOCAL_RANK"]), device_of(run))
    ours = not dist.is_initialized()
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if ours:
        _join(world)
    try:
        yield world
    except RuntimeError as error:
        if not _lost(error):
            raise
        raise UserError(
            f"process {rank} lost another one, whose own message or the launcher's summary says why; the same command continues"
        ) from None
    # Not after an error: leaving may wait for processes that have gone, and the frames of the error hold DDP, which would then be the last to
    # hold the group. Dropping that waits for gloo's thread with the interpreter held, and the thread may need it to drop a tensor: the
    # process would never end. cli.command ends it with the group as it is.
    if ours:
        dist.destroy_process_group()


def _join(world: World) -> None:
    """Meet the other processes.

    Raises:
        UserError: when one of them did not come, or was lost on the way.
    """
    # Small facts go between the hosts, over gloo, so that exchanging them does not wait for the devices.
    cuda = world.device.type == "cuda"
    backend, device = ("cpu:gloo,cuda:nccl", world.device) if cuda else ("gloo", None)
    try:
        store = _store(world)
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=TIMEOUT, device_id=device)
    except (RuntimeError, OSError) as error:
        if isinstance(error, RuntimeError) and not _lost(error):
            raise
        place, minutes = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", JOIN.total_seconds() / 60
        raise UserError(
            f"process {world.rank} of {world.size} did not find all others at {place} within {minutes:g} minutes, or lost one: see what they "
            "say, and start all of them again"
        ) from None


def _store(world: World) -> Any:
    """Where the processes meet. torch's own listens at all addresses of the first process's machine; ours at the one that the others use."""
    host, port, here = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), os.environ.pop("OVERNIGHT_LISTEN_FD", "")
    fd = int(here) if here else None
    if fd is None and world.main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        found = listening(host, port)
        fd = found.detach() if found else None  # behind a translated address, which this machine does not know as its own
    if fd is None:
        return next(rendezvous("env://", timeout=JOIN))[0]
    return cast(Any, dist).TCPStore(host, port, world.size, True, JOIN, multi_tenant=True, master_listen_fd=fd)


def _lost(error: RuntimeError) -> bool:
    # gloo has no error of its own.
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo/transport")
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in signs)


@contextmanager
def raise_on_all_ranks(world: World) -> Iterator[None]:
    """What all processes do, or none has done: an error in one is raised in all, and printed by the first that has it.

    Raises:
        UserError, OSError: the error of this process.
        Elsewhere: in its stead, where another process prints it.
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
    """See that all processes have the same facts, else each would wait for another step of the others, or train something else.

    Args:
        facts: nested plain values.

    Raises:
        ConfigError: naming what differs from the first process.
        Elsewhere: in its stead, where another process prints it.
    """
    if world.size == 1:
        return
    import json

    mine = torch.tensor(list(json.dumps(facts, sort_keys=True).encode()), dtype=torch.uint8)
    length = torch.tensor(len(mine))
    dist.broadcast(length, 0)
    theirs = mine if world.main else torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(theirs, 0)
    with raise_on_all_ranks(world):
        if different := list(differences(json.loads(bytes(theirs.tolist())), json.loads(bytes(mine.tolist())))):
            listed = "\n  ".join(different)
            raise ConfigError(
                f"process {world.rank} does not have what process 0 has:\n  {listed}\nStart all with the same recipe, data and version"
            )


def shared_facts(run: Run, corpus: str, world: World) -> dict[str, Any]:
    """What the processes of a run must agree on before they begin.

    Args:
        corpus: fingerprint of the data.
    """
    tree = to_tree(run)
    for *parents, last in _OWN:
        node = tree
        for parent in parents:
            node = node[parent]
        node.pop(last, None)  # a setting of one family
    versions = {"overnight": __version__, "torch": torch.__version__}
    return {"recipe": tree, "data": corpus, "versions": versions, "device": world.device.type, "processes": world.size}


def all_reduce_sum(tensor: Tensor, world: World) -> Tensor:
    """Add up a tensor over the processes, in place."""
    if world.size > 1:
        dist.all_reduce(tensor)
    return tensor


def all_reduce_sums(numbers: Mapping[str, float], world: World) -> dict[str, float]:
    """Add up named numbers over the processes, all of which have the same names; waits for no device."""
    if world.size == 1:
        return dict(numbers)
    return dict(zip(numbers, all_reduce_sum(torch.tensor(list(numbers.values()), dtype=torch.float64), world).tolist(), strict=True))


def all_reduce_max(number: int, world: World) -> int:
    """The greatest of the processes' numbers; waits for no device."""
    if world.size == 1:
        return number
    found = torch.tensor(number)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


class Losses(nn.Module):
    """A network whose forward is its losses: what DDP and FSDP2 wrap."""

    def __init__(self, model: BertForPretraining | ByteModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Any:
        return self.model.losses(*args)


def parallelize_model(model: BertForPretraining | ByteModel, world: World, run: Run) -> Callable[..., Any]:
    """The objective of a network on all processes; its backward pass adds the gradients up.

    Args:
        model: whole and alike on every process; with `distributed.strategy = fsdp` its parameters become DTensors, cut along their first dimension.
    """
    if world.size == 1:
        return model.losses
    whole, dtype = Losses(model), _REDUCE[run.distributed.grad_reduce_dtype]
    if run.distributed.strategy == "ddp":
        # Without next-sentence prediction its head has no gradient, and DDP would wait for it.
        unused = isinstance(model, BertForPretraining) and not all(
            isinstance(phase, BertPhase) and phase.nsp for phase in run.phases.values()
        )
        ddp = nn.parallel.DistributedDataParallel(whole, find_unused_parameters=unused)
        # A sum, not DDP's mean: each process has divided by the targets of all.
        ddp.register_comm_hook(None, lambda _, bucket: _sum(bucket.buffer(), dtype))
        return ddp
    # Half a second, which no other verb should pay.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    layers = model.encoder.layers if isinstance(model, BertForPretraining) else ()
    for part in (*layers, whole):
        cut = fully_shard(part, mesh=mesh)
        cut.set_force_sum_reduction_for_comms(True)
        cut.set_gradient_divide_factor(1.0)
        if dtype != torch.float32:
            cut.set_custom_reduce_scatter(cast(Any, _Scatter(dtype)))
    return whole


def _sum(flat: Tensor, dtype: torch.dtype) -> torch.futures.Future[Tensor]:
    """Add up a bucket of gradients over the processes in some type; the sum is in its place and of its own type."""
    sent = flat.to(dtype)  # in fp32 the bucket itself
    work = dist.all_reduce(sent, async_op=True)
    return work.get_future().then(lambda done: done.value()[0] if sent is flat else flat.copy_(done.value()[0]))


class _Scatter:
    """FSDP2's adding up of gradients over the processes, each of which gets a part of the sum, in another type than theirs.

    Its MixedPrecisionPolicy would add up the micro-batches of a process in that type too: of 128, the last would keep one bit each in bf16.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> None:
        assert not async_op
        # Renamed in torch 2.13.
        scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
        part = torch.empty_like(output_tensor, dtype=self.dtype)
        scatter(part, input_tensor.to(self.dtype), op=op, group=group)
        output_tensor.copy_(part)


@contextmanager
def gradient_sync(objective: Callable[..., Any], last: bool) -> Iterator[None]:
    """Within it, forward and backward of a micro-batch; the gradients are added over the processes only in the last of a step."""
    if hasattr(objective, "set_requires_gradient_sync"):  # FSDP2's
        objective.set_requires_gradient_sync(last)
    with objective.no_sync() if hasattr(objective, "no_sync") and not last else nullcontext():  # DDP's
        yield


def all_gather_rows(rows: Tensor, world: World) -> Tensor:
    """The rows of all processes, one's after the other's, on the host; each must have equally many."""
    if world.size == 1:
        return rows
    parts = [torch.empty_like(rows) for _ in range(world.size)]
    dist.all_gather(parts, rows)
    return torch.cat(parts)


def full_tensor_cpu(tensor: Tensor) -> Tensor:
    """A whole tensor on the host, also where each process holds a part; then every process must ask."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().cpu().contiguous()


def distribute_like(p: Any, tensor: Tensor) -> Tensor:
    """A copy of a whole tensor on a parameter's device, cut as the parameter is where it has its shape."""
    if hasattr(p, "placements") and tensor.shape == p.shape:
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(tensor.to(p.device, copy=True), p.device_mesh, p.placements, src_data_rank=None)
    return tensor.to(p.device, copy=True)
