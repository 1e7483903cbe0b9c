"""The training loop: the only one. It yields after every optimizer step, and whoever runs it logs, evaluates and saves.

    for done in optimise(model, optimizer, batches, ...):
        ...

The loss of a step is a sum over its global batch divided by the number of its targets, so accumulation does not change it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from overnight.batches.loader import prefetch
from overnight.batches.order import key
from overnight.batches.packing import Batch, StepBatches


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
    parameters = [p for p in model.parameters() if p.requires_grad]
    for step, work in zip(range(start, settings.steps), prefetch(batches, start, settings.steps), strict=True):
        model.train()
        torch.manual_seed(key(*settings.seed, step) >> 1)
        divisors = work.divisors()
        losses: dict[str, Tensor] = {}
        for batch in work.micro:
            summed, _ = objective(batch.to(settings.device), settings.dtype)
            parts = {name: loss / divisors[name] for name, loss in summed.items()}
            total = torch.stack(list(parts.values())).sum()
            total.backward()
            for name, loss in parts.items():
                losses[name] = losses[name] + loss.detach() if name in losses else loss.detach()
        grad_norm = clip(parameters, settings.max_grad_norm)
        lr = settings.lr(step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield Step(step + 1, losses, grad_norm, lr, work.tokens, work.sequences)


def clip(parameters: list[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients down so that their common norm is at most `max_norm`; no scaling at 0.

    Returns:
        the norm before.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
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
