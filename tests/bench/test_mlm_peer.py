"""The peer is what transformers' run_mlm.py does with Trainer's defaults, on the tokens of a prepared folder."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("accelerate")
from transformers import AutoModelForMaskedLM, AutoTokenizer, TrainingArguments

from benchmarks import mlm_peer
from benchmarks.mlm_peer import LEAST_STEPS, ROW, Clock, Settings, Size, Text, blocks, main, run_trainer, valid_loss
from overnight.corpus.shards import open_shards
from overnight.corpus.tokenizer import load_tokenizer, load_vocabulary

TINY = Size(layers=1, width=32, heads=2, length=32)


def test_blocks_hold_every_token_in_order_with_rows_between_cls_and_sep(tiny_data: Path) -> None:
    vocabulary, shards = load_vocabulary(tiny_data), open_shards(tiny_data, "train")
    made = blocks(shards, vocabulary, 32)
    assert made.dtype == shards[0].tokens.dtype and made.shape[1] == 32
    stream = made.reshape(-1)
    text = np.concatenate([shard.tokens for shard in shards])
    kept = stream[(stream != vocabulary.cls) & (stream != vocabulary.sep)]
    assert len(text) - 32 <= len(kept) and np.array_equal(kept, text[: len(kept)])
    begins, ends = np.flatnonzero(stream == vocabulary.cls), np.flatnonzero(stream == vocabulary.sep)
    assert begins[0] == 0 and np.array_equal(begins[1:], ends[: len(begins) - 1] + 1)
    # A row is about a paragraph, but a document ends one, and a sentence is never cut.
    documents = sum(len(shard.document_sentences) - 1 for shard in shards)
    assert documents + (len(text) / ROW - documents) * 0.5 < len(begins) < documents + len(text) / ROW


def test_a_document_begins_a_row(tiny_data: Path) -> None:
    vocabulary, (shard, *_) = load_vocabulary(tiny_data), open_shards(tiny_data, "train")
    stream = blocks([shard], vocabulary, 1).reshape(-1)
    special = (stream == vocabulary.cls) | (stream == vocabulary.sep)
    begins = np.cumsum(~special)[stream == vocabulary.cls]
    assert set(shard.sentence_starts[shard.document_sentences[:-1]]) <= set(begins)


def test_what_is_not_tuned_is_as_the_trainer_has_it_by_default(tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}

    class Noted(mlm_peer.Trainer):
        def __init__(self, **given: Any) -> None:
            made.update(given)
            super().__init__(**given)

    monkeypatch.setattr(mlm_peer, "Trainer", Noted)
    run_trainer(Text.read(tiny_data, 32), TINY, Settings(), 0, 1, Clock(), tmp_path)
    used, default = made["args"], TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    changed = {f.name for f in dataclasses.fields(used) if getattr(used, f.name) != getattr(default, f.name)}
    # Nothing of these decides what is learned.
    assert changed <= {
        "max_steps",
        "save_strategy",
        "disable_tqdm",
        "dataloader_pin_memory",
        "remove_unused_columns",
        "seed",
        "logging_dir",
    }
    assert (used.learning_rate, used.per_device_train_batch_size, used.warmup_steps, used.weight_decay) == (5e-5, 8, 0, 0)
    assert (used.adam_beta1, used.adam_beta2, used.adam_epsilon, used.max_grad_norm) == (0.9, 0.999, 1e-8, 1.0)
    assert (str(used.optim), str(used.lr_scheduler_type)) == ("OptimizerNames.ADAMW_TORCH_FUSED", "SchedulerType.LINEAR")
    assert (made["data_collator"].mlm_probability, made["data_collator"].mask_replace_prob) == (0.15, 0.8)
    masked = made["data_collator"]([made["train_dataset"][0]])
    special = made["train_dataset"][0]["special_tokens_mask"].bool()
    assert special.any() and (masked["labels"][0][special] == -100).all()


def test_a_clock_saves_the_times_on_the_way_and_leaves_out_what_saving_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]

    def slow_save(folder: Path) -> None:
        now[0] += 50

    monkeypatch.setattr(mlm_peer.time, "perf_counter", lambda: now[0])
    clock, control = Clock(saves=[120, 60, 30], out=tmp_path), SimpleNamespace(should_training_stop=False)
    clock.on_train_begin()
    for _ in range(13):
        now[0] += 10
        clock.on_step_end(None, None, control, model=SimpleNamespace(save_pretrained=slow_save))
    assert clock.reached == {"0.5": {"seconds": 30.0, "steps": 3}, "1": {"seconds": 60.0, "steps": 6}}
    assert clock.saves == [120] and not control.should_training_stop, "the last is saved after the training"
    assert clock.step_seconds() == pytest.approx(10)
    limited = Clock(most=10)
    limited.on_train_begin()
    stopped = []
    for _ in range(LEAST_STEPS):
        now[0] += 11
        limited.on_step_end(None, None, control)
        stopped.append(control.should_training_stop)
    assert stopped == [False] * (LEAST_STEPS - 1) + [True]


@pytest.mark.heavy
def test_a_seed_gives_the_same_training_and_it_learns(tiny_data: Path, tmp_path: Path) -> None:
    text, tuned = Text.read(tiny_data, 32), Settings(batch=8, lr=5e-3, dropout=0.0)
    first, again, other = (valid_loss(run_trainer(text, TINY, tuned, seed, 20, Clock(), tmp_path), text) for seed in (1, 1, 2))
    assert first == again != other
    assert first is not None and first < math.log(text.vocabulary.size) - 0.3, "better than knowing nothing"


@pytest.mark.heavy
def test_a_training_leaves_folders_that_transformers_loads(tiny_data: Path, tmp_path: Path) -> None:
    sizes = ["--layers", "1", "--width", "32", "--heads", "2", "--length", "32", "--threads", "1"]
    tuned = ["--batch", "4", "--lr", "5e-3", "--warmup", "0.1", "--bf16", "--dropout", "0"]
    main(["--data", str(tiny_data), "--out", str(tmp_path), "--minutes", "0.005", "0.02", "--trial-seconds", "0.2", *sizes, *tuned])
    training = json.loads((tmp_path / "training.json").read_text())
    assert training["settings"] == {"batch": 4, "lr": 5e-3, "warmup": 0.1, "bf16": True, "dropout": 0.0}
    assert training["reached"]["0.02"]["steps"] == training["steps"] >= training["reached"]["0.005"]["steps"] >= 1
    assert math.isfinite(training["valid_loss"])
    model, tokenizer = (kind.from_pretrained(tmp_path / "0.02m") for kind in (AutoModelForMaskedLM, AutoTokenizer))
    assert (model.config.hidden_size, model.config.vocab_size) == (32, load_vocabulary(tiny_data).size)
    text = "The [MASK] statement, Éa?"
    assert tokenizer(text)["input_ids"] == load_tokenizer(tiny_data).encode(text).ids
    assert tokenizer.mask_token_id == load_vocabulary(tiny_data).mask
