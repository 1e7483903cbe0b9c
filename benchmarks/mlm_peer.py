"""The peer of `benchmarks.time_to_quality`: transformers' recipe for masked language models, at a given size and for a given time.

    python -m benchmarks.mlm_peer --data DATA --out FOLDER --minutes 6                                  # Trainer's defaults
    python -m benchmarks.mlm_peer --data DATA --out FOLDER --minutes 6 --batch 32 --lr 4e-4 --warmup 0.1 --bf16 --dropout 0

What `examples/pytorch/language-modeling/run_mlm.py` of transformers does, from random weights: BertForMaskedLM, trained by Trainer; rows of text with
[CLS] and [SEP] around each are put on end across documents and cut into blocks; DataCollatorForLanguageModeling masks 15 %; the logits are computed
at every position. Trainer's defaults are batch 8, fp32, learning rate 5e-5 linear to 0 without warm-up, fused AdamW without decay (0.9, 0.999, 1e-8),
clipping at norm 1. The tokens are those of a folder that `overnight prepare` made, so the vocabulary and the validation documents are the same.

The schedule ends with the time: the speed is measured first, which does not count, as importing and building do not; the time is that from the
first step to the last. The speed of the machine may change on the way, so training.json says what the steps really took. Into --out goes a folder for
each of --minutes (the schedule is that of the longest; the others are saved on the way), and training.json when all is done.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from overnight.corpus.shards import Shard, open_shards
from overnight.corpus.tokenizer import Vocabulary, load_tokenizer, load_vocabulary
from overnight.run_dir.atomic import write_json

ROW = 90
"""Tokens of a row of text: the mean of a paragraph of the books, each a line of its file, and a line is what run_mlm.py takes for a row."""
VALIDATION_BLOCKS = 512
LEAST_STEPS = 6
"""By which a speed is measured, however long they take."""


@dataclass(frozen=True)
class Size:
    """Of the network and its blocks."""

    layers: int = 6
    width: int = 256
    heads: int = 4
    length: int = 128
    """Tokens of a block."""


@dataclass(frozen=True)
class Settings:
    """What of the recipe may be tuned, as run_mlm.py has it by default."""

    batch: int = 8
    lr: float = 5e-5
    warmup: float = 0.0
    """Share of the steps."""
    bf16: bool = False
    dropout: float = 0.1


@dataclass(frozen=True)
class Training:
    """What a training took and gave."""

    size: Size
    settings: Settings
    seed: int
    steps: int
    step_seconds: float
    """Measured before the training, on which its number of steps rests."""
    reached: dict[str, dict[str, float]] = field(default_factory=dict)
    """By minutes: `seconds` from the first step, and `steps` that were done."""
    valid_loss: float | None = None
    """Nats a masked token of the validation text, in the end; None is no number."""


class Blocks(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Blocks of tokens, with what a tokenizer says beside them."""

    def __init__(self, blocks: np.ndarray, vocabulary: Vocabulary) -> None:
        self.blocks, self.added = blocks, (vocabulary.cls, vocabulary.sep)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(self.blocks[index].astype(np.int64))
        special = (ids == self.added[0]) | (ids == self.added[1])
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "token_type_ids": torch.zeros_like(ids),
            "special_tokens_mask": special.long(),
        }


class Clock(TrainerCallback):
    """Notes when each step ends, saves the model on the way, and may stop the training."""

    def __init__(self, most: float = math.inf, saves: Sequence[float] = (), out: Path | None = None) -> None:
        self.most, self.saves, self.out = most, sorted(saves), out
        self.start, self.ends = 0.0, list[float]()
        self.reached: dict[str, dict[str, float]] = {}

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter() - self.start)
        control.should_training_stop |= self.ends[-1] >= self.most and len(self.ends) >= LEAST_STEPS
        # The last is saved when the training has ended, whatever its steps took.
        while len(self.saves) > 1 and self.ends[-1] >= self.saves[0]:
            self.save(self.saves.pop(0), kwargs["model"])

    def save(self, seconds: float, model: BertForMaskedLM) -> None:
        """Save the model as that of a time; saving takes none."""
        minutes = f"{seconds / 60:g}"
        self.reached[minutes] = {"seconds": round(self.ends[-1], 2), "steps": len(self.ends)}
        before = time.perf_counter()
        if self.out:
            model.save_pretrained(self.out / f"{minutes}m")
        self.start += time.perf_counter() - before

    def step_seconds(self) -> float:
        """Seconds a step, over the later two thirds of the steps so far."""
        first = len(self.ends) // 3
        return (self.ends[-1] - self.ends[first]) / (len(self.ends) - 1 - first)


def blocks(shards: Sequence[Shard], vocabulary: Vocabulary, length: int) -> np.ndarray:
    """Return the text of shards as run_mlm.py groups it: [CLS] row [SEP] [CLS] row [SEP] ..., cut into blocks, the rest dropped.

    Returns:
        [blocks, length], in the type of the shards.
    """
    streams = []
    for shard in shards:
        starts = shard.sentence_starts[:-1]
        documents = np.repeat(np.arange(len(shard.document_sentences) - 1), np.diff(shard.document_sentences))
        # A row is the sentences of a document that begin in the same ROW tokens of it.
        rows = (starts - shard.sentence_starts[shard.document_sentences[documents]]) // ROW
        begins = np.ones(len(starts), bool)
        begins[1:] = (np.diff(documents) > 0) | (np.diff(rows) > 0)
        between = starts[begins][1:]
        ends = np.tile(np.array([vocabulary.sep, vocabulary.cls], shard.tokens.dtype), len(between))
        stream = np.insert(shard.tokens, np.repeat(between, 2), ends)
        streams += [np.array([vocabulary.cls], stream.dtype), stream, np.array([vocabulary.sep], stream.dtype)]
    stream = np.concatenate(streams)
    return stream[: len(stream) // length * length].reshape(-1, length)


def tokenizer_of(data: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a prepared folder as transformers has it."""
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    return PreTrainedTokenizerFast(tokenizer_object=load_tokenizer(data), **names)


def network(size: Size, dropout: float, vocabulary: Vocabulary) -> BertForMaskedLM:
    """Return the network with random weights."""
    sizes = {"num_hidden_layers": size.layers, "hidden_size": size.width, "num_attention_heads": size.heads}
    drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config = BertConfig(
        vocab_size=vocabulary.size,
        intermediate_size=4 * size.width,
        max_position_embeddings=max(512, size.length),
        pad_token_id=vocabulary.pad,
        **sizes,
        **drops,
    )
    return BertForMaskedLM(config)


@dataclass(frozen=True)
class Text:
    """What every training of a folder shares."""

    tokenizer: PreTrainedTokenizerFast
    vocabulary: Vocabulary
    train: Blocks
    valid: Blocks

    @classmethod
    def read(cls, data: Path, length: int) -> Text:
        """Read a prepared folder."""
        vocabulary = load_vocabulary(data)
        parts = [Blocks(blocks(open_shards(data, split, verify=False), vocabulary, length), vocabulary) for split in ("train", "valid")]
        return cls(tokenizer_of(data), vocabulary, *parts)


def run_trainer(text: Text, size: Size, settings: Settings, seed: int, steps: int, clock: Clock, out: Path) -> BertForMaskedLM:
    """Train from random weights by Trainer; what is not named here has its default."""
    set_seed(seed)
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=settings.batch,
        learning_rate=settings.lr,
        warmup_steps=settings.warmup,  # below 1: a share
        bf16=settings.bf16,
        seed=seed,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        # Else the special tokens of each block are found again, token by token, in the collator.
        remove_unused_columns=False,
    )
    trainer = Trainer(
        model=network(size, settings.dropout, text.vocabulary),
        args=arguments,
        train_dataset=text.train,
        data_collator=DataCollatorForLanguageModeling(text.tokenizer, mlm_probability=0.15),
        processing_class=text.tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    return cast(BertForMaskedLM, trainer.model)


@torch.no_grad()
def valid_loss(model: BertForMaskedLM, text: Text) -> float | None:
    """Return nats a masked token of the first validation blocks, in fp32, with the same masks every time; None is no number."""
    collate = DataCollatorForLanguageModeling(text.tokenizer, mlm_probability=0.15, seed=0)
    model.eval()
    total, count = 0.0, 0
    for first in range(0, min(VALIDATION_BLOCKS, len(text.valid)), 32):
        batch = collate([text.valid[i] for i in range(first, min(first + 32, len(text.valid)))])
        batch.pop("special_tokens_mask", None)
        masked = int((batch["labels"] != -100).sum())
        total, count = total + float(model(**batch).loss) * masked, count + masked
    return total / count if math.isfinite(total) and count else None


def train(data: Path, out: Path, minutes: Sequence[float], size: Size, settings: Settings, seed: int, trial_seconds: float) -> Training:
    """Measure the speed, train for the longest of some times, and save the model at each of them.

    Args:
        data: a prepared folder.
        out: where the models go.
        minutes: from the first step on; each is saved, the schedule ends with the longest.
        trial_seconds: how long the speed is measured.
    """
    text, seconds = Text.read(data, size.length), sorted(60 * m for m in minutes)
    trial = Clock(most=trial_seconds)
    run_trainer(text, size, settings, seed, 1 << 30, trial, out)
    step_seconds = trial.step_seconds()
    steps = max(1, round(seconds[-1] / step_seconds))
    clock = Clock(saves=seconds, out=out)
    model = run_trainer(text, size, settings, seed, steps, clock, out)
    # A machine that turned faster has ended before a time that was to be saved on the way.
    for at in clock.saves:
        clock.save(at, model)
    for folder in clock.reached:
        text.tokenizer.save_pretrained(out / f"{folder}m")
    return Training(size, settings, seed, steps, step_seconds, clock.reached, valid_loss(model, text))


def main(arguments: Sequence[str] | None = None) -> None:
    """Train once, and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that `overnight prepare` made")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, nargs="+", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trial-seconds", type=float, default=15.0, help="how long the speed is measured before")
    parser.add_argument("--bf16", action="store_true")
    for name in ("batch", "lr", "warmup", "dropout"):
        default = getattr(Settings, name)
        parser.add_argument(f"--{name}", type=type(default), default=default)
    for name in ("layers", "width", "heads", "length"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Size, name))
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    size = Size(given.layers, given.width, given.heads, given.length)
    settings = Settings(given.batch, given.lr, given.warmup, given.bf16, given.dropout)
    training = train(given.data, given.out, given.minutes, size, settings, given.seed, given.trial_seconds)
    write_json(given.out / "training.json", asdict(training))
    print(json.dumps(asdict(training)))


if __name__ == "__main__":
    main()
