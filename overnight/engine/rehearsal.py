"""How long a step of a phase takes, before the phase begins: a few steps at a learning rate of 0, timed and thrown away."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch

from overnight.batches.batch_size import micro_batch, micro_batch_sizes, pad_to_multiple, usual_micro_batch, usual_on_gpu
from overnight.batches.loader import Samples
from overnight.batches.matching import share_of_pairs
from overnight.config import BatchWarmup, BertPhase, Phase, Run
from overnight.config.optimizers import ClippingOptim
from overnight.distributed.world import World
from overnight.engine.loop import LoopConfig, training_steps
from overnight.engine.memory import OutOfMemory, first_line, is_out_of_memory, memory_budget, release
from overnight.engine.precision import DTYPES
from overnight.engine.workload import Workload, loss_weights
from overnight.optim.groups import build_optimizer

# Steps that are timed, after a first one: as many as take so long (s), within these.
_SECONDS, _FEWEST, _MOST = 4.0, 4, 40
# A GPU is waited for after stretches of so many seconds (s), not after each step, since in training it is behind its host.
_STRETCH, _MOST_ON_GPU = 0.5, 1000


def seconds_per_step(run: Run, workload: Workload, number: int, device: torch.device) -> float:
    """Return the median time of a step with a full batch (s); the network's state is not kept.

    Args:
        workload: of the run, in this process alone.
        number: of the phase, from 0.

    Raises:
        OutOfMemory: when not even one sequence fits.
    """
    phase = list(run.phases.values())[number]
    if isinstance(phase, BertPhase):
        phase = dataclasses.replace(phase, batch_warmup=BatchWarmup())  # what is asked for is the full batch
    usual = usual_micro_batch(phase)
    if device.type == "cuda":
        usual = usual_on_gpu(run.model, phase, memory_budget(device).limit, DTYPES[run.precision].itemsize)
    most = micro_batch(phase, phase.steps) if phase.micro_batch_size else usual
    while True:
        size = max(size for size in micro_batch_sizes(phase) if size <= most)
        try:
            return _timed(run, workload, phase, number, size, device)
        except (OutOfMemory, MemoryError, RuntimeError) as error:
            if not isinstance(error, OutOfMemory) and not is_out_of_memory(error):
                raise
            if size == 1:
                raise OutOfMemory(str(error) if isinstance(error, OutOfMemory) else first_line(error)) from None
            most = size // 2  # as training does
        release(workload.model, device)


def _timed(run: Run, workload: Workload, phase: Phase, number: int, size: int, device: torch.device) -> float:
    """Return the median time of a step in micro-batches of a size (s)."""
    samples = workload.samples(phase, number, "train")
    samples.set_micro_batch_size(size)
    if isinstance(samples, Samples) and isinstance(phase, BertPhase):
        samples.set_share_of_pairs(lambda step: share_of_pairs(phase, phase.steps))  # most steps have the last share
    settings = LoopConfig(
        steps=_MOST + 1 if device.type == "cpu" else _MOST_ON_GPU,
        lr=lambda step: 0.0,
        max_grad_norm=phase.optim.max_grad_norm if isinstance(phase.optim, ClippingOptim) else 0.0,
        dtype=DTYPES[run.precision],
        device=device,
        seed=(run.seed, number),
        weights=partial(loss_weights, phase),
        world=World(device=device),
    )
    batches = partial(samples.step, pad_to_multiple=pad_to_multiple(phase, samples.phase.micro_batch_size))
    optimizer, carry, took = build_optimizer(workload.model, phase.optim), workload.carry(samples), []
    steps = training_steps(workload.model, workload.model.losses, optimizer, batches, settings, carry=carry)
    on_gpu, begun = device.type == "cuda", 0.0
    for seconds in stretches(steps, partial(torch.cuda.synchronize, device) if on_gpu else lambda: None, _STRETCH if on_gpu else 0.0):
        took.append(seconds)
        if not begun:
            begun = time.perf_counter()
        elif len(took) > _FEWEST and time.perf_counter() - begun >= _SECONDS:
            break
    return statistics.median(took[1:])


def stretches(steps: Iterable[object], wait: Callable[[], object], least: float) -> Iterator[float]:
    """Yield the mean time of a step (s): of the first alone, then of stretches of steps that the host has asked for in at least so long.

    Args:
        wait: for the device, at the end of a stretch.
        least: time of a stretch (s); 0 makes each step one.
    """
    last, count, first = time.perf_counter(), 0, True
    for _ in steps:
        count += 1
        if not first and time.perf_counter() - last < least:
            continue
        wait()
        now = time.perf_counter()
        yield (now - last) / count
        last, count, first = now, 0, False
