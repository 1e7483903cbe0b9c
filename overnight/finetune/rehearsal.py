"""How long a fine-tuning will take: its own rows, a few steps of an untrained network, and some of its scoring, timed."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from overnight.batches.order import key, order
from overnight.config import BertRun, Finetune, Search
from overnight.config.budget import length_of
from overnight.corpus.tokenizer import Vocabulary, load_vocabulary
from overnight.distributed.world import World
from overnight.engine.precision import DTYPES
from overnight.engine.rehearsal import seconds_per_step
from overnight.engine.training_run import set_up_machine
from overnight.finetune.encoded_examples import EncodedExamples
from overnight.finetune.encoded_task import EncodedTask, encode_task
from overnight.finetune.seed import outputs, scoring_steps
from overnight.finetune.workload import FinetuneWorkload, seed_run

# Batches that are scored.
_BATCHES = 8
# What a seed takes besides: its network is made, saved and loaded.
_PER_SEED = 1.0


class Rehearsal:
    """Times the steps and the scoring of an untrained network on the rows of a task; nothing is kept or written.

    Args:
        run: with the encoder.
        task: read and encoded.
        vocabulary: of the tokenizer.
    """

    def __init__(self, run: BertRun, task: EncodedTask, vocabulary: Vocabulary, device: torch.device) -> None:
        self.run, self.task, self.vocabulary, self.device = run, task, vocabulary, device
        self._steps: dict[int, float] = {}
        self._passes: dict[int, float] = {}
        self._workload: FinetuneWorkload | None = None

    def seed_seconds(self, spec: Finetune) -> float:
        """Return how long one seed is trained with some settings, and scored on the way or at its end to choose by (s)."""
        task, seed = self.task, spec.seeds[0]
        single = seed_run(self.run, spec, len(task.train), seed, "rehearsal", self.run.run_dir)
        (phase,) = single.phases.values()
        if not self._workload:
            self._workload = FinetuneWorkload(single, task, seed, None, self.vocabulary, "", World(device=self.device))
        if phase.global_batch_size not in self._steps:
            self._steps[phase.global_batch_size] = seconds_per_step(single, self._workload, 0, self.device)
        times = len(scoring_steps(spec, len(task.train), phase.global_batch_size, phase.steps)) if spec.selects else 0
        chosen_by = task.selection[0] if task.selection else task.dev
        scoring = times * self.scoring_seconds(chosen_by, spec) if times else 0.0
        return phase.steps * self._steps[phase.global_batch_size] + scoring + _PER_SEED

    def scoring_seconds(self, examples: EncodedExamples, spec: Finetune) -> float:
        """Return how long the network takes for all sequences (s), from a few batches of them, of all lengths; after :meth:`seed_seconds`."""
        assert self._workload is not None
        if id(examples) not in self._passes:
            size, dtype = spec.micro_batch_size, DTYPES[self.run.precision]
            self._passes[id(examples)] = _scoring_seconds(self._workload, examples, size, dtype, self.device)
        return self._passes[id(examples)]


def finetune_seconds(run: BertRun, name: str, corpus: Path) -> float:
    """Return how long a task of a run will take, with its search and all its seeds (s); nothing is kept or written.

    Args:
        name: key in `run.finetune`.
        corpus: holds the vocabulary.

    Raises:
        DataError: when a file of the task is missing or a row cannot be used.
    """
    begun, spec, device = time.perf_counter(), run.finetune[name], set_up_machine(run)
    vocabulary = load_vocabulary(corpus)
    task = encode_task(spec, corpus, vocabulary)
    task.baselines()
    reading = time.perf_counter() - begun
    rehearsal = Rehearsal(run, task, vocabulary, device)
    # The longest of what is searched may win.
    tried = [rehearsal.seed_seconds(replace(spec, **settings)) for settings in combinations(spec.search)]
    training = max(tried) if tried else rehearsal.seed_seconds(spec)
    searching = min(sum(tried), length_of(spec.search.budget)) if spec.search.budget else sum(tried)
    splits = [task.dev, *(task.test[split][0] for split in task.extra_metrics)]
    scoring = sum(rehearsal.scoring_seconds(examples, spec) for examples in splits)
    # What has labels is scored for every seed, and not computed again to write its answers.
    predicting = sum(
        rehearsal.scoring_seconds(examples, spec) for split, (examples, _) in task.test.items() if split not in task.extra_metrics
    )
    seeds = len(spec.seeds) + len(spec.seeds[: spec.random_init_seeds])
    return reading + searching + seeds * (training + scoring) + len(spec.seeds) * predicting


def combinations(search: Search) -> list[dict[str, Any]]:
    """Return the settings that a search tries, in the order in which it tries them."""
    found = search.combinations
    if not (search.draw > 0 and found):
        return found
    drawn = order(np.arange(min(search.draw, len(found))), len(found), key(search.seed))
    return [found[i] for i in drawn]


def _scoring_seconds(workload: FinetuneWorkload, examples: EncodedExamples, size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return how long the network takes for all sequences (s), from a few batches of them, of all lengths."""
    chosen = np.linspace(0, len(examples) - 1, min(len(examples), size * _BATCHES)).astype(int)
    some = EncodedExamples(
        [examples.ids[i] for i in chosen],
        [examples.segments[i] for i in chosen],
        {name: values[chosen] for name, values in examples.targets.items()},
    )
    # Untimed the first time, in which layers may be compiled for it.
    outputs(workload.model, some, size, dtype, device)
    begun = time.perf_counter()
    outputs(workload.model, some, size, dtype, device)
    return (time.perf_counter() - begun) * sum(map(len, examples.ids)) / max(1, sum(map(len, some.ids)))
