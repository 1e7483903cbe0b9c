"""One phase of training: its steps, and between them what is logged, evaluated and saved."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch

from overnight.batches.batch_size import full_micro_batch, pad_to_multiple, sequences_before
from overnight.batches.masking import falling_rate
from overnight.batches.matching import share_of_pairs
from overnight.checkpoint.reader import TrainingProgress
from overnight.config import BertPhase, Phase
from overnight.config.optimizers import ClippingOptim
from overnight.distributed.collectives import all_reduce_max, raise_on_all_ranks
from overnight.distributed.wrap import settle_buckets
from overnight.engine.context import PhaseContext
from overnight.engine.loop import LoopConfig, StepResult, due, training_steps
from overnight.engine.memory import HOW_TO_SAVE_MEMORY, OutOfMemory, first_line, is_out_of_memory, release, reset_peak
from overnight.engine.metrics_logger import MetricsLogger
from overnight.engine.micro_batch import halve, schedule_of
from overnight.engine.precision import DTYPES
from overnight.engine.stability import StabilityGuard
from overnight.engine.validator import Validator
from overnight.engine.workload import loss_weights
from overnight.optim.schedules import decay_factors, learning_rates
from overnight.run_dir.lock import Heartbeat
from overnight.signals import Interrupted

# In the place of a signal's number: a checkpoint could not be written, which the processes must know at the same step.
_UNSAVED = 1 << 16


def count_skipped(phase: Phase, progress: TrainingProgress) -> None:
    """Count the sequences that rollbacks passed over, of a checkpoint from before they were counted: a step then read the whole batch of a later one."""
    if progress.batches_skipped and not progress.sequences_skipped:
        read = sequences_before(phase, progress.step + progress.batches_skipped)
        progress.sequences_skipped = read - sequences_before(phase, progress.step)


class Trainer:
    """A phase in one process, from the step where the progress stands to its end.

    Args:
        context: what all phases share.
        number: of the phase, from 0.
        optimizer: with the state of that step.
    """

    def __init__(self, context: PhaseContext, number: int, optimizer: torch.optim.Optimizer) -> None:
        self.context, self.run, self.world, self.progress = context, context.run, context.world, context.progress
        self.number, self.optimizer, self.model = number, optimizer, context.workload.model
        self.name = list(self.run.phases)[number]
        self.phase: Phase = context.phases[self.name]
        self.samples, valid = (context.workload.samples(self.phase, number, split) for split in ("train", "valid"))
        self.carry = context.workload.carry(self.samples)
        if self.carry and context.carried:
            self.carry.load(context.carried["streams"])
        count_skipped(self.phase, self.progress)
        self.samples.passed_over = self.progress.sequences_skipped
        if isinstance(self.phase, BertPhase):
            self._schedule_samples(self.phase)
        self.settings, states = self._settings(), self.progress.states
        self.logger = MetricsLogger(context, number, self.settings.weights, states.get("metrics", {}))
        self.guard = StabilityGuard(context, self.logger, self.samples, self.carry, states)
        self.validator = Validator(context, self.logger, valid, self.settings)

    def _schedule_samples(self, phase: BertPhase) -> None:
        """Have what is predicted follow the step."""
        planner = self.context.planner
        if phase.final_mlm_probability:
            decay = planner.decay_factors(phase, self.name) if planner else decay_factors(phase)
            self.samples.set_mask_rate(falling_rate(phase.mlm_probability, phase.final_mlm_probability, decay))
        if phase.token_matching:
            self.samples.set_share_of_pairs(planner.shares_of_pairs(phase, self.name) if planner else partial(share_of_pairs, phase))

    def _settings(self) -> LoopConfig:
        phase, run, planner = self.phase, self.run, self.context.planner
        return LoopConfig(
            steps=phase.steps,
            lr=planner.learning_rates(phase, self.name) if planner else learning_rates(phase),
            max_grad_norm=phase.optim.max_grad_norm if isinstance(phase.optim, ClippingOptim) else 0.0,
            dtype=DTYPES[run.precision],
            device=self.world.device,
            seed=(run.seed, self.number),
            measure_every=run.logging.tensor_norms_every,
            noise_every=run.logging.grad_noise_every,
            weights=partial(loss_weights, phase),
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
        with self._apart("start"):
            with raise_on_all_ranks(self.world):
                if self.world.main:  # The others find its plans of the first epoch in the folder.
                    self.samples.epoch_size(), self.validator.samples.epoch_size()
            self.schedule = schedule_of(self.context, self.name, self.samples, self.optimizer, self.logger)
        reset_peak(self.world.device)
        self._use_micro_batch()
        if self.world.size > 1 and progress.global_step:
            self._settle_buckets()
        if planner := self.context.planner:
            with self._apart("warm-up"):
                self.validator.warm_up()
            validation = min(self.run.logging.eval_examples, self.validator.samples.epoch_size())
            planner.begin(self.number, progress.step, self.samples.epoch_size(), validation, self.logger)
        if self.context.announces and not (planner and planner.measuring):
            self.logger.announce(self.phase, self.samples, self.optimizer)
        heartbeat = Heartbeat(self.run.run_dir)
        while progress.step < self.context.phases[self.name].steps:
            self._use_micro_batch()
            try:
                self._steps(heartbeat)
            except OutOfMemory as error:
                text, smaller = halve(self.schedule, self.phase, progress, self.world, error)
                release(self.model, self.world.device)
                self.logger.event("out_of_memory", text, micro_batch_size=smaller)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                # In the optimizer or the evaluation, where a smaller micro-batch is of no use.
                raise OutOfMemory(f"after step {progress.step} of phase {self.name}: {first_line(error)}. {HOW_TO_SAVE_MEMORY}") from None

    def _settle_buckets(self) -> None:
        """Have DDP add up the first step after a resume in the order of a run that was not stopped, by a pass whose gradients are thrown away."""
        progress, world = self.progress, self.world
        next_step = self.samples.step(progress.step, rank=world.rank, world=world.size)
        try:
            settle_buckets(self.context.objective, next_step.micro[0].to(world.device), DTYPES[self.run.precision])
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            halve(
                self.schedule, self.phase, progress, world, OutOfMemory(f"step {progress.step + 1} ran out of memory ({first_line(error)})")
            )
        release(self.model, world.device)

    def _use_micro_batch(self) -> None:
        """Use the micro-batch that is due from the present step on."""
        phase = self.context.phases[self.name]
        self.phase = replace(phase, micro_batch_size=self.schedule.at(self.progress.step))
        for source in (self.samples, self.validator):
            source.set_micro_batch_size(self.phase.micro_batch_size)

    def _steps(self, heartbeat: Heartbeat) -> None:
        """Take steps as long as the batches are split as they are now."""
        phase, world, progress, writer = self.phase, self.world, self.progress, self.context.writer
        settings = replace(self.settings, steps=self.schedule.until(progress.step, phase.steps))
        # Not by the steps of the phase: a budget only expects them, and fewer may fill the streams up otherwise.
        multiple = pad_to_multiple(phase, full_micro_batch(phase, world.size))
        batches = partial(self.samples.step, rank=world.rank, world=world.size, pad_to_multiple=multiple)
        objective, begin, guard, planner = self.context.objective, progress.step, self.guard, self.context.planner
        for done in training_steps(
            self.model, objective, self.optimizer, batches, settings, begin, guard.scale, guard.detector, self.carry
        ):
            last = done.step == self.context.phases[self.name].steps
            every = (self.run.logging.log_every, self.run.logging.eval_every, self.run.checkpoint.save_every)
            logs, evaluates, saves = (last or due(done.step - 1, n) for n in every)
            looks = planner is not None and not last and planner.due(done.step)
            saves = saves or (looks and planner is not None and planner.before_decay)
            self.logger.note(done, wait=logs or evaluates or saves or looks)
            received = all_reduce_max(_UNSAVED if writer.error else self.context.signals.received or 0, world)
            if received == _UNSAVED:
                writer.wait()
            if world.main:
                heartbeat.beat(self.name, done.step)
            guard.note(done)
            saves = bool(saves or received)
            guard.check_replicas(done, self.optimizer, saves)  # first: it says which process has a NaN that the others do not have
            if logs or evaluates or saves:
                guard.check_finite(done, saves)
            self._report(done, logs, evaluates, last)
            if saves:
                with self._apart("checkpoint"):
                    self._save()
            if received:
                writer.wait()
                raise Interrupted(received, f"step {done.step} of phase {self.name}")
            if looks and self._look(done.step):
                return

    def _look(self, step: int) -> bool:
        """Look at the clock, of a run with a budget; return whether the phase has other steps now."""
        planner = self.context.planner
        assert planner is not None
        measured = planner.measuring
        decided = planner.look(step, self.logger)
        if measured and decided and self.context.announces:
            phase = replace(self.context.phases[self.name], micro_batch_size=self.phase.micro_batch_size)
            self.logger.announce(phase, self.samples, self.optimizer)
        return decided

    def _report(self, done: StepResult, logs: bool, evaluates: bool, last: bool) -> None:
        """Log and evaluate what is due after a step."""
        logger, line = self.logger, self.context.line
        logger.log_measured(done, self.model)
        if logs:
            if seen := logger.log(done, self.guard.scale):
                self.guard.look_for_spike(done.step, seen)
            self.guard.check_carry(done)
        if logs or line.due():
            line.update(logger.status(), final=last)
        if evaluates and self.validator.steps:
            with self._apart("evaluation"):
                self.validator.evaluate(done)
        if last:
            logger.log_memory(self.phase)
            place = logger.place(done.step)
            self.context.metrics.write("phase", **{key: place[key] for key in ("phase", "global_step", "seconds")}, event="end")

    def _apart(self, what: str) -> AbstractContextManager[None]:
        """Return what counts the time within it apart from that of the steps, where the run has a budget."""
        return self.context.planner.clock.pause(what) if self.context.planner else nullcontext()

    def _save(self) -> None:
        context, logger, progress = self.context, self.logger, self.progress
        with raise_on_all_ranks(self.world):
            context.workload.check_data(progress)
            progress.metrics_bytes = context.metrics.sync()
        logger.speed.read()
        progress.states = {"metrics": logger.state_dict(), **self.guard.state_dict()}
        carried = {"streams": self.carry.whole()} if self.carry else None
        stall_seconds = context.writer.save(self.model, self.optimizer, progress, carried)
        logger.write("event", progress.step, event="checkpoint_saved", save_seconds=round(stall_seconds, 3))
        logger.known["checkpoint"] = f"step {progress.global_step:,}"
        logger.speed.pause()
