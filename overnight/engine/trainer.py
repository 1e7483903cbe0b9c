"""One phase of pretraining: its steps, and between them what is logged, evaluated, saved and watched over."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from overnight.batches.batch_size import batch_size, batch_warmup, micro_batch, micro_batch_sizes, pad_to_multiple, sequences_before
from overnight.batches.packing import Provenance
from overnight.checkpoint.reader import Progress
from overnight.checkpoint.run_corpus import assert_same_corpus
from overnight.checkpoint.writer import CheckpointWriter
from overnight.config import BytePhase, LansConfig, Phase, Run
from overnight.console import Line, Status, facts
from overnight.corpus.shards import load_manifest
from overnight.display import measures, plural, share
from overnight.distributed.collectives import all_reduce_max, raise_on_all_ranks
from overnight.distributed.replicas import ReplicaMismatch, compare_replicas
from overnight.distributed.stragglers import StragglerMonitor
from overnight.distributed.world import World
from overnight.engine.finite import NonFiniteError, describe_losses, nonfinite_tensors
from overnight.engine.loop import LoopConfig, Objective, StepResult, due, evaluate, training_steps
from overnight.engine.memory import HOW_TO_SAVE_MEMORY, OutOfMemory, first_line, is_out_of_memory, peak_gb, release, reset_peak
from overnight.engine.micro_batch import BatchSizeFinder, MicroBatchSchedule, conditions, optimizer_state_bytes
from overnight.engine.precision import DTYPES, INITIAL_SCALE, LossScale
from overnight.engine.spikes import Rollback, SpikeDetector, minimized, provenance_text
from overnight.engine.throughput import Throughput
from overnight.engine.workload import Workload, bits_per_character
from overnight.errors import first_names
from overnight.models.flops import Peak
from overnight.optim.groups import group_lines
from overnight.optim.noise import NoiseScale, follow, noise_text
from overnight.optim.offload import offload
from overnight.optim.schedules import learning_rate, peak_lr
from overnight.run_dir.lock import Heartbeat
from overnight.run_dir.metrics import Metrics
from overnight.signals import Interrupted, Signals

# In the place of a signal's number: a checkpoint could not be written, which the processes must know at the same step.
_UNSAVED = 1 << 16


@dataclass
class PhaseContext:
    """What the phases of a run share in one process."""

    run: Run
    workload: Workload
    """Data and network."""
    objective: Objective
    """Losses of the network, of which the backward pass adds up the gradients of all processes."""
    world: World
    progress: Progress
    writer: CheckpointWriter
    metrics: Metrics
    line: Line
    signals: Signals
    peak: Peak | None = None
    """What the devices of all processes compute at most; None leaves out the share of it that is used."""
    carried: dict[str, Tensor] = field(default_factory=dict)
    """State of the checkpoint that the run resumes from, of a model that carries one."""


class Trainer:
    """A phase in one process, from the step where the progress stands to its end.

    Args:
        context: what all phases share.
        number: of the phase, from 0.
        optimizer: with the state of that step.
    """

    def __init__(self, context: PhaseContext, number: int, optimizer: torch.optim.Optimizer) -> None:
        self.context, self.run, self.world, self.workload = context, context.run, context.world, context.workload
        self.progress, self.metrics, self.line, self.signals = context.progress, context.metrics, context.line, context.signals
        self.model, self.objective, self.writer = context.workload.model, context.objective, context.writer
        self.number, self.optimizer = number, optimizer
        self.name = list(self.run.phases)[number]
        self.phase: Phase = self.run.phases[self.name]
        self.samples, self.valid = (self.workload.samples(self.phase, number, split) for split in ("train", "valid"))
        self.carry = self.workload.carry(self.samples)
        if self.carry and context.carried:
            self.carry.load(context.carried["lanes"])
        self.settings = self._settings()
        self.peak, self.values, self.accuracy, self.saved = context.peak, dict[str, Any](), "", ""
        self.speed = Throughput(self.run, number, self.world, self.workload.flops, self.peak)
        self.spike_detector = SpikeDetector(
            self.run.stability.spike_threshold,
            self.progress.watched,
            self.run.logging.log_every if self.run.stability.on_spike == "ignore" else 1,
        )
        self.stragglers = StragglerMonitor(self.world)

    def _settings(self) -> LoopConfig:
        """Return what the loop needs to know of the phase."""
        phase, run = self.phase, self.run
        return LoopConfig(
            steps=phase.steps,
            lr=lambda step: learning_rate(phase, step),
            max_grad_norm=0.0 if isinstance(phase.optim, LansConfig) else phase.optim.max_grad_norm,
            dtype=DTYPES[run.precision],
            device=self.world.device,
            seed=(self.run.seed, self.number),
            measure_every=run.logging.tensor_norms_every,
            noise_every=run.logging.grad_noise_every,
            weights={"label": phase.label_weight} if isinstance(phase, BytePhase) else {},
            on_nonfinite=run.stability.on_nonfinite,
            on_spike="stop" if run.stability.on_spike == "ignore" else run.stability.on_spike,
            world=self.world,
        )

    def train(self) -> None:
        """Take the steps that are left.

        Raises:
            DataError: when the checkpoint before could not be written, or the data is another by now.
            Interrupted: after a checkpoint.
            TrainingError: when training cannot continue.
            OutOfMemory: when not even one sequence fits, or on many processes.
            Rollback: when it must go back to the newest checkpoint.
        """
        progress = self.progress
        with raise_on_all_ranks(self.world):
            if self.world.main:  # The others find its plans of the first epoch in the folder.
                self.samples.epoch_size(), self.valid.epoch_size()
        if self.run.memory.optimizer_cpu_offload and self.world.device.type == "cuda":  # a CPU is its own host
            offload(self.optimizer)
        self.schedule = self._micro_batch_schedule()
        reset_peak(self.world.device)
        self._use_micro_batch()
        self._announce()
        heartbeat = Heartbeat(self.run.run_dir)
        scale = LossScale(progress.loss_scale or INITIAL_SCALE, progress.clean_steps) if self.run.precision == "fp16" else None
        while progress.step < self.phase.steps:
            self._use_micro_batch()
            try:
                self._steps(heartbeat, scale)
            except OutOfMemory as error:
                self._halve(error)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                # In the optimizer or the evaluation, where a smaller micro-batch is of no use.
                raise OutOfMemory(f"after step {progress.step} of phase {self.name}: {first_line(error)}. {HOW_TO_SAVE_MEMORY}") from None

    def _steps(self, heartbeat: Heartbeat, scale: LossScale | None) -> None:
        """Take steps as long as the batches are split as they are now."""
        phase, world, progress = self.phase, self.world, self.progress
        settings, passed = replace(self.settings, steps=self.schedule.until(progress.step, phase.steps)), progress.passed
        fill = pad_to_multiple(phase, micro_batch(phase, phase.steps, world.size))
        step = partial(self.samples.step, rank=world.rank, world=world.size, pad_to_multiple=fill)
        detector, begin = None if self.run.stability.on_spike == "ignore" else self.spike_detector, progress.step
        for done in training_steps(
            self.model, self.objective, self.optimizer, lambda t: step(t + passed), settings, begin, scale, detector, self.carry
        ):
            last = done.step == phase.steps
            logs, evaluates, saves = (
                last or due(done.step - 1, n)
                for n in (self.run.logging.log_every, self.run.logging.eval_every, self.run.checkpoint.save_every)
            )
            self.speed.note(done, progress, wait=logs or evaluates or saves)
            received = all_reduce_max(_UNSAVED if self.writer.error else self.signals.received or 0, world)
            if received == _UNSAVED:
                self.writer.wait()
            if world.main:
                heartbeat.beat(self.name, done.step)
            self.stragglers.note(done.waited, done.worked)
            self._note_scale(done, scale)
            if logs or evaluates or saves or received:
                self._check_finite(done, bool(saves or received))
            if saves or received or due(done.step - 1, self.run.stability.replica_check_every):
                self._check_replicas(done)
            self._measures(done)
            if logs:
                self._log(done)
                self._check_carry(done)
            if logs or self.line.due():
                self.line.update(self._status(), final=last)
            if evaluates:
                self._evaluate(done)
            if last:
                self._note_memory()
                self.metrics.write("phase", phase=self.name, event="end", global_step=progress.global_step, seconds=self._seconds())
            if saves or received:
                self._save()
            if received:
                self.writer.wait()
                raise Interrupted(received, f"step {done.step} of phase {self.name}")

    def _micro_batch_schedule(self) -> MicroBatchSchedule:
        """Return the micro-batches of the phase: as remembered, as the recipe says, or found by trial."""
        run, phase, world, step = self.run, self.phase, self.world, self.progress.step
        found = MicroBatchSchedule(run.run_dir / "memory.json", self.name, conditions(run, phase, world), world)
        if found.since:
            if found.at(step) != phase.micro_batch_size:
                self.line.print(f"micro-batch {found.at(step)}, as {found.path} says")
        elif phase.micro_batch_size:
            found.use(0, phase.micro_batch_size)
        else:
            finder = BatchSizeFinder(run, self.model, self.objective, self.samples, self.settings.dtype, world)
            count, text = finder.micro_batch(optimizer_state_bytes(self.optimizer))
            found.use(step, count)
            with raise_on_all_ranks(world):
                if world.main:
                    found.keep()
            self._log_event("micro_batch_size", text, micro_batch_size=count)
        return found

    def _use_micro_batch(self) -> None:
        """Use the micro-batch that is due from the present step on."""
        size = self.schedule.at(self.progress.step)
        self.phase = replace(self.phase, micro_batch_size=size)
        for source in (self.samples, self.valid):
            source.set_micro_batch_size(size)
        self.validation_steps = self.valid.validation_steps(self.run.logging.eval_examples)

    def _halve(self, error: OutOfMemory) -> None:
        """Take the step at which memory ran out again in smaller micro-batches.

        Raises:
            OutOfMemory: where there is none smaller, or other processes wait for this one in a step that it cannot end.
        """
        phase, world, step = self.phase, self.world, self.progress.step
        count = micro_batch(phase, step + self.progress.passed, world.size)
        what = f"{error} with micro-batches of {count}"
        smaller = [size for size in micro_batch_sizes(phase, world.size) if size <= count // 2]
        if not smaller:
            raise OutOfMemory(f"phase {self.name}, {what} up to {phase.seq_len} tokens. {HOW_TO_SAVE_MEMORY}") from None
        self.schedule.use(step, smaller[-1])
        self.schedule.keep()
        if world.size > 1:
            raise OutOfMemory(
                f"process {world.rank}, phase {self.name}, {what}. The others cannot continue without it. {self.schedule.path} now says "
                f"{smaller[-1]}, with which the same command, or a restart by the launcher, resumes from the newest checkpoint"
            ) from None
        release(self.model, world.device)
        self._log_event("out_of_memory", f"{what}: taken again with {smaller[-1]}", micro_batch_size=smaller[-1])

    def _note_memory(self) -> None:
        """Write what the phase took at most, by what it follows from."""
        phase, segment, most = self.phase, self.run.memory.activation_checkpointing, round(peak_gb(self.world.device), 3)
        facts = {"micro_batch_size": phase.micro_batch_size, "seq_len": phase.seq_len, "activation_checkpointing": segment, "peak_gb": most}
        self.metrics.write("event", event="memory", phase=self.name, global_step=self.progress.global_step, **facts)

    def _seconds(self) -> float:
        return round(self.progress.seconds, 3)

    def _where(self, step: int) -> dict[str, str | int | float]:
        return {"phase": self.name, "step": step, "global_step": self.progress.global_step, "seconds": self._seconds()}

    def _log(self, done: StepResult) -> None:
        """Write a line of metrics, and keep it for the live view."""
        progress = self.progress
        means = {name: total / count for name, (total, count) in progress.running.items() if count}
        losses, progress.running = (
            minimized(means, {name: count for name, (_, count) in progress.running.items()}, self.settings.weights),
            {},
        )
        rate = self.speed.rate()
        norm = float(done.grad_norm)
        if not means:  # Every step since the last line was skipped, with a loss that is no number.
            return
        values = dict(
            loss=next(iter(losses.values())),
            **{f"{name}_loss": value for name, value in means.items()},
            lr=done.lr,
            **({"batch": done.sequences} if batch_warmup(self.phase).initial_batch_size else {}),
            grad_norm=norm if math.isfinite(norm) else None,
            **({"loss_scale": progress.loss_scale} if progress.loss_scale else {}),
            **({"skipped": progress.skipped} if progress.loss_scale or progress.skipped else {}),
            tokens=progress.tokens,
            sequences=progress.sequences,
            **rate,
            **({"memory_gb": memory} if (memory := round(peak_gb(self.world.device), 3)) else {}),
            **self._straggler_metrics(),
        )
        self.metrics.write("train", **self._where(done.step), **values)
        if self.run.stability.on_spike == "ignore" and (spike := self.spike_detector.first({**losses, "grad_norm": norm})):
            self._log_event("spike", f"step {done.step}: {spike}")
        self.values = values
        if wrong := self.speed.exceeds():
            self._log_event("peak", wrong)
            self.peak = self.context.peak = self.speed.peak = None

    def _straggler_metrics(self) -> dict[str, float]:
        share, slow = self.stragglers.line()
        if slow:
            self._log_event("slow_process", slow)
        return share

    def _log_event(self, event: str, message: str, **more: Any) -> None:
        self.line.print(message)
        self.metrics.write("event", event=event, message=message, phase=self.name, global_step=self.progress.global_step, **more)

    def _status(self) -> Status:
        phases = list(self.run.phases.items())
        done = {name: p.steps if at < self.number else 0 for at, (name, p) in enumerate(phases)} | {self.name: self.progress.step}
        peak = " of the measured peak" if self.peak and self.peak.measured else ""
        words = facts(self.values, peak, {"validation accuracy": self.accuracy, "checkpoint": self.saved})
        return Status(self.name, {name: (done[name], p.steps) for name, p in phases}, self.speed.left(self.progress), words)

    def _evaluate(self, done: StepResult) -> None:
        scores = evaluate(self.model, self.objective, self.validation_steps, self.settings, self.workload.validation_carry())
        scores |= bits_per_character(scores)
        self.metrics.write("eval", **self._where(done.step), **scores)
        self.accuracy = next((share(scores[name]) for name in ("mlm_accuracy", "byte_accuracy") if name in scores), "")
        self.line.print(f"{self.name} {done.step:,}/{self.phase.steps:,}  validation: {measures(scores)}")
        if "run" in self.progress.noise:
            self.line.print(noise_text(NoiseScale(*self.progress.noise["run"]).value, done.sequences))
        self.speed.pause()

    def _save(self) -> None:
        with raise_on_all_ranks(self.world):
            assert_same_corpus(self.progress, load_manifest(self.run.data_dir), self.run.data_dir, self.run)
        self.speed.read(self.progress)
        self.progress.metrics_bytes = self.metrics.size()
        stall_seconds = self.writer.save(self.model, self.optimizer, self.progress, {"lanes": self.carry.whole()} if self.carry else None)
        self.metrics.write("event", event="checkpoint_saved", **self._where(self.progress.step), save_seconds=round(stall_seconds, 3))
        self.saved = f"step {self.progress.global_step:,}"
        self.speed.pause()

    def _note_scale(self, done: StepResult, scale: LossScale | None) -> None:
        """Keep the loss scale for the next checkpoint, and tell of a step that was skipped."""
        if scale:
            self.progress.loss_scale, self.progress.clean_steps = scale.scale, scale.clean
        if done.skipped:
            # Of an overflow of fp16 the scale is the cause, not the data.
            samples = [] if scale else self.provenance(done.step - 1, done.worst)
            then = f"; the loss scale is now {scale.scale:g}" if scale else f". {provenance_text(samples)}"
            self._log_event("skipped", f"step {done.step} skipped: {done.skipped}{then}", **({"samples": samples} if samples else {}))

    def _check_finite(self, done: StepResult, saves: bool) -> None:
        """Check that what goes into metrics, and above all into a checkpoint, is finite: the loop does not look at every step of a GPU.

        Raises:
            NonFiniteError: naming the weights that are not.
        """
        broken = not done.skipped and not math.isfinite(float(done.grad_norm))
        bad = nonfinite_tensors(self.model.named_parameters()) if saves or broken else []
        if bad or broken:
            weights = f"the weights of {first_names(bad)} are not finite" if bad else "the weights are still finite, their gradient is not"
            text = f"step {done.step}, or one since the last line of metrics: {describe_losses(done.losses, self.world)}; {weights}"
            error = NonFiniteError(text, done.step - 1)
            raise Rollback(error) if self.run.stability.on_nonfinite == "rollback" else error

    def _check_carry(self, done: StepResult) -> None:
        if self.carry and (streams := self.carry.broken()):
            named = first_names([str(stream) for stream in streams])
            self._log_event(
                "carry", f"step {done.step}: the carried state of streams {named} was not finite and begins anew at zero", streams=streams
            )

    def _check_replicas(self, done: StepResult) -> None:
        """Check that all processes hold the same values, above all before a checkpoint takes those of the first.

        Raises:
            ReplicaMismatch: naming the processes and the tensors that differ.
        """
        if self.world.size == 1 or not self.run.stability.replica_check_every:
            return
        try:
            compare_replicas(self.model, self.optimizer, self.world)
        except ReplicaMismatch as error:
            error = ReplicaMismatch(f"step {done.step}: {error}", done.step - 1)
            raise (Rollback(error, skips_batches=False) if self.run.stability.on_replica_mismatch == "rollback" else error) from None

    def provenance(self, step: int | None, worst: int | None) -> list[Provenance]:
        """Return where the sequences of micro-batch number `worst` of step `step` (from 0) come from; nothing where that is not known."""
        return [] if step is None or worst is None else self.samples.provenance(step + self.progress.passed, self.world.size, worst)

    def _measures(self, done: StepResult) -> None:
        """Write what the loop measured at this step, if it did."""
        if done.tensors:
            rows: dict[str, list[float | None]] = done.tensors.rows()
            norms = {name: rows[name] for name, _ in self.model.named_parameters() if name in rows}
            self.metrics.write("tensor_norms", **self._where(done.step), tensor_norms=norms)
        if done.noise:
            groups = follow(self.progress.noise, done.noise)
            self.metrics.write("noise", **self._where(done.step), batch=done.sequences, groups=groups)

    def _announce(self) -> None:
        phase, processes = self.phase, self.world.size
        size, micro = self.samples.epoch_size(), micro_batch(phase, phase.steps, processes)
        accumulation = phase.global_batch_size // micro // processes
        split = f"{micro} x {accumulation}" if accumulation > 1 else f"{micro}"
        split += f" in each of {processes} processes" if processes > 1 else ""
        growing = f"{batch_size(phase, 0):,} to " if batch_warmup(phase).initial_batch_size else ""
        self.line.print(
            f"phase {self.name}: {plural(phase.steps, 'step')} of {growing}{plural(phase.global_batch_size, 'sequence')} ({split}) up to {phase.seq_len} tokens, "
            f"{sequences_before(phase, phase.steps) / size:.2f} epochs of {plural(size, 'example')}, {phase.optim.name} at {peak_lr(phase):g}, "
            f"{self.run.precision} on {self.world.device}" + (f" ({self.peak.text()})" if self.peak else "")
        )
        for text in group_lines(self.optimizer.param_groups):
            self.line.print(f"  {text}")
