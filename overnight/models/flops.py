"""Floating-point operations: what the training of a network takes, and what a device gives at most."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import torch

from overnight.batches.packing import Sizes
from overnight.config import Model
from overnight.models.bert import padded_vocabulary
from overnight.models.layers import linear

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
# Where the device is not in the table: a product of this size, the best of so many, or of those that begin within so many seconds.
_SIZE, _REPEATS, _SECONDS = 1024, 8, 0.2


@dataclass(frozen=True)
class Peak:
    """The most that a device can compute."""

    flops: float
    """Operations a second; a multiplication and an addition are two."""
    measured: bool
    """By a product on the device; else from the table."""

    def text(self) -> str:
        """For people, with where it is from."""
        tera = self.flops / 1e12
        return (f"{tera:,.0f}" if tera >= 10 else f"{tera:.2f}") + " TFLOP/s" + (", measured" if self.measured else "")


def training_flops(model: Model, vocabulary: int, sizes: Sizes) -> float:
    """Operations of a network's forward and backward pass over some sequences, without recomputation; a multiply-add is two.

    Products only: 6 for each of their parameters and each token that they see, and for attention 12·h·L a pair of tokens:
    3·(2·L·(4h² + 2·h·ff)·tokens + 4·L·h·Σ length² + 2·(h² + h·V)·predicted + 2·(h² + 2h)·sequences) (Chowdhery et al. 2022,
    arXiv 2204.02311, appendix B, with the heads where they are computed).

    Args:
        vocabulary: pieces of the tokenizer.
        sizes: of the sequences; 0 sequences leaves out next-sentence prediction.
    """
    h, ff, layers = model.width, model.ffn or 4 * model.width, model.layers
    encoder = layers * ((4 * h * h + 2 * h * ff) * sizes.tokens + 2 * h * sizes.squares)
    heads = (h * h + h * padded_vocabulary(vocabulary)) * sizes.predicted + (h * h + 2 * h) * sizes.sequences
    return 6 * (encoder + heads)


def known_peak(name: str, precision: str) -> Peak | None:
    """The peak of a GPU by its name, or None where it is not known.

    Args:
        precision: as in `train.precision`.
    """
    kind = {"fp8": 0, "bf16": 1, "fp16": 1, "tf32": 2, "fp32": 3}[precision]
    # A slice of a GPU, or a smaller one of nearly the same name, has another peak.
    rate = next((rates[kind] for known, rates in _TFLOPS.items() if re.search(rf"\b{known}\b(?! D| Laptop|.* MIG )", name)), 0.0)
    # Volta and Turing compute bf16 without tensor cores, at a speed that nobody states.
    if not rate or (precision == "bf16" and re.search(r"\b(V100|T4)\b", name)):
        return None
    return Peak(rate * 1e12, measured=False)


def device_peak(device: torch.device, precision: str, dtype: torch.dtype) -> Peak:
    """The peak of a device: of a GPU from the table, else the best rate of a product, in a fifth of a second.

    Args:
        precision: as in `train.precision`.
        dtype: of products.
    """
    known = known_peak(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None
    return known or _measured_peak(device, dtype)


@torch.no_grad()
def _measured_peak(device: torch.device, dtype: torch.dtype) -> Peak:
    size = _SIZE if device.type == "cpu" else 8 * _SIZE
    # A generator of its own: measuring must not move the one that training draws from.
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
    best, end = float("inf"), time.perf_counter() + _SECONDS
    for _ in range(_REPEATS):
        start = time.perf_counter()
        linear(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() > end:
            break
    return Peak(2 * size**3 / best, measured=True)
