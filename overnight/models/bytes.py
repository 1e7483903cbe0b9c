"""Language models of bytes: the multiplicative LSTM (Krause et al. 2016; Radford et al. 2017; Puri et al. 2018), the LSTM, and a causal Transformer.

    x_t = E[byte_t]
    m_t = (W_mx x_t) ∘ (W_mh h_{t-1})                    LSTM: m_t = h_{t-1}
    i, f, g, o = split(W_x x_t + b + W_h m_t)
    c_t = σ(f) ∘ c_{t-1} + σ(i) ∘ tanh(g)
    h_t = σ(o) ∘ tanh(c_t)
    logits_t = W_out h_t + b_out

With weight normalization (Salimans and Kingma 2016) each of the four matrices is w = g · v / |v| by output row, with fp32 norms.
A layer above the first has the h of the layer below for x. The network of Puri et al. is one layer; its recurrence is in recurrence.py.

Shapes: B rows, T bytes of a window, L layers, H width, E width of the embedding, K documents that end in a window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from overnight.batches.streams import ByteBatch
from overnight.config import CausalLMConfig
from overnight.config.schema import ByteLMConfig
from overnight.models.bert import Embedding, Linear, Norm
from overnight.models.layers import dropout, linear
from overnight.models.recurrence import Workspace, recur
from overnight.models.recurrence_graph import Graphs
from overnight.models.vocabulary_loss import vocabulary_loss

BYTES = 256
# Rows of logits that exist at once where they are not made slice by slice anyway: 16 MB.
_ROWS = 1 << 14


@dataclass(frozen=True)
class Matrices:
    """What a recurrent layer multiplies by in a window, fp32."""

    w_x: Tensor
    """W_x, and below it W_mx: what x is multiplied by (G, inputs)."""
    b: Tensor
    w_h: Tensor
    w_mh: Tensor | None

    def products(self, x_RE: Tensor) -> Tensor:
        """Return W_x x + b, and beside it W_mx x, of each row (R, G), fp32."""
        return linear(x_RE, self.w_x).to(self.b.dtype) + F.pad(self.b, (0, len(self.w_x) - len(self.b)))


Prepared = tuple[list[Matrices], Tensor]


def byte_model(model: ByteLMConfig, label: bool = False, recompute: int = 0, graphs: bool = False) -> ByteModel:
    """Return the network of a configuration, with random weights.

    Args:
        model: sizes and kind (`mlstm`, `lstm` or `transformer`).
        label: also the head of the auxiliary objective, which predicts a number at the end of a document.
        recompute: bytes of a segment of the window; the backward pass recomputes all but the state between segments. 0 keeps everything.
            The Transformer recomputes layer by layer, whatever the number.
        graphs: capture the passes of the recurrence as CUDA graphs (a GPU only).
    """
    return ByteModel(model, label, recompute, Graphs() if graphs else None)


class ByteModel(nn.Module):
    """A language model of bytes; :func:`byte_model` says what it takes.

    `state_shape` is that of the carried state of one stream: (L, 2, H) with h and c of each layer; (0,) for the Transformer, which sees the
    window alone.
    """

    def __init__(self, model: ByteLMConfig, label: bool, recompute: int, graphs: Graphs | None) -> None:
        super().__init__()
        self.recurrent, self.recompute = not isinstance(model, CausalLMConfig), recompute
        self.dropout = model.dropout if isinstance(model, CausalLMConfig) else 0.0
        self.state_shape: tuple[int, ...] = (model.num_layers, 2, model.hidden_size) if self.recurrent else (0,)
        self.layers, self.workspace, self.graphs = nn.ModuleList(), Workspace(), graphs
        if not isinstance(model, CausalLMConfig):
            self.embedding = nn.Embedding(BYTES, model.embedding_size)
            for at in range(model.num_layers):
                inputs = model.hidden_size if at else model.embedding_size
                self.layers.append(Layer(inputs, model.hidden_size, model.kind == "mlstm", model.weight_norm))
        else:
            self.embedding, self.position = Embedding(BYTES, model.hidden_size), Embedding(model.max_position_embeddings, model.hidden_size)
            self.layers.extend(Block(model) for _ in range(model.num_layers))
            self.norm = Norm(model.hidden_size)
        self.decoder = nn.Linear(model.hidden_size, BYTES)  # U(±1/√H), also its bias
        self.label = Linear(model.hidden_size, 1) if label else None

    def hidden(
        self, ids_BT: Tensor, state_B: Tensor | None, dtype: torch.dtype, prepared: Prepared | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the top layer at every byte, differentiable.

        Args:
            ids_BT: bytes (int64).
            state_B: state before the window (B, *state_shape); None is zero.
            dtype: type of matrix products and activations.
            prepared: as :meth:`prepared` made it from the same weights; None makes it anew.

        Returns:
            h (B, T, H) in `dtype`; c (B, T, H) fp32, None for the Transformer; the state after the window.
        """
        state_B = self.zero_state(len(ids_BT)) if state_B is None else state_B
        return self._hidden(ids_BT, state_B, dtype, prepared or self.prepared(dtype), None)

    def zero_state(self, rows: int) -> Tensor:
        """Return the state before a first window (B, *state_shape)."""
        return torch.zeros(rows, *self.state_shape, device=self.decoder.weight.device)

    def logits(self, h: Tensor) -> Tensor:
        """Return logits of the next byte (..., 256), fp32."""
        return linear(h.reshape(-1, h.shape[-1]), self.decoder.weight, self.decoder.bias).view(*h.shape[:-1], BYTES).float()

    def losses(self, batch: ByteBatch, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        """Return summed losses by name, summed correct predictions (outside training only), and the state after the window, detached.

        `byte` is the cross-entropy (nats), `label` the squared error of the auxiliary objective.
        """
        rows, steps = batch.ids_BT.shape
        state = self.zero_state(rows) if batch.state_B is None else batch.state_B
        state = state.masked_fill(batch.fresh_B.view(-1, *(1 for _ in self.state_shape)), 0.0)
        recompute = self.recurrent and 0 < self.recompute < steps and torch.is_grad_enabled()
        length, prepared = self.recompute if recompute else steps, self.prepared(dtype)
        losses: dict[str, Tensor] = {}
        correct: dict[str, Tensor] = {}
        for start in range(0, steps, length):
            arguments = batch, slice(start, start + length), state, dtype, prepared
            if recompute:
                part, count_correct, state = checkpoint(self._segment, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                part, count_correct, state = self._segment(*arguments)
            losses = {name: losses[name] + loss if start else loss for name, loss in part.items()}
            correct = {name: correct[name] + count if start else count for name, count in count_correct.items()}
        return losses, correct, state.detach()

    def _segment(
        self, batch: ByteBatch, part: slice, state_B: Tensor, dtype: torch.dtype, prepared: Prepared | None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        """Return losses and correct predictions of a part of the window, and the state after it."""
        h_BTH, c_BTH, state_B = self._hidden(batch.ids_BT[:, part], state_B, dtype, prepared, self.workspace)
        losses: dict[str, Tensor] = {}
        correct: dict[str, Tensor] = {}
        if self.label is not None and batch.ends_K is not None:
            features = h_BTH if c_BTH is None else c_BTH
            row, at = batch.ends_K // batch.ids_BT.shape[1], batch.ends_K % batch.ids_BT.shape[1] - part.start
            # Documents that end elsewhere in the window count 0: to leave them out would make a GPU wait for their number.
            inside = (at >= 0) & (at < features.shape[1])
            ends_KH = features[row, at.clamp(0, features.shape[1] - 1)].float()
            error = linear(ends_KH, self.label.weight, self.label.bias)[:, 0] - batch.targets["label"]
            losses["label"] = (error.square() * inside).sum()
        # By time, as h lies in memory where there is a recurrence.
        losses["byte"], count_correct = self._byte_loss(h_BTH.transpose(0, 1).flatten(0, 1), batch.targets["byte"][:, part].t().flatten())
        if count_correct is not None:
            correct["byte"] = count_correct
        return losses, correct, state_B

    def _byte_loss(self, h_NH: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return summed cross-entropy and correct predictions, without all logits at once."""
        arguments, count = (self.decoder.weight, self.decoder.bias), not self.training
        if h_NH.device.type == "cpu" and torch.is_grad_enabled() and not count:  # goes slice by slice itself
            return vocabulary_loss(h_NH, *arguments, targets_N, False)
        losses, correct = [], []
        for h, targets in zip(h_NH.split(_ROWS), targets_N.split(_ROWS), strict=True):
            loss, count_correct = checkpoint(vocabulary_loss, h, *arguments, targets, count, use_reentrant=False, preserve_rng_state=False)
            losses.append(loss)
            correct.append(count_correct)
        return torch.stack(losses).sum(), torch.stack(correct).sum() if count else None

    def prepared(self, dtype: torch.dtype) -> Prepared | None:
        """Return what is made once for a window, or for all that are read with the same weights: the matrices, and the products with each of the 256 bytes."""
        if not self.recurrent:
            return None
        matrices = [layer.matrices() for layer in self.layers if isinstance(layer, Layer)]
        return matrices, matrices[0].products(self.embedding.weight.to(dtype))

    def _hidden(
        self, ids_BT: Tensor, state_B: Tensor, dtype: torch.dtype, prepared: Prepared | None, workspace: Workspace | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        if prepared is None:
            return self._attend(ids_BT, dtype), None, state_B
        (matrices, table), rows_TB, ends = prepared, ids_BT.t(), []
        # Validation text and texts to describe come in many shapes, each of which would take a graph.
        graphs = self.graphs if workspace is not None and torch.is_grad_enabled() else None
        for at, layer in enumerate(matrices):
            h_TBH, c_TBH = recur(table, rows_TB, layer.w_mh, layer.w_h, state_B[:, at, 0], state_B[:, at, 1], dtype, workspace, graphs)
            ends.append(torch.stack((h_TBH[-1].to(c_TBH.dtype), c_TBH[-1]), 1))
            if at + 1 < len(matrices):
                # In the layers above each place has a row of its own.
                table = matrices[at + 1].products(h_TBH.flatten(0, 1))
                rows_TB = torch.arange(len(table), device=table.device).view(rows_TB.shape)
        return h_TBH.transpose(0, 1), c_TBH.transpose(0, 1), torch.stack(ends, 1)

    def _attend(self, ids_BT: Tensor, dtype: torch.dtype) -> Tensor:
        steps = ids_BT.shape[1]
        x_ND = (self.embedding(ids_BT) + self.position.weight[:steps]).to(dtype).flatten(0, 1)
        x_ND = dropout(x_ND, self.dropout, self.training)
        for layer in self.layers:
            again = self.recompute > 0 and torch.is_grad_enabled()
            x_ND = checkpoint(layer, x_ND, steps, use_reentrant=False) if again else layer(x_ND, steps)
        return self.norm(x_ND).view(*ids_BT.shape, -1)


class Layer(nn.Module):
    """A layer of the recurrence.

    Args:
        inputs: width of x.
        width: H.
        multiplicative: m = (W_mx x) ∘ (W_mh h), else m = h.
        weight_norm: of the matrices, which then are v; `g` holds the lengths of their rows.
    """

    def __init__(self, inputs: int, width: int, multiplicative: bool, weight_norm: bool) -> None:
        super().__init__()
        shapes = {"w_x": (4 * width, inputs), "w_h": (4 * width, width)}
        if multiplicative:
            shapes |= {"w_mx": (width, inputs), "w_mh": (width, width)}
        bound = 1 / math.sqrt(width)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape).uniform_(-bound, bound)))
        self.b = nn.Parameter(torch.empty(4 * width).uniform_(-bound, bound))
        self.names = tuple(shapes)
        lengths = {name: nn.Parameter(self.get_parameter(name).detach().norm(dim=1)) for name in shapes} if weight_norm else {}
        self.g = nn.ParameterDict(lengths)

    def matrices(self) -> Matrices:
        """Return the matrices with weight normalization applied."""
        w: dict[str, Tensor] = {name: self.get_parameter(name) for name in self.names}
        w |= {name: torch._weight_norm(w[name], g[:, None], 0) for name, g in self.g.items()}
        return Matrices(torch.cat([w[name] for name in ("w_x", "w_mx") if name in w]), self.b, w["w_h"], w.get("w_mh"))


class Block(nn.Module):
    """One layer: x = x + attention(norm(x)); x = x + ffn(norm(x))."""

    def __init__(self, model: CausalLMConfig) -> None:
        super().__init__()
        width, inner = model.hidden_size, model.intermediate_size or 4 * model.hidden_size
        self.heads, self.dropout = model.num_heads, model.dropout
        self.norm1, self.qkv, self.out = Norm(width), Linear(width, 3 * width), Linear(width, width)
        self.norm2, self.up, self.down = Norm(width), Linear(width, inner), Linear(inner, width)
        with torch.no_grad():  # so that the sum over all layers has the variance of one
            for last in (self.out, self.down):
                last.weight.div_(math.sqrt(2 * model.num_layers))

    def forward(self, x_ND: Tensor, steps: int) -> Tensor:
        width = x_ND.shape[1]
        q, k, v = self.qkv(self.norm1(x_ND)).view(-1, steps, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(-1, width)
        x_ND = x_ND + dropout(self.out(mixed), self.dropout, self.training)
        return x_ND + dropout(self.down(F.gelu(self.up(self.norm2(x_ND)))), self.dropout, self.training)
