"""What one rank of tests/optim/test_sharded.py does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from overnight.optim import Lamb, Lans, Lars
from overnight.optim.layerwise import Layerwise, whole_norms

BATCH = 16
MAKE: dict[str, Callable[[list[dict[str, object]]], Layerwise]] = {
    "lamb": lambda groups: Lamb(groups, lr=0.01, max_grad_norm=0.5),
    "lans": lambda groups: Lans(groups, lr=0.01),
    "lars": lambda groups: Lars(groups, lr=0.1, nesterov=True),
}


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Sizes that no number of ranks divides, a tensor smaller than the ranks, and a table of which rows have no gradient."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(23, 13), nn.Flatten(), nn.Linear(3 * 13, 11), nn.Tanh(), nn.LayerNorm(11), nn.Linear(11, 3)).to(dtype)


def data(step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 20, (BATCH, 3), generator=generator), torch.randn(BATCH, 3, generator=generator)


def optimizer_of(net: nn.Module, name: str) -> Layerwise:
    """Groups as in training: vectors neither decayed nor adapted."""
    named = list(net.named_parameters())
    return MAKE[name](
        [
            {"params": [(n, p) for n, p in named if p.ndim > 1], "weight_decay": 0.01},
            {"params": [(n, p) for n, p in named if p.ndim == 1], "weight_decay": 0.0, "trust_ratio": False},
        ]
    )


def train(net: nn.Module, optimizer: Layerwise, steps: range, rank: int = 0, world: int = 1) -> None:
    """Steps on this rank's share of the global batches; the parallel wrapper averages the gradients."""
    for step in steps:
        x, y = (t[rank::world] for t in data(step))
        out = net(x)
        optimizer.zero_grad()
        ((out - y.to(out.dtype)) ** 2).mean().backward()
        optimizer.step()


def whole(net: nn.Module) -> list[Tensor]:
    """The parameters, gathered."""
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in net.parameters()]


def shard(net: nn.Module, world: int) -> nn.Module:
    """FSDP2 over all ranks; with four, in two replicas of two shards."""
    shape, names = ((2, 2), ("replicate", "shard")) if world == 4 else ((world,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    fully_shard(net[2], mesh=mesh)  # type: ignore[index]
    fully_shard(net, mesh=mesh)
    return net


def shard_and_split(net: nn.Module) -> nn.Module:
    """FSDP2 over two processes, each of which shares its matrices and tables with a third and fourth (tensor parallelism)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole_in, whole_out = {"input_layouts": Replicate()}, {"output_layouts": Replicate()}
    plan = {"0": ColwiseParallel(**whole_out), "2": ColwiseParallel(**whole_out), "5": RowwiseParallel(**whole_in)}
    fully_shard(parallelize_module(net, mesh["tp"], plan), mesh=mesh["dp"])
    return net


def main(rank: int, world: int, steps: int, folder: Path) -> None:
    """Write the ends of all trajectories (rank 0)."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    ends: dict[str, list[Tensor]] = {}
    # A sum of which each process has a term, as tensor parallelism leaves some gradients: 1 + 2 + ... in all of four places.
    terms = DTensor.from_local(torch.full((4,), 1.0 + rank), init_device_mesh("cpu", (world,)), [Partial()])
    assert whole_norms([terms]).tolist() == [float(world * (world + 1))]
    for name in MAKE:
        for kind in ("float32", "float64"):
            dtype = getattr(torch, kind)
            plain, spread, cut = network(dtype), DistributedDataParallel(network(dtype)), shard(network(dtype), world)
            train(plain, optimizer_of(plain, name), range(steps))
            train(spread, optimizer_of(spread, name), range(steps), rank, world)
            optimizer = optimizer_of(cut, name)
            train(cut, optimizer, range(steps), rank, world)
            ends |= {f"{name} {kind} {how}": whole(net) for how, net in (("plain", plain), ("ddp", spread), ("fsdp", cut))}
            if world == 4:
                split = shard_and_split(network(dtype))
                train(split, optimizer_of(split, name), range(steps), rank // 2, 2)
                ends[f"{name} {kind} fsdp and tp"] = whole(split)

        # Half the way cut in shards, saved, and the other half on plain tensors; and the other way round.
        half = steps // 2
        nets = {"fsdp": shard(network(), world), "plain": network()}
        moved = {"plain": network(), "fsdp": shard(network(), world)}
        for source, target in (("fsdp", "plain"), ("plain", "fsdp")):
            first, second = nets[source], moved[target]
            optimizer = optimizer_of(first, name)
            train(first, optimizer, range(half), *((rank, world) if source == "fsdp" else ()))
            place = str(folder / f"{name}-{source}")
            dcp.save(dict(zip(("net", "optimizer"), get_state_dict(first, optimizer), strict=True)), checkpoint_id=place)
            other = optimizer_of(second, name)
            parts = dict(zip(("net", "optimizer"), get_state_dict(second, other), strict=True))
            dcp.load(parts, checkpoint_id=place)
            set_state_dict(second, other, model_state_dict=parts["net"], optim_state_dict=parts["optimizer"])
            train(second, other, range(half, steps), *((rank, world) if target == "fsdp" else ()))
            ends[f"{name} float32 {source} to {target}"] = whole(second)
    if rank == 0:
        torch.save(ends, folder / "ends.pt")
    dist.barrier()
    dist.destroy_process_group()
