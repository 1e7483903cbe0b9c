"""The networks and batches that benchmarks share."""

from __future__ import annotations

import torch

from overnight.batches.packing import Batch, Sizes
from overnight.config import BertConfig, EncoderConfig, ModernBertConfig
from overnight.models.flops import training_flops

VOCABULARY = 30522

MODELS = {
    "bert-mini": BertConfig(num_layers=4, hidden_size=256, num_heads=4),
    "bert-24m": BertConfig(num_layers=16, hidden_size=282, num_heads=6),
    "bert-base": BertConfig(),
    "bert-large": BertConfig(num_layers=24, hidden_size=1024, num_heads=16),
    "bert-tiny": BertConfig(num_layers=2, hidden_size=64, num_heads=2),
}
MODERN_MODELS = {
    "modernbert-mini": ModernBertConfig(num_layers=4, hidden_size=256, num_heads=4),
    "modernbert-tiny": ModernBertConfig(num_layers=2, hidden_size=64, num_heads=2),
}


def full_batch(sequences: int, length: int, predictions: int, vocabulary: int = VOCABULARY, seed: int = 0) -> Batch:
    """Return a random batch of full-length pairs: what every implementation can be given, since nothing is padded.

    Args:
        sequences: S.
        length: tokens of each.
        predictions: predicted tokens of each.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, vocabulary, (sequences * length,), generator=generator)
    positions = torch.arange(length).repeat(sequences)
    chosen = [1 + torch.randperm(length - 2, generator=generator)[:predictions].sort().values + at * length for at in range(sequences)]
    predicted = torch.cat(chosen)
    return Batch(
        ids_N=ids,
        positions_N=positions,
        segments_N=(positions >= length // 2).long(),
        starts=torch.arange(0, sequences * length + 1, length, dtype=torch.int32),
        lengths=(length,) * sequences,
        predicted_M=predicted,
        targets={"mlm": ids[predicted], "nsp": torch.randint(0, 2, (sequences,), generator=generator)},
    )


def sequence_flops(model: EncoderConfig, length: int) -> float:
    """Return floating-point operations of training on one full sequence, with 15 % of its tokens predicted."""
    return training_flops(model, VOCABULARY, Sizes(length, length**2, round(0.15 * length), 1))
