"""Pretraining: prepared shards and a recipe to a trained network, phase by phase; run again to resume."""

from __future__ import annotations

import gc
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overnight.batches.batch_size import micro_batch
from overnight.batches.packing import Provenance
from overnight.checkpoint import reader
from overnight.checkpoint.reader import Progress
from overnight.checkpoint.run_corpus import assert_same_corpus, find_data, keep_corpus
from overnight.checkpoint.run_identity import check_folder, claim_folder, unrecorded_extensions
from overnight.checkpoint.writer import CheckpointWriter
from overnight.config import Run
from overnight.console import Line
from overnight.display import plural
from overnight.distributed.collectives import ErrorOnOtherRank, assert_same_on_all_ranks, raise_on_all_ranks, shared_facts
from overnight.distributed.world import World, device_of, process_group
from overnight.distributed.wrap import distribute_like, parallelize_model
from overnight.engine.loop import Objective
from overnight.engine.precision import DTYPES, set_matmul_precision
from overnight.engine.spikes import Rollback, provenance_text
from overnight.engine.throughput import peak_of_all
from overnight.engine.trainer import PhaseContext, Trainer
from overnight.engine.workload import build_workload
from overnight.errors import ConfigError, DataError, TrainingError
from overnight.models.flops import device_peak
from overnight.optim.groups import build_optimizer
from overnight.run_dir.atomic import write_json
from overnight.run_dir.environment import environment
from overnight.run_dir.lock import run_lock
from overnight.run_dir.metrics import Metrics, open_loggers
from overnight.signals import Interrupted, catch_signals
from overnight.state_files import sealed

# Rollbacks to one checkpoint before the run stops.
_ROLLBACKS = 20


def set_up_machine(run: Run) -> torch.device:
    """Set the threads and the matmul precision of a run in this process; return its device."""
    if run.compute.threads:
        torch.set_num_threads(run.compute.threads)
    device = device_of(run)
    set_matmul_precision(run.precision, device)
    return device


def check_batches(run: Run, processes: int = 1) -> None:
    """Check that every batch can be split over the processes, and that noise, if it is asked for, can be seen between micro-batches.

    Raises:
        ConfigError: naming the batch, or the phase that takes its batch at once.
    """
    if run.logging.grad_noise_every and processes > 1:
        raise ConfigError(
            f"logging.grad_noise_every = {run.logging.grad_noise_every}: noise is measured in one process only; set it to 0 under torchrun"
        )
    for name, phase in run.phases.items():
        micro_batch(phase, 0, processes)
        if run.logging.grad_noise_every and (phase.micro_batch_size or 1) >= phase.global_batch_size:
            raise ConfigError(
                f"logging.grad_noise_every = {run.logging.grad_noise_every}: noise is seen between micro-batches, and phase {name} takes its batch of "
                f"{phase.global_batch_size} sequences as one; set phases.{name}.micro_batch_size below {phase.global_batch_size}"
            )


class Pretraining:
    """One run in one process, or in each of many: its network, data and files.

    Args:
        run: the recipe, resolved.
        line: where progress is shown.
        world: the processes that share every step; None for this one.
    """

    def __init__(self, run: Run, line: Line, world: World | None = None) -> None:
        self.device = set_up_machine(run)
        self.world = world or World(device=self.device)
        self.run, self.line = run, line if self.world.main else Line(Path(os.devnull).open("w"))  # noqa: SIM115
        check_batches(run, self.world.size)
        self.workload = build_workload(run, self.world)
        self.manifest, self.model, self.samples = self.workload.manifest, self.workload.model, self.workload.samples
        self.objective: Objective = self.model.losses
        self.checkpoints = run.run_dir / "checkpoints"

    def go(self) -> None:
        """Train every phase to its end, from the newest checkpoint.

        Raises:
            Interrupted: on SIGINT, SIGTERM or SIGUSR1, after a checkpoint.
            TrainingError: when training cannot continue; the newest checkpoint is from before.
        """
        names, main = list(self.run.phases), self.world.main
        carried: dict[str, Tensor] = {}
        with raise_on_all_ranks(self.world):
            progress, moments, problems = reader.load_checkpoint(self.checkpoints, self.model, carried) or (Progress(), {}, [])
            if progress.phase and (progress.phase not in names):
                raise DataError(f"{self.checkpoints} are of a phase {progress.phase!r} that the recipe does not have")
            self._same_optimizer(progress)
            assert_same_corpus(progress, self.manifest, self.run.data_dir, self.run)
            progress.corpus = self.manifest.fingerprint()
            if main:
                keep_corpus(self.run, self.manifest)
            if main and not self.finished(progress):  # else it would name the machine that only looked
                write_json(self.run.run_dir / "env.json", sealed(environment()))
        assert_same_on_all_ranks({"newest checkpoint": {"step": progress.global_step}}, self.world)
        if self.world.size > 1:
            self.objective = parallelize_model(self.model, self.world, self.run)
        with raise_on_all_ranks(self.world):
            loggers = open_loggers(self.run, progress.global_step, self.line.print) if main and not self.finished(progress) else []
        # Measured in all processes at once, which may share a machine.
        peak = peak_of_all(device_peak(self.device, self.run.precision, DTYPES[self.run.precision]), self.world)
        path = self.run.run_dir / "metrics.jsonl" if main else None
        with (
            Metrics(path, progress.metrics_bytes, loggers) as metrics,
            catch_signals() as signals,
            CheckpointWriter(
                self.checkpoints,
                self.run.checkpoint.keep_latest_k,
                self.run.checkpoint.keep_every_n_steps,
                self.run.checkpoint.async_save,
                self.world,
            ) as writer,
        ):
            for problem in problems:
                self.line.print(f"falling back to an older checkpoint: {problem}")
                metrics.write("event", event="checkpoint_fell_back", message=problem, global_step=progress.global_step)
            for event in unrecorded_extensions(self.run, progress) if main else ():
                self.line.print(event["message"])
                metrics.write("event", **event, global_step=progress.global_step)
            if self.finished(progress):
                self.line.print(f"all phases are done; the newest checkpoint is {reader.newest_checkpoint(self.checkpoints)}")
            elif progress.phase:
                self.line.print(f"continuing at step {progress.step} of phase {progress.phase}")
                metrics.write("event", event="resumed", global_step=progress.global_step, seconds=progress.seconds)
            context = PhaseContext(
                self.run, self.workload, self.objective, self.world, progress, writer, metrics, self.line, signals, peak, carried
            )
            first = names.index(progress.phase) if progress.phase else 0
            for number in range(first, len(names)):
                moments = self._train(context, number, moments)

    def _train(self, context: PhaseContext, number: int, moments: dict[str, Tensor]) -> dict[str, Tensor]:
        """Train a phase to its end, from where the progress stands; returns the optimizer's tensors.

        Args:
            moments: the optimizer's tensors of the checkpoint that the run resumes from, or of the phase before.
        """
        name, phase = list(self.run.phases.items())[number]
        events: list[dict[str, Any]] = []  # rollbacks to the newest checkpoint, which knows nothing of them
        if context.progress.phase != name:
            context.progress.passed = 0
        while True:
            progress, metrics = context.progress, context.metrics
            optimizer = build_optimizer(self.model, phase.optim)
            if progress.phase == name:
                reader.restore_optimizer(optimizer, moments)
            else:
                if moments and not phase.optim.reset_moments:
                    reader.restore_optimizer(optimizer, moments, restart_count=phase.optim.schedule.step_offset == 0)
                progress.phase, progress.step, progress.running, progress.noise, progress.watched = name, 0, {}, {}, {}
                context.carried.clear()
                validation = {f"validation_{what}": self.manifest.count("valid", what) for what in ("documents", "tokens")}
                metrics.write("phase", phase=name, event="start", global_step=progress.global_step, seconds=progress.seconds, **validation)
            for event in events:
                metrics.write("event", **event)
            progress.optimizer = phase.optim.name
            if progress.step >= phase.steps:
                return reader.optimizer_tensors(optimizer)
            training = Trainer(context, number, optimizer)
            try:
                training.train()
                return reader.optimizer_tensors(optimizer)
            except Rollback as bad:
                samples = training.provenance(bad.error.step, bad.error.worst)
                del training, optimizer  # before there are others
                moments = self._go_back(bad, context, number, samples, events)
            except TrainingError as error:
                raise self._final_error(error, context, training.provenance(error.step, error.worst)) from None

    def _go_back(
        self, bad: Rollback, context: PhaseContext, number: int, samples: list[Provenance], events: list[dict[str, Any]]
    ) -> dict[str, Tensor]:
        """Put the newest checkpoint, or the untrained network, in the place of what was trained since; returns the optimizer's tensors.

        A kill after it changes nothing: the next start comes to the same step by itself, and goes back again.

        Args:
            samples: that may have to do with it.
            events: rollbacks so far to the newest checkpoint; one is added.

        Raises:
            TrainingError: the cause, when going back does not help.
        """
        progress, error, names = context.progress, bad.error, list(self.run.phases)
        assert error.step is not None
        context.writer.wait()
        whole = self.workload.untrained(torch.device("cpu"))
        context.carried.clear()
        with raise_on_all_ranks(self.world):
            restored, moments, _ = reader.load_checkpoint(self.checkpoints, whole, context.carried) or (
                Progress(corpus=progress.corpus),
                {},
                [],
            )
        assert_same_on_all_ranks({"newest checkpoint": {"step": restored.global_step}}, self.world)
        if events and events[-1]["to_step"] != restored.global_step:
            events.clear()
        if len(events) == _ROLLBACKS:
            again = f"{error}. The run went back to step {restored.global_step} {_ROLLBACKS} times: lower the learning rate, or look at the data"
            raise self._final_error(type(error)(again), context, samples)
        inside = restored.phase == names[number]
        if not inside and (names.index(restored.phase) + 1 if restored.phase else 0) != number:
            raise self._final_error(error, context, samples)  # Checkpoints were damaged; the next start resumes in an earlier phase.
        steps = error.step + 1 - (restored.step if inside else 0)
        restored.passed, restored.seconds = progress.passed + steps * bad.skips_batches, progress.seconds
        with torch.no_grad():
            tensors = self.model.state_dict()
            for name, tensor in whole.state_dict().items():
                tensors[name].copy_(distribute_like(tensors[name], tensor))
        context.metrics.back_to(restored.metrics_bytes, restored.global_step)
        context.progress = restored
        place = {
            "phase": names[number],
            "global_step": restored.global_step,
            "from_step": restored.global_step + steps,
            "to_step": restored.global_step,
        }
        data = f", passing over {plural(steps, 'step')} of data" if bad.skips_batches else ""
        text = ". ".join(part for part in (str(error), provenance_text(samples)) if part)
        message = f"phase {names[number]}: gone back from step {place['from_step']} to step {place['to_step']} of the run{data}: {text}"
        self.line.print(message)
        events.append(
            {
                "event": "rolled_back",
                "message": message,
                **place,
                "cause": error.event,
                "batches_skipped": restored.passed,
                "samples": samples,
            }
        )
        return moments

    def _final_error(self, error: TrainingError, context: PhaseContext, samples: list[Provenance]) -> TrainingError:
        """Return the error that ends the run, with its place, its data and the way back."""
        text = ". ".join(part for part in (f"phase {context.progress.phase}, {error}", provenance_text(samples)) if part)
        place = {"phase": context.progress.phase, "global_step": context.progress.global_step}
        context.metrics.write("event", event=error.event, message=text, **place, **({"samples": samples} if samples else {}))
        return type(error)(f"{text}.\n{self._where_to_resume(context.writer)}")

    def finished(self, progress: Progress) -> bool:
        """Return whether the last phase is done."""
        name = list(self.run.phases)[-1]
        return progress.phase == name and progress.step >= self.run.phases[name].steps

    def _same_optimizer(self, progress: Progress) -> None:
        theirs, ours = progress.optimizer, self.run.phases[progress.phase].optim.name if progress.phase else ""
        if theirs and theirs != ours:
            raise DataError(
                f"the checkpoints in {self.checkpoints} are of {theirs}, and phase {progress.phase} trains with {ours}, which cannot continue "
                "with its moments; give this run a new folder (--out=...)"
            )

    def _where_to_resume(self, writer: CheckpointWriter) -> str:
        writer.settle()
        newest = reader.newest_checkpoint(self.checkpoints)
        good = f"The last good checkpoint is {newest}, and" if newest else "There is no checkpoint yet, and"
        return f"{good} the same command resumes from there" + (f"; the {writer.error}" if writer.error else "")


def pretrain(run: Run, line: Line | None = None, extend: bool = False) -> Path:
    """Pretrain the phases of a run whose data is prepared, in this process or with all that torchrun started; returns the newest checkpoint.

    Args:
        extend: the run folder may hold a shorter run, which this one resumes from.

    Raises:
        ConfigError, DataError, Interrupted, TrainingError.
        UserError: when another process is writing the run folder.
    """
    with process_group(run) as world, ExitStack() as locks:
        with raise_on_all_ranks(world):
            # First what can fail: a folder is claimed by a run that can begin.
            pretraining = Pretraining(find_data(run), line or Line(), world)
            check_folder(run, extend)
        assert_same_on_all_ranks(shared_facts(run, pretraining.manifest.fingerprint(), world), world)
        with raise_on_all_ranks(world):
            if world.main:
                run.run_dir.mkdir(parents=True, exist_ok=True)
                locks.enter_context(run_lock(run.run_dir))
                claim_folder(run, extend)
        try:
            pretraining.go()
        except (Interrupted, TrainingError) as error:  # in all processes; one says it
            raise error if world.main else ErrorOnOtherRank(error.exit_code) from None
        finally:
            pretraining.line.clear()
        # DDP must be gone before its process group is, or the last thread of gloo waits for the interpreter, and the interpreter for it.
        pretraining.objective = pretraining.model.losses
        gc.collect()
    newest = reader.newest_checkpoint(pretraining.checkpoints)
    assert newest is not None or not world.main, "every phase ends with a checkpoint"
    return newest or pretraining.checkpoints
