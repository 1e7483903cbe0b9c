"""The training loop: the only one. It yields after every optimizer step, and whoever runs it logs, evaluates and saves.

    for done in optimise(model, optimizer, batches, ...):
        ...

The loss of a step is a sum over its global batch divided by the number of its targets, so accumulation does not change it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from overnight.batches.loader import prefetch
from overnight.batches.order import key
from overnight.batches.packing import Batch, StepBatches
from overnight.optim.layerwise import Layerwise, whole_norms
from overnight.optim.noise import MicroGradients, Pair
from overnight.optim.telemetry import Norms, Snapshot


class Objective(Protocol):
    """What the loop knows of a model: summed losses of a micro-batch by name and, outside training, summed hits."""

    def __call__(self, batch: Batch, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]: ...


@dataclass(frozen=True)
class Step:
    """What one optimizer step did; the tensors are left on the device, so that reading them is the reader's wait."""

    step: int
    """Steps done, this one included."""
    losses: dict[str, Tensor]
    """Mean over the targets of the step, by name (fp32 scalars); their sum is what was minimised."""
    grad_norm: Tensor
    """Norm of the whole gradient before clipping."""
    lr: float
    tokens: int
    sequences: int
    tensors: Norms | None = None
    """Norms of every tensor, at measured steps."""
    noise: Pair | None = None
    """Squared gradient norms of the micro-batches and of the whole, at measured steps."""


@dataclass(frozen=True)
class Settings:
    """What the loop needs beside model, optimizer and batches."""

    steps: int
    """Where to stop (steps)."""
    lr: Callable[[int], float]
    """Learning rate of a step, from 0."""
    max_grad_norm: float
    """0: no clipping."""
    dtype: torch.dtype
    """Of products and activations."""
    device: torch.device
    seed: tuple[int, ...]
    """Dropout of step t is drawn from (seed, t)."""
    measure_every: int = 0
    """Steps between measurements of every tensor; 0: never."""
    noise_every: int = 0
    """Steps between measurements of the gradients of micro-batches; 0: never. A step of one micro-batch is passed over."""


def optimise(
    model: nn.Module,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    batches: Callable[[int], StepBatches],
    settings: Settings,
    start: int = 0,
) -> Iterator[Step]:
    """Take the optimizer steps from `start` to `settings.steps`, yielding after each.

    Args:
        model: set to training mode at every step.
        objective: its losses, usually `model.losses`.
        batches: micro-batches of a step, from 0; called ahead in a background thread.
    """
    for step, work in zip(range(start, settings.steps), prefetch(batches, start, settings.steps), strict=True):
        model.train()
        torch.manual_seed(key(*settings.seed, step) >> 1)
        micro = MicroGradients(optimizer) if due(step, settings.noise_every) and len(work.micro) > 1 else None
        losses = backward(objective, work, settings, micro)
        noise = micro.pair(work.sequences) if micro else None
        before = Snapshot(optimizer) if due(step, settings.measure_every) else None
        lr = settings.lr(step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        grad_norm = clip_and_step(optimizer, settings.max_grad_norm)
        tensors = before.after() if before else None
        optimizer.zero_grad(set_to_none=True)
        yield Step(step + 1, losses, grad_norm, lr, work.tokens, work.sequences, tensors, noise)


def due(step: int, every: int) -> bool:
    """Whether something that is done every so many steps (0: never) is done in step `step`, from 0."""
    return every > 0 and (step + 1) % every == 0


def backward(objective: Objective, work: StepBatches, settings: Settings, micro: MicroGradients | None) -> dict[str, Tensor]:
    """Add up the gradient of a step over its micro-batches.

    Args:
        micro: measures the gradient of each, or None.

    Returns:
        the losses of the step, by name.
    """
    divisors = work.divisors()
    losses: dict[str, Tensor] = {}
    for batch in work.micro:
        summed, _ = objective(batch.to(settings.device), settings.dtype)
        parts = {name: loss / divisors[name] for name, loss in summed.items()}
        total = torch.stack(list(parts.values())).sum()
        with micro.apart() if micro else nullcontext():
            total.backward()
        for name, loss in parts.items():
            losses[name] = losses[name] + loss.detach() if name in losses else loss.detach()
    return losses


def clip_and_step(optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
    """Step the optimizer on clipped gradients; the layer-wise ones clip by themselves, in passes they make anyway.

    Args:
        max_norm: as in :func:`clip`; layer-wise optimizers are built with theirs.

    Returns:
        the norm of the whole gradient before clipping.
    """
    if isinstance(optimizer, Layerwise):
        optimizer.step()
        assert optimizer.grad_norm is not None, "no parameter has a gradient"
        return optimizer.grad_norm
    norm = clip([p for group in optimizer.param_groups for p in group["params"]], max_norm)
    optimizer.step()
    return norm


def clip(parameters: Sequence[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients down so that their common norm is at most `max_norm`; no scaling at 0.

    Returns:
        the norm before.
    """
    # Not torch's own norm: of millions of numbers on a CPU it is 1e-3 off.
    norm = torch.linalg.vector_norm(whole_norms([p.grad for p in parameters if p.grad is not None]))
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


@torch.no_grad()
def evaluate(model: nn.Module, objective: Objective, work: list[StepBatches], settings: Settings) -> dict[str, float]:
    """Mean loss and accuracy over held-out batches, by name: `mlm_loss`, `mlm_accuracy`, `nsp_loss`, ...

    Args:
        work: from `Samples.held_out`; the same every time.
    """
    was_training = model.training
    model.eval()
    losses: dict[str, float] = {}
    hits: dict[str, int] = {}
    targets: dict[str, int] = {}
    for step in work:
        for name, count in step.divisors().items():
            targets[name] = targets.get(name, 0) + count
        for batch in step.micro:
            summed, correct = objective(batch.to(settings.device), settings.dtype)
            for name, loss in summed.items():
                losses[name] = losses.get(name, 0.0) + float(loss)
            for name, hit in correct.items():
                hits[name] = hits.get(name, 0) + int(hit)
    model.train(was_training)
    result = {f"{name}_loss": loss / targets[name] for name, loss in losses.items()}
    return result | {f"{name}_accuracy": count / targets[name] for name, count in hits.items()}
