"""Weights cast to the type of the products once a step, not once a micro-batch: they do not change before the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# By identity and type: the weight, so that its identity stays its own, and its copy. None: nothing is kept.
_kept: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] | None = None


@contextmanager
def kept_copies(keep: bool = True) -> Iterator[None]:
    """Keep the copies of weights that are made within it; no weight may change there.

    Args:
        keep: False keeps none: with FSDP2 whole weights are there for a layer's time only, and their copies until its backward pass, or where
            that computes the layer again for its time.
    """
    global _kept
    before, _kept = _kept, {} if keep else None
    try:
        yield
    finally:
        _kept = before


def copy_of(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight in another type, without a gradient: its kept copy where there is one, else a new one; itself where it is of that type."""
    if weight.dtype == dtype:
        return weight.detach()
    # What is made of parameters is made anew in each micro-batch: its copies would be of no use to another, and stay until the step ends.
    if _kept is None or not weight.is_leaf:
        return weight.detach().to(dtype)
    key = id(weight), dtype
    if key not in _kept:
        _kept[key] = weight, weight.detach().to(dtype)
    return _kept[key][1]
