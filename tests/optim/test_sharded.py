"""The same trajectory on plain tensors, under DDP and cut into shards by FSDP2, also of what tensor parallelism has cut, on 2 and 4 processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from overnight.optim import Lamb, Lans, Lars, Muon
from overnight.optim.batch import groups_of
from tests.optim import sharded_worker
from tests.processes import Process


@pytest.mark.parametrize(("world", "steps"), [(2, 8), *(pytest.param(world, 50, marks=pytest.mark.heavy) for world in (2, 4))])
def test_plain_ddp_fsdp_and_moves_between_them_agree_to_1e_6(world: int, steps: int, tmp_path: Path) -> None:
    with ExitStack() as running:
        ranks = [running.enter_context(Process(sharded_worker.main, rank, world, steps, tmp_path)) for rank in range(world)]
        codes, outputs = zip(*(rank.end() for rank in ranks), strict=True)
    assert codes == (0,) * world, "\n".join(outputs)[-3000:]
    ends = torch.load(tmp_path / "ends.pt", weights_only=True)
    assert len(ends) == (24 if world == 2 else 30)
    for name, found in ends.items():
        optimizer, kind, *_ = name.split()
        ours, reference = (torch.cat([p.detach().flatten() for p in params]) for params in (found, ends[f"{optimizer} {kind} plain"]))
        # What is left in float32 is the rounding of gradients that were added in another order.
        assert float((ours - reference).norm() / reference.norm()) <= (1e-6 if kind == "float32" else 1e-13), name


def test_norms_of_what_fsdp_and_tensor_parallelism_both_cut_are_added_over_both() -> None:
    placements = (_StridedShard(0, split_factor=2), Shard(0), Replicate())
    cut: Any = SimpleNamespace(device_mesh=SimpleNamespace(get_group=lambda dimension: dimension), placements=placements)
    assert groups_of(cut) == [0, 1]


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_a_parameter_of_which_each_process_has_a_term_is_refused_by_name(alone: None) -> None:
    terms = DTensor.from_local(torch.zeros(3), init_device_mesh("cpu", (1,)), [Partial()])
    with pytest.raises(ValueError, match=r"scale is a sum of which each process has a term \(Partial\): redistribute it"):
        Lamb([("scale", nn.Parameter(terms))])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [Lamb, Lans, Lars, Muon])
@pytest.mark.parametrize("keep_names", [True, False])
def test_tensors_that_fsdp_of_the_first_generation_has_flattened_are_refused(keep_names: bool, make: Any, alone: None) -> None:
    cut = FullyShardedDataParallel(nn.Linear(3, 2), use_orig_params=keep_names, device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"is flattened by FullyShardedDataParallel, .*: shard by fully_shard \(FSDP2\)"):
        make(cut.named_parameters())
