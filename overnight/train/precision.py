"""Precision of a run: the type of its products, the automatic loss scale of fp16, and what is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from overnight.errors import UserError
from overnight.optim.layerwise import whole_norms
from overnight.train.parallel import World, totals

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Type of products and activations; tf32 differs from fp32 only in how a GPU multiplies."""

START, FLOOR, CEILING = 2.0**32, 1.0, 2.0**40
WINDOW = 1000
"""Clean steps after which the scale doubles."""


class NotFinite(UserError):
    """A loss, a gradient or a weight is NaN or infinite, and the run stops."""


@dataclass
class LossScale:
    """The automatic loss scale of fp16 (Puri et al. 2018, arXiv 1812.01466): halved on overflow, doubled after `WINDOW` clean steps.

    Start, window and floor are those of the published code. It starts high because too high a scale is found in as many steps as
    it must be halved, and too low a one, which loses small gradients silently, in a thousand steps a doubling. It is always a power
    of two, so that scaling rounds nothing. Two plain numbers, so that it can be saved.
    """

    scale: float = START
    clean: int = 0
    """Steps without overflow since the scale last changed."""

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale."""
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_mul_(grads, 1 / self.scale)

    def update(self, finite: bool) -> None:
        """Take in whether the gradient of a step was finite.

        Raises:
            NotFinite: when it was not at the lowest scale: then it is not the scale that overflows.
        """
        if finite:
            self.clean += 1
            if self.clean == WINDOW:
                self.scale, self.clean = min(2 * self.scale, CEILING), 0
        elif self.scale <= FLOOR:
            raise NotFinite(
                f"the loss scale is at its floor of {FLOOR:g}, so it is not the scale that overflows fp16. "
                "Train with train.precision=bf16 (in a folder of its own), or lower the learning rate"
            )
        else:
            self.scale, self.clean = self.scale / 2, 0


def set_products(precision: str, device: torch.device) -> None:
    """Let the fp32 products of a GPU be TF32 (11 significant bits) or not; a CPU has no TF32, and nothing changes there."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")


def not_finite(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of the tensors that hold a NaN or an infinity; waits for the device once."""
    names, tensors = zip(*named, strict=True)
    return [name for name, norm in zip(names, whole_norms(tensors).tolist(), strict=True) if not math.isfinite(norm)]


def listed(names: list[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def losses_text(losses: dict[str, Tensor], world: World) -> str:
    """The losses of a step in words: which are not finite, or that all are; all processes must ask."""
    values = totals({name: float(loss) for name, loss in losses.items()}, world)
    bad = {name: value for name, value in values.items() if not math.isfinite(value)}
    if bad:
        return " and ".join(f"the {name} loss is {value}" for name, value in bad.items())
    return "the losses are finite (" + ", ".join(f"{name} {value:.4g}" for name, value in values.items()) + ")"
