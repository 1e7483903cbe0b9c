"""The networks and batches that benchmarks share, and what they do where one does not fit into memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeVar

import torch

from overnight.batches.packing import Batch, Sizes
from overnight.bench.measure import Row
from overnight.config import BertConfig, EncoderConfig, ModernBertConfig
from overnight.engine.memory import first_line, is_out_of_memory
from overnight.engine.precision import emulates_bf16, slow_precision
from overnight.models.bert import EncoderLayers
from overnight.models.flops import training_flops
from overnight.models.fused_layer import why_not_compiled

VOCABULARY = 30522
Case = TypeVar("Case")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

MODELS = {
    "bert-mini": BertConfig(num_layers=4, hidden_size=256, num_heads=4),
    "bert-24m": BertConfig(num_layers=16, hidden_size=282, num_heads=6),
    "bert-base": BertConfig(),
    "bert-large": BertConfig(num_layers=24, hidden_size=1024, num_heads=16),
    "bert-tiny": BertConfig(num_layers=2, hidden_size=64, num_heads=2),
}
MODERN_MODELS = {
    "night-gpu": ModernBertConfig(num_layers=12),
    "modernbert-mini": ModernBertConfig(num_layers=4, hidden_size=256, num_heads=4),
    "modernbert-tiny": ModernBertConfig(num_layers=2, hidden_size=64, num_heads=2),
}


# Tokens of film reviews (WordPiece, uncased, with [CLS] and [SEP]) cut at 512: sixteen quantiles of 4,000 of IMDB's, in no order.
REVIEW_LENGTHS = (208, 512, 144, 280, 115, 457, 178, 73, 320, 156, 252, 512, 192, 378, 167, 228)


def full_batch(sequences: int, length: int, predictions: int, vocabulary: int = VOCABULARY, seed: int = 0) -> Batch:
    """Return a random batch of full-length pairs: what every implementation can be given, since nothing is padded.

    Args:
        sequences: S.
        length: tokens of each.
        predictions: predicted tokens of each.
    """
    return batch_of((length,) * sequences, (predictions,) * sequences, vocabulary, seed)


def natural_batch(lengths: Sequence[int], vocabulary: int = VOCABULARY, seed: int = 0) -> Batch:
    """Return a random batch of pairs of these lengths, 15 % of the tokens of each predicted."""
    return batch_of(lengths, [max(1, round(0.15 * length)) for length in lengths], vocabulary, seed)


def batch_of(lengths: Sequence[int], predictions: Sequence[int], vocabulary: int, seed: int) -> Batch:
    """Return a random batch of pairs.

    Args:
        lengths: tokens of each sequence.
        predictions: predicted tokens of each.
    """
    generator, ends = torch.Generator().manual_seed(seed), list(accumulate(lengths))
    ids = torch.randint(5, vocabulary, (ends[-1],), generator=generator)
    chosen = [
        1 + torch.randperm(length - 2, generator=generator)[:count].sort().values + end - length
        for length, count, end in zip(lengths, predictions, ends, strict=True)
    ]
    predicted = torch.cat(chosen)
    return Batch(
        ids_N=ids,
        positions_N=torch.cat([torch.arange(length) for length in lengths]),
        segments_N=torch.cat([(torch.arange(length) >= length // 2).long() for length in lengths]),
        starts=torch.tensor([0, *ends], dtype=torch.int32),
        lengths=tuple(lengths),
        predicted_M=predicted,
        targets={"mlm": ids[predicted], "nsp": torch.randint(0, 2, (len(lengths),), generator=generator)},
    )


def sixteen_bits(device: torch.device) -> str:
    """Return the precision of 16 bits that a device trains in: fp16 on a GPU that would emulate bf16, many times slower."""
    return "fp16" if device.type == "cuda" and emulates_bf16(device) else "bf16"


def not_emulated(cases: Sequence[Case], precision_of: Callable[[Case], str]) -> list[Case]:
    """Return the cases in precisions that this processor has, and print why the others are left out: they would take most of the time."""
    slow = {precision: slow_precision(precision, torch.device("cpu")) for precision in map(precision_of, cases)}
    for precision, why in slow.items():
        if why:
            print(f"{precision}: left out, since {why.partition(';')[0]}", flush=True)
    return [case for case in cases if not slow[precision_of(case)]]


def training_dtype(device: torch.device) -> torch.dtype:
    """Return the type of activations in which a device trains: of 16 bits on a GPU, fp32 on a CPU."""
    return DTYPES[sixteen_bits(device) if device.type == "cuda" else "fp32"]


def set_up_layers(encoder: EncoderLayers, device: torch.device, dtype: torch.dtype, fuses: bool = True) -> None:
    """Have the layers of an encoder on a GPU computed by their own kernels, where that cannot be compiled, and where neither can as they are.

    Args:
        fuses: whether kernels of their own may be taken.
    """
    if device.type == "cuda" and (not fuses or encoder.fuse_layers(device, dtype)) and not why_not_compiled(device):
        encoder.compile_layers()


def sequence_flops(model: EncoderConfig, length: int) -> float:
    """Return floating-point operations of training on one full sequence, with 15 % of its tokens predicted."""
    return training_flops(model, VOCABULARY, Sizes(length, length**2, round(0.15 * length), 1))


def fitting(name: str, device: torch.device, measured: Callable[[], list[Row]]) -> list[Row]:
    """Return the rows of a measurement, none where memory runs out, and give back what it took."""
    rows: list[Row] = []
    try:
        rows = measured()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        print(f"left out, for memory: {name} ({first_line(error)})", flush=True)
    gc.collect()  # After the error is gone, whose frames hold on to the tensors.
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rows
