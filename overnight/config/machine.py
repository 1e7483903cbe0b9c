"""How this machine carries a run out: the sections of a recipe that do not decide what is learned, but for what their fields say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from overnight.config.fields import MACHINE, NonNegativeInt, PositiveFloat, PositiveInt, Range


@dataclass(frozen=True)
class Compute:
    """Where and how this machine computes."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on."""
    threads: Annotated[int, Range(0, 1024)] = 0
    """CPU threads (at most 1024). 0: every core, or in a container with a CPU limit as many as the limit allows."""
    torch_compile: bool | Literal["auto"] = False
    """Compile the layers of an encoder with torch.compile (pays on a GPU, needs a C++ compiler on a CPU); `auto` does so on a GPU of compute capability 7.0 or newer with Triton. On compute capability 8.0 or newer, the program's own kernels compute BERT's layers in 16 bits instead."""
    cuda_graphs: bool = False
    """mLSTM and LSTM on a GPU: capture the steps of a window as CUDA graphs, so that the host need not launch each; uses more memory. The results are bit-identical; the speed has not been measured."""
    deterministic: bool = False
    """On a GPU, use algorithms that give the same bits each time (torch.use_deterministic_algorithms); the backward pass of attention is then slower. Without it, two equal runs differ by rounding. On a CPU they never differ."""


@dataclass(frozen=True)
class Memory:
    """Less memory for more time."""

    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What the backward pass recomputes instead of storing: nothing, everything but the matrix products with weights, or whole layers. Same values, less memory, more time."""
    optimizer_cpu_offload: bool = False
    """Keep the optimizer state in host memory and bring it to the GPU piece by piece in each step: same values, less GPU memory. On a CPU it changes nothing."""


@dataclass(frozen=True)
class Stability:
    """What is done at steps that should not stand; where there are none, it changes nothing."""

    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """When a gradient is not finite: stop with the weights as they were, skip the step, or go back to the newest checkpoint and skip the data since then. fp16 halves its loss scale and repeats the step; it follows this setting only at the lowest scale. Each step waits for the GPU only with skip, rollback or fp16; with stop, the gradient is checked when metrics are logged and before each checkpoint."""
    on_spike: Literal["ignore", "stop", "skip", "rollback"] = "ignore"
    """When a loss or gradient norm is far above those before it: report it only, or act as in on_nonfinite. With ignore, the logged metrics are checked; otherwise every step is checked before it is taken, which waits for the GPU."""
    spike_threshold: PositiveFloat = 10.0
    """Robust deviations above the median of the last 64 steps (with on_spike=ignore: lines of metrics) that count as a spike."""
    replica_check_every: NonNegativeInt = 1000
    """With several processes: steps between comparisons of the bits that must be the same in all of them; also compared before each checkpoint (0: never)."""
    on_replica_mismatch: Literal["stop", "rollback"] = "stop"
    """When a process holds other values than the rest: stop, or go back to the newest checkpoint."""


@dataclass(frozen=True)
class Checkpoint:
    """When the state of the training is saved, and what is kept."""

    save_every: PositiveInt = 100
    """Steps between checkpoints."""
    keep_latest_k: PositiveInt = 3
    """Number of newest checkpoints to keep."""
    keep_every_n_steps: NonNegativeInt = 0
    """Also keep, permanently, the first checkpoint at or after each multiple of this many steps, counted over all phases (0: none)."""
    async_save: bool = True
    """Write checkpoints while training continues: it pauses only to copy the tensors, for which the host needs memory for one more model and optimizer. false: training waits until each is written."""


@dataclass(frozen=True)
class Logging:
    """What is measured and written on the way."""

    log_every: PositiveInt = 10
    """Steps between lines of metrics."""
    eval_every: NonNegativeInt = 100
    """Steps between evaluations (0: only at the end of a phase)."""
    eval_examples: PositiveInt = 512
    """Validation examples per evaluation, the same every time."""
    tensor_norms_every: NonNegativeInt = 0
    """Steps between measurements of each tensor's norms and trust ratio (0: never)."""
    grad_noise_every: NonNegativeInt = 0
    """Steps between estimates of the gradient noise scale (0: never; needs at least two micro-batches)."""
    tensorboard: bool = False
    """Also write TensorBoard events."""
    wandb_project: str = ""
    """Weights & Biases project that also receives the metrics; empty: none. Without a key or the network it records offline."""


@dataclass(frozen=True)
class Distributed:
    """How many processes share a step."""

    strategy: Annotated[Literal["ddp", "fsdp"], MACHINE] = "ddp"
    """With several processes: each holds the whole model (`ddp`), or a part of the parameters, gradients and optimizer state (`fsdp`: FSDP2), which saves memory."""
    grad_reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """With several processes: type in which they sum their gradients. 16 bits halve what is sent and leave 8 (bf16) or 11 (fp16) significant bits. fp16 needs the loss scale of precision=fp16. One process alone has nothing to sum."""
