"""Heads for fine-tuning, on the pretrained encoder.

Shapes: N tokens, S sequences, T longest sequence, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overnight.batches.packing import IGNORED, Batch, moved
from overnight.config import BertConfig, EncoderConfig, ModernBertConfig
from overnight.models.bert import Linear, first_tokens
from overnight.models.encoders import encoder
from overnight.models.layers import dropout
from overnight.models.modernbert import PredictionHead, pooled


def pretrained_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what a task takes of a pretrained network: the encoder and the pooler; of ModernBERT without next-sentence prediction the transform of the masked-LM head as the pooler."""
    taken = {name: tensor for name, tensor in state.items() if name.startswith(("encoder.", "pooler."))}
    if "encoder.final_norm.weight" in state and "pooler.dense.weight" not in state and "mlm.dense.weight" in state:
        taken |= {f"pooler.{part}.weight": state[f"mlm.{part}.weight"] for part in ("dense", "norm")}
    return taken


def without_top(weights: Mapping[str, Tensor], count: int, layers: int) -> dict[str, Tensor]:
    """Return pretrained tensors without those of the top layers, and the pooler, which then begin at random (Zhang et al. 2021, arXiv:2006.05987).

    Args:
        weights: of :func:`pretrained_weights`.
        count: layers to leave out; of 0 the pooler stays.
        layers: of the encoder.
    """
    top = tuple(f"encoder.layers.{i}." for i in range(layers - count, layers)) + ("pooler.",) * (count > 0)
    return {name: tensor for name, tensor in weights.items() if not name.startswith(top)} if top else dict(weights)


def _padded(logits_NC: Tensor, batch: Batch) -> Tensor:
    """Return what belongs to each sequence as a row (S, T, C), -inf behind its end."""
    # Made on the host, which would otherwise wait for the device to say how many there are.
    count, total = len(batch.lengths), len(logits_NC)
    lengths = torch.tensor(batch.lengths, device="cpu")
    sequence_N = torch.repeat_interleave(torch.arange(count, device="cpu"), lengths, output_size=total)
    out = logits_NC.new_full((count, max(batch.lengths), logits_NC.shape[1]), float("-inf"))
    return out.index_put((moved(sequence_N, logits_NC.device), batch.positions_N), logits_NC)


class Classifier(nn.Module):
    """One class, any number of them, or one number, from the pooled first token (Devlin et al. 2018, section 4.1); of ModernBERT from the mean of the tokens, or the first.

    Args:
        model: sizes of the encoder.
        vocab_size: tokens of the vocabulary.
        outputs: classes; 1 is a regression where the labels are numbers.
    """

    class_weights: Tensor | None = None
    """(C,) of each class in the loss, no part of the state; None is 1 for all."""
    unit: tuple[float, float] = 0.0, 1.0
    """Zero and one of the numbers that are learned, in those of the labels, no part of the state: by their mean and standard deviation numbers of any size are learned alike."""

    def __init__(self, model: EncoderConfig, vocab_size: int, outputs: int) -> None:
        super().__init__()
        self.model, self.encoder = model, encoder(model, vocab_size)
        width = model.hidden_size
        self.pooler = Linear(width, width) if isinstance(model, BertConfig) else PredictionHead(width)
        self.head = Linear(model.hidden_size, outputs)
        self.probability = model.dropout

    def forward(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        """Return logits (S, C), or numbers (S, 1), fp32."""
        hidden_ND = self.encoder(batch, dtype)
        if isinstance(self.model, ModernBertConfig):
            pooled_SD = self.pooler(pooled(hidden_ND, batch, self.model))
        else:
            pooled_SD = torch.tanh(self.pooler(first_tokens(hidden_ND, batch)))
        pooled_SD = dropout(pooled_SD, self.probability, self.training)
        # Of a number 16 bits keep two or three digits: 2003.7 would be answered as 2008.
        return self.head(pooled_SD.float() if self.head.out_features == 1 else pooled_SD).float()

    def losses(self, batch: Batch, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return summed cross-entropy, of labels (S, C) between 0 and 1 that of each class alone, of numbers (S) the squared error in units.

        Sequences behind the last that has a label fill the stream up.
        """
        labels = batch.targets["label"]
        logits = self(batch, dtype)[: len(labels)]
        if labels.ndim == 2:
            right = (logits > 0) == (labels > 0.5)
            return {"label": F.binary_cross_entropy_with_logits(logits, labels, reduction="sum")}, {"label": right.sum()}
        if labels.is_floating_point():
            zero, one = self.unit
            return {"label": F.mse_loss(logits[:, 0], (labels - zero) / one, reduction="sum")}, {}
        loss = F.cross_entropy(logits, labels, self.class_weights, reduction="sum")
        return {"label": loss}, {"label": (logits.argmax(-1) == labels).sum()}

    def in_labels(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return trained weights whose head answers in the numbers of the labels, not in units."""
        zero, one = self.unit
        return {**state, "head.weight": state["head.weight"] * one, "head.bias": state["head.bias"] * one + zero}


class TokenClassifier(nn.Module):
    """A class for every token (Devlin et al. 2018, section 5.3).

    Args:
        model: sizes of the encoder.
        vocab_size: tokens of the vocabulary.
        outputs: classes.
    """

    def __init__(self, model: EncoderConfig, vocab_size: int, outputs: int) -> None:
        super().__init__()
        self.encoder = encoder(model, vocab_size)
        self.pooler = nn.Identity() if isinstance(model, BertConfig) else PredictionHead(model.hidden_size)
        self.head = Linear(model.hidden_size, outputs)
        self.probability = model.dropout

    def logits(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        """Return logits (N, C), fp32."""
        return self.head(dropout(self.pooler(self.encoder(batch, dtype)), self.probability, self.training)).float()

    def forward(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        """Return logits (S, T, C), fp32, -inf behind the end of a sequence."""
        return _padded(self.logits(batch, dtype), batch)

    def losses(self, batch: Batch, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return summed cross-entropy of the tokens that have a label (N; -100 has none)."""
        logits, labels = self.logits(batch, dtype), batch.targets["label"]
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        return {"label": loss}, {"label": (logits.argmax(-1) == labels).sum()}


class QuestionAnswering(nn.Module):
    """Start and end of an answer, a softmax over the tokens of each window (Devlin et al. 2018, section 4.2)."""

    def __init__(self, model: EncoderConfig, vocab_size: int) -> None:
        super().__init__()
        self.encoder = encoder(model, vocab_size)
        self.pooler = nn.Identity() if isinstance(model, BertConfig) else PredictionHead(model.hidden_size)
        self.head = Linear(model.hidden_size, 2)

    def forward(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        """Return logits (S, T, 2) of start and end, fp32, -inf behind the end of a window."""
        return _padded(self.head(self.pooler(self.encoder(batch, dtype))).float(), batch)

    def losses(self, batch: Batch, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return summed cross-entropy of start and of end, half each."""
        logits = self(batch, dtype)[: len(batch.targets["start"])]  # sequences behind them fill the stream up
        return {
            name: 0.5 * F.cross_entropy(logits[:, :, i], batch.targets[name], reduction="sum") for i, name in enumerate(("start", "end"))
        }, {}
