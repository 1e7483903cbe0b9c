"""How long a fine-tuning will take: its own rows, a few steps of an untrained network, and some of its scoring, timed."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch

from overnight.config import BertRun
from overnight.corpus.tokenizer import load_vocabulary
from overnight.distributed.world import World
from overnight.engine.precision import DTYPES
from overnight.engine.rehearsal import seconds_per_step
from overnight.engine.training_run import set_up_machine
from overnight.finetune.encoded_task import EncodedExamples, encode_task
from overnight.finetune.seed import outputs
from overnight.finetune.workload import FinetuneWorkload, seed_run

# Batches that are scored.
_BATCHES = 8
# What a seed takes besides: its network is made, saved and loaded.
_PER_SEED = 1.0


def finetune_seconds(run: BertRun, name: str, corpus: Path) -> float:
    """Return how long a task of a run will take, with all its seeds (s); nothing is kept or written.

    Args:
        name: key in `run.finetune`.
        corpus: holds the vocabulary.

    Raises:
        DataError: when a file of the task is missing or a row cannot be used.
    """
    begun, spec, device = time.perf_counter(), run.finetune[name], set_up_machine(run)
    vocabulary = load_vocabulary(corpus)
    task = encode_task(spec, corpus, vocabulary)
    reading = time.perf_counter() - begun
    seed = spec.seeds[0]
    single = seed_run(run, spec, len(task.train), seed, name, run.run_dir)
    workload = FinetuneWorkload(single, task, seed, None, vocabulary, "", World(device=device))
    training = single.phases[name].steps * seconds_per_step(single, workload, 0, device)
    splits = [task.dev, *(task.test[split][0] for split in task.extra_metrics)]
    scoring = sum(_scoring_seconds(workload, examples, spec.micro_batch_size, DTYPES[run.precision], device) for examples in splits)
    predicting = sum(
        _scoring_seconds(workload, examples, spec.micro_batch_size, DTYPES[run.precision], device) for examples, _ in task.test.values()
    )
    seeds = len(spec.seeds) + len(spec.seeds[: spec.random_init_seeds])
    return reading + seeds * (training + scoring + _PER_SEED) + len(spec.seeds) * predicting


def _scoring_seconds(workload: FinetuneWorkload, examples: EncodedExamples, size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return how long the network takes for all sequences (s), from a few batches of them, of all lengths."""
    chosen = np.linspace(0, len(examples) - 1, min(len(examples), size * _BATCHES)).astype(int)
    some = EncodedExamples(
        [examples.ids[i] for i in chosen],
        [examples.segments[i] for i in chosen],
        {name: values[chosen] for name, values in examples.targets.items()},
    )
    begun = time.perf_counter()
    outputs(workload.model, some, size, dtype, device)
    return (time.perf_counter() - begun) * sum(map(len, examples.ids)) / max(1, sum(map(len, some.ids)))
