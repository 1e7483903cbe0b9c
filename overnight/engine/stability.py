"""What training must not silently continue with: losses and weights that are not finite, spikes, replicas that differ, broken states."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from overnight.batches.loader import Samples
from overnight.batches.packing import Provenance
from overnight.batches.streams import Streams
from overnight.distributed.collectives import all_reduce_max
from overnight.distributed.replicas import ReplicaMismatch, compare_replicas
from overnight.engine.context import PhaseContext
from overnight.engine.finite import NonFiniteError, describe_losses, nonfinite_tensors
from overnight.engine.loop import StepResult, due
from overnight.engine.metrics_logger import MetricsLogger
from overnight.engine.precision import INITIAL_SCALE, LossScale
from overnight.engine.recurrent_state import RecurrentState
from overnight.engine.spikes import Rollback, SpikeDetector, provenance_text
from overnight.errors import first_names


class StabilityGuard:
    """Watches the steps of a phase, beside what the loop itself looks at.

    Args:
        context: what all phases share.
        logger: takes what is seen.
        samples: of the training split.
        carry: the state that the model carries, or None.
        states: of :meth:`state_dict` at the step that the phase resumes from; without `spikes` at its beginning.
    """

    def __init__(
        self,
        context: PhaseContext,
        logger: MetricsLogger,
        samples: Samples | Streams,
        carry: RecurrentState | None,
        states: Mapping[str, Any],
    ) -> None:
        self.context, self.logger, self.samples, self.carry = context, logger, samples, carry
        self.policy, run = context.run.stability, context.run
        self.scale = LossScale(**(states.get("loss_scale") or {"scale": INITIAL_SCALE})) if run.precision == "fp16" else None
        """Of the loss, for fp16."""
        ignores = self.policy.on_spike == "ignore"
        self._detector = SpikeDetector(self.policy.spike_threshold, states.get("spikes", {}), run.logging.log_every if ignores else 1)
        self.detector = None if ignores else self._detector
        """What the loop asks at every step; None where a spike is only logged, which is looked for in the lines of metrics."""

    def state_dict(self) -> dict[str, Any]:
        """Return what spikes are told by, and the loss scale."""
        return {"spikes": self._detector.window} | ({"loss_scale": vars(self.scale)} if self.scale else {})

    def note(self, done: StepResult) -> None:
        """Log a step that was skipped."""
        if done.skipped:
            # Of an overflow of fp16 the scale is the cause, not the data.
            samples = [] if self.scale else self.provenance(done.step - 1, done.worst)
            then = f"; the loss scale is now {self.scale.scale:g}" if self.scale else f". {provenance_text(samples)}"
            self.logger.event("skipped", f"step {done.step} skipped: {done.skipped}{then}", **({"samples": samples} if samples else {}))

    def look_for_spike(self, step: int, values: Mapping[str, float]) -> None:
        """Log a spike among the values of a line of metrics, where it is only logged."""
        if self.detector is None and (spike := self._detector.first(values)):
            self.logger.event("spike", f"step {step}: {spike}")

    def check_finite(self, done: StepResult, saves: bool) -> None:
        """Check that what goes into metrics, and above all into a checkpoint, is finite: the loop does not look at every step of a GPU.

        All processes must ask, and end alike, also where one alone has weights that are not finite.

        Raises:
            NonFiniteError: naming the weights that are not.
            Rollback: in its stead, where that is asked for.
        """
        broken = not done.skipped and not math.isfinite(float(done.grad_norm))
        bad = nonfinite_tensors(self.context.workload.model.named_parameters()) if saves or broken else []
        if all_reduce_max(int(bool(bad or broken)), self.context.world):
            weights = f"the weights of {first_names(bad)} are not finite" if bad else "the weights are still finite, their gradient is not"
            if not bad and not broken:
                weights = "weights of another process are not finite"
            text = f"step {done.step}, or one since the last line of metrics: {describe_losses(done.losses, self.context.world)}; {weights}"
            error = NonFiniteError(text, done.step - 1)
            raise Rollback(error) if self.policy.on_nonfinite == "rollback" else error

    def check_carry(self, done: StepResult) -> None:
        """Log the streams whose carried state was not finite."""
        if self.carry and (streams := self.carry.broken()):
            named = first_names([str(stream) for stream in streams])
            text = f"step {done.step}: the carried state of streams {named} was not finite and begins anew at zero"
            self.logger.event("carry", text, streams=streams)

    def check_replicas(self, done: StepResult, optimizer: torch.optim.Optimizer, saves: bool) -> None:
        """Check, when it is due, that all processes hold the same values, above all before a checkpoint takes those of the first.

        Raises:
            ReplicaMismatch: naming the processes and the tensors that differ.
            Rollback: in its stead, where that is asked for.
        """
        every, world = self.policy.replica_check_every, self.context.world
        if world.size == 1 or not every or not (saves or due(done.step - 1, every)):
            return
        try:
            compare_replicas(self.context.workload.model, optimizer, world)
        except ReplicaMismatch as error:
            error = ReplicaMismatch(f"step {done.step}: {error}", done.step - 1)
            raise (Rollback(error, skips_batches=False) if self.policy.on_replica_mismatch == "rollback" else error) from None

    def provenance(self, step: int | None, worst: int | None) -> list[Provenance]:
        """Return where the sequences of micro-batch number `worst` of step `step` (from 0) come from; nothing where that is not known."""
        if step is None or worst is None:
            return []
        return self.samples.provenance(step, self.context.world.size, worst)
