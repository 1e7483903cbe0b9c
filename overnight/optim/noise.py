"""The gradient noise scale: from which batch on a larger one stops paying (McCandlish et al. 2018, arXiv 1812.06162, appendix A).

With gradients of a small batch b and a big batch B of the same step,

    |G|² = (B·|G_B|² − b·|G_b|²) / (B − b)         S = (|G_b|² − |G_B|²) / (1/b − 1/B)         B_simple = S / |G|²

|G| is the norm of the true gradient and S the trace of the covariance of an example's. Training at batch B takes
S_min·(1 + B_c/B) steps and E_min·(1 + B/B_c) examples, with B_c near B_simple: far below it twice the batch halves the steps, at it
both are twice their least, far above it a larger batch only costs examples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from overnight.optim.layerwise import whole_norms
from overnight.optim.telemetry import rounded


@dataclass
class NoiseScale:
    """Exponential averages of S and |G|², kept apart and divided last; plain numbers, so that they can be saved.

    The scale is unknown while |G|² is not above 0 by twice its standard error, as happens where the batch is far below the scale and
    few pairs were seen: a number would then be chance.
    """

    weight: float = 0.0
    """Sum of the weights of the pairs, 1 − decay^n, by which the sums are divided; without that the averages would begin near 0."""
    weight_sq: float = 0.0
    """Sum of their squares."""
    noise_sum: float = 0.0
    signal_sum: float = 0.0
    signal_sq_sum: float = 0.0
    decay: float = 0.99
    """Of the averages, for each pair; 0.99 remembers about a hundred."""

    def update(self, small_sq: float, big_sq: float, b: float, B: float) -> None:
        """Take in the gradients of one step; a pair that is not finite is left out.

        Args:
            small_sq: |G_b|², averaged over the small batches.
            big_sq: |G_B|².
            b: sequences of the small batch.
            B: sequences of the big batch.

        Raises:
            ValueError: unless 0 < b < B.
        """
        if not 0 < b < B:
            raise ValueError(f"b = {b}, B = {B}: the small batch must be smaller than the big one")
        if not (math.isfinite(small_sq) and math.isfinite(big_sq)):
            return
        noise, signal = (small_sq - big_sq) / (1 / b - 1 / B), (B * big_sq - b * small_sq) / (B - b)
        keep, new = self.decay, 1 - self.decay
        self.weight = keep * self.weight + new
        self.weight_sq = keep**2 * self.weight_sq + new**2
        self.noise_sum = keep * self.noise_sum + new * noise
        self.signal_sum = keep * self.signal_sum + new * signal
        self.signal_sq_sum = keep * self.signal_sq_sum + new * signal**2

    @property
    def state(self) -> list[float]:
        """Its numbers: `NoiseScale(*state)` resumes from there."""
        return [self.weight, self.weight_sq, self.noise_sum, self.signal_sum, self.signal_sq_sum]

    @property
    def noise(self) -> float:
        """S, the trace of the covariance of the gradient of one sequence; NaN before the first pair."""
        return self.noise_sum / self.weight if self.weight else math.nan

    @property
    def signal(self) -> float:
        """|G|² of the true gradient, by chance also below 0; NaN before the first pair."""
        return self.signal_sum / self.weight if self.weight else math.nan

    @property
    def error(self) -> float:
        """Standard error of |G|², from the spread of the pairs; infinite before the second."""
        share = self.weight_sq / self.weight**2 if self.weight else 1.0  # 1/n where all weigh the same
        if share > 1 - 1e-9:
            return math.inf
        variance = max(0.0, self.signal_sq_sum / self.weight - self.signal**2) / (1 - share)
        return math.sqrt(variance * share)

    @property
    def value(self) -> float | None:
        """B_simple (sequences, 0 or more), or None: unknown."""
        return max(0.0, self.noise / self.signal) if self.signal > 2 * self.error else None


def cost(scale: float, batch: float) -> tuple[float, float]:
    """Return how many times the fewest possible steps, and the fewest possible examples, training at a batch takes.

    Args:
        scale: the noise scale (sequences), taken for the critical batch.
        batch: sequences.
    """
    return 1 + scale / batch, 1 + batch / scale if scale > 0 else math.inf


def noise_text(scale: float | None, batch: int) -> str:
    """Return the noise scale in words: what the present batch costs compared with the fewest steps and the fewest examples."""
    if scale is None:
        return "noise scale unknown: the gradient does not yet stand out from its noise"
    steps, examples = cost(scale, batch)
    return f"noise scale {scale:,.0f} sequences (batch {batch:,}: {steps:.1f} times the fewest steps, {examples:.1f} times the fewest examples)"


def follow(states: dict[str, list[float]], pair: Pair) -> dict[str, float | None]:
    """Take a pair into the averages of each group and of the whole run; waits for the device.

    Args:
        states: of each :class:`NoiseScale`, changed in place; empty at first.
        pair: of a step.

    Returns:
        the noise scales as far as they are known (sequences, five significant digits), the run's first.
    """
    scales = {}
    for name, (small_sq, big_sq) in pair.squares().items():
        scale = NoiseScale(*states.get(name, []))
        scale.update(small_sq, big_sq, pair.b, pair.B)
        states[name] = scale.state
        scales[name] = None if scale.value is None else rounded(scale.value)
    return scales


@dataclass(frozen=True)
class Pair:
    """Squared gradient norms of a step at two batch sizes, by parameter group, left on the device."""

    groups: list[str]
    small_sq: Tensor
    """|G_b|², averaged over the micro-batches (groups)."""
    big_sq: Tensor
    """|G_B|² (groups)."""
    b: float
    B: int

    def squares(self) -> dict[str, tuple[float, float]]:
        """Return (|G_b|², |G_B|²) of each group, those of one name together, and of all as `run`; waits for the device."""
        small, big = self.small_sq.tolist(), self.big_sq.tolist()
        squares = {"run": (sum(small), sum(big))}
        # With a rate for each layer there are as many groups of a name as rates.
        for name, here, there in zip(self.groups, small, big, strict=True):
            before = squares.get(name, (0.0, 0.0))
            squares[name] = (before[0] + here, before[1] + there)
        return squares


class MicroGradients:
    """Measures the gradient of every micro-batch of a step while the step's gradient is summed up as without it.

    Around the backward pass of a micro-batch, `with micro.apart():` sets the sum so far aside, so that the pass fills fresh gradients, and
    adds these to it afterwards: the additions that autograd does, in its order, so that the sum is the same bit by bit. It takes one more
    gradient's memory and no more passes. Gradients that something else holds on to (DistributedDataParallel's buckets) do not allow it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups = optimizer.param_groups
        self._squares: list[Tensor] = []  # |g|² by group, of each micro-batch so far

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Keep the gradients within it to those of one micro-batch alone."""
        params = [p for group in self._groups for p in group["params"]]
        sums = [p.grad for p in params]
        for p in params:
            p.grad = None
        yield
        with torch.no_grad():
            self._squares.append(self._by_group())
            for p, total in zip(params, sums, strict=True):
                if total is not None:
                    p.grad = total if p.grad is None else total.add_(p.grad)

    def pair(self, sequences: int, scale: float = 1.0) -> Pair:
        """Return both sides of the estimate, after the last micro-batch and before clipping.

        The gradient of a micro-batch is that of its share of the step's loss, a sum over its targets divided by the targets of the step.
        It is scaled by the number of micro-batches, which hold equally many sequences. For one loss with equally many targets in each
        that is exactly the gradient of the micro-batch's own mean. Otherwise a micro-batch with more targets weighs more, as it does in
        the step; the mean over the micro-batches is the step's gradient, and S is never negative.

        Micro-batches are dealt to be alike in length, so what differs between lengths is not seen as noise.

        Args:
            sequences: of the step, B.
            scale: by which the loss, and so all gradients, were multiplied.
        """
        count = len(self._squares)
        small = torch.stack(self._squares).mean(0) * count**2 / scale**2
        groups = [str(group.get("name", number)) for number, group in enumerate(self._groups)]
        return Pair(groups, small, self._by_group() / scale**2, sequences / count, sequences)

    def _by_group(self) -> Tensor:
        grads = [[p.grad for p in group["params"] if p.grad is not None] for group in self._groups]
        # A group without any gradient is on no device: all are counted on that of the first.
        device = next((g.device for group in grads for g in group), torch.device("cpu"))
        return torch.stack([whole_norms(group).to(device, torch.float64).square().sum() for group in grads])
