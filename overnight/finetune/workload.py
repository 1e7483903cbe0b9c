"""Fine-tuning as the engine trains it: a labeled task instead of a corpus, and an encoder with a head."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from overnight.batches.batch_size import micro_batch
from overnight.batches.order import key
from overnight.batches.packing import Provenance, StepBatches
from overnight.checkpoint import reader
from overnight.checkpoint.reader import TrainingProgress
from overnight.config import OPTIMIZERS, BertPhase, BertRun, Finetune, Phase, Schedule
from overnight.corpus.tokenizer import Vocabulary
from overnight.distributed.world import World
from overnight.engine.loop import StepResult
from overnight.engine.workload import set_up_encoder
from overnight.finetune.encoded_examples import EncodedExamples
from overnight.finetune.encoded_task import EncodedTask
from overnight.models.building import plain_defaults
from overnight.models.flops import training_flops
from overnight.models.heads import Classifier, QuestionAnswering, TokenClassifier

# Sub-streams of a task's seed.
_INIT, _ORDER, _DROPOUT = 1, 2, 3
# Checkpoints of a seed at most, beside the last.
_CHECKPOINTS = 10
# Learning rates of AdamW at two widths, and of the optimizers whose steps are scaled by a norm: LAMB and Muon.
_RATES, _RATE_BY_NORM = ((256, 3e-4), (768, 5e-5)), 1e-3


def task_model(task_kind: str, labels: int, run: BertRun, vocab_size: int) -> Classifier | TokenClassifier | QuestionAnswering:
    """Return the untrained network of a task, with the encoder of a run."""
    if task_kind == "spans":
        return QuestionAnswering(run.model, vocab_size)
    if task_kind == "token_classification":
        return TokenClassifier(run.model, vocab_size, labels)
    return Classifier(run.model, vocab_size, 1 if task_kind == "regression" else labels)


def config_hash(run: BertRun, spec: Finetune, source: Path, data: str) -> str:
    """Return a hash of all that decides the result of a seed: the settings of the task, the precision, the checkpoint it begins from, and the rows.

    Of a search it says only that there is one, so that a trial is the same in every search that has it.

    Args:
        data: hash of the files of the task.
    """
    undecided = {"seeds": [], "random_init_seeds": 0, "micro_batch_size": 0, "search": bool(spec.search.combinations)}
    facts = json.dumps([asdict(spec) | undecided, source.name, reader.model_digest(source), run.precision, data])
    return hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()


def with_rate(spec: Finetune, hidden_size: int) -> Finetune:
    """Return a task with its learning rate, which fits the optimizer and the width of the network where none is given.

    AdamW's falls with the width, by a power that goes through 3e-4 at 256, which is its most, and 5e-5 at 768: the small BERTs of Turc et al. 2019
    (arXiv 1908.08962) were fine-tuned by up to the one, as was ELECTRA of width 256 (Clark et al. 2020, arXiv 2003.10555), BERT-base (Devlin et al.
    2018, arXiv 1810.04805) by up to the other.
    """
    if spec.lr:
        return spec
    if spec.optimizer != "adamw":
        return replace(spec, lr=_RATE_BY_NORM)
    (small, high), (base, low) = _RATES
    power = math.log(high / low) / math.log(base / small)
    return replace(spec, lr=float(f"{high * (small / max(hidden_size, small)) ** power:.2g}"))


def seed_run(run: BertRun, spec: Finetune, examples: int, seed: int, name: str, folder: Path) -> BertRun:
    """Return the run that fine-tunes one seed, with one phase of all its epochs.

    Args:
        examples: to train on.
        name: of the phase.
        folder: of its checkpoints and metrics.
    """
    batch = min(spec.global_batch_size, examples)
    micro = next(size for size in range(min(spec.micro_batch_size, batch), 0, -1) if batch % size == 0)
    steps = max(1, round(spec.epochs * examples / batch))
    optim = OPTIMIZERS[spec.optimizer](
        lr=spec.lr,
        weight_decay=spec.weight_decay,
        layer_lr_decay=spec.layer_lr_decay,
        schedule=Schedule(warmup_ratio=spec.warmup_ratio),
    )
    every = max(run.checkpoint.save_every, steps // _CHECKPOINTS)
    phase = BertPhase(steps=steps, global_batch_size=batch, seq_len=spec.seq_len, micro_batch_size=micro, optim=optim, nsp=False)  # type: ignore[arg-type]
    return replace(
        run,
        out=str(folder),
        budget="",
        seed=key(seed, _DROPOUT) >> 1,
        phases={name: phase},
        # A seed takes minutes: it is saved now and then. Where a state is chosen, whoever chooses removes those that are not it.
        checkpoint=replace(run.checkpoint, save_every=every, keep_latest_k=steps if spec.selects_epoch else 1, keep_every_n_steps=0),
        logging=replace(run.logging, eval_every=0, grad_noise_every=0),
    )


@dataclass
class TaskSamples:
    """The examples of a task as an endless stream of shuffled epochs."""

    examples: EncodedExamples
    phase: Phase
    seed: int
    pad: int = 0
    """Id of [PAD]."""
    passed_over: int = 0
    """Examples that are left out before those of any step: whole batches."""

    def epoch_size(self) -> int:
        """Return the number of examples."""
        return len(self.examples)

    def passes(self, examples: int) -> dict[str, tuple[float, float]]:
        """Return nothing: a task has one source."""
        return {}

    def set_micro_batch_size(self, size: int) -> None:
        """Split the steps from now on into micro-batches of so many examples."""
        self.phase = replace(self.phase, micro_batch_size=size)

    def step(self, step: int, rank: int = 0, world: int = 1, pad_to_multiple: int = 0) -> StepBatches:
        """Return what one process does in optimizer step `step` (from 0)."""
        phase = self.phase
        fill = {"pad_to_multiple": pad_to_multiple, "longest": phase.seq_len, "pad": self.pad}
        at = step + self.passed_over // phase.global_batch_size
        return self.examples.step(at, phase.global_batch_size, micro_batch(phase, step, world), (self.seed, _ORDER), rank, world, **fill)

    def validation_steps(self, count: int) -> list[StepBatches]:
        """Return nothing: a task is scored at its end, by its own metrics."""
        return []

    def provenance(self, step: int, world: int, number: int) -> list[Provenance]:
        """Return the examples of micro-batch `number` of a step, by their places among those to train on."""
        phase = self.phase
        at = step + self.passed_over // phase.global_batch_size
        _, bins = self.examples.drawn(at, phase.global_batch_size, micro_batch(phase, step, world), (self.seed, _ORDER))
        epoch = at * phase.global_batch_size // len(self.examples)
        return [{"epoch": epoch, "sample": int(row), "shard": "train", "row": int(row)} for row in bins[number]]


class FinetuneWorkload:
    """One seed of a task: its examples, and the network that begins from pretrained weights, or from random ones.

    Args:
        run: of :func:`seed_run`.
        task: read and encoded.
        seed: of the task.
        pretrained: tensors of the encoder and the pooler; None begins from random weights.
        vocabulary: of the tokenizer.
        fingerprint: of settings, checkpoint and rows (:func:`config_hash`).
        world: the processes that share every step.
    """

    def __init__(
        self,
        run: BertRun,
        task: EncodedTask,
        seed: int,
        pretrained: Mapping[str, Tensor] | None,
        vocabulary: Vocabulary,
        fingerprint: str,
        world: World,
    ) -> None:
        self.run, self.task, self.seed, self.pretrained, self.vocabulary = run, task, seed, pretrained, vocabulary
        self.fingerprint = fingerprint
        self.model = self.untrained(world.device)
        set_up_encoder(self.model, run, world.device)

    def untrained(self, device: torch.device) -> Classifier | TokenClassifier | QuestionAnswering:
        """Return the network before its first step: the same values every time."""
        torch.manual_seed(key(self.seed, _INIT) >> 1)
        with plain_defaults():
            model = task_model(self.task.kind, len(self.task.labels), self.run, self.vocabulary.size).to(device)
        if self.task.class_weights and isinstance(model, Classifier):
            model.class_weights = torch.tensor(self.task.class_weights, dtype=torch.float32, device=device)
        if self.task.kind == "regression" and isinstance(model, Classifier):
            labels = self.task.train.targets["label"].astype(np.float64)
            model.unit = float(labels.mean()), float(labels.std()) or 1.0
        if self.pretrained is not None:
            own = model.state_dict()
            reader.fill(model, {**own, **{k: v for k, v in self.pretrained.items() if k in own}}, self.run.run_dir)
        return model

    def samples(self, phase: Phase, number: int, split: str) -> TaskSamples:
        """Return the examples of a split."""
        return TaskSamples(self.task.train if split == "train" else self.task.dev, phase, self.seed, self.vocabulary.pad)

    def flops(self, done: StepResult) -> float:
        """Return operations of a step, of all processes."""
        return training_flops(self.run.model, self.vocabulary.size, done.sizes) if done.sizes else 0.0

    def carry(self, samples: Any) -> None:
        """Return nothing: no state is carried from batch to batch."""

    def validation_carry(self) -> None:
        """Return nothing: none is carried in validation either."""

    def check_data(self, progress: TrainingProgress) -> None:
        """Check nothing: the folder of a seed is named after all that decides its result."""

    def keep(self) -> None:
        """Copy nothing: the task's folder gets what is needed of the data once there is a result."""

    def validation_counts(self) -> dict[str, float]:
        """Return the number of examples that the result is scored on."""
        return {"validation_examples": len(self.task.dev)}
