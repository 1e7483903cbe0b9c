"""Losses, gradients, weights and outputs that are NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from overnight.distributed.collectives import all_reduce_sums
from overnight.distributed.world import World
from overnight.errors import TrainingError
from overnight.optim.layerwise import whole_norms


class NonFiniteError(TrainingError):
    """A loss, a gradient, a weight or an output is NaN or infinite."""

    event = "not_finite"


def nonfinite_tensors(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return names of the tensors that hold a NaN or an infinity; waits for the device once."""
    names, tensors = zip(*named, strict=True)
    return [name for name, norm in zip(names, whole_norms(tensors).tolist(), strict=True) if not math.isfinite(norm)]


def finite(losses: dict[str, Tensor], world: World) -> bool:
    """Return whether all losses of a step are finite, of all processes, which must all ask."""
    return all(math.isfinite(value) for value in all_reduce_sums({name: float(loss) for name, loss in losses.items()}, world).values())


def finite_outputs(values: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.floating[Any]]:
    """Return what a trained network computes.

    Raises:
        NonFiniteError: when there is NaN or Infinity in it, of which an answer would be one of chance, and no JSON.
    """
    if not np.isfinite(values).all():
        raise NonFiniteError(
            "the model computes numbers that are not finite: it has diverged, or its weights are damaged; take another one"
        )
    return values


def describe_losses(losses: dict[str, Tensor], world: World) -> str:
    """Return the losses of a step in words: which are not finite, or that all are; all processes must ask."""
    values = all_reduce_sums({name: float(loss) for name, loss in losses.items()}, world)
    bad = {name: value for name, value in values.items() if not math.isfinite(value)}
    if bad:
        return " and ".join(f"the {name} loss is {value}" for name, value in bad.items())
    return "the losses are finite (" + ", ".join(f"{name} {value:.4g}" for name, value in values.items()) + ")"
