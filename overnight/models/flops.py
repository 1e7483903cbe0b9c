"""Floating-point operations: what the training of a network takes, and what a device gives at most."""

from __future__ import annotations

import functools
import re
import time
from dataclasses import dataclass

import torch

from overnight.batches.packing import MATCH_CLASSES, Sizes
from overnight.config import BertConfig, CausalLMConfig, Model, ModernBertConfig, RecurrentLMConfig
from overnight.config.schema import TransformerConfig
from overnight.models.bert import padded_vocabulary
from overnight.models.modernbert import inner_size, is_local
from overnight.models.recurrence import multiplier

# Dense TFLOP/s: of 8 bits, 16 bits, tf32, and fp32 without tensor cores; 0 where there is none. From NVIDIA's data sheets, where the larger
# number is that of sparse matrices; GeForce and RTX A6000, with sums in fp32, from the white papers of their architectures. The first
# name that is in the device's counts.
_TFLOPS: dict[str, tuple[float, float, float, float]] = {
    "B200": (4500, 2250, 1125, 75),
    "H200 NVL": (1671, 835, 418, 60),
    "H200": (1979, 989, 495, 67),
    "GH200": (1979, 989, 495, 67),
    "H100 NVL": (1671, 835, 418, 60),
    "H100 PCIe": (1513, 756, 378, 51),
    "H100": (1979, 989, 495, 67),
    "A100": (0, 312, 156, 19.5),
    "A40": (0, 150, 74.8, 37.4),
    "A30": (0, 165, 82, 10.3),
    "V100-PCIE": (0, 112, 14, 14),
    "V100": (0, 125, 15.7, 15.7),
    "L40S": (733, 362, 183, 91.6),
    "RTX A6000": (0, 155, 77.4, 38.7),
    "RTX 4090": (330, 165, 82.6, 82.6),
    "RTX 3090": (0, 71, 35.6, 35.6),
    "T4": (0, 65, 8.1, 8.1),
}
# Where the device is not in the table: matrix products of these sizes, the best of so many of each, or of those that begin within so many seconds. A
# small one stays in the cache of one core, many cores need a large one.
_SIZES, _REPEATS, _SECONDS = {"cpu": (512, 1024, 2048), "cuda": (8192,)}, 8, 0.2
_BYTES = 256


@dataclass(frozen=True)
class Peak:
    """The most that a device can compute."""

    flops: float
    """Operations a second; a multiplication and an addition are two."""
    measured: bool
    """By a product on the device; else from the table."""

    def text(self) -> str:
        """Return it in words, with where it is from."""
        tera = self.flops / 1e12
        return (f"{tera:,.0f}" if tera >= 10 else f"{tera:.2f}") + " TFLOP/s" + (", measured" if self.measured else "")


def training_flops(model: Model, vocabulary: int, sizes: Sizes) -> float:
    """Return the operations of a network's forward and backward pass over some sequences; a multiply-add is two.

    Matrix products only, each counted three times: once forward, twice backward (Chowdhery et al. 2022, arXiv 2204.02311, appendix B, with the
    heads where they are computed). Nothing is counted twice that is only computed again (`memory.activation_checkpointing`), and embeddings, positions, norms
    and the head of the auxiliary objective, one number a document, count 0.

    Args:
        vocabulary: tokens of the vocabulary; a byte model's is 256, whatever is given.
        sizes: of the sequences; of BERT, 0 sequences leaves out next-sentence prediction.
    """
    if isinstance(model, RecurrentLMConfig):
        return 6 * _recurrent_products(model, sizes)
    if isinstance(model, CausalLMConfig):
        return 6 * _transformer_products(model, sizes)
    if isinstance(model, ModernBertConfig):
        return 6 * _modern_products(model, vocabulary, sizes)
    assert isinstance(model, BertConfig)
    return 6 * _bert_products(model, vocabulary, sizes)


def _layers(model: TransformerConfig, sizes: Sizes) -> float:
    """Return multiply-adds of Transformer layers: 4h² + 2·h·ff a token; scores and mixture, h each, a pair of tokens, of a causal one all pairs too."""
    h, ff = model.hidden_size, model.intermediate_size or 4 * model.hidden_size
    return model.num_layers * ((4 * h * h + 2 * h * ff) * sizes.tokens + 2 * h * sizes.squares)


def _bert_products(model: BertConfig, vocabulary: int, sizes: Sizes) -> float:
    h = model.hidden_size
    heads = (h * h + h * padded_vocabulary(vocabulary)) * sizes.predicted + (h * h + 2 * h) * sizes.sequences
    return _layers(model, sizes) + heads


def _modern_products(model: ModernBertConfig, vocabulary: int, sizes: Sizes) -> float:
    """Return multiply-adds of ModernBERT: 4h² + 3·h·ff a token of a layer, and h each for scores and mixture a pair of tokens, of local layers within the window."""
    h, ff = model.hidden_size, inner_size(model)
    near = min(sizes.squares, sizes.tokens * (model.local_attention + 1))
    pairs = sum(near if is_local(model, number) else sizes.squares for number in range(model.num_layers))
    layers = model.num_layers * (4 * h * h + 3 * h * ff) * sizes.tokens + 2 * h * pairs
    heads = (h * h + h * padded_vocabulary(vocabulary)) * sizes.predicted + (h * h + 2 * h) * sizes.sequences
    return layers + heads + (h * h + MATCH_CLASSES * h) * sizes.matched


def _transformer_products(model: CausalLMConfig, sizes: Sizes) -> float:
    return _layers(model, sizes) + model.hidden_size * _BYTES * sizes.predicted


def _recurrent_products(model: RecurrentLMConfig, sizes: Sizes) -> float:
    """Return multiply-adds of the recurrence; the first layer's products with the input are 256, one for each byte value, made once a step."""
    h, columns = model.hidden_size, (5 if model.kind == "mlstm" else 4) * model.hidden_size
    inputs = model.embedding_size * _BYTES + (model.num_layers - 1) * h * sizes.tokens
    return columns * (inputs + model.num_layers * h * sizes.tokens) + h * _BYTES * sizes.predicted


def known_peak(name: str, precision: str) -> Peak | None:
    """Return the peak of a GPU by its name, or None where it is not known.

    Args:
        precision: as in `precision`.
    """
    kind = {"fp8": 0, "bf16": 1, "fp16": 1, "tf32": 2, "fp32": 3}[precision]
    # A slice of a GPU, or a smaller one of nearly the same name, has another peak.
    rate = next((rates[kind] for known, rates in _TFLOPS.items() if re.search(rf"\b{known}\b(?! D| Laptop|.* MIG )", name)), 0.0)
    # Volta and Turing compute bf16 without tensor cores, at a speed that nobody states.
    if not rate or (precision == "bf16" and re.search(r"\b(V100|T4)\b", name)):
        return None
    return Peak(rate * 1e12, measured=False)


def device_peak(device: torch.device, precision: str, dtype: torch.dtype) -> Peak | None:
    """Return the peak of a device: of a GPU from the table, else the best rate of a product, in a fifth of a second.

    None where neither is possible: 8 bits on a GPU that is not in the table.

    Args:
        precision: as in `precision`.
        dtype: of matrix products.
    """
    known = known_peak(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None
    # Products of 16 bits, which are what could be measured, say nothing of those of 8, which are twice as fast.
    return known or (None if precision == "fp8" else _measured_peak(device, dtype))


@functools.cache  # another run in this process needs no other fifth of a second
@torch.no_grad()
def _measured_peak(device: torch.device, dtype: torch.dtype) -> Peak:
    # A generator of its own: measuring must not move the one that training draws from.
    generator = torch.Generator(device).manual_seed(0)
    best, end = 0.0, None
    for size in _SIZES.get(device.type, _SIZES["cuda"]):
        a, b = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
        # With the weight laid out as the recurrence has it, which is the fastest product there is here.
        product = multiplier(b, size, _REPEATS)
        if end is None:
            # With the first product a GPU's libraries begin, which takes longer than all that is measured.
            product(a)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            end = time.perf_counter() + _SECONDS
        for _ in range(_REPEATS):
            start = time.perf_counter()
            product(a)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
            if time.perf_counter() > end:
                return Peak(best, measured=True)
    return Peak(best, measured=True)
