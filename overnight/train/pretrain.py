"""Pretraining: prepared shards and a recipe to a trained network, phase by phase; run again to go on."""

from __future__ import annotations

import math
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from overnight import config
from overnight.batches.loader import Samples
from overnight.batches.order import key
from overnight.batches.size import batch_size, micro_batch, sequences_before
from overnight.config import Phase, Run
from overnight.corpus.files import write_json, write_whole
from overnight.corpus.shards import Manifest, Shard, load_manifest, open_shards
from overnight.corpus.tokenizer import Vocabulary, load_vocabulary
from overnight.environment import environment
from overnight.errors import ConfigError, DataError
from overnight.models.bert import BertForPretraining
from overnight.optim.groups import build_optimizer, group_lines
from overnight.optim.noise import NoiseScale, follow, noise_text
from overnight.optim.schedules import learning_rate, peak_lr
from overnight.train import checkpoint
from overnight.train.checkpoint import Progress
from overnight.train.lock import Heartbeat, hold
from overnight.train.loop import Settings, Step, due, evaluate, optimise
from overnight.train.monitor import Line, Metrics, Speed, progress_text
from overnight.train.parallel import Elsewhere, World, agree, device_of, facts_of, greatest, joined, spread, together
from overnight.train.precision import DTYPES, START, LossScale, NotFinite, listed, losses_text, not_finite, set_products
from overnight.train.signals import Interrupted, Signals, catch_signals

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


def same_corpus(progress: Progress, manifest: Manifest, run: Run) -> None:
    """See that a checkpoint was trained on the data that lies in the run's data folder now.

    Raises:
        DataError: when the data was prepared anew since.
    """
    if progress.corpus not in ("", manifest.fingerprint()):
        raise DataError(
            f"{run.data_dir} was prepared anew since the checkpoints in {run.run_dir} were written: this run cannot go on with other data; "
            "give it a new folder (--out=...)"
        )


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


def check_folder(run: Run) -> None:
    """See that the run folder is new or holds this run.

    Raises:
        ConfigError: when it belongs to another recipe, naming the fields that differ.
    """
    import yaml

    path = run.run_dir / "run.yaml"
    if path.exists():
        theirs = config.build(yaml.safe_load(path.read_text(encoding="utf-8")))
        different = list(config.differences(config.identity(theirs), config.identity(run)))
        if different:
            listed = "\n  ".join(different)
            raise ConfigError(f"{run.run_dir} holds another run:\n  {listed}\nGive this one its own folder (--out=...) or delete that one")


def claim_folder(run: Run) -> None:
    """Make the run folder, unless it holds another run, and write `run.yaml` with the settings as they are now."""
    check_folder(run)
    write_whole(run.run_dir / "run.yaml", [config.save(run).encode()])


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

    def settings(self, phase: Phase, number: int) -> Settings:
        """What the loop needs to know of a phase."""
        return Settings(
            steps=phase.steps,
            lr=lambda step: learning_rate(phase, step),
            max_grad_norm=phase.optim.max_grad_norm,
            dtype=DTYPES[self.run.train.precision],
            device=self.device,
            seed=(self.run.seed, number),
            measure_every=self.run.train.telemetry_every,
            noise_every=self.run.train.noise_every,
            on_nonfinite=self.run.train.on_nonfinite,
            world=self.world,
        )

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
                        self._phase(number, name, optimizer, progress, metrics, signals)
                    except NotFinite as error:
                        metrics.write("event", what="not finite", message=str(error), phase=name, global_step=progress.global_step)
                        raise NotFinite(f"phase {name}, {error}.\n{self._way_back()}") from None
                moments = checkpoint.optimizer_tensors(optimizer)

    def finished(self, progress: Progress) -> bool:
        """Whether the last phase is done."""
        name = list(self.run.phases)[-1]
        return progress.phase == name and progress.step >= self.run.phases[name].steps

    def _phase(
        self, number: int, name: str, optimizer: torch.optim.Optimizer, progress: Progress, metrics: Metrics, signals: Signals
    ) -> None:
        phase, train, world = self.run.phases[name], self.run.train, self.world
        samples, valid = (self.samples(phase, number, split) for split in ("train", "valid"))
        with together(world):
            if world.main:  # The others find its plans of the first epoch in the folder.
                samples.epoch_size(), valid.epoch_size()
        held_out = valid.held_out(train.eval_sequences)
        settings = self.settings(phase, number)
        # Fill the stream up to a multiple of 1/64 of its full size: a compiled model wants few shapes, and so does oneDNN, which
        # keeps a kernel for each (a GB after 250 steps of ever new sizes).
        grain = max(64, micro_batch(phase, phase.steps, world.size) * phase.length // 64)
        self.line.say(self._announce(name, phase, samples))
        for text in group_lines(optimizer.param_groups):
            self.line.say(f"  {text}")
        speed, heartbeat = Speed(self.run, number, progress, world), Heartbeat(self.run.run_dir)
        scale = LossScale(progress.loss_scale or START, progress.clean_steps) if train.precision == "fp16" else None
        work = partial(samples.step, rank=world.rank, world=world.size, grain=grain)
        for done in optimise(self.model, self.objective, optimizer, work, settings, progress.step, scale):
            last = done.step == phase.steps
            logs, evaluates, saves = (last or due(done.step - 1, n) for n in (train.log_every, train.eval_every, train.checkpoint_every))
            speed.note(done, progress, wait=logs or evaluates or saves)
            received = greatest(signals.received or 0, world)
            if world.main:
                heartbeat.beat(name, done.step)
            self._note_scale(done, scale, progress, metrics)
            if logs or evaluates or saves or received:
                self._see_finite(done, bool(saves or received))
            self._measures(done, progress, metrics)
            if logs:
                values = self._log(done, progress, metrics, speed, phase)
                self.line.show(progress_text(progress, phase.steps, values, *speed.left(progress)), final=last)
            if evaluates:
                held = evaluate(self.model, self.objective, held_out, settings)
                metrics.write(
                    "eval", phase=name, step=done.step, global_step=progress.global_step, seconds=round(progress.seconds, 3), **held
                )
                self.line.say(
                    f"{name} {done.step}/{phase.steps}  held out: " + "  ".join(f"{k.replace('_', ' ')} {v:.4f}" for k, v in held.items())
                )
                if "run" in progress.noise:
                    self.line.say(noise_text(NoiseScale(*progress.noise["run"]).value, done.sequences))
                speed.pause()
            if last:
                metrics.write("phase", phase=name, event="end", global_step=progress.global_step, seconds=round(progress.seconds, 3))
            if saves or received:
                speed.read(progress)
                progress.metrics_bytes = metrics.size()
                checkpoint.save(self.checkpoints, self.model, optimizer, progress, train.keep, world)
                speed.pause()
            if received:
                raise Interrupted(received, f"step {done.step} of phase {name}")

    def _log(self, done: Step, progress: Progress, metrics: Metrics, speed: Speed, phase: Phase) -> dict[str, float]:
        means = {name: total / count for name, (total, count) in progress.running.items()}
        progress.running = {}
        rate = speed.rate(phase)
        norm = float(done.grad_norm)
        if not means:  # Every step since the last line was skipped, with a loss that is no number.
            return {"lr": done.lr, "grad": norm}
        metrics.write(
            "train",
            phase=progress.phase,
            step=done.step,
            global_step=progress.global_step,
            seconds=round(progress.seconds, 3),
            loss=sum(means.values()),
            **{f"{name}_loss": value for name, value in means.items()},
            lr=done.lr,
            **({"batch": done.sequences} if phase.batch_warmup.start else {}),
            grad_norm=norm if math.isfinite(norm) else None,
            **({"loss_scale": progress.loss_scale} if progress.loss_scale else {}),
            **({"skipped": progress.skipped} if progress.loss_scale or progress.skipped else {}),
            tokens=progress.tokens,
            sequences=progress.sequences,
            **{name: round(value, 1) for name, value in rate.items()},
        )
        return {"loss": sum(means.values()), "lr": done.lr, "grad": norm}

    def _note_scale(self, done: Step, scale: LossScale | None, progress: Progress, metrics: Metrics) -> None:
        """Keep the loss scale for the next checkpoint, and tell of a step that was skipped."""
        if scale:
            progress.loss_scale, progress.clean_steps = scale.scale, scale.clean
        if done.skipped:
            then = f"; the loss scale is now {scale.scale:g}" if scale else ""
            message = f"step {done.step} skipped: {done.skipped}{then}"
            self.line.say(message)
            metrics.write("event", what="skipped", message=message, phase=progress.phase, global_step=progress.global_step)

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

    def _way_back(self) -> str:
        newest = checkpoint.newest(self.checkpoints)
        good = f"The last good checkpoint is {newest}, and" if newest else "There is no checkpoint yet, and"
        return f"{good} the same command goes on from there"

    def _measures(self, done: Step, progress: Progress, metrics: Metrics) -> None:
        """Write what the loop measured at this step, if it did."""
        seconds = round(progress.seconds, 3)
        where = {"phase": progress.phase, "step": done.step, "global_step": progress.global_step, "seconds": seconds}
        if done.tensors:
            rows = done.tensors.rows()
            metrics.write("tensors", **where, tensors={name: rows[name] for name, _ in self.model.named_parameters() if name in rows})
        if done.noise:
            metrics.write("noise", **where, batch=done.sequences, groups=follow(progress.noise, done.noise))

    def _announce(self, name: str, phase: Phase, samples: Samples) -> str:
        size = samples.epoch_size()
        micro, processes = micro_batch(phase, phase.steps, self.world.size), self.world.size
        accumulation = phase.global_batch // micro // processes
        cut = f"{micro} x {accumulation}" if accumulation > 1 else f"{micro}"
        cut += f" in each of {processes} processes" if processes > 1 else ""
        growing = f"{batch_size(phase, 0)} to " if phase.batch_warmup.start else ""
        return (
            f"phase {name}: {phase.steps} steps of {growing}{phase.global_batch} sequences ({cut}) up to {phase.length} tokens, "
            f"{sequences_before(phase, phase.steps) / size:.2f} epochs of {size:,} examples, {phase.optim.name} at {peak_lr(phase):g}, "
            f"{self.run.train.precision} on {self.device}"
        )


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
