"""The three optimizers, seeded tensors, and the published trajectories."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from overnight.optim import Lamb, Lans, Lars
from overnight.optim.layerwise import Layerwise

VECTORS = Path(os.environ.get("OVERNIGHT_VECTORS", Path(__file__).parents[2].parent / "shared" / "vectors")) / "optimizers_f64.json"
CLASSES: dict[str, type[Layerwise]] = {"lamb": Lamb, "lans": Lans, "lars": Lars}
SHAPES = [(5, 4), (3,), (1,), (2, 3, 2)]


def vectors() -> dict[str, Any]:
    """The file of trajectories, whose settings have two names of their own; the test is skipped where it is not."""
    if not VECTORS.is_file():
        pytest.skip(f"no optimizer vectors at {VECTORS}; set OVERNIGHT_VECTORS")
    found = dict(json.loads(VECTORS.read_text(encoding="utf-8")))
    ours = {"adapt": "trust_ratio", "trust_clip": "max_trust_ratio"}
    for case in found["cases"].values():
        case["settings"] = {ours.get(key, key): value for key, value in case["settings"].items()}
    return found


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Seeded normal numbers."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parameters(shapes: list[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Seeded parameters."""
    return [draw(*shape, seed=i, dtype=dtype).requires_grad_() for i, shape in enumerate(shapes)]


def fill(params: list[Tensor], step: int, scale: float = 1.0) -> None:
    """Seeded gradients of a step."""
    for i, p in enumerate(params):
        p.grad = (draw(*p.shape, seed=1000 + 50 * step + i) * scale).to(p.dtype)


def run(
    make: Callable[..., Layerwise],
    steps: int = 5,
    scale: float = 1.0,
    shapes: list[tuple[int, ...]] = SHAPES,
    dtype: torch.dtype = torch.float64,
    **settings: Any,
) -> list[list[Tensor]]:
    """Points of a trajectory on seeded gradients, the start first."""
    params = parameters(shapes, dtype)
    optimizer = make(params, **settings)
    points = [[p.detach().clone() for p in params]]
    for step in range(steps):
        fill(params, step, scale)
        optimizer.step()
        points.append([p.detach().clone() for p in params])
    return points
