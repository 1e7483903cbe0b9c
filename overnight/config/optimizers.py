"""The optimizers of a recipe, each with its own settings, and the schedule of the learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from overnight.config.fields import BelowOne, LayerDecay, NonNegativeFloat, NonNegativeInt, PositiveFloat, Tagged


class Reference(NamedTuple):
    """A peak learning rate and a warm-up (share of the steps), and the batch size for which they hold (sequences)."""

    lr: float
    warmup_ratio: float
    batch_size: int


UNTUNED = Reference(6.25e-4, 1 / 320, 512)
"""You et al. 2019 (arXiv 1904.00962, table 4): where the rule for untuned LAMB begins."""


@dataclass(frozen=True)
class Schedule:
    """Learning-rate factor as a function of the step: linear warm-up, then decay to zero."""

    name: Literal["linear", "poly", "poly_nvidia", "wsd", "cosine", "constant"] = "poly"
    """Shape of the decay. `poly_nvidia` is (1-t/T)^power: it drops abruptly where the warm-up ends, and its last step has factor 0. `wsd` (warm-up, stable, decay) stays at the peak before the decay, as in LANS."""
    warmup_ratio: float = 0.1
    """Share of the schedule's steps that warm up linearly from 0 (0 to 1)."""
    power: PositiveFloat = 1.0
    """`poly`, `poly_nvidia`, `wsd`: exponent of the decay; 1 is linear."""
    decay: Literal["power", "sqrt"] = "power"
    """`wsd`: form of the decay: a power of its remaining share, or 1 minus the square root of its completed share (Hägele et al. 2024, arXiv 2405.18392)."""
    stable_ratio: float = 0.0
    """`wsd`: share of the schedule's steps at the peak (0 to 1)."""
    total_steps: int = 0
    """Steps of the whole schedule if it is longer than the phase; 0: the phase's own steps."""
    step_offset: int = 0
    """Step of the schedule at which this phase begins."""
    max_warmup_steps: NonNegativeInt = 0
    """Maximum length of the warm-up (steps), however long the schedule is; `wsd` spends the rest at the peak. 0: no limit."""


def share_problems(key: str, schedule: Schedule, warmup: float, how: str = "") -> Iterator[str]:
    """Yield why the warm-up and the stable part do not fit into a schedule, in a line that begins with the setting; `key` is that of the schedule.

    Args:
        warmup: share of the steps that the warm-up comes to.
        how: what has made it so long.
    """
    if not 0 <= warmup <= 1:
        yield f"{key}.warmup_ratio = {warmup}{how}: longer than the phase; it is a share of the steps, 0 to 1"
    elif schedule.name == "wsd" and not (schedule.stable_ratio >= 0 and warmup + schedule.stable_ratio <= 1 + 1e-9):  # by rounding alone
        yield f"{key}.stable_ratio = {schedule.stable_ratio}: must be 0 to {1 - warmup:g}, what the warm-up leaves"


@dataclass(frozen=True)
class Scaling:
    """How the peak learning rate follows the phase's global batch B (with a batch warm-up: the full one)."""

    rule: Literal["none", "linear", "sqrt", "lamb_untuned"] = "none"
    """Rule for the peak learning rate at batch size B: `lr`, `lr`·B/base or `lr`·√(B/base); `lamb_untuned` (You et al.) is the last, with a warm-up whose share grows as B/base."""
    base_batch_size: NonNegativeInt = 0
    """Batch size for which `lr` (for `lamb_untuned` also `schedule.warmup_ratio`) was tuned (sequences). 0 with `lamb_untuned`: the paper's rate 6.25e-4 and warm-up 1/320 at 512."""


@dataclass(frozen=True)
class Optim:
    """What every optimizer has."""

    name: str = ""
    """Optimizer; `muon` updates the matrices, and AdamW the rest."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate, for the global batch unless `scaling` names another batch size; never scaled by the number of GPUs."""
    weight_decay: NonNegativeFloat = 0.01
    """Weight decay, decoupled except in LARS, where it is part of the gradient; biases and norm parameters have none."""
    scaling: Scaling = field(default_factory=Scaling)
    """Rule for the learning rate at another batch size."""
    schedule: Schedule = field(default_factory=Schedule)
    """Learning-rate schedule."""
    layer_lr_decay: LayerDecay = 1.0
    """Encoders: factor (above 0, at most 1) from each layer's learning rate to that of the layer below. Layer i of L, from 0, uses `lr`·decay^(L-i), the embeddings `lr`·decay^(L+1), and everything above the layers `lr` (Clark et al. 2020, arXiv 2003.10555)."""
    reset_moments: bool = True
    """Start the phase with moments of zero; false keeps those of the previous phase (the step count still restarts with the schedule, as in NVLAMB)."""


@dataclass(frozen=True)
class LayerwiseOptim(Optim):
    """What the optimizers with a trust ratio for every tensor have."""

    trust_ratio_on: Literal["matrices", "all", "none"] = "matrices"
    """Tensors whose step the trust ratio scales; `matrices` leaves out biases and norm parameters."""
    skip_zero_grad: bool = True
    """Leave a tensor unchanged when its gradient is exactly 0, as if it had none."""


@dataclass(frozen=True)
class AdaptiveOptim(Optim):
    """What the optimizers with a second moment have."""

    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    """Decay rates of the first and second moments (each 0 to 1)."""
    eps: PositiveFloat = 1e-6
    """Constant added to the square root of the second moment."""


@dataclass(frozen=True)
class ClippingOptim(Optim):
    """What the optimizers have for which the scale of a gradient matters."""

    max_grad_norm: NonNegativeFloat = 1.0
    """Maximum global gradient norm; larger gradients are scaled down to it. 0: no clipping."""


@dataclass(frozen=True)
class LambConfig(ClippingOptim, AdaptiveOptim, LayerwiseOptim):
    """LAMB (You et al. 2019, arXiv 1904.00962)."""

    name: Literal["lamb"] = "lamb"
    """LAMB."""
    bias_correction: bool = True
    """Divide the moments by 1-β^t."""
    max_trust_ratio: NonNegativeFloat = 0.0
    """Upper bound of the trust ratio; 0: none."""


@dataclass(frozen=True)
class LansConfig(AdaptiveOptim, LayerwiseOptim):
    """LANS (Zheng et al. 2020, arXiv 2006.13484). It normalizes every gradient and never clips."""

    name: Literal["lans"] = "lans"
    """LANS."""


@dataclass(frozen=True)
class LarsConfig(ClippingOptim, LayerwiseOptim):
    """LARS (You et al. 2017, arXiv 1708.03888)."""

    name: Literal["lars"] = "lars"
    """LARS."""
    momentum: BelowOne = 0.9
    """Share of the momentum kept in each step (0 to 1)."""
    nesterov: bool = False
    """Use Nesterov momentum."""
    trust_coefficient: PositiveFloat = 1e-3
    """Factor of the ratio |x| / |g| in the trust ratio."""
    lr_in_momentum: bool = True
    """Apply the learning rate inside the momentum, as in the paper; false: outside, as in most PyTorch code."""


@dataclass(frozen=True)
class AdamWConfig(ClippingOptim, AdaptiveOptim):
    """AdamW of torch."""

    name: Literal["adamw"] = "adamw"
    """AdamW."""


@dataclass(frozen=True)
class MuonConfig(ClippingOptim, AdaptiveOptim):
    """Muon of torch for the matrices, AdamW for the rest, whose are `betas` and `eps`."""

    name: Literal["muon"] = "muon"
    """Muon."""
    momentum: BelowOne = 0.9
    """Share of the momentum kept in each step (0 to 1); always Nesterov."""
    base_width: NonNegativeInt = 0
    """Encoders: width of the hidden states for which `lr` was tuned. At another width, matrices use `lr`·√(base/width), and embeddings, which are also the decoder, `lr`·base/width (Yang et al. 2023, arXiv 2310.17813). 0: all use `lr`, whatever the width."""


AnyOptim = Annotated[LambConfig | LansConfig | LarsConfig | AdamWConfig | MuonConfig, Tagged("name", "lamb")]
OPTIMIZERS: dict[str, type[Optim]] = {"lamb": LambConfig, "lans": LansConfig, "lars": LarsConfig, "adamw": AdamWConfig, "muon": MuonConfig}
"""The settings of each optimizer by its name."""

SCHEDULE_SETTINGS: dict[str, tuple[str, ...]] = {
    "linear": ("warmup_ratio", "max_warmup_steps"),
    "poly": ("warmup_ratio", "max_warmup_steps", "power"),
    "poly_nvidia": ("warmup_ratio", "max_warmup_steps", "power"),
    "wsd": ("warmup_ratio", "max_warmup_steps", "stable_ratio", "power", "decay"),
    "cosine": ("warmup_ratio", "max_warmup_steps"),
    "constant": ("warmup_ratio", "max_warmup_steps"),
}
"""What only some schedules have; the others do nothing with it, so there it may not be set."""
