"""A run's model, pretrained or fine-tuned, in the Hugging Face layout."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from overnight.checkpoint import reader
from overnight.checkpoint.run_corpus import assert_same_corpus, kept_vocabulary, task_vocabulary
from overnight.checkpoint.task_folder import read_facts, read_weights
from overnight.config import BertRun
from overnight.corpus.shards import load_manifest
from overnight.errors import DataError
from overnight.interop.huggingface import export


def export_run(run: BertRun, out: Path, task: str | None = None) -> None:
    """Write the newest checkpoint, or a fine-tuned task, so that transformers loads it by its Auto classes.

    Args:
        run: a run with a checkpoint.
        out: folder to write.
        task: a fine-tuned task; None is the pretrained model.

    Raises:
        DataError: when there is nothing to export.
    """
    kind: Literal["pretraining", "classification", "spans"] = "pretraining"
    labels: tuple[str, ...] = ()
    if task is None:
        source = reader.newest_checkpoint(run.run_dir / "checkpoints")
        if source is None:
            raise DataError(f"{run.run_dir} has no checkpoint to export; run `overnight pretrain` first")
        progress, state, _ = reader.read_checkpoint(source)
        tokenizer, _ = kept_vocabulary(run)
        assert_same_corpus(progress, load_manifest(tokenizer), tokenizer, run)
    else:
        folder = tokenizer = run.run_dir / "finetune" / task
        if not (folder / "task.json").exists():
            raise DataError(f"{run.run_dir} has no fine-tuned task {task!r} to export; run `overnight finetune {task}` first")
        facts = read_facts(folder)
        kind = "spans" if facts["kind"] == "spans" else "classification"
        labels = tuple(facts["labels"])
        task_vocabulary(folder, facts["tokenizer"])
        state = read_weights(folder, facts)
    export(state, kind, run.model, tokenizer, out, labels)
