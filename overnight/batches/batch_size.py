"""How many sequences a step has: the global batch, or less while the batch warms up.

The warm-up adds `initial_batch_size` sequences at a time, on a line from that many in step 0 to the global batch in step `steps`. What it takes from the
stream of samples depends on these numbers alone, so every sample comes once and in order, whatever the hardware and wherever it stopped.
"""

from __future__ import annotations

import numpy as np

from overnight.batches.lengths import expected_lengths
from overnight.config import BatchWarmup, BertConfig, BertPhase, ModernBertConfig, Phase
from overnight.errors import ConfigError

_USUAL_MICRO_BATCH = 32
# On a GPU at least, and numbers that a layer keeps for the backward pass, for each token and unit of width.
_ON_GPU, _KEPT = 256, 26


def batch_warmup(phase: Phase) -> BatchWarmup:
    """Return how the batch of a phase begins; that of a byte model, whose sequences are read on from step to step, cannot grow."""
    return phase.batch_warmup if isinstance(phase, BertPhase) else BatchWarmup()


def batch_size(phase: Phase, step: int) -> int:
    """Return sequences of step `step` (from 0) of a phase."""
    start, steps = batch_warmup(phase).initial_batch_size, batch_warmup(phase).steps
    if not start or step >= steps:
        return phase.global_batch_size
    return start * (1 + (phase.global_batch_size // start - 1) * step // steps)


def sequences_before(phase: Phase, step: int) -> int:
    """Return sequences of all steps of a phase before `step`; of all the phase for `phase.steps`."""
    start, steps = batch_warmup(phase).initial_batch_size, batch_warmup(phase).steps
    if not start:
        return step * phase.global_batch_size
    # Portion k of `start` sequences is first part of a batch in the step ceil(k·steps / last).
    last = phase.global_batch_size // start - 1
    begins = -(-np.arange(last + 1) * steps // last)
    return start * int(np.maximum(step - begins, 0).sum())


def usual_micro_batch(phase: Phase) -> int:
    """Return sequences of a micro-batch where it is left open and cannot be found by trial: near the best of a CPU, more of them where they are short."""
    return round(_USUAL_MICRO_BATCH * phase.seq_len / expected_lengths(phase).mean)


def usual_on_gpu(model: object, phase: Phase, memory: float, element: int) -> int:
    """Return sequences of a micro-batch where it is left open: as many of full length as take about half of the memory of a GPU, 256 at least.

    With fewer, the GPU waits for its host where the network is small.

    Args:
        memory: of the GPU (bytes).
        element: bytes of an activation.
    """
    if not (isinstance(phase, BertPhase) and isinstance(model, BertConfig | ModernBertConfig)):
        return _ON_GPU
    return max(_ON_GPU, round(memory / 2 / (element * _KEPT * model.num_layers * model.hidden_size * phase.seq_len)))


def micro_batch_sizes(phase: Phase, world: int = 1) -> list[int]:
    """Return all micro-batches that split a process's share of the global batch equally, the smallest first."""
    share = phase.global_batch_size // world
    return [count for count in range(1, share + 1) if share % count == 0]


def pad_to_multiple(phase: Phase, count: int) -> int:
    """Return tokens to whose multiple the stream of a micro-batch of `count` sequences is filled up: 1/64 of its full size.

    A compiled model wants few shapes, and so does oneDNN, which keeps a kernel for each (a GB after 250 steps of ever new sizes).
    """
    return max(64, count * phase.seq_len // 64)


def micro_batch(phase: Phase, step: int, world: int = 1) -> int:
    """Return the sequences of a micro-batch: the setting, or while the batch warms up the most below it that split a process's share equally.

    A setting that is still to be found (0) counts as 1, the least.

    Args:
        step: of the phase, from 0.
        world: processes.

    Raises:
        ConfigError: when a batch cannot be split into equal shares for the processes, or the global one not into micro-batches.
    """
    full, batch = phase.global_batch_size, batch_size(phase, step)
    most = min(phase.micro_batch_size or 1, full // world)
    if most == 0 or full % (most * world):
        raise ConfigError(
            f"global_batch_size = {full}: cannot be split for {world} processes into micro-batches of {most or 1}; it must divide"
        )
    if batch % world:
        raise ConfigError(
            f"batch_warmup.initial_batch_size = {batch_warmup(phase).initial_batch_size}: cannot be split for {world} processes; it must divide"
        )
    share = batch // world
    return max(count for count in range(1, min(most, share) + 1) if share % count == 0)


def full_micro_batch(phase: Phase, world: int) -> int:
    """Return the sequences of a micro-batch of the global batch, also of a phase that is too short to come to it; else as :func:`micro_batch`."""
    return micro_batch(phase, max(phase.steps, batch_warmup(phase).steps), world)
