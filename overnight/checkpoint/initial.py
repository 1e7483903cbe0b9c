"""A pretrained encoder with its vocabulary, from which something begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from overnight.config import EncoderConfig

_VOCABULARY = ("encoder.word.weight", "mlm.bias")
"""Tensors with a row for each token."""


@dataclass(frozen=True)
class Initial:
    """A pretrained encoder with its vocabulary, wherever it is from."""

    source: str
    """What it was called when it was read."""
    model: EncoderConfig
    tokens: list[str]
    """The vocabulary, id by id."""
    lowercase: bool
    state: dict[str, Tensor]
    """By our names: the encoder always; `pooler`, `mlm` and `nsp` where it has them."""

    def lacks(self) -> list[str]:
        """Return the heads that it does not have."""
        wanted = ["mlm"] if self.model.kind == "modernbert" else ["pooler", "mlm", "nsp"]
        return [head for head in wanted if not any(name.startswith(f"{head}.") for name in self.state)]


def with_new_rows(table: Tensor, rows: int, old_ids: list[list[int]], padded: int) -> Tensor:
    """Return a tensor with a row for each token, with rows for new tokens behind them: the means of those of their pieces.

    Args:
        table: one row for each token, and padding.
        rows: tokens that it has.
        old_ids: for each new token its ids among them.
        padded: rows of the result; those that belong to no token are 0.
    """
    new = [table[ids].mean(0) for ids in old_ids]
    out = table.new_zeros((padded, *table.shape[1:]))
    out[:rows] = table[:rows]
    if new:
        out[rows : rows + len(new)] = torch.stack(new)
    return out


def with_tokens(state: Mapping[str, Tensor], rows: int, padded: int) -> dict[str, Tensor]:
    """Return parameters without the rows behind those of the tokens, which a checkpoint may have for padding."""
    return {name: with_new_rows(tensor, rows, [], padded) if name in _VOCABULARY else tensor for name, tensor in state.items()}
