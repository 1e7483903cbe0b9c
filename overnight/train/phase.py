"""One phase of pretraining: its steps, and between them what is logged, evaluated, saved and watched over."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from overnight.batches.loader import Samples
from overnight.batches.size import batch_size, micro_batch, sequences_before
from overnight.config import Phase, Run
from overnight.optim.groups import group_lines
from overnight.optim.noise import NoiseScale, follow, noise_text
from overnight.optim.schedules import learning_rate, peak_lr
from overnight.train import checkpoint
from overnight.train.checkpoint import Progress
from overnight.train.lock import Heartbeat
from overnight.train.loop import Objective, Settings, Step, due, evaluate, optimise
from overnight.train.monitor import Line, Metrics, Speed, progress_text
from overnight.train.parallel import World, greatest, together
from overnight.train.precision import DTYPES, START, LossScale, NotFinite, listed, losses_text, not_finite
from overnight.train.signals import Interrupted, Signals


@dataclass
class Work:
    """What the phases of a run share in one process."""

    run: Run
    model: nn.Module
    objective: Objective
    """Losses of the network, of which the backward pass adds up the gradients of all processes."""
    world: World
    samples: Callable[[Phase, int, str], Samples]
    """The stream of a split for a phase and its number."""
    progress: Progress
    checkpoints: Path
    metrics: Metrics
    line: Line
    signals: Signals


class PhaseTraining:
    """A phase in one process, from the step where the progress stands to its end.

    Args:
        work: what all phases share.
        number: of the phase, from 0.
        optimizer: with the state of that step.
    """

    def __init__(self, work: Work, number: int, optimizer: torch.optim.Optimizer) -> None:
        self.run, self.model, self.objective, self.world = work.run, work.model, work.objective, work.world
        self.progress, self.metrics, self.line, self.signals = work.progress, work.metrics, work.line, work.signals
        self.checkpoints, self.optimizer, self.number = work.checkpoints, optimizer, number
        self.name, self.phase = list(work.run.phases.items())[number]
        self.samples, self.valid = (work.samples(self.phase, number, split) for split in ("train", "valid"))
        self.settings = self._settings()
        self.speed = Speed(work.run, number, work.progress, work.world)

    def _settings(self) -> Settings:
        """What the loop needs to know of the phase."""
        phase, train = self.phase, self.run.train
        return Settings(
            steps=phase.steps,
            lr=lambda step: learning_rate(phase, step),
            max_grad_norm=phase.optim.max_grad_norm,
            dtype=DTYPES[train.precision],
            device=self.world.device,
            seed=(self.run.seed, self.number),
            measure_every=train.telemetry_every,
            noise_every=train.noise_every,
            on_nonfinite=train.on_nonfinite,
            world=self.world,
        )

    def train(self) -> None:
        """Take the steps that are left.

        Raises:
            Interrupted: after a checkpoint.
            NotFinite: when training cannot go on.
        """
        phase, train, world, progress = self.phase, self.run.train, self.world, self.progress
        with together(world):
            if world.main:  # The others find its plans of the first epoch in the folder.
                self.samples.epoch_size(), self.valid.epoch_size()
        self.held_out = self.valid.held_out(train.eval_sequences)
        self._announce()
        # Fill the stream up to a multiple of 1/64 of its full size: a compiled model wants few shapes, and so does oneDNN, which
        # keeps a kernel for each (a GB after 250 steps of ever new sizes).
        grain = max(64, micro_batch(phase, phase.steps, world.size) * phase.length // 64)
        heartbeat = Heartbeat(self.run.run_dir)
        scale = LossScale(progress.loss_scale or START, progress.clean_steps) if train.precision == "fp16" else None
        batches = partial(self.samples.step, rank=world.rank, world=world.size, grain=grain)
        for done in optimise(self.model, self.objective, self.optimizer, batches, self.settings, progress.step, scale):
            last = done.step == phase.steps
            logs, evaluates, saves = (last or due(done.step - 1, n) for n in (train.log_every, train.eval_every, train.checkpoint_every))
            self.speed.note(done, progress, wait=logs or evaluates or saves)
            received = greatest(self.signals.received or 0, world)
            if world.main:
                heartbeat.beat(self.name, done.step)
            self._note_scale(done, scale)
            if logs or evaluates or saves or received:
                self._see_finite(done, bool(saves or received))
            self._measures(done)
            if logs:
                values = self._log(done)
                self.line.show(progress_text(progress, phase.steps, values, *self.speed.left(progress)), final=last)
            if evaluates:
                self._evaluate(done)
            if last:
                self.metrics.write("phase", phase=self.name, event="end", global_step=progress.global_step, seconds=self._seconds())
            if saves or received:
                self._save()
            if received:
                raise Interrupted(received, f"step {done.step} of phase {self.name}")

    def _seconds(self) -> float:
        return round(self.progress.seconds, 3)

    def _where(self, step: int) -> dict[str, str | int | float]:
        return {"phase": self.name, "step": step, "global_step": self.progress.global_step, "seconds": self._seconds()}

    def _log(self, done: Step) -> dict[str, float]:
        """Write a line of metrics; returns what is shown of it."""
        progress = self.progress
        means = {name: total / count for name, (total, count) in progress.running.items()}
        progress.running = {}
        rate = self.speed.rate(self.phase)
        norm = float(done.grad_norm)
        if not means:  # Every step since the last line was skipped, with a loss that is no number.
            return {"lr": done.lr, "grad": norm}
        self.metrics.write(
            "train",
            **self._where(done.step),
            loss=sum(means.values()),
            **{f"{name}_loss": value for name, value in means.items()},
            lr=done.lr,
            **({"batch": done.sequences} if self.phase.batch_warmup.start else {}),
            grad_norm=norm if math.isfinite(norm) else None,
            **({"loss_scale": progress.loss_scale} if progress.loss_scale else {}),
            **({"skipped": progress.skipped} if progress.loss_scale or progress.skipped else {}),
            tokens=progress.tokens,
            sequences=progress.sequences,
            **{name: round(value, 1) for name, value in rate.items()},
        )
        return {"loss": sum(means.values()), "lr": done.lr, "grad": norm}

    def _evaluate(self, done: Step) -> None:
        held = evaluate(self.model, self.objective, self.held_out, self.settings)
        self.metrics.write("eval", **self._where(done.step), **held)
        text = "  ".join(f"{k.replace('_', ' ')} {v:.4f}" for k, v in held.items())
        self.line.say(f"{self.name} {done.step}/{self.phase.steps}  held out: {text}")
        if "run" in self.progress.noise:
            self.line.say(noise_text(NoiseScale(*self.progress.noise["run"]).value, done.sequences))
        self.speed.pause()

    def _save(self) -> None:
        self.speed.read(self.progress)
        self.progress.metrics_bytes = self.metrics.size()
        checkpoint.save(self.checkpoints, self.model, self.optimizer, self.progress, self.run.train.keep, self.world)
        self.speed.pause()

    def _note_scale(self, done: Step, scale: LossScale | None) -> None:
        """Keep the loss scale for the next checkpoint, and tell of a step that was skipped."""
        if scale:
            self.progress.loss_scale, self.progress.clean_steps = scale.scale, scale.clean
        if done.skipped:
            then = f"; the loss scale is now {scale.scale:g}" if scale else ""
            message = f"step {done.step} skipped: {done.skipped}{then}"
            self.line.say(message)
            self.metrics.write("event", what="skipped", message=message, phase=self.name, global_step=self.progress.global_step)

    def _see_finite(self, done: Step, saves: bool) -> None:
        """See that what goes into metrics, and above all into a checkpoint, is finite: the loop does not look at every step of a GPU.

        Raises:
            NotFinite: naming the weights that are not.
        """
        broken = not done.skipped and not math.isfinite(float(done.grad_norm))
        bad = not_finite(self.model.named_parameters()) if saves or broken else []
        if bad or broken:
            weights = f"the weights of {listed(bad)} are not finite" if bad else "the weights are still finite, their gradient is not"
            raise NotFinite(f"step {done.step}, or one since the last line of metrics: {losses_text(done.losses, self.world)}; {weights}")

    def _measures(self, done: Step) -> None:
        """Write what the loop measured at this step, if it did."""
        if done.tensors:
            rows: dict[str, list[float | None]] = done.tensors.rows()
            tensors = {name: rows[name] for name, _ in self.model.named_parameters() if name in rows}
            self.metrics.write("tensors", **self._where(done.step), tensors=tensors)
        if done.noise:
            groups = follow(self.progress.noise, done.noise)
            self.metrics.write("noise", **self._where(done.step), batch=done.sequences, groups=groups)

    def _announce(self) -> None:
        phase, processes = self.phase, self.world.size
        size, micro = self.samples.epoch_size(), micro_batch(phase, phase.steps, processes)
        accumulation = phase.global_batch // micro // processes
        cut = f"{micro} x {accumulation}" if accumulation > 1 else f"{micro}"
        cut += f" in each of {processes} processes" if processes > 1 else ""
        growing = f"{batch_size(phase, 0)} to " if phase.batch_warmup.start else ""
        self.line.say(
            f"phase {self.name}: {phase.steps} steps of {growing}{phase.global_batch} sequences ({cut}) up to {phase.length} tokens, "
            f"{sequences_before(phase, phase.steps) / size:.2f} epochs of {size:,} examples, {phase.optim.name} at {peak_lr(phase):g}, "
            f"{self.run.train.precision} on {self.world.device}"
        )
        for text in group_lines(self.optimizer.param_groups):
            self.line.say(f"  {text}")
