"""The least time that pretraining of BERT can take on a device, by component: a roofline (Williams et al. 2009, doi 10.1145/1498765.1498785).

A component takes at least its operations at the rate of matrix products, and at least its bytes at the rate of memory; the components come one after another.
Operations are those of :func:`overnight.models.flops.training_flops`. Bytes are those of each tensor that a kernel between the products must read or write
where all that can be one pass is one (docs/gpu.md); those of products stay hidden behind their operations.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from overnight.batches.packing import Sizes
from overnight.config import BertConfig
from overnight.models.bert import BertForPretraining, padded_vocabulary

OPTIMIZER_BYTES = {"lamb": 44, "lans": 48, "lars": 28, "adamw": 32, "muon": 32}
"""Bytes for each fp32 parameter, clipping included; of Muon AdamW's, without the products of its iteration."""


@dataclass(frozen=True)
class Rates:
    """What a device sustains."""

    products: float
    """Operations of matrix products a second; a multiply-add is two."""
    copy: float
    """Bytes read and written a second, in a copy or, on a CPU, an addition."""


@dataclass(frozen=True)
class Gpu:
    """What a data sheet says of a GPU, and the shares of it that are taken to be sustained."""

    name: str
    tflops: float
    """Dense, 16 bits."""
    terabytes: float
    """A second."""
    product_share: float
    copy_share: float

    @property
    def rates(self) -> Rates:
        """What it is taken to sustain."""
        return Rates(self.tflops * self.product_share * 1e12, self.terabytes * self.copy_share * 1e12)


# NVIDIA's data sheets (SXM). The shares of an H100 were measured at the shapes of BERT-large, under which it lowers its clock; those of the others are taken to be. Measure yours: `overnight bench roof`.
GPUS = (Gpu("H100", 989, 3.35, 0.68, 0.85), Gpu("H200", 989, 4.8, 0.68, 0.85), Gpu("A100", 312, 2.04, 0.80, 0.83))


@dataclass(frozen=True)
class Component:
    """A part of the work."""

    name: str
    flops: float
    bytes: float

    def seconds(self, rates: Rates) -> float:
        """Return the least time (s)."""
        return max(self.flops / rates.products, self.bytes / rates.copy)


@functools.cache
def parameters(model: BertConfig, vocabulary: int) -> int:
    """Return the parameters of a network with its pretraining heads."""
    with torch.device("meta"):
        return sum(p.numel() for p in BertForPretraining(model, vocabulary).parameters())


def micro_batch(model: BertConfig, vocabulary: int, sizes: Sizes, element: int) -> list[Component]:
    """Return the components of a forward and backward pass.

    Args:
        vocabulary: tokens of the vocabulary.
        sizes: of its sequences.
        element: bytes of an activation.
    """
    h, ff, layers, rows = (
        model.hidden_size,
        model.intermediate_size or 4 * model.hidden_size,
        model.num_layers,
        padded_vocabulary(vocabulary),
    )
    tokens, predicted = sizes.tokens, sizes.predicted
    return [
        # Reads queries, keys and values, writes the mixture; backward reads these and its gradient, and writes three.
        Component("attention", 12 * h * sizes.squares * layers, 12 * h * element * tokens * layers),
        Component("products of the layers", 6 * (4 * h * h + 2 * h * ff) * tokens * layers, 0),
        # Two norms of four passes each way, GELU two and three, and the gradients of attention side by side.
        Component("norms, GELU, dropout", 0, (22 * h + 5 * ff) * element * tokens * layers),
        Component("vocabulary head", 6 * (h * h + h * rows) * predicted + 6 * (h * h + 2 * h) * sizes.sequences, 0),
        # Logits read and their gradient written in place, then summed for the bias.
        Component("loss", 0, 3 * element * rows * predicted),
        # Rows looked up and written, looked up again with their gradient, and added to the gradient of the decoder, which is the same table.
        Component("embeddings", 0, (24 + 2 * element) * h * tokens),
    ]  # fmt: skip


def optimizer_step(model: BertConfig, vocabulary: int, micro: int, element: int, optimizer: str) -> list[Component]:
    """Return the components of a step besides its passes.

    Args:
        micro: micro-batches of the step.
        optimizer: its name.
    """
    count = parameters(model, vocabulary)
    casts = (4 + element) * count if element < 4 else 0
    return [
        Component("weights cast, gradients added", 0, casts + 12 * (micro - 1) * count),
        Component("optimizer", 0, OPTIMIZER_BYTES[optimizer] * count),
    ]


def table(models: dict[str, BertConfig], vocabulary: int, sequences: int = 128, length: int = 128, micro: int = 64) -> str:
    """Return the least times of networks on GPUs as a Markdown table: ms of a micro-batch with its share of a step of LAMB, in bf16.

    Args:
        models: by name.
        sequences, length: of a micro-batch of full sequences, 15 % of whose tokens are predicted.
        micro: micro-batches of a step.
    """
    sizes = Sizes(sequences * length, sequences * length**2, sequences * round(0.15 * length), sequences)
    columns: list[tuple[str, list[tuple[str, float]]]] = []
    for name, model in models.items():
        for gpu in GPUS:
            passes = [(part.name, part.seconds(gpu.rates)) for part in micro_batch(model, vocabulary, sizes, 2)]
            step = [(part.name, part.seconds(gpu.rates) / micro) for part in optimizer_step(model, vocabulary, micro, 2, "lamb")]
            columns.append((f"{name}, {gpu.name}", passes + step))
    lines = ["| ms | " + " | ".join(name for name, _ in columns) + " |", "|---" * (1 + len(columns)) + "|"]
    for at, (name, _) in enumerate(columns[0][1]):
        lines.append(f"| {name} | " + " | ".join(f"{1e3 * parts[at][1]:.2f}" for _, parts in columns) + " |")
    sums = [sum(seconds for _, seconds in parts) for _, parts in columns]
    lines.append("| sum | " + " | ".join(f"{1e3 * seconds:.1f}" for seconds in sums) + " |")
    lines.append("| sequences/s at most | " + " | ".join(f"{sequences / seconds:,.0f}" for seconds in sums) + " |")
    return "\n".join(lines)
