"""A run's model, pretrained or fine-tuned, in the Hugging Face layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overnight.checkpoint import reader
from overnight.checkpoint.run_corpus import assert_same_corpus, kept_vocabulary, task_vocabulary
from overnight.checkpoint.task_folder import read_facts, read_weights
from overnight.config import BertRun
from overnight.corpus.shards import load_manifest
from overnight.errors import DataError
from overnight.interop.export_marks import check_target, export_marks
from overnight.interop.huggingface import export
from overnight.interop.layout import Kind
from overnight.interop.model_card import model_card


def export_run(run: BertRun, out: Path, task: str | None = None, license: str = "", onnx: bool = False) -> None:
    """Write the newest checkpoint, or a fine-tuned task, so that transformers loads it by its Auto classes.

    Args:
        run: a run with a checkpoint.
        out: folder to write.
        task: a fine-tuned task; None is the pretrained model.
        license: of the model card.
        onnx: also write `model.onnx`.

    Raises:
        ConfigError: a package that ONNX needs is missing, or the folder holds another model.
        DataError: when there is nothing to export, or ONNX computes something else.
    """
    check_target(out, run.run_dir, task)
    # A network that no phase taught to tell the next sentence has nothing to say of it.
    kind: Kind = "pretraining" if run.predicts_next_sentence else "masked_lm"
    more = None
    if onnx:
        from overnight.interop.onnx import check_onnx, write_onnx

        check_onnx()
        more = write_onnx
    labels: tuple[str, ...] = ()
    facts = None
    progress, corpus = None, run.run_dir / "corpus"
    if task is None:
        source = reader.newest_checkpoint(run.run_dir / "checkpoints")
        if source is None:
            raise DataError(f"{run.run_dir} has no checkpoint to export; run `overnight pretrain` first")
        progress, state, _ = reader.read_checkpoint(source)
        if "mlm.bias" not in state:  # of an imported encoder
            raise DataError(f"{source} has no masked-LM head to export; fine-tune it and export the task (--task)")
        tokenizer, _ = kept_vocabulary(run)
        assert_same_corpus(progress, load_manifest(tokenizer), tokenizer, run)
    else:
        folder = tokenizer = run.run_dir / "finetune" / task
        if not (folder / "task.json").exists():
            raise DataError(f"{run.run_dir} has no fine-tuned task {task!r} to export; run `overnight finetune {task}` first")
        facts = read_facts(folder)
        kind = facts["kind"]
        labels = tuple(facts["labels"])
        task_vocabulary(folder, facts["tokenizer"])
        state = read_weights(folder, facts)
    imported = (run.run_dir / "imported.json").is_file()
    if not imported and not (corpus / "manifest.json").is_file():  # else the model card would say that nobody knows the text
        raise DataError(
            f"{corpus / 'manifest.json'}: is missing, which says what text the model is of; put it back, or run "
            f"`overnight pretrain {run.run_dir}` once where {run.data_dir} can be read: it adds what is missing"
        )
    manifest = None if imported else load_manifest(corpus)
    card = model_card(run, kind, progress, manifest, license, facts)
    # As training and `predict` cut the texts of a task.
    longest = 0 if facts is None else int(facts["spec"]["seq_len"])
    settings = None if facts is None else _settings(facts)
    export(state, kind, run.model, tokenizer, out, labels, card, more, longest, settings, export_marks(run.run_dir, task))


def _settings(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a task is asked and answered, as :func:`overnight.interop.huggingface.task_settings` reads it."""
    spec = facts["spec"]
    if facts["kind"] != "spans":
        named = {what: name for what, name in (spec.get("columns") or {}).items() if name}
        read = {"task": spec["task"], "pairs": facts["pairs"], **({"columns": named} if named else {})}
        return read if facts["kind"] != "token_classification" else {}
    threshold = facts["result"].get("metrics", {}).get("null_threshold")
    settings = {key: spec[key] for key in ("doc_stride", "max_answer_length")}
    return settings | ({} if threshold is None else {"null_threshold": threshold})
