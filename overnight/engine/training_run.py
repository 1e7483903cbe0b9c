"""A training in one process, or in each of many: its phases one after another, from the newest checkpoint; run again to resume."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from overnight.batches.batch_size import micro_batch
from overnight.checkpoint import reader
from overnight.checkpoint.reader import TrainingProgress
from overnight.checkpoint.run_identity import unrecorded_extensions
from overnight.checkpoint.writer import CheckpointWriter
from overnight.config import Phase, Run
from overnight.config.validate import refuse_int8
from overnight.console import Line
from overnight.distributed.collectives import ErrorOnOtherRank, assert_same_on_all_ranks, raise_on_all_ranks
from overnight.distributed.world import World, device_of
from overnight.distributed.wrap import parallelize_model
from overnight.engine.budget_extension import unrecorded_budgets
from overnight.engine.context import PhaseContext
from overnight.engine.loop import Objective
from overnight.engine.planner import Planner, open_planner
from overnight.engine.precision import DTYPES, set_deterministic, set_matmul_precision
from overnight.engine.recovery import Recovery
from overnight.engine.spikes import Rollback
from overnight.engine.throughput import peak_of_all
from overnight.engine.trainer import Trainer
from overnight.engine.workload import Workload, build_workload
from overnight.errors import ConfigError, DataError, TrainingError
from overnight.machine import keep_freed_memory, usable_cores, use_large_pages, why_no_kernels
from overnight.models.flops import device_peak
from overnight.optim.groups import build_optimizer
from overnight.optim.offload import offload
from overnight.run_dir.atomic import write_json
from overnight.run_dir.environment import environment
from overnight.run_dir.metrics import Metrics, open_loggers
from overnight.signals import Interrupted, catch_signals
from overnight.state_files import sealed


def set_up_machine(run: Run, predicts: bool = False) -> torch.device:
    """Set the threads, the pages of memory, the matmul precision and the determinism of a run in this process; return its device.

    Args:
        predicts: the network is trained no more, and asked for what texts give.

    Raises:
        ConfigError: where 8 bits are asked for and something else is done, or it is not done on a CPU; where torch has no kernels for the GPU.
    """
    if not predicts:
        refuse_int8(run)
    if run.compute.threads:
        torch.set_num_threads(run.compute.threads)
    elif usable_cores() < torch.get_num_threads():  # torch counts the cores of the machine, also in a container that has the time of a few
        torch.set_num_threads(usable_cores())
    device = device_of(run)
    if run.precision == "int8" and device.type != "cpu":
        raise ConfigError("precision = int8: is for CPUs; take bf16, or compute.device=cpu")
    built = torch.cuda.get_arch_list() if device.type == "cuda" else []
    if built and (why := why_no_kernels(torch.cuda.get_device_capability(device), built)):
        raise ConfigError(f"compute.device: {why}, or train on the CPU with compute.device=cpu")
    if device.type == "cpu":
        use_large_pages()
        if not predicts:
            keep_freed_memory()
    set_matmul_precision(run.precision, device)
    if run.compute.deterministic:
        set_deterministic(device)
    return device


def check_batches(run: Run, processes: int) -> None:
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
                f"logging.grad_noise_every = {run.logging.grad_noise_every}: noise is measured between micro-batches, and phase {name} takes its batch of "
                f"{phase.global_batch_size} sequences as a single one; set phases.{name}.micro_batch_size below {phase.global_batch_size}"
            )


class TrainingRun:
    """One run in one process, or in each of many: its network, data and files.

    Args:
        run: the recipe, resolved.
        line: where progress is shown.
        world: the processes that share every step; None for this one.
        workload: data and network, where they are not the recipe's; a function of the world.
        announces: whether it prints what each phase will do, and where it continues.
    """

    def __init__(
        self,
        run: Run,
        line: Line,
        world: World | None = None,
        workload: Callable[[World], Workload] | None = None,
        announces: bool = True,
    ) -> None:
        self.device = set_up_machine(run)
        self.world = world or World(device=self.device)
        self.run, self.line = run, line if self.world.main else Line(Path(os.devnull).open("w"))  # noqa: SIM115
        check_batches(run, self.world.size)
        self.workload = workload(self.world) if workload else build_workload(run, self.world)
        self.model, self.announces = self.workload.model, announces
        self.objective: Objective = self.model.losses
        self.checkpoints = run.run_dir / "checkpoints"
        self.phases: dict[str, Phase] = dict(run.phases)
        self.planner: Planner | None = None

    def go(self) -> None:
        """Train every phase to its end, from the newest checkpoint.

        Raises:
            Interrupted: on SIGINT, SIGTERM, SIGHUP or SIGUSR1, after a checkpoint; without one where it ended the compiler of the layers.
            TrainingError: when training cannot continue; the newest checkpoint is from before.
        """
        try:
            self._go()
        except (Interrupted, TrainingError) as error:  # in all processes; one says it
            raise error if self.world.main else ErrorOnOtherRank(error.exit_code) from None
        finally:
            self.line.clear()
        # DDP must be gone before its process group is, or the last thread of gloo waits for the interpreter, and the interpreter for it.
        self.objective = self.model.losses
        gc.collect()

    def _restore(self, carried: dict[str, Tensor]) -> tuple[TrainingProgress, dict[str, Tensor], list[str]]:
        """Fill the network from the newest checkpoint; return the progress, the optimizer's tensors, and what was wrong with newer checkpoints."""
        with raise_on_all_ranks(self.world):
            found = reader.load_checkpoint(self.checkpoints, self.model, carried)
            progress, moments, problems = found or (TrainingProgress(), {}, [])
            if progress.phase and progress.phase not in self.run.phases:
                raise DataError(f"{self.checkpoints} are of a phase {progress.phase!r} that the recipe does not have")
            self._same_optimizer(progress)
            self.workload.check_data(progress)
            progress.corpus = self.workload.fingerprint
            if self.world.main:
                self.workload.keep()
                if not self.finished(progress):  # else it would name the machine that only looked
                    write_json(self.run.run_dir / "env.json", sealed(environment()))
        assert_same_on_all_ranks({"newest checkpoint": {"step": progress.global_step}}, self.world)
        return progress, moments, problems

    def _go(self) -> None:
        names, main = list(self.run.phases), self.world.main
        carried: dict[str, Tensor] = {}
        self.planner, self.phases = open_planner(self.run, self.world, self.run.phases)
        progress, moments, problems = self._restore(carried)
        if self.world.size > 1:
            self.objective = parallelize_model(self.model, self.world, self.run)
        with raise_on_all_ranks(self.world):
            loggers = open_loggers(self.run, progress.global_step, self.line.print) if main and not self.finished(progress) else []
        # Measured in all processes at once, which may share a machine.
        peak = peak_of_all(device_peak(self.device, self.run.precision, DTYPES[self.run.precision]), self.world)
        path = self.run.run_dir / "metrics.jsonl" if main else None
        with (
            Metrics(path, progress.metrics_bytes, loggers, progress.global_step) as metrics,
            catch_signals() as signals,
            CheckpointWriter(
                self.checkpoints,
                self.run.checkpoint.keep_latest_k,
                self.run.checkpoint.keep_every_n_steps,
                self.run.checkpoint.async_save,
                self.world,
                self._first_decay,
            ) as writer,
        ):
            for problem in problems:
                self.line.print(f"falling back to an older checkpoint: {problem}")
                metrics.write("event", event="checkpoint_fell_back", message=problem, global_step=progress.global_step)
            lost = [{"event": "metrics_lost", "message": metrics.lost}] if metrics.lost else []
            for event in [*lost, *unrecorded_extensions(self.run, progress), *unrecorded_budgets(self.run)] if main else ():
                self.line.print(event["message"])
                metrics.write("event", **event, global_step=progress.global_step)
            if self.finished(progress):
                if self.announces:
                    self.line.print(f"all phases are done; the newest checkpoint is {reader.newest_checkpoint(self.checkpoints)}")
            elif progress.phase:
                if self.announces:
                    self.line.print(f"continuing at step {progress.step} of phase {progress.phase}")
                metrics.write("event", event="resumed", global_step=progress.global_step, seconds=progress.seconds)
            context = PhaseContext(
                self.run,
                self.workload,
                self.objective,
                self.world,
                progress,
                writer,
                metrics,
                self.line,
                signals,
                self.phases,
                self.planner,
                peak,
                carried,
                self.announces,
            )
            first = names.index(progress.phase) if progress.phase else 0
            for number in range(first, len(names)):
                moments = self._train(context, number, moments)
        if self.planner:
            self.planner.finish(self.line.print)

    def _train(self, context: PhaseContext, number: int, moments: dict[str, Tensor]) -> dict[str, Tensor]:
        """Train a phase to its end, from where the progress stands; returns the optimizer's tensors.

        Args:
            moments: the optimizer's tensors of the checkpoint that the run resumes from, or of the phase before.
        """
        name, phase = list(self.run.phases.items())[number]
        recovery = Recovery(context, number, self.checkpoints)
        if context.progress.phase != name:
            context.progress.batches_skipped = context.progress.sequences_skipped = 0
        while True:
            progress, metrics = context.progress, context.metrics
            optimizer = build_optimizer(self.model, phase.optim)
            if self.run.memory.optimizer_cpu_offload and context.world.device.type == "cuda":  # a CPU is its own host
                offload(optimizer)
            if progress.phase == name:
                reader.restore_optimizer(optimizer, moments)
            else:
                if moments and not phase.optim.reset_moments:
                    reader.restore_optimizer(optimizer, moments, restart_count=phase.optim.schedule.step_offset == 0)
                progress.phase, progress.step = name, 0
                progress.states = {part: state for part, state in progress.states.items() if part == "loss_scale"}
                context.carried.clear()
                metrics.write(
                    "phase",
                    phase=name,
                    event="start",
                    global_step=progress.global_step,
                    seconds=progress.seconds,
                    **self.workload.validation_counts(),
                )
            for event in recovery.events:
                metrics.write("event", **event)
            progress.optimizer = phase.optim.name
            if progress.step >= self._steps(name):
                return reader.optimizer_tensors(optimizer)
            training = Trainer(context, number, optimizer)
            try:
                training.train()
                return reader.optimizer_tensors(optimizer)
            except Rollback as bad:
                samples = training.guard.provenance(bad.error.step, bad.error.worst)
                del training, optimizer  # before there are others
                moments = recovery.go_back(bad, samples)
            except TrainingError as error:
                raise recovery.final_error(error, training.guard.provenance(error.step, error.worst)) from None
            except RuntimeError as error:
                received = context.signals.received
                # A terminal sends its signal to the compiler, too, which ends by it.
                if received and isinstance(error, torch._dynamo.exc.BackendCompilerFailed):
                    where = f"step {progress.step + 1} of phase {name}, whose layers were being compiled"
                    raise Interrupted(received, where, "the same command continues from the newest checkpoint, if there is one") from None
                raise

    def finished(self, progress: TrainingProgress) -> bool:
        """Return whether the last phase is done."""
        name = list(self.run.phases)[-1]
        return progress.phase == name and progress.step >= self._steps(name)

    def _first_decay(self) -> int | None:
        """Return the step at which the decay of the first phase begins, None while a budget has not decided it: with more time, the run continues from before it."""
        return self.planner.record.first_decay(next(iter(self.run.phases))) if self.planner else None

    def _steps(self, phase: str) -> float:
        """Return the steps of a phase; of one whose end is still to be decided, more than any."""
        return self.phases[phase].steps if self.planner is None or self.planner.decays(phase) else math.inf

    def _same_optimizer(self, progress: TrainingProgress) -> None:
        theirs, ours = progress.optimizer, self.run.phases[progress.phase].optim.name if progress.phase else ""
        if theirs and theirs != ours:
            raise DataError(
                f"the checkpoints in {self.checkpoints} are of {theirs}, and phase {progress.phase} trains with {ours}, which cannot continue "
                "with its moments; give this run a new folder (--out=...)"
            )
