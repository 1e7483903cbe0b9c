"""Evaluation of a run's newest checkpoint on a whole split, in the loop that validates during training."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from overnight.batches.loader import Samples
from overnight.batches.packing import StepBatches, Walk
from overnight.checkpoint import reader
from overnight.checkpoint.run_corpus import kept_vocabulary, same_vocabulary
from overnight.config import BertRun, Run
from overnight.console import Line
from overnight.corpus.shards import load_manifest
from overnight.display import duration, share
from overnight.distributed.world import World
from overnight.engine import loop
from overnight.engine.finite import finite_outputs
from overnight.engine.precision import DTYPES
from overnight.engine.training_run import set_up_machine
from overnight.engine.workload import BertWorkload, seed
from overnight.errors import ConfigError, DataError

# Sequences at once where the recipe leaves the number to be found by trial.
_MICRO = 32
# Loss (nats) whose perplexity is a number.
_LARGEST = 700.0


@dataclass(frozen=True)
class Score:
    """How well a BERT fills in the masked tokens of a split."""

    metrics: dict[str, float]
    """`mlm_loss` (nats), `perplexity`, `mlm_accuracy`; after a phase with next-sentence prediction also `nsp_loss` and `nsp_accuracy`."""
    phase: str
    """Whose length, pairs and masks the examples have: that of the checkpoint."""
    examples: int
    documents: int
    seconds: float


def evaluate(run: BertRun, split: str, line: Line | None = None) -> Score:
    """Predict the masked tokens of every example of a split's first epoch; masks and pairs are the same every time, those of the validation in training.

    Args:
        run: settings of a run folder, with the folder of its prepared data.
        split: train or valid.
        line: where progress is shown; None shows nothing.

    Raises:
        ConfigError: for the test split.
        DataError: when there is no checkpoint, no data of that split, or it has another vocabulary.
        NonFiniteError: when the loss, or its perplexity, is NaN or infinite.
    """
    start = time.perf_counter()
    if split == "test":
        raise ConfigError("--split = test: only byte models have a test split (data.test_fraction); of BERT, name valid or train")
    checkpoint = reader.newest_checkpoint(run.run_dir / "checkpoints")
    if checkpoint is None:
        raise DataError(f"{run.run_dir} has no checkpoint; run `overnight pretrain` first")
    progress, state, _ = reader.read_checkpoint(checkpoint)
    reader.assert_masked_lm(state, run.run_dir)
    if not (run.data_dir / "manifest.json").is_file():
        raise DataError(
            f"{run.data_dir}: holds no prepared data from which to read the {split} text; name its folder with --data.dir=FOLDER, or raw text with --text"
        )
    same_vocabulary(run.data_dir, kept_vocabulary(run)[1].hash, checkpoint)
    device = set_up_machine(run)
    workload = BertWorkload(run, World(device=device))
    reader.fill(workload.model, state, checkpoint)
    phase = replace(run.phases[progress.phase], token_matching=0.0, objective="masked")
    number = list(run.phases).index(progress.phase)
    # Without the plans that a run folder keeps: whoever only evaluates may not be able to write there. And without a mixture: every document counts.
    samples = Samples(workload.split(split), workload.vocabulary, phase, seed(run, number, split))
    samples.set_micro_batch_size(phase.micro_batch_size or _MICRO)
    work = samples.whole()
    work = shown(work, split, "tokens", line) if line else work
    metrics = loop.evaluate(workload.model, workload.model.losses, work, evaluation_config(run, device))
    first, *others = metrics.items()
    perplexity = math.exp(metrics["mlm_loss"]) if metrics["mlm_loss"] < _LARGEST else math.inf  # also of NaN
    finite_outputs(np.array(perplexity))
    metrics = dict([first, ("perplexity", perplexity), *others])
    documents = load_manifest(run.data_dir).count(split, "documents")
    return Score(metrics, progress.phase, samples.epoch_size(), documents, time.perf_counter() - start)


def shown(work: Walk, text: str, unit: str, line: Line) -> Walk:
    """Return the same steps, of which it is shown how many are done when the next one is asked for.

    Args:
        work: steps that are asked for once each, in order.
        text: what it is that is read.
        unit: of :attr:`StepBatches.tokens`, in the plural.
        line: where progress is shown.
    """
    start, read = time.perf_counter(), 0

    def make(step: int) -> StepBatches:
        nonlocal read
        if step:
            seconds = time.perf_counter() - start
            left = duration(seconds / step * (len(work) - step))
            line.update(f"{text}: {share(step / len(work))}  {read:,} {unit} read  {read / seconds:,.0f} {unit}/s  left {left}")
        found = work[step]
        read += found.tokens
        return found

    return Walk(make, len(work))


def evaluation_config(run: Run, device: torch.device) -> loop.LoopConfig:
    """Return what the loop needs to know of a run to evaluate without a step."""
    return loop.LoopConfig(
        steps=0,
        lr=lambda step: 0.0,
        max_grad_norm=0.0,
        dtype=DTYPES[run.precision],
        device=device,
        seed=(run.seed,),
        world=World(device=device),
    )
