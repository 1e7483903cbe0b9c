"""How this machine carries a run out: the sections of a recipe that do not decide what is learned, but for what their fields say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from overnight.config.fields import MACHINE, NonNegativeInt, PositiveFloat, PositiveInt, Range


@dataclass(frozen=True)
class Compute:
    """Where and how this machine computes."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""
    threads: Annotated[int, Range(0, 1024)] = 0
    """CPU threads (at most 1024); 0 takes every core, of a container with a limit as many as it has the time of."""
    torch_compile: bool | Literal["auto"] = False
    """Compile the layers with torch.compile (pays on a GPU, needs a C++ compiler on a CPU); auto does so where there are a GPU and Triton. On a GPU of compute capability 8.0 or newer, those of BERT in 16 bits are computed by kernels of their own instead."""
    cuda_graphs: bool = False
    """mLSTM and LSTM on a GPU: capture the steps of a window as CUDA graphs, so that the host need not launch each; takes memory. The same bits; whether it is faster has not been measured."""
    deterministic: bool = False
    """On a GPU, take algorithms that give the same bits each time (torch.use_deterministic_algorithms): the backward pass of attention is slower then. Without it two equal runs differ by rounding. On a CPU they never do."""


@dataclass(frozen=True)
class Memory:
    """Less memory for more time."""

    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again instead of keeping it: nothing, all but the matrix products with weights, or whole layers. The same values in less memory, for more time."""
    optimizer_cpu_offload: bool = False
    """Keep the optimizer's state in the memory of the host, and bring it to the GPU piece by piece for each step: the same values in less of the GPU's memory. On a CPU it is there already, and nothing changes."""


@dataclass(frozen=True)
class Stability:
    """What is done at steps that should not stand; where there are none, it changes nothing."""

    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """At a gradient that is not finite: stop with the weights as they were, skip the step, or go back to the newest checkpoint and pass over the data since. fp16 skips and lowers its loss scale, and does this at the lowest. A GPU is waited for at every step only with skip, rollback or fp16; with stop the gradient is looked at when a line is logged and before each checkpoint."""
    on_spike: Literal["ignore", "stop", "skip", "rollback"] = "ignore"
    """At a loss or a gradient norm far above those before it: say so, or do as in on_nonfinite. With ignore the lines of metrics are watched, else every step, before it is taken, and a GPU is waited for."""
    spike_threshold: PositiveFloat = 10.0
    """Robust deviations above the median of the last 64 steps (with on_spike=ignore: lines) that make a spike."""
    replica_check_every: NonNegativeInt = 1000
    """On many processes, steps between comparisons of the bits that all should hold alike; also before each checkpoint (0: never)."""
    on_replica_mismatch: Literal["stop", "rollback"] = "stop"
    """When a process holds other values than the others: stop, or go back to the newest checkpoint."""


@dataclass(frozen=True)
class Checkpoint:
    """When the state of the training is saved, and what is kept."""

    save_every: PositiveInt = 100
    """Steps between checkpoints."""
    keep_latest_k: PositiveInt = 3
    """Newest checkpoints that are kept."""
    keep_every_n_steps: NonNegativeInt = 0
    """Steps, counted over all phases, of which one more checkpoint is kept for ever: the first (0: none)."""
    async_save: bool = True
    """Write checkpoints while the training continues; it stands still only while the tensors are copied, for which the host needs memory for one more model and optimizer. Off, it waits until each is written."""


@dataclass(frozen=True)
class Logging:
    """What is measured and written on the way."""

    log_every: PositiveInt = 10
    """Steps between lines of metrics."""
    eval_every: NonNegativeInt = 100
    """Steps between evaluations (0: only at the end of a phase)."""
    eval_examples: PositiveInt = 512
    """Validation examples of an evaluation, the same every time."""
    tensor_norms_every: NonNegativeInt = 0
    """Steps between measurements of every tensor's norms and trust ratio (0: never)."""
    grad_noise_every: NonNegativeInt = 0
    """Steps between estimates of the gradient noise scale (0: never; needs at least two micro-batches)."""
    tensorboard: bool = False
    """Also write TensorBoard events."""
    wandb_project: str = ""
    """Project of Weights & Biases that is also shown the metrics; empty is none. Without a key or the network it records offline."""


@dataclass(frozen=True)
class Distributed:
    """How many processes share a step."""

    strategy: Annotated[Literal["ddp", "fsdp"], MACHINE] = "ddp"
    """On many processes: each has the whole model, or a part of parameters, gradients and optimizer state (FSDP2), which saves memory."""
    grad_reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """On many processes, the type in which gradients are added up between them: 16 bits halve what is sent, and leave 8 (bf16) or 11 (fp16) significant bits of each. fp16 needs the loss scale of precision=fp16. One process alone has nothing to add up."""
