"""A small network with weights large enough to matter, and random batches, for the tests of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from overnight.batches.packing import Batch
from overnight.config import BertConfig, ModernBertConfig
from overnight.models.bert import BertForPretraining
from overnight.models.modernbert import ModernBertForMaskedLM

VOCAB = 1000
SIZES: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 64,
    "num_heads": 4,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
MODERN_SIZES: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_heads": 4,
    "max_position_embeddings": 64,
    "rope_theta": 1000.0,
    "local_rope_theta": 100.0,
}


def loud(model: nn.Module) -> nn.Module:
    """The model with weights ten times as large as at its start and no parameter at 0 or 1, so that an error shows in the logits."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                p.mul_(10 if "layers" not in name else 6)
            elif not name.endswith("mlm.bias"):
                p.add_(torch.randn_like(p) * 0.3)
            else:
                p[:VOCAB].add_(torch.randn(VOCAB))
    return model


def pretraining(seed: int = 0, **sizes: Any) -> BertForPretraining:
    """A loud BERT with its heads."""
    torch.manual_seed(seed)
    model = loud(BertForPretraining(BertConfig(**{**SIZES, **sizes}), VOCAB))
    assert isinstance(model, BertForPretraining)
    return model


def modern(seed: int = 0, **sizes: Any) -> ModernBertForMaskedLM:
    """A loud ModernBERT with its head."""
    torch.manual_seed(seed)
    model = loud(ModernBertForMaskedLM(ModernBertConfig(**{**MODERN_SIZES, **sizes}), VOCAB))
    assert isinstance(model, ModernBertForMaskedLM)
    return model


def random_batch(lengths: Sequence[int], seed: int = 1, vocab: int = VOCAB, nsp: bool = True, causal: bool = False) -> Batch:
    """Sequences of these lengths, about a sixth of their tokens predicted; of a causal batch by those before them."""
    generator = torch.Generator().manual_seed(seed)
    total, starts = sum(lengths), torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    predicted = torch.randperm(total, generator=generator)[: max(1, total // 6)].sort().values
    targets = {"clm" if causal else "mlm": torch.randint(0, vocab, predicted.shape, generator=generator)}
    if nsp:
        targets["nsp"] = torch.randint(0, 2, (len(lengths),), generator=generator)
    return Batch(
        ids_N=torch.randint(0, vocab, (total,), generator=generator),
        positions_N=torch.cat([torch.arange(length) for length in lengths]),
        segments_N=torch.cat([(torch.arange(length) > length // 2).long() for length in lengths]),
        starts=starts,
        lengths=tuple(lengths),
        predicted_M=predicted,
        causal=causal,
        targets=targets,
    )


def unseen(length: int, window: tuple[int, int]) -> Tensor:
    """Which tokens (T, T) each token does not see, with a window of so many before it and behind it, -1 for all."""
    before, after = (reach if reach >= 0 else length for reach in window)
    at = torch.arange(length)
    back = at[:, None] - at
    return (back > before) | (-back > after)


def padded(flat_N: Tensor, batch: Batch, fill: int = 0) -> Tensor:
    """Rows of a flat batch as (S, T), filled up behind."""
    parts = [flat_N[start : start + length] for start, length in zip(batch.starts.tolist(), batch.lengths, strict=False)]
    return nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=fill)


class Copies(TorchDispatchMode):
    """Copies from the host to another device, and whether the host waits for each."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to = kwargs.get("device")  # None where only the type changes
        if func is torch.ops.aten._to_copy.default and to is not None and args[0].device.type != torch.device(to).type:
            self.waited.append(not kwargs.get("non_blocking"))
        return func(*args, **kwargs)
