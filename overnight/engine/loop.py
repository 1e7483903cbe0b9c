"""The training loop: the only one. It yields after every optimizer step, and whoever runs it logs, evaluates and saves.

    for done in training_steps(model, objective, optimizer, batches, settings):
        ...

The loss of a step is a sum over its global batch divided by the number of its targets, so accumulation does not change it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from overnight.batches.order import key
from overnight.batches.packing import Sizes, StepBatches
from overnight.batches.prefetch import prefetch
from overnight.distributed.collectives import all_reduce_sums
from overnight.distributed.stragglers import Timestamp, timestamp
from overnight.distributed.world import World, seed
from overnight.distributed.wrap import gradient_sync
from overnight.engine.finite import NonFiniteError, describe_losses, finite, nonfinite_tensors
from overnight.engine.memory import OutOfMemory, first_line, is_out_of_memory
from overnight.engine.precision import LossScale
from overnight.engine.recurrent_state import RecurrentState
from overnight.engine.spikes import Rollback, Spike, SpikeDetector, largest_gradients, measured, worst_micro_batch
from overnight.errors import TrainingError, first_names
from overnight.models.weight_copies import kept_copies
from overnight.optim.layerwise import Layerwise, whole_norms
from overnight.optim.noise import MicroGradients, Pair
from overnight.optim.offload import offloaded, step_in_chunks
from overnight.optim.telemetry import Norms, Snapshot
from overnight.optim.tensor_list import total_norm

# Steps in a row that may be skipped before the run stops: what was wrong with one batch is over by then.
_SKIPS = 20


class Objective(Protocol):
    """What the loop knows of a model: summed losses of a micro-batch by name and, outside training, summed correct predictions.

    Of a model that carries a state, the third is the state after the window.
    """

    def __call__(self, batch: Any, dtype: torch.dtype) -> Any: ...


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; the tensors are left on the device, so that reading them is the reader's wait."""

    step: int
    """Steps done, this one included."""
    losses: dict[str, Tensor]
    """Mean over the targets of the step, by name (fp32 scalars); their weighted sum is what was minimized. On many processes, this one's part."""
    targets: dict[str, float]
    """Number of targets of the step, of all processes, by name; a loss without one is 0 and stands for nothing."""
    grad_norm: Tensor
    """Norm of the whole gradient before clipping."""
    lr: float
    tokens: int
    sequences: int
    tensors: Norms | None = None
    """Norms of every tensor, at measured steps."""
    noise: Pair | None = None
    """Squared gradient norms of the micro-batches and of the whole, at measured steps."""
    skipped: str = ""
    """Why the optimizer was not stepped: which losses and gradients are not finite, or far above the usual; empty where it was."""
    worst: int | None = None
    """Number of the micro-batch with the largest loss among those of all processes, where the optimizer was not stepped."""
    sizes: Sizes | None = None
    """What the arithmetic of the global batch follows from, where it is known."""
    waited: float = 0.0
    """Time that the loop stood still for want of a batch (s)."""
    worked: tuple[Timestamp, Timestamp] = (0.0, 0.0)
    """Begin and end of what this process did of the step before it had to exchange gradients: all but the last backward pass."""


@dataclass(frozen=True)
class LoopConfig:
    """What the loop needs besides model, optimizer and batches."""

    steps: int
    """Where to stop (steps)."""
    lr: Callable[[int], float]
    """Learning rate of a step, from 0."""
    max_grad_norm: float
    """0: no clipping."""
    dtype: torch.dtype
    """Of matrix products and activations."""
    device: torch.device
    seed: tuple[int, ...]
    """Dropout of step t is drawn from (seed, t), and on one of many processes from (seed, t, rank)."""
    measure_every: int = 0
    """Steps between measurements of every tensor; 0: never."""
    noise_every: int = 0
    """Steps between measurements of the gradients of micro-batches; 0: never. A step of one micro-batch is passed over."""
    weights: Callable[[int], Mapping[str, float]] = lambda step: {}
    """Of the losses of a step, from 0, by name; 1 where there is none."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """What to do at a gradient that is not finite; with a loss scale, at one that is not so at the lowest scale."""
    on_spike: Literal["stop", "skip", "rollback"] = "stop"
    """What to do at a spike, where one is watched for."""
    world: World = field(default_factory=World)
    """The processes that share the step; the gradients of `objective` are those of all (:func:`overnight.distributed.wrap.parallelize_model`)."""


def training_steps(
    model: nn.Module,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    batches: Callable[[int], StepBatches],
    settings: LoopConfig,
    start: int = 0,
    scale: LossScale | None = None,
    spike_detector: SpikeDetector | None = None,
    carry: RecurrentState | None = None,
) -> Iterator[StepResult]:
    """Take the optimizer steps from `start` to `settings.steps`, yielding after each.

    A step whose gradient is not finite, or which is a spike, changes nothing: it is skipped, or the run stops or goes back. With a loss scale
    a step whose gradient overflows while its losses are finite is taken again, on the same batch, at half the scale. To know it takes a wait for the device, so on a GPU it is looked for only where that is asked for; elsewhere whoever runs the loop sees it in `grad_norm`.

    Args:
        model: set to training mode at every step.
        objective: its losses, usually `model.losses`.
        batches: micro-batches of a step, from 0; called ahead in a background thread.
        scale: of the loss, for fp16; changed as the steps go.
        spike_detector: tells spikes; None looks for none. Takes in the steps as they go.
        carry: the state that the model carries from step to step; changed as the steps go.

    Raises:
        NonFiniteError, Spike: naming the step, the losses and the tensors; the parameters and the optimizer's state are as before the step.
        Rollback: in their stead, where that is asked for.
        OutOfMemory: when a forward or backward pass has none; nothing but the gradients is lost, and the step can be taken again.
    """
    check = settings.device.type == "cpu" or scale is not None or spike_detector is not None or settings.on_nonfinite != "stop"
    step, row, again, world = start, 0, False, settings.world
    ahead = prefetch(batches, start, settings.steps)
    while step < settings.steps:
        began = time.perf_counter()
        if not again:
            step_batches = next(ahead)
        waited = time.perf_counter() - began
        model.train()
        seed(settings.device, key(*settings.seed, step, *([world.rank] if world.size > 1 else [])) >> 1)
        micro = MicroGradients(optimizer) if due(step, settings.noise_every) and len(step_batches.micro) > 1 else None
        factor = scale.scale if scale else 1.0
        targets, weights = all_reduce_sums(step_batches.divisors(), world), settings.weights(step)
        failed = ""
        try:
            with kept_copies(not hasattr(objective, "set_requires_gradient_sync")):
                losses, parts, worked = backward(objective, step_batches, targets, weights, settings, micro, factor, carry)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            failed = first_line(error)
        if failed:  # No sooner: the error holds on to all that its frames do.
            optimizer.zero_grad(set_to_none=True)
            if carry:
                carry.drop()
            raise OutOfMemory(f"step {step + 1} ran out of memory ({failed})")
        noise = micro.pair(step_batches.sequences, factor) if micro else None
        if scale:
            scale.unscale(optimizer)
        before = Snapshot(optimizer) if due(step, settings.measure_every) else None
        lr = settings.lr(step)
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_factor", 1.0)
        seen = measured(losses, targets, weights, optimizer, world) if spike_detector else {}
        spike, problem = spike_detector.spike(seen) if spike_detector else "", ""
        if spike:
            grad_norm, problem = torch.tensor(seen["grad_norm"]), f"{spike}; {largest_gradients(optimizer)}"
        else:
            try:
                grad_norm = clip_and_step(optimizer, settings.max_grad_norm, check)
            except FloatingPointError as error:
                grad_norm, problem = torch.tensor(math.nan), f"{describe_losses(losses, world)}; {error}"
        # An overflow of fp16 loses neither data nor a step of the schedule: the step is taken again at half the scale.
        again = bool(problem and not spike and scale and finite(losses, world) and scale.lower())
        if again:
            optimizer.zero_grad(set_to_none=True)
            if carry:
                carry.drop()
            continue
        if spike_detector and not problem:
            spike_detector.note(seen)
        if carry:
            carry.commit()
        tensors = before.after() if before and not problem else None
        optimizer.zero_grad(set_to_none=True)
        row = row + 1 if problem else 0
        number = worst_micro_batch(parts, world) if problem else None
        handle_bad_step(step, Spike if spike else NonFiniteError, problem, number, row, settings, scale)
        yield StepResult(
            step + 1,
            losses,
            targets,
            grad_norm,
            lr,
            step_batches.tokens,
            step_batches.sequences,
            tensors,
            noise,
            problem,
            number,
            step_batches.sizes,
            waited,
            worked,
        )
        step += 1


def handle_bad_step(
    step: int, kind: type[TrainingError], problem: str, number: int | None, row: int, settings: LoopConfig, scale: LossScale | None
) -> None:
    """Decide whether the training continues after a step; the loss scale takes it in.

    Args:
        step: from 0.
        kind: Spike or NonFiniteError.
        problem: why it was not taken; empty where it was.
        number: of the micro-batch with the largest loss.
        row: steps in a row that were not.

    Raises:
        NonFiniteError, Spike: when it may not continue.
        Rollback: in their stead, where that is asked for.
    """
    policy, key = (settings.on_spike, "on_spike") if kind is Spike else (settings.on_nonfinite, "on_nonfinite")
    why: str | None = None
    if scale:
        try:
            scale.update(finite=not problem or kind is Spike)
        except NonFiniteError as error:
            why = f". {error}"
    if problem and why is None and (scale is None or kind is Spike):
        if policy == "stop":
            why = f". If it happens again, lower the learning rate, or let such steps be skipped: stability.{key}=skip"
        elif policy == "rollback":
            why = ""
        elif row >= _SKIPS:
            why = f". {row} steps in a row were skipped: lower the learning rate, or look at the data"
    if why is not None:
        refused = kind(f"step {step + 1}: {problem}{why}", step, number)
        raise Rollback(refused) if policy == "rollback" else refused


def due(step: int, every: int) -> bool:
    """Return whether something that is done every so many steps (0: never) is done in step `step`, from 0."""
    return every > 0 and (step + 1) % every == 0


def backward(
    objective: Objective,
    step_batches: StepBatches,
    targets: Mapping[str, float],
    weights: Mapping[str, float],
    settings: LoopConfig,
    micro: MicroGradients | None,
    scale: float = 1.0,
    carry: RecurrentState | None = None,
) -> tuple[dict[str, Tensor], list[Tensor], tuple[Timestamp, Timestamp]]:
    """Add up the gradient of a step over its micro-batches.

    Args:
        targets, weights: of the losses of the step, by name; the sums are divided by the targets of all processes.
        micro: measures the gradient of each, or None.
        scale: what the gradient is multiplied by, so that little of it is lost in 16 bits.

    Returns:
        the losses of the step, by name, without the scale; the loss of each micro-batch, with it; begin and end of this process's own work.
    """
    begun = ended = timestamp(settings.device)
    losses: dict[str, Tensor] = {}
    micro_losses: list[Tensor] = []
    for batch in step_batches.micro:
        with gradient_sync(objective, last=batch is step_batches.micro[-1]):
            summed, _ = forward(objective, batch, settings, carry)
            # A step without a label has a loss of 0.
            parts = {name: loss / max(1, targets[name]) for name, loss in summed.items()}
            total = torch.stack([part * weights.get(name, 1.0) for name, part in parts.items()]).sum() * scale
            micro_losses.append(total.detach())
            if batch is step_batches.micro[-1]:
                ended = timestamp(settings.device)
            with micro.apart() if micro else nullcontext():
                total.backward()
        for name, loss in parts.items():
            losses[name] = losses[name] + loss.detach() if name in losses else loss.detach()
    return losses, micro_losses, (begun, ended)


def forward(
    objective: Objective, batch: Any, settings: LoopConfig, carry: RecurrentState | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return losses and correct predictions of a micro-batch, which takes the state of its streams and leaves the new one."""
    batch = batch.to(settings.device)
    if carry is None:
        return objective(batch, settings.dtype)
    losses, correct, state_B = objective(carry.enter(batch), settings.dtype)
    carry.leave(batch, state_B)
    return losses, correct


def clip_and_step(optimizer: torch.optim.Optimizer, max_norm: float, check: bool = False) -> Tensor:
    """Step the optimizer on clipped gradients; the layer-wise ones clip by themselves, in passes they make anyway.

    Args:
        max_norm: as in :func:`clip`; layer-wise optimizers are built with theirs.
        check: wait for the norm, and refuse a gradient that is not finite.

    Returns:
        the norm of the whole gradient before clipping.

    Raises:
        FloatingPointError: with `check`, naming the tensors; parameters and state are as before.
    """
    if isinstance(optimizer, Layerwise):
        optimizer.check_finite = check
        optimizer.step()
        assert optimizer.grad_norm is not None, "no parameter has a gradient"
        return optimizer.grad_norm
    names = [name for group in optimizer.param_groups for name in group["param_names"]] if check else None
    norm = clip([p for group in optimizer.param_groups for p in group["params"]], max_norm, names)
    if offloaded(optimizer.param_groups[0]):
        step_in_chunks(optimizer)
    else:
        optimizer.step()
    return norm


def clip(parameters: Sequence[Tensor], max_norm: float, names: Sequence[str] | None = None) -> Tensor:
    """Scale all gradients down so that their common norm is at most `max_norm`; no scaling at 0.

    Args:
        names: of the parameters. Given, the norm is waited for, and one that is not finite refused.

    Returns:
        the norm before.

    Raises:
        FloatingPointError: with `names`, naming the tensors; nothing is scaled.
    """
    # Not torch's own norm: of millions of numbers on a CPU it is 1e-3 off.
    norm = total_norm(whole_norms([p.grad for p in parameters if p.grad is not None]))
    if names is not None and not torch.isfinite(norm):
        bad = nonfinite_tensors((name, p.grad) for name, p in zip(names, parameters, strict=True) if p.grad is not None)
        raise FloatingPointError(f"the gradient of {first_names(bad) or 'all tensors together'} is not finite")
    if max_norm > 0 and not (norm.device.type == "cpu" and norm + 1e-6 <= max_norm):  # a CPU knows where the factor is 1
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


@torch.no_grad()
def evaluate(
    model: nn.Module, objective: Objective, steps: Sequence[StepBatches], settings: LoopConfig, carry: RecurrentState | None = None
) -> dict[str, float]:
    """Return the mean loss and accuracy over the targets of validation batches, by name: `mlm_loss`, `mlm_accuracy`, `nsp_loss`, ...; none without targets.

    Args:
        steps: from `Samples.validation_steps`; the same every time.
        carry: of all streams, zero; then every process takes all the steps, in order, and the first one's count.
    """
    was_training = model.training
    model.eval()
    losses: dict[str, float] = {}
    correct: dict[str, float] = {}
    targets: dict[str, float] = {}
    world = settings.world
    first, stride = (0, 1) if carry else (world.rank, world.size)
    # Each process takes equally many, the last ones for nothing: where parameters are sharded, every forward pass needs all processes.
    for at in range(first, -(-len(steps) // stride) * stride, stride):
        step, counts = steps[at % len(steps)], at < len(steps) and (world.main or not carry)
        for name, count in step.divisors().items():
            _add(targets, name, count * counts, step)
        for batch in step.micro:
            summed, summed_correct = forward(objective, batch, settings, carry)
            for name, loss in summed.items():
                _add(losses, name, float(loss) * counts, step)
            for name, number in summed_correct.items():
                correct[name] = correct.get(name, 0) + int(number) * counts
        if carry:
            carry.commit()
    model.train(was_training)
    losses, correct, targets = (all_reduce_sums(numbers, world) for numbers in (losses, correct, targets))
    # `mlm_loss`, and of a source `mlm_loss/SOURCE`.
    result = {"{}_loss{}{}".format(*name.partition("/")): loss / targets[name] for name, loss in losses.items() if targets[name]}
    return result | {f"{name}_accuracy": count / targets[name] for name, count in correct.items() if targets[name]}


def _add(totals: dict[str, float], name: str, value: float, step: StepBatches) -> None:
    """Add to a total, and to that of the step's source among all of them: every process has the same names, in the same order."""
    for total, share in {name: 1, **{f"{name}/{source}": source == step.source for source in step.sources}}.items():
        totals[total] = totals.get(total, 0) + value * share
