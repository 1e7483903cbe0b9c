"""ModernBERT (Warner et al. 2024, arXiv 2412.13663): the encoder on a flat batch, and the masked-LM head.

Shapes: N tokens, M predicted positions, D width, V vocabulary (padded to a multiple of 64).
Pre-LayerNorm without biases, rotary positions, gated GELU, global and local layers, a final norm, decoder tied to the word embedding. The
attention of the first layer has no norm of its own: that of the embeddings is right before it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overnight.batches.packing import IGNORED, MATCH_CLASSES, Batch, moved
from overnight.config import ModernBertConfig
from overnight.models.attention import Layout, angle_table, angles, attention, layout
from overnight.models.bert import Embedding, EncoderLayer, EncoderLayers, Linear, MaskedLMHead, Norm, first_tokens, padded_vocabulary
from overnight.models.forward_native import View
from overnight.models.layers import dropout, eager_cpu, gated_gelu, linear
from overnight.models.vocabulary_loss import TiedGradient, tied_rows, vocabulary_loss

EPS = 1e-5


def inner_size(model: ModernBertConfig) -> int:
    """Return the width inside the feed-forward part, of each half."""
    return model.intermediate_size or max(32, 8 * model.hidden_size // 3 // 32 * 32)


def is_local(model: ModernBertConfig, number: int) -> bool:
    """Return whether layer `number` (from 0) sees a window only."""
    return bool(model.local_attention and number % model.global_attention_every)


class ModernLayer(EncoderLayer):
    """One layer: x = x + attention(norm(x)); x = x + ffn(norm(x))."""

    def __init__(self, model: ModernBertConfig, number: int) -> None:
        super().__init__()
        width, inner = model.hidden_size, inner_size(model)
        self.heads, self.dropout = model.num_heads, model.dropout
        self.norm1 = Norm(width, bias=False, eps=EPS) if number else nn.Identity()
        self.qkv, self.out = Linear(width, 3 * width, bias=False), Linear(width, width, bias=False)
        self.norm2 = Norm(width, bias=False, eps=EPS)
        self.up, self.down = Linear(width, 2 * inner, bias=False), Linear(inner, width, bias=False)
        scale = {"megatron": 1 / math.sqrt(2 * model.num_layers), "zero": 0.0, "normal": 1.0}[model.init]
        with torch.no_grad():
            for residual in (self.out, self.down):
                residual.weight.mul_(scale)

    def _forward(self, x_ND: Tensor, where: Layout, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        mixed_ND = attention(self.qkv(self.norm1(x_ND)), self.heads, where, 0.0, (cos, sin))
        x_ND = x_ND + dropout(self.out(mixed_ND), self.dropout, self.training)
        inner = dropout(gated_gelu(self.up(self.norm2(x_ND))), self.dropout, self.training)
        return x_ND + self.down(inner)


class ModernEncoder(EncoderLayers):
    """Embeddings, layers and final norm.

    Args:
        model: sizes.
        vocab_size: tokens of the vocabulary; the table is padded.
    """

    def __init__(self, model: ModernBertConfig, vocab_size: int) -> None:
        super().__init__()
        self.model = model
        self.word = Embedding(padded_vocabulary(vocab_size), model.hidden_size)
        with torch.no_grad():  # The padding has no gradient, so it stays 0, and the norm of the table is that of the tokens.
            self.word.weight[vocab_size:] = 0.0
        self.norm = Norm(model.hidden_size, bias=False, eps=EPS)
        self.layers = nn.ModuleList(ModernLayer(model, number) for number in range(model.num_layers))
        self.final_norm = Norm(model.hidden_size, bias=False, eps=EPS)

    def forward(
        self, batch: Batch, dtype: torch.dtype = torch.float32, tied: TiedGradient | None = None, depth: int | None = None
    ) -> Tensor:
        """Return hidden states (N, D) of a flat batch, in `dtype`, the type of all matrix products and activations.

        Args:
            tied: in which a decoder leaves its gradient of the words, on a CPU.
            depth: behind how many layers, without the final norm; None is all.
        """
        if self.native is not None:
            return self.native(batch, self._views(batch)[:depth], last_norm=depth is None)
        model = self.model
        size = model.hidden_size // model.num_heads
        whole = layout(batch, 0.0, dtype, size=size), *angles(batch.positions_N, size, model.rope_theta)
        near = whole
        if model.local_attention:
            near = layout(batch, 0.0, dtype, model.local_attention // 2, size), *angles(batch.positions_N, size, model.local_rope_theta)
        words_ND = self.word(batch.ids_N) if tied is None else tied_rows(batch.ids_N, self.word.weight, tied)
        x_ND = dropout(self.norm(words_ND).to(dtype), model.dropout, self.training)
        for number, layer in enumerate(self.layers[:depth]):
            x_ND = layer(x_ND, *(near if is_local(model, number) else whole))
        return self.final_norm(x_ND) if depth is None else x_ND

    def _views(self, batch: Batch) -> list[View]:
        """Return how each layer sees the sequences."""
        model, longest, reach = self.model, max(batch.lengths), self.model.local_attention // 2
        size = model.hidden_size // model.num_heads
        whole = View(-1, 0 if batch.causal else -1, angle_table(longest, size, model.rope_theta))
        near = View(reach, 0 if batch.causal else reach, angle_table(longest, size, model.local_rope_theta))
        return [near if is_local(model, number) else whole for number in range(len(self.layers))]


class PredictionHead(nn.Module):
    """ModernBERT's transform before any head: norm(gelu(dense(h))), as in the masked-LM head, from whose weights it begins."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense, self.norm = Linear(width, width, bias=False), Norm(width, bias=False, eps=EPS)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(F.gelu(self.dense(hidden)))


def pooled(hidden_ND: Tensor, batch: Batch, model: ModernBertConfig) -> Tensor:
    """Return what stands for each sequence (S, D): the mean of the hidden states of its tokens, taken in fp32, or that of its first."""
    if model.pooling == "cls":
        return first_tokens(hidden_ND, batch)
    lengths = moved(torch.tensor(batch.lengths, device="cpu"), hidden_ND.device)
    # `unsafe` leaves out a look at the lengths, for which the host would wait twice.
    return torch.segment_reduce(hidden_ND.float(), "mean", lengths=lengths, unsafe=True).to(hidden_ND.dtype)


class ModernBertForMaskedLM(nn.Module):
    """The encoder with the masked-LM head.

    Args:
        model: sizes.
        vocab_size: tokens of the vocabulary.
        nsp: whether it also has a head for next-sentence prediction, which ModernBERT as published has not.
        matching: whether it also has one for token matching (:mod:`overnight.batches.matching`), behind the same transform.
    """

    def __init__(self, model: ModernBertConfig, vocab_size: int, nsp: bool = False, matching: bool = False) -> None:
        super().__init__()
        self.model, self.encoder = model, ModernEncoder(model, vocab_size)
        self.mlm = MaskedLMHead(model.hidden_size, vocab_size, bias=False, eps=EPS)
        self.predicts_next_sentence = nsp
        if nsp or matching:
            self.pooler = PredictionHead(model.hidden_size)
        if nsp:
            self.nsp = Linear(model.hidden_size, 2)
        if matching:
            self.match = Linear(model.hidden_size, MATCH_CLASSES)

    @torch.no_grad()
    def begin_at_unigram(self, counts_V: Tensor) -> None:
        """Set the bias of the decoder to the logarithm of each token's frequency (Meister et al. 2022, arXiv 2212.09686); one that never came counts one.

        Args:
            counts_V: how often each token comes in the training text, without the padding rows.
        """
        counts = counts_V.double().clamp(min=1.0)
        self.mlm.bias[: self.mlm.vocab_size] = (counts / counts.sum()).log().to(self.mlm.bias)

    def mlm_logits(self, hidden_MD: Tensor) -> Tensor:
        """Return logits over the (padded) vocabulary, (M, V)."""
        return linear(self.mlm(hidden_MD), self.encoder.word.weight, self.mlm.masked_bias())

    def losses(self, batch: Batch, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return summed losses by name, and summed correct predictions (outside training only), both fp32.

        The vocabulary head is computed at the predicted positions only.
        """
        assert batch.predicted_M is not None
        name = "clm" if batch.causal else "mlm"
        tied = TiedGradient() if eager_cpu(batch.ids_N) else None
        hidden_ND = self.encoder(batch, dtype, tied)
        hidden_MD = self.mlm(hidden_ND.index_select(0, batch.predicted_M))
        decoder = self.encoder.word.weight, self.mlm.masked_bias()
        loss, right = vocabulary_loss(hidden_MD, *decoder, batch.targets[name], not self.training, tied)
        losses, correct = {name: loss}, {} if right is None else {name: right}
        if self.predicts_next_sentence and "nsp" in batch.targets:
            labels = batch.targets["nsp"]
            logits = self.nsp(self.pooler(pooled(hidden_ND, batch, self.model)))[: len(labels)].float()
            losses["nsp"] = F.cross_entropy(logits, labels, reduction="sum")
            if not self.training:
                correct["nsp"] = (logits.argmax(-1) == labels).sum()
        if "match" in batch.targets:
            labels = batch.targets["match"]
            # Of all tokens: their number is the same at most steps, that of the labels is not, and oneDNN keeps a kernel for every size.
            logits = self.match(self.pooler(hidden_ND)).float()
            losses["match"] = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
            if not self.training:
                correct["match"] = (logits.argmax(-1) == labels).sum()
        return losses, correct
