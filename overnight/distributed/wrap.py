"""A network on many processes: DDP or FSDP2, whose backward pass adds the gradients up, and tensors of which each process holds a shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overnight.config import BertPhase, BytePhase, Run
from overnight.distributed.world import World

_REDUCE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Type in which gradients are added up between processes, by `distributed.grad_reduce_dtype`."""


class Losses(nn.Module):
    """A network whose forward is its losses: what DDP and FSDP2 wrap."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Any:
        return self.model.losses(*args)


def parallelize_model(model: Any, world: World, run: Run) -> Callable[..., Any]:
    """Return the objective of a network on all processes; its backward pass adds the gradients up.

    Args:
        model: whole and alike on every process; with `distributed.strategy = fsdp` its parameters become DTensors, sharded along their first dimension.
    """
    if world.size == 1:
        return model.losses
    whole, dtype = Losses(model), _REDUCE[run.distributed.grad_reduce_dtype]
    if run.distributed.strategy == "ddp":
        # In a phase without its objective a head has no gradient, and DDP would wait for it.
        phases = [phase for phase in run.phases.values() if isinstance(phase, BertPhase)]
        unused = hasattr(model, "nsp") and not all(phase.nsp for phase in phases)
        unused |= hasattr(model, "match") and not all(phase.token_matching for phase in phases)
        streams = [phase for phase in run.phases.values() if isinstance(phase, BytePhase)]
        unused |= getattr(model, "label", None) is not None and not all(phase.label_weight for phase in streams)
        ddp = nn.parallel.DistributedDataParallel(whole, find_unused_parameters=unused)
        # A sum, not DDP's mean: each process has divided by the targets of all.
        ddp.register_comm_hook(None, lambda _, bucket: _sum(bucket.buffer(), dtype))
        return ddp
    # Half a second, which no other command should pay.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    layers = getattr(getattr(model, "encoder", None), "layers", ())
    for part in (*layers, whole):
        sharded = fully_shard(part, mesh=mesh)
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(1.0)
        if dtype != torch.float32:
            sharded.set_custom_reduce_scatter(cast(Any, _Scatter(dtype)))
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
    """Run forward and backward of a micro-batch within it; the gradients are added over the processes only in the last of a step."""
    if hasattr(objective, "set_requires_gradient_sync"):  # FSDP2's
        objective.set_requires_gradient_sync(last)
    with objective.no_sync() if hasattr(objective, "no_sync") and not last else nullcontext():  # DDP's
        yield


def settle_buckets(objective: Callable[..., Any], batch: Any, dtype: torch.dtype) -> None:
    """Have DDP lay its buckets out as it does behind the first step of a run; all processes must call. Gradients are left on the parameters.

    Until then they hold the parameters in the order of the network, from then on in the order in which their gradients came. The place in a bucket
    decides in which order a number is added up over three or more processes, so without it the first step after a resume would be rounded otherwise
    than in a run that was not stopped.

    Args:
        batch: any that all parameters take part in, on the device.
        dtype: of matrix products and activations.
    """
    if isinstance(objective, nn.parallel.DistributedDataParallel) and not objective.find_unused_parameters:  # else they stay as they are
        objective.train()
        summed, *_ = objective(batch, dtype)
        torch.stack(list(summed.values())).sum().backward()


def full_tensor_cpu(tensor: Tensor) -> Tensor:
    """Return a whole tensor on the host, also where each process holds a part; then every process must ask."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().cpu().contiguous()


def distribute_like(p: Any, tensor: Tensor) -> Tensor:
    """Return a copy of a whole tensor on a parameter's device, sharded as the parameter is where it has its shape."""
    if hasattr(p, "placements") and tensor.shape == p.shape:
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(tensor.to(p.device, copy=True), p.device_mesh, p.placements, src_data_rank=None)
    return tensor.to(p.device, copy=True)
