"""Pretraining: prepared shards and a recipe to a trained network, phase by phase; run again to go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from overnight import config
from overnight.batches.loader import Samples
from overnight.batches.order import key
from overnight.batches.size import batch_size, sequences_before
from overnight.config import Phase, Run
from overnight.corpus.files import write_json, write_whole
from overnight.corpus.shards import Manifest, Shard, load_manifest, open_shards
from overnight.corpus.tokenizer import Vocabulary, load_vocabulary
from overnight.environment import environment
from overnight.errors import ConfigError, DataError, UserError
from overnight.models.bert import BertForPretraining
from overnight.optim.groups import build_optimizer, group_lines
from overnight.optim.noise import NoiseScale, follow, noise_text
from overnight.optim.schedules import learning_rate, peak_lr
from overnight.train import checkpoint
from overnight.train.checkpoint import Progress
from overnight.train.loop import Settings, Step, due, evaluate, optimise
from overnight.train.monitor import Line, Metrics, Speed, progress_text

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_TRAIN, _HELD_OUT = 0, 1


class Interrupted(UserError):
    """A signal asked the run to stop; a checkpoint was written."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class Signals:
    """Which of Ctrl-C and SIGTERM came; a second Ctrl-C stops at once."""

    received: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = number


@contextmanager
def catch_signals() -> Iterator[Signals]:
    """Within it, SIGINT and SIGTERM are noted instead of obeyed, so that the step in hand can end and be saved."""
    signals = Signals()
    before = {number: signal.signal(number, signals) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def device_of(run: Run) -> torch.device:
    """The device a run trains on.

    Raises:
        ConfigError: when it asks for a GPU that is not there.
    """
    wanted = run.train.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device = 'cuda': no GPU is visible to torch; use 'auto' or 'cpu'")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def set_up_machine(run: Run) -> torch.device:
    """Threads and device of a run.

    Raises:
        ConfigError: under a launcher of several processes, each of which would train the same.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(f"WORLD_SIZE = {os.environ['WORLD_SIZE']}: this version trains in one process; start it without torchrun")
    if run.train.threads:
        torch.set_num_threads(run.train.threads)
    return device_of(run)


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


def check_noise(run: Run) -> None:
    """See that every step has the two micro-batches between which noise is seen.

    Raises:
        ConfigError: naming the phase that takes its batch at once.
    """
    for name, phase in run.phases.items():
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
    """One run on one process: its network, data and files.

    Args:
        run: the recipe, resolved.
        line: where progress is shown.
    """

    def __init__(self, run: Run, line: Line) -> None:
        self.run, self.line = run, line
        check_noise(run)
        self.device = set_up_machine(run)
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
        )

    def go(self) -> None:
        """Train every phase to its end, from the newest checkpoint.

        Raises:
            Interrupted: on SIGINT or SIGTERM, after a checkpoint.
        """
        progress, moments, problems = checkpoint.load(self.checkpoints, self.model) or (Progress(), {}, [])
        board = self.run.run_dir / "tensorboard" if self.run.train.tensorboard else None
        names = list(self.run.phases)
        if progress.phase and (progress.phase not in names):
            raise DataError(f"{self.checkpoints} are of a phase {progress.phase!r} that the recipe does not have")
        same_corpus(progress, self.manifest, self.run)
        progress.corpus = self.manifest.fingerprint()
        if not self.finished(progress):  # else it would name the machine that only looked
            write_json(self.run.run_dir / "env.json", environment())
        with Metrics(self.run.run_dir / "metrics.jsonl", progress.metrics_bytes, board) as metrics, catch_signals() as signals:
            for problem in problems:
                self.line.say(f"falling back to an older checkpoint: {problem}")
                metrics.write("event", what="checkpoint fell back", message=problem, global_step=progress.global_step)
            if progress.phase and not self.finished(progress):
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
                    self._phase(number, name, optimizer, progress, metrics, signals)
                moments = checkpoint.optimizer_tensors(optimizer)

    def finished(self, progress: Progress) -> bool:
        """Whether the last phase is done."""
        name = list(self.run.phases)[-1]
        return progress.phase == name and progress.step >= self.run.phases[name].steps

    def _phase(
        self, number: int, name: str, optimizer: torch.optim.Optimizer, progress: Progress, metrics: Metrics, signals: Signals
    ) -> None:
        phase, train = self.run.phases[name], self.run.train
        samples = self.samples(phase, number, "train")
        held_out = self.samples(phase, number, "valid").held_out(train.eval_sequences)
        settings = self.settings(phase, number)
        # Fill the stream up to a multiple of 1/64 of its full size: a compiled model wants few shapes, and so does oneDNN, which
        # keeps a kernel for each (a GB after 250 steps of ever new sizes).
        grain = max(64, min(phase.micro_batch, phase.global_batch) * phase.length // 64)
        self.line.say(self._announce(name, phase, samples))
        for text in group_lines(optimizer.param_groups):
            self.line.say(f"  {text}")
        speed = Speed(self.run, number, progress)
        for done in optimise(self.model, self.objective, optimizer, lambda step: samples.step(step, grain=grain), settings, progress.step):
            last = done.step == phase.steps
            logs, evaluates, saves = (last or due(done.step - 1, n) for n in (train.log_every, train.eval_every, train.checkpoint_every))
            speed.note(done, progress, wait=logs or evaluates or saves)
            self._measures(done, progress, metrics)
            if logs:
                values = self._log(done, progress, metrics, speed, phase)
                self.line.show(progress_text(progress, phase.steps, values, *speed.left(progress)), final=last)
            if evaluates:
                held = evaluate(self.model, self.model.losses, held_out, settings)
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
            if saves or signals.received:
                speed.read(progress)
                progress.metrics_bytes = metrics.size()
                checkpoint.save(self.checkpoints, self.model, optimizer, progress, train.keep)
                speed.pause()
            if signals.received:
                word = "interrupted" if signals.received == signal.SIGINT else "terminated"
                message = f"{word} at step {done.step} of phase {name}; a checkpoint is written, the same command continues"
                raise Interrupted(signals.received, message)

    def _log(self, done: Step, progress: Progress, metrics: Metrics, speed: Speed, phase: Phase) -> dict[str, float]:
        means = {name: total / count for name, (total, count) in progress.running.items()}
        progress.running = {}
        rate = speed.rate(phase)
        norm = float(done.grad_norm)
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
            grad_norm=norm,
            tokens=progress.tokens,
            sequences=progress.sequences,
            **{name: round(value, 1) for name, value in rate.items()},
        )
        return {"loss": sum(means.values()), "lr": done.lr, "grad": norm}

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
        micro = min(phase.micro_batch, phase.global_batch)
        accumulation = phase.global_batch // micro
        cut = f"{micro} x {accumulation}" if accumulation > 1 else f"{phase.global_batch}"
        growing = f"{batch_size(phase, 0)} to " if phase.batch_warmup.start else ""
        return (
            f"phase {name}: {phase.steps} steps of {growing}{phase.global_batch} sequences ({cut}) up to {phase.length} tokens, "
            f"{sequences_before(phase, phase.steps) / size:.2f} epochs of {size:,} examples, {phase.optim.name} at {peak_lr(phase):g}, "
            f"{self.run.train.precision} on {self.device}"
        )


def pretrain(run: Run, line: Line | None = None) -> Path:
    """Pretrain the phases of a run whose data is prepared; returns the newest checkpoint.

    Raises:
        ConfigError, DataError, Interrupted.
    """
    # First what can fail: a folder is claimed by a run that can begin.
    work = Pretraining(run, line or Line())
    claim_folder(run)
    work.go()
    newest = checkpoint.newest(work.checkpoints)
    assert newest is not None, "every phase ends with a checkpoint"
    return newest
