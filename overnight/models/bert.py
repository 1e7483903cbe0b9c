"""BERT (Devlin et al. 2018): the encoder on a flat batch, and the pretraining heads.

Shapes: N tokens, S sequences, M predicted positions, D width, V vocabulary (padded to a multiple of 64).
Post-LayerNorm, GELU (erf), learned positions, decoder tied to the word embedding, as published.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from overnight.batches.packing import Batch
from overnight.config import BertConfig
from overnight.models.attention import Layout, attention, layout
from overnight.models.forward_native import NativeEncoder, View
from overnight.models.fused_layer import fused_embedding, fused_layer, why_not
from overnight.models.int8 import Int8Weight, int8_product, quantized
from overnight.models.layers import _onednn_linear, dropout, eager_cpu, layer_norm, linear, packed, packed_product, rows, unpacked
from overnight.models.vocabulary_loss import TiedGradient, tied_rows, vocabulary_loss

# Logits of the padding rows of the vocabulary: exp(-1e4) is exactly 0 in fp32, and so is their gradient.
_NEVER = -1e4
INIT_STD = 0.02
_COMPILATIONS = 64
"""Most compilations of the layers in one process: a network takes two, or four with local attention, and two more for each other mode."""


def padded_vocabulary(size: int) -> int:
    """Return the number of rows of the word embedding: the next multiple of 64, which matrix units want."""
    return -(-size // 64) * 64


def _draw(weight: Tensor) -> Tensor:
    """Fill a weight from N(0, 0.02) and return it; without memory (the meta device), where torch would import its compiler for that (a second), it stays as it is."""
    return weight if weight.is_meta else weight.normal_(0.0, INIT_STD)


class Linear(nn.Linear):
    """y = x W^T + b with W from N(0, 0.02) and b = 0."""

    packed: Tensor | None = None
    """The weight as :func:`overnight.models.layers.packed` lays it out, of a network that is trained no more."""
    in_8_bits: Int8Weight | None = None
    """The weight and the bias in 8 bits, of such a network."""

    def reset_parameters(self) -> None:
        """Fill weight and bias."""
        _draw(self.weight.data)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            return packed_product(x, self.packed, self.bias, self.out_features)
        if self.in_8_bits is not None:
            return int8_product(x, self.in_8_bits)
        return linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Lay the weight out for products of its type, once and for all: nothing else is kept of it."""
        self.packed = packed(self.weight)
        if self.packed is not None:
            self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)

    def to_8_bits(self) -> None:
        """Multiply in 8 bits from now on: nothing else is kept of the weight."""
        self.in_8_bits = quantized(self.weight, self.bias)
        self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of: the weight as it was, since its layout belongs to this processor."""
        return self.__dict__ | ({} if self.packed is None else {"packed": unpacked(self.packed, self.out_features, self.in_features)})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.packed is not None:
            self.weight = nn.Parameter(self.packed, requires_grad=False)
            self.pack()


class Norm(nn.Module):
    """LayerNorm over the width.

    Args:
        bias: whether it has one.
        eps: added to the variance.
    """

    def __init__(self, width: int, bias: bool = True, eps: float = 1e-12) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


class Embedding(nn.Embedding):
    """A table of vectors from N(0, 0.02)."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width, _weight=_draw(torch.empty(rows, width)))


Recompute = Literal["none", "selective", "full"]

# Products with a weight: nearly all the time of a layer. Those of attention are left out, because their results grow with the length.
_PRODUCTS = {getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "linear", "_scaled_mm") if hasattr(torch.ops.aten, name)} | (
    {_onednn_linear.default} if _onednn_linear is not None else set()
)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return what `selective` keeps: the results of matrix products; all between them is cheap."""
    return CheckpointPolicy.MUST_SAVE if op in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


class EncoderLayer(nn.Module):
    """A layer of an encoder, which may be recomputed in the backward pass."""

    recompute: Recompute = "none"

    def forward(self, x_ND: Tensor, *where: Any) -> Tensor:
        if self.recompute == "none" or not (self.training and torch.is_grad_enabled()):
            return self._forward(x_ND, *where)
        # Dropout comes out the same the second time: `checkpoint` puts the generators back.
        if self.recompute == "full":  # torch.compile does not take the default given as a variable
            return checkpoint(self._forward, x_ND, *where, use_reentrant=False)
        contexts = partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(self._forward, x_ND, *where, use_reentrant=False, context_fn=contexts)

    def _forward(self, x_ND: Tensor, *where: Any) -> Tensor:
        raise NotImplementedError


class EncoderLayers(nn.Module):
    """What all encoders can do with their `layers`."""

    layers: nn.ModuleList
    native: NativeEncoder | None = None
    """What computes all of it in one call, of a network that is trained no more and whose weights are laid out for that."""

    def call_natively(self) -> None:
        """Compute all of it in one call from now on, where the weights are laid out for that."""
        first: Any = self.layers[0]
        if first.qkv.packed is not None and not first.qkv.packed.is_mkldnn:
            self.native = NativeEncoder(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a copy, perhaps on another machine, where weights may be laid out in another form (:class:`Linear`)."""
        super().__setstate__(state)
        if self.native is not None:
            self.native = None
            self.call_natively()

    def compile_layers(self) -> None:
        """Compile the layers with torch.compile: nearly all of the work, once for all numbers of tokens, sequences and lengths."""
        # All networks of a process share the count of compilations, since their layers are one piece of code. Behind the limit, which is 8,
        # layers would be trained uncompiled: sizes that are tried, rehearsals and phases come to more.
        torch._dynamo.config.recompile_limit = max(_COMPILATIONS, torch._dynamo.config.recompile_limit)
        for layer in self.layers:
            layer.compile(dynamic=True)

    def fuse_layers(self, device: torch.device, dtype: torch.dtype) -> str:
        """Have the layers computed by a function of their own on a device, in a type of activations; returns why not, empty where they are."""
        return "there is none for these layers"

    def recompute_layers(self, recompute: Recompute) -> None:
        """Keep less of the forward pass for the backward pass, which computes it again (Chen et al. 2016, arXiv 1604.06174); the same gradients.

        Args:
            recompute: `full` keeps the input of each layer, `selective` also the results of its matrix products with weights.
        """
        for layer in self.layers:
            assert isinstance(layer, EncoderLayer)
            layer.recompute = recompute


class Layer(EncoderLayer):
    """One Transformer layer: x = norm(x + attention(x)); x = norm(x + ffn(x))."""

    fused = False

    def __init__(self, model: BertConfig) -> None:
        super().__init__()
        width, inner = model.hidden_size, model.intermediate_size or 4 * model.hidden_size
        self.heads, self.dropout, self.attention_dropout = model.num_heads, model.dropout, model.attention_dropout
        self.qkv, self.out, self.norm1 = Linear(width, 3 * width), Linear(width, width), Norm(width)
        self.up, self.down, self.norm2 = Linear(width, inner), Linear(inner, width), Norm(width)

    def _forward(self, x_ND: Tensor, where: Layout) -> Tensor:  # type: ignore[override]
        if self.fused and where.varlen:
            return fused_layer(self, x_ND, where)
        mixed_ND = attention(self.qkv(x_ND), self.heads, where, self.attention_dropout if self.training else 0.0)
        x_ND = self.norm1(x_ND + dropout(self.out(mixed_ND), self.dropout, self.training))
        inner = F.gelu(self.up(x_ND))
        return self.norm2(x_ND + dropout(self.down(inner), self.dropout, self.training))


class Encoder(EncoderLayers):
    """Embeddings and layers.

    Args:
        model: sizes.
        vocab_size: tokens of the vocabulary; the table is padded.
    """

    fused = False

    def __init__(self, model: BertConfig, vocab_size: int) -> None:
        super().__init__()
        self.word = Embedding(padded_vocabulary(vocab_size), model.hidden_size)
        with torch.no_grad():  # The padding has no gradient, so it stays 0, and the norm of the table is that of the tokens.
            self.word.weight[vocab_size:] = 0.0
        self.position = Embedding(model.max_position_embeddings, model.hidden_size)
        self.segment = Embedding(2, model.hidden_size)
        self.norm = Norm(model.hidden_size)
        self.layers = nn.ModuleList(Layer(model) for _ in range(model.num_layers))
        self.dropout, self.attention_dropout = model.dropout, model.attention_dropout
        self.head_size = model.hidden_size // model.num_heads

    def fuse_layers(self, device: torch.device, dtype: torch.dtype) -> str:
        width = len(self.norm.weight)
        why = why_not(device, dtype, width, width // self.head_size, self.attention_dropout)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.fused = not why
        self.fused = not why
        return why

    def embedded(self, batch: Batch, dtype: torch.dtype, tied: TiedGradient | None = None) -> Tensor:
        """Return the embeddings of tokens, positions and segments, after norm and dropout (N, D)."""
        if self.fused:
            return fused_embedding(self, (batch.ids_N, batch.positions_N, batch.segments_N), dtype, tied or TiedGradient())
        words_ND = self.word(batch.ids_N) if tied is None else tied_rows(batch.ids_N, self.word.weight, tied)
        x_ND = words_ND + self.position(batch.positions_N) + self.segment(batch.segments_N)
        return dropout(self.norm(x_ND).to(dtype), self.dropout, self.training)

    def forward(
        self, batch: Batch, dtype: torch.dtype = torch.float32, tied: TiedGradient | None = None, depth: int | None = None
    ) -> Tensor:
        """Return hidden states (N, D) of a flat batch, in `dtype`, the type of all matrix products and activations.

        Args:
            tied: in which a decoder leaves its gradient of the words.
            depth: behind how many layers; None is all.
        """
        layers = self.layers[:depth]
        if self.native is not None:
            return self.native(batch, [View(after=0 if batch.causal else -1)] * len(layers), last_norm=False)
        where = layout(batch, self.attention_dropout if self.training else 0.0, dtype, size=self.head_size)
        x_ND = self.embedded(batch, dtype, tied)
        for layer in layers:
            x_ND = layer(x_ND, where)
        return x_ND


def first_tokens(hidden_ND: Tensor, batch: Batch) -> Tensor:
    """Return hidden states of the [CLS] of each sequence (S, D)."""
    return hidden_ND.index_select(0, batch.starts[:-1])


class MaskedLMHead(nn.Module):
    """Transform and tied decoder: logits = norm(gelu(dense(h))) E^T + bias.

    The bias of the padding rows is 0 and takes no part: a constant stands for it in the logits.

    Args:
        bias: whether dense and norm have one.
        eps: of the norm.
    """

    def __init__(self, width: int, vocab_size: int, bias: bool = True, eps: float = 1e-12) -> None:
        super().__init__()
        self.dense, self.norm, self.vocab_size = Linear(width, width, bias), Norm(width, bias, eps), vocab_size
        self.bias = nn.Parameter(torch.zeros(padded_vocabulary(vocab_size)))

    def masked_bias(self) -> Tensor:
        """Return the bias of the logits (V), which never lets a padding row be predicted."""
        return F.pad(self.bias[: self.vocab_size], (0, len(self.bias) - self.vocab_size), value=_NEVER)

    def forward(self, hidden_MD: Tensor) -> Tensor:
        """Return what the decoder multiplies: (M, D)."""
        return self.norm(F.gelu(self.dense(hidden_MD)))


class BertForPretraining(nn.Module):
    """The encoder with the masked-LM and next-sentence heads."""

    def __init__(self, model: BertConfig, vocab_size: int) -> None:
        super().__init__()
        self.encoder = Encoder(model, vocab_size)
        self.pooler = Linear(model.hidden_size, model.hidden_size)
        self.mlm = MaskedLMHead(model.hidden_size, vocab_size)
        self.nsp = Linear(model.hidden_size, 2)

    def mlm_logits(self, hidden_MD: Tensor) -> Tensor:
        """Return logits over the (padded) vocabulary, (M, V)."""
        return linear(self.mlm(hidden_MD), self.encoder.word.weight, self.mlm.masked_bias())

    def nsp_logits(self, first_SD: Tensor) -> Tensor:
        """Return logits of `is next`, `is random`, (S, 2), from the hidden states of the first tokens."""
        return self.nsp(torch.tanh(self.pooler(first_SD)))

    def losses(self, batch: Batch, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return summed losses by name, and summed correct predictions (outside training only), both fp32.

        The vocabulary head is computed at the predicted positions only.
        """
        assert batch.predicted_M is not None
        tied = TiedGradient() if self.encoder.fused or eager_cpu(batch.ids_N) else None
        hidden_ND = self.encoder(batch, dtype, tied)
        # One look-up, so that the gradient of all hidden states is filled once.
        chosen = rows(hidden_ND, torch.cat((batch.predicted_M, batch.starts[:-1].long())))
        predicted_MD, first_SD = chosen.split((len(batch.predicted_M), len(batch.starts) - 1))
        hidden_MD = self.mlm(predicted_MD)
        decoder = self.encoder.word.weight, self.mlm.masked_bias()
        name = "clm" if batch.causal else "mlm"
        loss, right = vocabulary_loss(hidden_MD, *decoder, batch.targets[name], not self.training, tied)
        losses, correct = {name: loss}, {} if right is None else {name: right}
        if "nsp" in batch.targets:
            labels = batch.targets["nsp"]
            logits = self.nsp_logits(first_SD)[: len(labels)].float()
            losses["nsp"] = F.cross_entropy(logits, labels, reduction="sum")
            if not self.training:
                correct["nsp"] = (logits.argmax(-1) == labels).sum()
        return losses, correct
