"""What every training of a task begins from: the pretrained weights, their vocabulary, and the processes that share the steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overnight.checkpoint import reader
from overnight.checkpoint.run_corpus import assert_same_corpus, kept_vocabulary
from overnight.checkpoint.task_folder import read_facts
from overnight.config import BertRun, Finetune, environment_path
from overnight.config.validate import refuse_sharded_muon
from overnight.console import Line
from overnight.corpus.shards import load_manifest
from overnight.corpus.tokenizer import Vocabulary
from overnight.distributed.world import World
from overnight.engine.training_run import set_up_machine
from overnight.errors import DataError
from overnight.finetune.encoded_task import EncodedTask
from overnight.finetune.seed import TrainedSeed, train_seed
from overnight.finetune.workload import FinetuneWorkload, config_hash, seed_run, task_model, with_rate
from overnight.models.heads import pretrained_weights, without_top
from overnight.tasks.data_hash import data_hash, documentation_hash, hashed_paths


@dataclass(frozen=True)
class Beginning:
    """What every training of a task begins from, in one process."""

    run: BertRun
    name: str
    """Of the task."""
    checkpoint: Path
    data: str
    """Hash of the files of the task."""
    paths: Mapping[str, Any]
    """Of the task, as they count for its results: :func:`overnight.tasks.data_hash.hashed_paths`."""
    weights: Mapping[str, Tensor]
    """Of the encoder and the pooler."""
    corpus: Path
    """Folder of the vocabulary."""
    vocabulary: Vocabulary
    line: Line
    world: World
    device: torch.device

    def config_hash(self, spec: Finetune) -> str:
        """Return the hash of all that decides the result of a seed with some settings."""
        spec = replace(with_rate(spec, self.run.model.hidden_size), **self.paths)
        return config_hash(self.run, spec, self.checkpoint, self.data)

    def train(self, spec: Finetune, task: EncodedTask, seed: int, init: str, what: str, folder: Path, announces: bool) -> TrainedSeed:
        """Train one seed.

        Args:
            init: `pretrained`, or `random`.
            what: is trained, for the lines.
            folder: for its checkpoints and metrics.
            announces: whether to print what will be done.
        """
        run = seed_run(self.run, with_rate(spec, self.run.model.hidden_size), len(task.train), seed, what, folder)
        weights = without_top(self.weights, spec.reinit_layers, run.model.num_layers) if init == "pretrained" else None
        workload = partial(FinetuneWorkload, run, task, seed, weights, self.vocabulary, self.config_hash(spec))
        return train_seed(run, spec, task, workload, self.line, self.world, announces)


def open_beginning(run: BertRun, name: str, checkpoint: Path, line: Line, world: World) -> Beginning:
    """Read a checkpoint to fine-tune from.

    Raises:
        ConfigError: when Muon is to train what several processes have in parts.
        DataError: when it, or the vocabulary, is damaged, or the two do not belong together, or to the network of the run.
    """
    if world.size > 1:  # one process has whole matrices, whatever is set
        refuse_sharded_muon(run, {f"finetune.{name}.optimizer": run.finetune[name].optimizer})
    device = set_up_machine(run)
    progress, state, _ = reader.read_checkpoint(checkpoint)
    corpus, vocabulary = kept_vocabulary(run)
    assert_same_corpus(progress, load_manifest(corpus), corpus, run)
    weights = pretrained_weights(state)
    _check_encoder(run, weights, vocabulary, checkpoint)
    return Beginning(run, name, checkpoint, *_rows(run, name), weights, corpus, vocabulary, line, world, device)


def _rows(run: BertRun, name: str) -> tuple[str, Mapping[str, Any]]:
    """Return the hash of the files of a task and their paths as they count.

    Where the files are gone, the hash is that of the rows its model was trained on: what is done stays done.
    """
    spec, folder = run.finetune[name], run.run_dir / "finetune" / name
    paths = {key: getattr(spec, key) for key in ("path", "dev")}
    if spec.task == "docnames":
        return documentation_hash(), paths
    found = data_hash(*(environment_path(path, f"finetune.{name}.{key}") for key, path in paths.items() if path))
    facts = read_facts(folder) if (folder / "task.json").exists() else None
    kept = str(facts["result"].get("data_hash", "")) if facts else ""
    return found or kept, hashed_paths(paths, found, facts)


def _check_encoder(run: BertRun, weights: Mapping[str, Tensor], vocabulary: Vocabulary, checkpoint: Path) -> None:
    """Check that a checkpoint has all of the encoder of a run, and no more: what it lacks would silently begin at random."""
    with torch.device("meta"):
        own = task_model("classification", 2, run, vocabulary.size).state_dict()
    here, there = ({name: list(tensor.shape) for name, tensor in part.items() if name.startswith("encoder.")} for part in (own, weights))
    wrong = [
        f"{name} is {there.get(name, 'absent')} there, {here.get(name, 'absent')} in the network of the run"
        for name in {**here, **there}
        if here.get(name) != there.get(name)
    ]
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise DataError(
            f"{checkpoint}: is of another network or vocabulary than {run.run_dir / 'run.yaml'} and {vocabulary.size:,} tokens: {'; '.join(wrong[:3])}{more}"
        )
