"""What is out of the ordinary in a step: a spike of the loss or of the gradient, what it came from, and the way back.

A spike is seen in the values of all processes, so all decide alike; whether a step is taken, passed over or undone is the loop's and
the run's to carry out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

import torch
from torch import Tensor

from overnight.batches.packing import Provenance
from overnight.display import share
from overnight.distributed.collectives import all_reduce_sum, all_reduce_sums
from overnight.distributed.world import World
from overnight.errors import TrainingError, first_names
from overnight.optim.layerwise import whole_norms
from overnight.optim.tensor_list import total_norm

WINDOW, LEAST = 64, 32
"""Values that are looked back on, and how many there must be before one is compared."""
# One standard deviation in terms of the median absolute deviation, for normal numbers.
_SIGMA = 1.4826
# The least deviation (of a logarithm: 1 %), for curves that are smooth, as those of a whole-batch descent are.
_QUIET = 0.01
# Tensors, and samples of a micro-batch, that a message names.
_NAMED = 3


class Spike(TrainingError):
    """A loss or a gradient norm is far above those before it, and the run stops."""

    event = "spike"


class Rollback(Exception):
    """A step must not stand, and the run goes back to its newest checkpoint.

    Args:
        error: what is wrong; raised where going back does not help.
        skips_batches: whether the data up to that step is passed over.
    """

    def __init__(self, error: TrainingError, skips_batches: bool = True) -> None:
        super().__init__(str(error))
        self.error, self.skips_batches = error, skips_batches


class SpikeDetector:
    """Tells a spike from noise: a value far above the median of the last ones, in units of their median absolute deviation.

    Both are of logarithms, so that a loss and a gradient norm of any size are compared alike. Neither is moved by a few outliers, and a curve
    that falls or rises steadily widens the deviation by its own slope, so a warm-up is not taken for a spike. Nothing is compared before
    `LEAST` values, nor across phases, which begin with an empty window.

    Args:
        threshold: deviations above the median.
        window: the logarithms so far, by name, `every`, and whether the last was a `spike`; it is filled in place and kept in checkpoints.
        every: steps that a value stands for; a window of others is forgotten.
    """

    def __init__(self, threshold: float, window: dict[str, list[float]], every: int = 1) -> None:
        self.threshold, self.window = threshold, window
        if window.get("every") != [every]:
            window.clear()
            window["every"] = [float(every)]

    def spike(self, values: Mapping[str, float]) -> str:
        """Return what is a spike among these (loss, grad_norm), in words; empty for none, and for what is not finite."""
        for name, value in values.items():
            before = self.window.get(name, [])
            if len(before) < LEAST or not 0 < value < math.inf:
                continue
            middle = median(before)
            deviation = max(_SIGMA * median(abs(x - middle) for x in before), _QUIET)
            above = (math.log(value) - middle) / deviation
            if above > self.threshold:
                usual = math.exp(middle)
                named = "gradient norm" if name == "grad_norm" else name
                return f"the {named} is {value:.4g}, {above:.0f} deviations above its usual {usual:.4g}"
        return ""

    def first(self, values: Mapping[str, float]) -> str:
        """Return what is a spike where the values before were none, in words; takes the values in, spike or not, so that a new level is learned."""
        spike, before = self.spike(values), self.window.get("spike", [0.0])
        self.window["spike"] = [float(bool(spike))]
        self.note(values)
        return spike if before == [0.0] else ""

    def note(self, values: Mapping[str, float]) -> None:
        """Take values in; those that have no logarithm are left out."""
        for name, value in values.items():
            if 0 < value < math.inf:
                self.window[name] = [*self.window.get(name, []), math.log(value)][-WINDOW:]


def minimized(losses: Mapping[str, float], targets: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    """Return the weighted sum of the losses that have targets, under a name to watch it by.

    A step in which one of the losses has no target is compared with others of its kind, under a name of their own: where labels are rare,
    each that comes would look like a spike.

    Args:
        losses: means over their targets, by name.
        targets: their number, also of losses that have none.
        weights: of the losses, by name; 1 where there is none.
    """
    present = [name for name, count in targets.items() if count]
    name = "loss" if len(present) == len(targets) else f"loss of {' and '.join(present)} alone"
    return {name: sum(weights.get(name, 1.0) * losses[name] for name in present)}


def measured(
    losses: Mapping[str, Tensor],
    targets: Mapping[str, float],
    weights: Mapping[str, float],
    optimizer: torch.optim.Optimizer,
    world: World,
) -> dict[str, float]:
    """Return the loss that is minimized and the gradient norm of a step before it is taken, the same values in all processes; waits for the device.

    Args:
        losses: this process's part.
        targets, weights: as in :func:`minimized`, of all processes.
    """
    norm = total_norm(whole_norms([grad for _, _, grad in _gradients(optimizer)]))
    *parts, grad_norm = torch.stack([*losses.values(), norm]).double().tolist()
    found = all_reduce_sums({**dict(zip(losses, parts, strict=True)), "grad_norm": grad_norm if world.main else 0.0}, world)
    return {**minimized(found, {name: targets[name] for name in losses}, weights), "grad_norm": found["grad_norm"]}


def _gradients(optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor, Tensor]]:
    """Return name, parameter and gradient, where there is one."""
    named = ((n, p) for group in optimizer.param_groups for n, p in zip(group["param_names"], group["params"], strict=True))
    return [(name, p, p.grad) for name, p in named if p.grad is not None]


def largest_gradients(optimizer: torch.optim.Optimizer) -> str:
    """Return the tensors that make up most of a gradient, in words, with their usual share where the second moments tell it.

    Shares of the squared norm, since clipping changes no share. LANS normalizes each gradient before it enters the moments, so its
    moments tell nothing. All processes must ask.
    """
    named = _gradients(optimizer)
    norms = whole_norms([grad for _, _, grad in named]).tolist()
    if bad := [name for (name, _, _), norm in zip(named, norms, strict=True) if not math.isfinite(norm)]:  # as where fp16 overflows, too
        return f"the gradient of {first_names(bad)} is not finite"
    now = torch.tensor(norms, dtype=torch.float64).square()
    moments = [optimizer.state[p].get("exp_avg_sq") for _, p, _ in named]
    before: list[float] | None = None
    if all(m is not None for m in moments) and type(optimizer).__name__ != "Lans":
        usual = whole_norms([m.sqrt() for m in moments]).double().square()
        before = (usual / usual.sum()).tolist()
    shares = (now / now.sum()).tolist()
    found = []
    for at in sorted(range(len(named)), key=lambda at: -shares[at])[:_NAMED]:
        beside = f", usually {share(before[at])}" if before else ""
        found.append(f"{named[at][0]} ({share(shares[at])} of it{beside})")
    return "most of the gradient is in " + ", ".join(found)


def worst_micro_batch(parts: Sequence[Tensor], world: World) -> int:
    """Return the number of the micro-batch with the largest loss among those of all processes, which are dealt out in turn.

    Args:
        parts: loss of each micro-batch of this process (scalars).
    """
    losses = torch.zeros(len(parts), world.size, dtype=torch.float64)
    losses[:, world.rank] = torch.stack(list(parts)).double().cpu()
    return int(torch.nan_to_num(all_reduce_sum(losses, world), nan=math.inf).argmax())


def provenance_text(found: Sequence[Provenance]) -> str:
    """Return where the sequences of the worst micro-batch come from, in words, of the first; empty for none."""
    if not found:
        return ""
    kind = "stream" if "stream" in found[0] else "sample"
    first = ", ".join(f"{s[kind]} of epoch {s['epoch']} ({s['shard']} row {s['row']})" for s in found[:_NAMED])
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"The micro-batch with the largest loss holds the {kind}s {first}{more}"
