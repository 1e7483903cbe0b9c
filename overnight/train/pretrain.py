"""Pretraining: prepared shards and a recipe to a trained network, phase by phase; run again to go on."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import torch

from overnight.batches.loader import Samples
from overnight.batches.order import key
from overnight.batches.size import micro_batch
from overnight.config import Phase, Run
from overnight.corpus.files import write_json
from overnight.corpus.shards import Shard, load_manifest, open_shards
from overnight.corpus.tokenizer import Vocabulary, load_vocabulary
from overnight.environment import environment
from overnight.errors import ConfigError, DataError
from overnight.models.bert import BertForPretraining
from overnight.optim.groups import build_optimizer
from overnight.train import checkpoint
from overnight.train.checkpoint import Progress
from overnight.train.folder import check_folder, claim_folder, same_corpus
from overnight.train.lock import hold
from overnight.train.monitor import Line, Metrics
from overnight.train.parallel import Elsewhere, World, agree, device_of, facts_of, joined, spread, together
from overnight.train.phase import PhaseTraining, Work
from overnight.train.precision import NotFinite, set_products
from overnight.train.signals import Interrupted, catch_signals

_TRAIN, _HELD_OUT = 0, 1


def set_up_machine(run: Run) -> torch.device:
    """Threads, device and kind of products of a run in this process."""
    if run.train.threads:
        torch.set_num_threads(run.train.threads)
    device = device_of(run)
    set_products(run.train.precision, device)
    return device


def new_model(run: Run, vocabulary: Vocabulary, device: torch.device) -> BertForPretraining:
    """The untrained network of a run: the same numbers on any device."""
    torch.manual_seed(key(run.seed, 0) >> 1)
    return BertForPretraining(run.model, vocabulary.size).to(device)


def check_batches(run: Run, processes: int = 1) -> None:
    """See that every batch can be cut for the processes, and that noise, if it is asked for, can be seen between micro-batches.

    Raises:
        ConfigError: naming the batch, or the phase that takes its batch at once.
    """
    if run.train.noise_every and processes > 1:
        raise ConfigError(f"train.noise_every = {run.train.noise_every}: noise is measured in one process only; set it to 0 under torchrun")
    for name, phase in run.phases.items():
        micro_batch(phase, 0, processes)
        if run.train.noise_every and phase.micro_batch >= phase.global_batch:
            raise ConfigError(
                f"train.noise_every = {run.train.noise_every}: noise is seen between micro-batches, and phase {name} takes its batch of "
                f"{phase.global_batch} sequences as one; set phases.{name}.micro_batch below {phase.global_batch}"
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
        self.manifest = load_manifest(run.data_dir)
        self.vocabulary = load_vocabulary(run.data_dir)
        self.shards = {split: open_shards(run.data_dir, split) for split in ("train", "valid")}
        self.model = new_model(run, self.vocabulary, self.device)
        self.objective = self.model.losses
        if run.train.compile:
            self.model.encoder.compile_layers()
        self.checkpoints = run.run_dir / "checkpoints"

    def samples(self, phase: Phase, number: int, split: str) -> Samples:
        """The stream of a split's examples for a phase."""
        shards: list[Shard] = self.shards[split]
        if not shards:
            raise DataError(f"{self.run.data_dir} holds no {split} text; raise data.valid_fraction or add documents")
        stream = (self.run.seed, number, _HELD_OUT if split == "valid" else _TRAIN)
        return Samples(shards, self.vocabulary, phase, stream, self.run.run_dir / "plans")

    def go(self) -> None:
        """Train every phase to its end, from the newest checkpoint.

        Raises:
            Interrupted: on SIGINT, SIGTERM or SIGUSR1, after a checkpoint.
            NotFinite: when training cannot go on; the newest checkpoint is from before.
        """
        names, main = list(self.run.phases), self.world.main
        with together(self.world):
            progress, moments, problems = checkpoint.load(self.checkpoints, self.model) or (Progress(), {}, [])
            if progress.phase and (progress.phase not in names):
                raise DataError(f"{self.checkpoints} are of a phase {progress.phase!r} that the recipe does not have")
            same_corpus(progress, self.manifest, self.run)
            progress.corpus = self.manifest.fingerprint()
            if main and not self.finished(progress):  # else it would name the machine that only looked
                write_json(self.run.run_dir / "env.json", environment())
        agree({"newest checkpoint": {"step": progress.global_step}}, self.world)
        if self.world.size > 1:
            self.objective = spread(self.model, self.world, self.run)
        board = self.run.run_dir / "tensorboard" if self.run.train.tensorboard and main else None
        path = self.run.run_dir / "metrics.jsonl" if main else None
        with Metrics(path, progress.metrics_bytes, board) as metrics, catch_signals() as signals:
            for problem in problems:
                self.line.say(f"falling back to an older checkpoint: {problem}")
                metrics.write("event", what="checkpoint fell back", message=problem, global_step=progress.global_step)
            if self.finished(progress):
                self.line.say(f"all phases are done; the newest checkpoint is {checkpoint.newest(self.checkpoints)}")
            elif progress.phase:
                self.line.say(f"continuing at step {progress.step} of phase {progress.phase}")
                metrics.write("event", what="resumed", global_step=progress.global_step, seconds=progress.seconds)
            work = Work(
                self.run, self.model, self.objective, self.world, self.samples, progress, self.checkpoints, metrics, self.line, signals
            )
            first = names.index(progress.phase) if progress.phase else 0
            for number, name in enumerate(names[first:], first):
                phase = self.run.phases[name]
                optimizer = build_optimizer(self.model, phase.optim)
                if progress.phase == name:
                    checkpoint.restore_optimizer(optimizer, moments)
                else:
                    if phase.optim.start == "keep" and moments:
                        checkpoint.restore_optimizer(optimizer, moments, restart_count=phase.optim.schedule.offset == 0)
                    progress.phase, progress.step, progress.running, progress.noise = name, 0, {}, {}
                    metrics.write("phase", phase=name, event="start", global_step=progress.global_step, seconds=progress.seconds)
                if progress.step < phase.steps:
                    try:
                        PhaseTraining(work, number, optimizer).train()
                    except NotFinite as error:
                        metrics.write("event", what="not finite", message=str(error), phase=name, global_step=progress.global_step)
                        raise NotFinite(f"phase {name}, {error}.\n{self._way_back()}") from None
                moments = checkpoint.optimizer_tensors(optimizer)

    def finished(self, progress: Progress) -> bool:
        """Whether the last phase is done."""
        name = list(self.run.phases)[-1]
        return progress.phase == name and progress.step >= self.run.phases[name].steps

    def _way_back(self) -> str:
        newest = checkpoint.newest(self.checkpoints)
        good = f"The last good checkpoint is {newest}, and" if newest else "There is no checkpoint yet, and"
        return f"{good} the same command goes on from there"


def pretrain(run: Run, line: Line | None = None) -> Path:
    """Pretrain the phases of a run whose data is prepared, in this process or with all that torchrun started; returns the newest checkpoint.

    Raises:
        ConfigError, DataError, Interrupted, NotFinite.
        UserError: when another process is writing the run folder.
    """
    with joined(run) as world, ExitStack() as held:
        with together(world):
            # First what can fail: a folder is claimed by a run that can begin.
            work = Pretraining(run, line or Line(), world)
            check_folder(run)
        agree(facts_of(run, work.manifest.fingerprint(), world), world)
        with together(world):
            if world.main:
                run.run_dir.mkdir(parents=True, exist_ok=True)
                held.enter_context(hold(run.run_dir))
                claim_folder(run)
        try:
            work.go()
        except (Interrupted, NotFinite) as error:  # in all processes; one says it
            raise error if world.main else Elsewhere(error.exit_code) from None
    newest = checkpoint.newest(work.checkpoints)
    assert newest is not None or not world.main, "every phase ends with a checkpoint"
    return newest or work.checkpoints
