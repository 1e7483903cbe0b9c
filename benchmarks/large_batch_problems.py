"""What the large-batch study trains: a small image network and a small BERT, both on data that every installation has.

Each problem knows its data, its network and its validation measures; the optimizer, the schedule and the tuning are the study's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overnight.batches.loader import Samples
from overnight.batches.packing import Batch
from overnight.config import BertConfig, BertPhase, load_run
from overnight.corpus.pipeline import prepare
from overnight.corpus.shards import open_shards
from overnight.corpus.tokenizer import load_vocabulary
from overnight.models.bert import BertForPretraining


def conv(inputs: int, outputs: int) -> list[nn.Module]:
    """A 3 x 3 convolution that keeps the size, with GroupNorm: BatchNorm would change with the batch, which is what is studied."""
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(4, outputs), nn.ReLU()]


@dataclass(frozen=True)
class Digits:
    """The 1,797 images of 8 x 8 that come with scikit-learn: 1,200 to train on, 237 to tune on, 360 to test on, stratified by digit."""

    epochs: int = 20
    batches: tuple[int, ...] = (32, 128, 512, 1024)
    tuning: tuple[int, ...] = (0, 6)
    """Seeds of the tuning, whose mean loss decides."""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Seeds that are reported."""
    title: ClassVar[str] = "digits"
    unit: ClassVar[str] = "images"
    """What a batch counts."""
    metric: ClassVar[str] = "accuracy"
    """What is compared: `loss` or `accuracy`."""
    max_grad_norm: ClassVar[float] = 0.0
    """Bound on the norm of the whole gradient; 0 is none."""
    lowest: ClassVar[dict[str, int]] = {"sgd": -8, "adamw": -11, "muon": -11, "lars": -1, "lamb": -10, "lans": -10}
    """The grid of learning rates begins at 2 to this power, by optimizer."""

    @cached_property
    def _data(self) -> dict[str, tuple[Tensor, Tensor]]:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        images, labels = load_digits(return_X_y=True)
        rest, test = train_test_split(np.arange(len(labels)), test_size=360, stratify=labels, random_state=0)
        train, valid = train_test_split(rest, test_size=237, stratify=labels[rest], random_state=0)
        x, y = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)
        return {name: (x[torch.tensor(i)], y[torch.tensor(i)]) for name, i in (("train", train), ("valid", valid), ("test", test))}

    @property
    def examples(self) -> int:
        """Examples that every training consumes, whatever its batch."""
        return self.epochs * len(self._data["train"][1])

    def network(self) -> nn.Module:
        """29,962 parameters: two convolutions, pooling, and two matrices."""
        return nn.Sequential(*conv(1, 16), *conv(16, 32), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 48), nn.ReLU(), nn.Linear(48, 10))

    def steps(self, network: nn.Module, batch: int, seed: int) -> Iterator[float]:
        """For each step, add up the gradient of the mean loss over the batch, and yield that loss."""
        x, y = self._data["train"]
        draw = torch.Generator().manual_seed(seed)
        order = torch.cat([torch.randperm(len(y), generator=draw) for _ in range(self.epochs)])
        for i in order.split(batch)[: self.examples // batch]:
            loss = F.cross_entropy(network(x[i]), y[i])
            loss.backward()
            yield float(loss.detach())

    @torch.no_grad()
    def measure(self, network: nn.Module, split: str) -> dict[str, float]:
        """Mean `loss` and `accuracy` (0 to 1) on the split `valid`, to tune on, or `test`, to report."""
        x, y = self._data[split]
        logits = network(x)
        return {"loss": float(F.cross_entropy(logits, y)), "accuracy": float((logits.argmax(1) == y).double().mean())}

    def blind(self) -> dict[str, float]:
        """`loss` and `accuracy` on the test split of knowing only how frequent each answer is in the training data."""
        return frequencies(self._data["train"][1], self._data["test"][1], 10)


@dataclass(frozen=True)
class MaskedLM:
    """Masked-LM of a BERT of one layer, width 64, on the documentation inside this Python environment, in sequences of 32 tokens.

    A vocabulary of 512 pieces, so that a fast training learns more than how frequent each is. It trains on a tenth of an epoch, so that
    nothing is seen twice. Tuned on 512 validation sequences, tested on 1,024 others.
    """

    folder: Path
    """Where the prepared text is or goes."""
    examples: int = 24576
    batches: tuple[int, ...] = (16, 64, 256, 1024)
    tuning: tuple[int, ...] = (0,)
    seeds: tuple[int, ...] = (1, 2, 3)
    validation: tuple[int, int] = (512, 1024)
    title: ClassVar[str] = "masked-LM"
    unit: ClassVar[str] = "sequences"
    metric: ClassVar[str] = "loss"
    max_grad_norm: ClassVar[float] = 1.0
    lowest: ClassVar[dict[str, int]] = {"sgd": -6, "adamw": -11, "muon": -11, "lars": 0, "lamb": -9, "lans": -9}

    def prepare(self) -> None:
        """Prepare the text, unless it is there."""
        prepare(load_run("demo", ["data.vocab_size=512"]).data, self.folder)

    def _samples(self, split: str, batch: int, seed: int) -> Samples:
        # At most 64 sequences at once, which stay in the cache; it does not change the gradient.
        phase = BertPhase(self.examples // batch, batch, seq_len=32, micro_batch_size=min(batch, 64), nsp=False, max_predictions_per_seq=8)
        shards = open_shards(self.folder, split, verify=False)
        return Samples(shards, load_vocabulary(self.folder), phase, (seed, 0, int(split == "valid")))

    @cached_property
    def _validation(self) -> dict[str, list[Batch]]:
        samples, first = self._samples("valid", 64, 0), 0
        found: dict[str, list[Batch]] = {}
        for name, count in zip(("valid", "test"), self.validation, strict=True):
            epochs, numbers = samples.locate(np.arange(first, first + count, dtype=np.int64))
            shards, rows = samples.rows(epochs, numbers)
            cuts = [slice(at, at + 64) for at in range(0, count, 64)]
            found[name] = [samples.batch(epochs[m], numbers[m], shards[m], rows[m]) for m in cuts]
            first += count
        assert first <= samples.epoch_size(), "the validation text is shorter than what is asked of it"
        return found

    def network(self) -> nn.Module:
        """243,970 parameters, 131,072 of them the table of words; the next-sentence head has no target and stays as it was."""
        sizes = BertConfig(num_layers=1, hidden_size=64, num_heads=2, max_position_embeddings=32, dropout=0.0, attention_dropout=0.0)
        return BertForPretraining(sizes, load_vocabulary(self.folder).size)

    def steps(self, network: nn.Module, batch: int, seed: int) -> Iterator[float]:
        """As those of :class:`Digits`."""
        assert isinstance(network, BertForPretraining)
        samples = self._samples("train", batch, seed)
        for step in range(self.examples // batch):
            work, total = samples.step(step, pad_to_multiple=64), 0.0
            targets = work.divisors()["mlm"]
            for micro in work.micro:
                loss = network.losses(micro, torch.float32)[0]["mlm"] / targets
                loss.backward()
                total += float(loss.detach())
            yield total

    @torch.no_grad()
    def measure(self, network: nn.Module, split: str) -> dict[str, float]:
        """As that of :class:`Digits`; predictions are those at masked positions."""
        assert isinstance(network, BertForPretraining)
        network.eval()
        loss = hits = targets = 0.0
        for batch in self._validation[split]:
            losses, correct = network.losses(batch, torch.float32)
            loss, hits = loss + float(losses["mlm"]), hits + float(correct["mlm"])
            targets += len(batch.targets["mlm"])
        return {"loss": loss / targets if math.isfinite(loss) else math.inf, "accuracy": hits / targets}

    def blind(self) -> dict[str, float]:
        """As that of :class:`Digits`."""
        known = [torch.from_numpy(shard.tokens.astype(np.int64)) for shard in self._samples("train", 64, 0).shards]
        asked = torch.cat([batch.targets["mlm"] for batch in self._validation["test"]])
        return frequencies(torch.cat(known), asked, load_vocabulary(self.folder).size)


def frequencies(known: Tensor, asked: Tensor, kinds: int) -> dict[str, float]:
    """`loss` and `accuracy` of answering by how often each answer is among the known ones, counting each once more.

    Args:
        known: answers (int64) that are counted.
        asked: right answers (int64).
        kinds: answers there are.
    """
    counts = torch.bincount(known, minlength=kinds).double() + 1
    loss = -(counts / counts.sum()).log()[asked].mean()
    return {"loss": float(loss), "accuracy": float((asked == counts.argmax()).double().mean())}


Problem = Digits | MaskedLM
