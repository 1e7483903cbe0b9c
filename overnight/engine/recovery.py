"""The way back from a step that must not stand: to the newest checkpoint of the phase, or to an error that says where to resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from overnight.batches.batch_size import sequences_before
from overnight.batches.packing import Provenance
from overnight.checkpoint import reader
from overnight.checkpoint.reader import TrainingProgress
from overnight.display import plural
from overnight.distributed.collectives import assert_same_on_all_ranks, raise_on_all_ranks
from overnight.distributed.wrap import distribute_like
from overnight.engine.context import PhaseContext
from overnight.engine.spikes import Rollback, provenance_text
from overnight.errors import TrainingError

# Rollbacks to one checkpoint before the run stops.
_ROLLBACKS = 20


class Recovery:
    """The rollbacks of a phase.

    Args:
        context: what all phases share; its progress is replaced.
        number: of the phase, from 0.
        checkpoints: of the run.
    """

    def __init__(self, context: PhaseContext, number: int, checkpoints: Path) -> None:
        self.context, self.number, self.checkpoints = context, number, checkpoints
        self.events: list[dict[str, Any]] = []
        """Rollbacks to the newest checkpoint, which knows nothing of them."""

    def go_back(self, bad: Rollback, samples: list[Provenance]) -> dict[str, Tensor]:
        """Put the newest checkpoint, or the untrained network, in the place of what was trained since; returns the optimizer's tensors.

        A kill after it changes nothing: the next start comes to the same step by itself, and goes back again.

        Args:
            samples: that may have to do with it.

        Raises:
            TrainingError: the cause, when going back does not help.
        """
        context, error, names = self.context, bad.error, list(self.context.run.phases)
        assert error.step is not None
        context.writer.wait()
        whole, progress = context.workload.untrained(torch.device("cpu")), context.progress
        restored, moments = self._newest(whole)
        if self.events and self.events[-1]["to_step"] != restored.global_step:
            self.events.clear()
        if len(self.events) == _ROLLBACKS:
            again = f"{error}. The run went back to step {restored.global_step} {_ROLLBACKS} times: lower the learning rate, or look at the data"
            raise self.final_error(type(error)(again), samples)
        inside = restored.phase == names[self.number]
        if not inside and (names.index(restored.phase) + 1 if restored.phase else 0) != self.number:
            raise self.final_error(error, samples)  # Checkpoints were damaged; the next start resumes in an earlier phase.
        phase, begin, end = context.phases[names[self.number]], restored.step if inside else 0, error.step + 1
        steps, sequences = end - begin, sequences_before(phase, end) - sequences_before(phase, begin)
        restored.batches_skipped = progress.batches_skipped + steps * bad.skips_batches
        restored.sequences_skipped = progress.sequences_skipped + sequences * bad.skips_batches
        restored.seconds = progress.seconds
        with torch.no_grad():
            tensors = context.workload.model.state_dict()
            for name, tensor in whole.state_dict().items():
                tensors[name].copy_(distribute_like(tensors[name], tensor))
        context.metrics.back_to(restored.metrics_bytes, restored.global_step)
        context.progress = restored
        self._record(bad, steps, samples)
        return moments

    def _newest(self, model: nn.Module) -> tuple[TrainingProgress, dict[str, Tensor]]:
        """Fill a network from the newest checkpoint, if there is one; return the progress and the optimizer's tensors."""
        context = self.context
        context.carried.clear()
        with raise_on_all_ranks(context.world):
            found = reader.load_checkpoint(self.checkpoints, model, context.carried)
        restored, moments, _ = found or (TrainingProgress(corpus=context.progress.corpus), {}, [])
        assert_same_on_all_ranks({"newest checkpoint": {"step": restored.global_step}}, context.world)
        return restored, moments

    def _record(self, bad: Rollback, steps: int, samples: list[Provenance]) -> None:
        """Print a rollback by a number of steps, and keep it for the metrics."""
        context, phase = self.context, list(self.context.run.phases)[self.number]
        to = context.progress.global_step
        data = f", skipping {plural(steps, 'step')} of data" if bad.skips_batches else ""
        text = ". ".join(part for part in (str(bad.error), provenance_text(samples)) if part)
        message = f"phase {phase}: rolled back from step {to + steps} to step {to} of the run{data}: {text}"
        context.line.print(message)
        place = {"phase": phase, "global_step": to, "from_step": to + steps, "to_step": to}
        skipped = {"cause": bad.error.event, "batches_skipped": context.progress.batches_skipped, "samples": samples}
        self.events.append({"event": "rolled_back", "message": message, **place, **skipped})

    def final_error(self, error: TrainingError, samples: list[Provenance]) -> TrainingError:
        """Return the error that ends the run, with its place, its data and the way back."""
        progress, writer = self.context.progress, self.context.writer
        text = ". ".join(part for part in (f"phase {progress.phase}, {error}", provenance_text(samples)) if part)
        place = {"phase": progress.phase, "global_step": progress.global_step}
        self.context.metrics.write("event", event=error.event, message=text, **place, **({"samples": samples} if samples else {}))
        writer.settle()
        newest = reader.newest_checkpoint(self.checkpoints)
        good = f"The last good checkpoint is {newest}, and the same command resumes from there"
        if not newest:
            good = "There is no checkpoint yet: the same command begins anew; with other settings, give the run its own folder (--out=...)"
        return type(error)(f"{text}.\n{good}" + (f"; the {writer.error}" if writer.error else ""))
