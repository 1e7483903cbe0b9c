"""What a phase of training writes down: lines of metrics, events, and the progress that is shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from overnight.batches.batch_size import batch_size, batch_warmup, full_micro_batch, sequences_before
from overnight.config import BertConfig, BertPhase, ModernBertConfig, Phase, Run
from overnight.console import Status, facts
from overnight.display import plural, share
from overnight.distributed.stragglers import StragglerMonitor
from overnight.engine.context import PhaseContext
from overnight.engine.core_waits import CoreWaits
from overnight.engine.loop import StepResult
from overnight.engine.memory import peak_gb
from overnight.engine.precision import DTYPES, LossScale, slow_precision
from overnight.engine.spikes import minimized
from overnight.engine.throughput import Throughput
from overnight.engine.workload import compiles_layers, why_not_compiled_again
from overnight.models.attention import how
from overnight.models.fused_layer import why_not, why_not_compiled
from overnight.optim import native
from overnight.optim.batch import why_lists
from overnight.optim.groups import group_lines
from overnight.optim.layerwise import Layerwise
from overnight.optim.noise import NoiseScale, follow, noise_text
from overnight.optim.schedules import peak_lr

# Loss of token matching, far below the 0.5 of a network that cannot compare two texts (docs/recipes.md).
_LEARNED = 0.3


class MetricsLogger:
    """The metrics of a phase in one process, and what is added up between their lines.

    Args:
        context: what all phases share.
        number: of the phase, from 0.
        weights: of the losses of a step, from 0, by name; 1 where there is none.
        state: of :meth:`state_dict` at the step that the phase resumes from; empty at its beginning.
    """

    def __init__(self, context: PhaseContext, number: int, weights: Callable[[int], Mapping[str, float]], state: Mapping[str, Any]) -> None:
        self.context, self.run, self.number, self.weights = context, context.run, number, weights
        self.name = list(context.phases)[number]
        self.speed = Throughput(context.phases, number, context.world, context.workload.flops, context.peak, state.get("running"))
        self.noise: dict[str, list[float]] = state.get("noise", {})
        self.stragglers = StragglerMonitor(context.world)
        self.core_waits = CoreWaits() if context.world.device.type == "cpu" else None
        self.values: dict[str, Any] = {}
        self.known = {"validation accuracy": "", "checkpoint": ""}
        """What the progress shows beside the values of the last line, in words."""

    @property
    def phase(self) -> Phase:
        """The phase, with its steps as they are known by now."""
        return self.context.phases[self.name]

    def state_dict(self) -> dict[str, Any]:
        """Return the sum and the number of targets of each loss since the last line, and the averages of the noise scale."""
        return {"running": self.speed.running, "noise": self.noise}

    def note(self, done: StepResult, wait: bool) -> None:
        """Count a step; with `wait` the device has then done it."""
        self.speed.note(done, self.context.progress, wait)
        self.stragglers.note(done.waited, done.worked)
        if self.core_waits and (said := self.core_waits.look()):
            self.event("busy_cores", said)

    def place(self, step: int) -> dict[str, str | int | float]:
        """Return where a line of metrics belongs."""
        progress = self.context.progress
        return {"phase": self.name, "step": step, "global_step": progress.global_step, "seconds": round(progress.seconds, 3)}

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Write a line of metrics for a step."""
        self.context.metrics.write(kind, **self.place(step), **values)

    def event(self, event: str, message: str, **more: Any) -> None:
        """Print what happened, and write it among the metrics."""
        self.context.line.print(message)
        global_step = self.context.progress.global_step
        self.context.metrics.write("event", event=event, message=message, phase=self.name, global_step=global_step, **more)

    def log(self, done: StepResult, scale: LossScale | None) -> dict[str, float]:
        """Write a line of metrics, and keep it for the progress.

        Returns:
            the loss that is minimized and the gradient norm, to look for spikes; nothing where every step since the last line was skipped.
        """
        progress, running, rate = self.context.progress, self.speed.take_losses(), self.speed.rate()
        means = {name: total / count for name, (total, count) in running.items() if count}
        if not means:
            return {}
        losses = minimized(means, {name: count for name, (_, count) in running.items()}, self.weights(done.step - 1))
        norm, memory = float(done.grad_norm), round(peak_gb(self.context.world.device), 3)
        share, slow = self.stragglers.line()
        self.values = dict(
            loss=next(iter(losses.values())),
            **{f"{name}_loss": value for name, value in means.items()},
            lr=done.lr,
            **({"batch": done.sequences} if batch_warmup(self.phase).initial_batch_size else {}),
            grad_norm=norm if math.isfinite(norm) else None,
            **({"loss_scale": scale.scale} if scale else {}),
            **({"skipped": progress.skipped} if scale or progress.skipped else {}),
            tokens=progress.tokens,
            sequences=progress.sequences,
            **rate,
            **({"memory_gb": memory} if memory else {}),
            **share,
        )
        if slow:
            self.event("slow_process", slow)
        self.write("train", done.step, **self.values)
        # What a budget is too short for was left out before it could be learned, which its decision says.
        phase, planner = self.phase, self.context.planner
        left_out = planner and isinstance(phase, BertPhase) and planner.leaves_out_pairs(self.name, done.step - 1)
        if not left_out and (said := not_learned(phase, done.step, self.run.logging.log_every, means)):
            self.event("token_matching", said)
        if wrong := self.speed.exceeds():
            self.event("peak", wrong)
            self.context.peak = self.speed.peak = None
        return {**losses, "grad_norm": norm}

    def log_measured(self, done: StepResult, model: nn.Module) -> None:
        """Write the norms of every tensor and the noise scale, where the loop measured them at this step."""
        if done.tensors:
            rows: dict[str, list[float | None]] = done.tensors.rows()
            self.write("tensor_norms", done.step, tensor_norms={name: rows[name] for name, _ in model.named_parameters() if name in rows})
        if done.noise:
            self.write("noise", done.step, batch=done.sequences, groups=follow(self.noise, done.noise))

    def log_memory(self, phase: Phase) -> None:
        """Write what the phase took at most, by what it follows from."""
        progress, segment = self.context.progress, self.run.memory.activation_checkpointing
        most = round(peak_gb(self.context.world.device), 3)
        facts = {"micro_batch_size": phase.micro_batch_size, "seq_len": phase.seq_len, "activation_checkpointing": segment, "peak_gb": most}
        self.context.metrics.write("event", event="memory", phase=self.name, global_step=progress.global_step, **facts)

    def print_noise(self, sequences: int) -> None:
        """Print the noise scale, where it is measured, compared with a batch."""
        if "run" in self.noise:
            self.context.line.print(noise_text(NoiseScale(*self.noise["run"]).value, sequences))

    def status(self) -> Status:
        """Return where the run stands."""
        phases, progress, peak = list(self.context.phases.items()), self.context.progress, self.speed.peak
        done = {name: p.steps if at < self.number else 0 for at, (name, p) in enumerate(phases)} | {self.name: progress.step}
        words = facts(self.values, " of the measured peak" if peak and peak.measured else "", self.known)
        planner = self.context.planner
        left = self.speed.left(progress, planner.left() if planner and planner.record.trained is None else 0.0)
        return Status(self.name, {name: (done[name], p.steps) for name, p in phases}, left, words)

    def announce(self, phase: Phase, samples: Any, optimizer: torch.optim.Optimizer) -> None:
        """Print what the phase will do.

        Args:
            phase: with the micro-batch that it begins with.
            samples: of the training text: how many an epoch has, and how often each source is read.
        """
        examples, sequences = samples.epoch_size(), sequences_before(phase, phase.steps)
        processes = self.context.world.size
        micro = full_micro_batch(phase, processes)
        accumulation = phase.global_batch_size // micro // processes
        split = f"{micro} x {accumulation}" if accumulation > 1 else f"{micro}"
        split += f" in each of {processes} processes" if processes > 1 else ""
        growing = f"{batch_size(phase, 0):,} to " if batch_warmup(phase).initial_batch_size else ""
        peak = self.speed.peak
        self.context.line.print(
            f"phase {self.name}: {plural(phase.steps, 'step')} of {growing}{plural(phase.global_batch_size, 'sequence')} ({split}) up to "
            f"{phase.seq_len} tokens, {sequences / examples:.2f} epochs of {plural(examples, 'example')}, "
            f"{phase.optim.name} {'continued' if phase.continues else f'at {peak_lr(phase):g}'}, {self.run.precision} on {self.context.world.device}"
            + (f" ({peak.text()})" if peak else "")
        )
        mixed = [f"{name} {share(part)} = {epochs:.2f} epochs" for name, (part, epochs) in samples.passes(sequences).items()]
        for text in [
            *([f"mixture: {', '.join(mixed)}"] if mixed else []),
            *group_lines(optimizer.param_groups),
            *self._paths(optimizer),
        ]:
            self.context.line.print(f"  {text}")

    def _paths(self, optimizer: torch.optim.Optimizer) -> Iterator[str]:
        """Yield which kernels a GPU takes, and why not the fastest; of a CPU only what it lacks."""
        device, model = self.context.world.device, self.run.model
        if device.type == "cpu" and (why := native.why_not()):
            yield f"warning: everything takes longer, LAMB, LANS and LARS four times as long, since nothing can be compiled in C: {why}"
        if emulated := slow_precision(self.run.precision, device):
            yield f"warning: {emulated}"
        if device.type == "cuda" and isinstance(optimizer, Layerwise):
            why = why_lists(device)
            yield f"optimizer: steps by lists of tensors, since {why}" if why else "optimizer: steps by Triton's kernels"
        if device.type == "cuda" and isinstance(model, BertConfig | ModernBertConfig):
            size, dropped = model.hidden_size // model.num_heads, getattr(model, "attention_dropout", 0.0)
            yield f"attention: {how(device, DTYPES[self.run.precision], size, dropped)}"
            if not compiles_layers(self.run, device):
                why = why_not_compiled(device) if self.run.compute.torch_compile == "auto" else "compute.torch_compile is false"
                yield f"layers: not compiled, since {why}"
            elif emulated:  # Inductor passes over such graphs
                yield "layers: not compiled, since torch.compile takes no bf16 that is emulated"
            else:
                yield _compiled(self.run, model, device)


def _compiled(run: Run, model: BertConfig | ModernBertConfig, device: torch.device) -> str:
    """Return how the layers of an encoder are computed on a GPU that could compile them."""
    why = ""
    if isinstance(model, BertConfig) and run.precision != "fp8":
        why = why_not(device, DTYPES[run.precision], model.hidden_size, model.num_heads, model.attention_dropout)
        if not why:
            return "layers: by Triton's kernels between the products"
    if again := why_not_compiled_again(run):
        return f"layers: not compiled, since {again}"
    return f"layers: compiled, since {why}" if why else "layers: compiled"


def not_learned(phase: Phase, step: int, every: int, losses: Mapping[str, float]) -> str:
    """Return what to do where token matching is not learned when its share falls, or at the end of the phase; else nothing.

    Args:
        step: of a line of metrics; the last one was `every` steps before.
        losses: means since then, by name.
    """
    if not isinstance(phase, BertPhase) or losses.get("match", 0.0) < _LEARNED:
        return ""
    falls, left = min(phase.token_matching_steps or phase.steps, phase.steps), phase.final_token_matching
    fallen, ended = falls < phase.steps and step - every < falls <= step, step == phase.steps and (left or falls == phase.steps)
    if not (fallen or ended):
        return ""
    text = f"token matching is not learned after {step if ended else falls:,} steps (loss {losses['match']:.2f}; below 0.1 when it is)"
    if fallen and not ended and left:
        return f"{text}; {share(left)} of the sequences are still pairs, and the end of the phase says whether that is too few"
    key = "token_matching_steps" if falls < phase.steps else "steps"
    return f"{text}, which will hurt tasks that compare texts: raise {key} or token_matching"
