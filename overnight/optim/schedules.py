"""The learning rate of a step: a peak, which a rule may derive from the batch, times a factor, which is a function of the step.

Step t = 0, 1, ..., T - 1 is the update number n = t + 1. With a warm-up of w·T updates, p the power, s the share of the stable part
and d = min(1, (1 - t/T) / (1 - w)) what is left behind the warm-up (where w·T is no whole number, the first step after it would be above 1):

    warm-up      n / (w·T)                                    while n <= w·T
    constant     1                                            from there on
    linear       d
    poly         d^p
    wsd          ((1 - t/T) / (1 - w - s))^p, 1 before        warm-up, stable, decay: LANS (Zheng et al. 2020, arXiv 2006.13484);
                 1 - sqrt(1 - (1 - t/T) / (1 - w - s))        with `decay: sqrt` (Hägele et al. 2024, arXiv 2405.18392)
    cosine       (1 - cos(pi·d)) / 2
    poly_nvidia  n / (w·T) while n < w·T, then (1 - n/T)^p

Two ways of counting are in use. transformers' `get_linear_schedule_with_warmup` and Google's BERT give step t the factor t/(w·T) while it
warms up, so that the first update does nothing: here the warm-up is one update ahead, and the decay is theirs. NVIDIA's
PolyWarmUpScheduler counts n throughout, so that its last update does nothing, and decays as if there had been no warm-up: it jumps down
where the warm-up ends (6e-3 to 5.08e-3 in NVLAMB). `poly_nvidia` is that, update by update; all others are continuous.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

from overnight.config import Optim, Phase, Schedule
from overnight.config.fields import hints, out_of_range
from overnight.config.optimizers import UNTUNED, Reference, share_problems
from overnight.optim.checks import NUMBER, check_setting


def learning_rates(phase: Phase) -> Callable[[int], float]:
    """Return the learning rate of a phase as a function of its step, from 0."""
    peak, schedule = peak_lr(phase), resolved(phase)
    return lambda step: peak * factor(schedule, step, phase.steps)


def decay_factors(phase: Phase) -> Callable[[int], float]:
    """Return the factor of a phase's decay as a function of its step, from 0: that of the learning rate, and 1 while it warms up."""
    schedule = resolved(phase)
    warmup = schedule.warmup_ratio * schedule.total_steps
    return lambda step: 1.0 if schedule.step_offset + step + 1 <= warmup else factor(schedule, step, phase.steps)


def learning_rate(phase: Phase, step: int) -> float:
    """Return the learning rate of a step of a phase, from 0."""
    return learning_rates(phase)(step)


def peak_lr(phase: Phase) -> float:
    """Return the peak learning rate of a phase, after the rule of its scaling.

    B is the global batch, also while a batch warm-up has not reached it. `linear` is lr·B/base (Goyal et al. 2017, arXiv 1706.02677);
    `sqrt` and `lamb_untuned` are lr·sqrt(B/base) (You et al. 2019, arXiv 1904.00962).
    """
    tuned, rule = reference(phase.optim), phase.optim.scaling.rule
    if rule == "none":
        return tuned.lr
    ratio = phase.global_batch_size / tuned.batch_size
    return tuned.lr * (ratio if rule == "linear" else math.sqrt(ratio))


def resolved(phase: Phase) -> Schedule:
    """Return the schedule of a phase with its warm-up, stable part and `total_steps` as they come out."""
    total = phase.optim.schedule.total_steps or phase.steps
    return limited(dataclasses.replace(phase.optim.schedule, warmup_ratio=warmup_ratio(phase), total_steps=total), total)


def limited(schedule: Schedule, total: int) -> Schedule:
    """Return a schedule of so many steps with its warm-up as long as `max_warmup_steps` allows; one that is limited already as it is, bit for bit."""
    ratio, most = schedule.warmup_ratio, schedule.max_warmup_steps
    if not most or ratio * total <= most + 1e-6:  # by rounding alone
        return schedule
    cut = ratio - most / total
    # The decay is as long as without the limit.
    stable = schedule.stable_ratio + cut if schedule.name == "wsd" else schedule.stable_ratio
    return dataclasses.replace(schedule, warmup_ratio=ratio - cut, stable_ratio=stable)


def warmup_ratio(phase: Phase) -> float:
    """Return the share of a phase's schedule that warms up, before any limit.

    `lamb_untuned` multiplies it by B/base, so that it has as many steps at every batch while the epochs stay the same.
    """
    tuned = reference(phase.optim)
    if phase.optim.scaling.rule == "lamb_untuned":
        return tuned.warmup_ratio * phase.global_batch_size / tuned.batch_size
    return phase.optim.schedule.warmup_ratio


def reference(optim: Optim) -> Reference:
    """Return the rate and the warm-up that the rule begins with, and the batch for which they hold."""
    if optim.scaling.rule == "lamb_untuned" and not optim.scaling.base_batch_size:
        return UNTUNED
    return Reference(optim.lr, optim.schedule.warmup_ratio, optim.scaling.base_batch_size)


class Stretch(NamedTuple):
    """The part that a phase has of its schedule, `wsd`: all of it, or of one that phases have together (`continues`)."""

    warmup: float
    """Share of the steps of the phase, before any limit."""
    decay: float
    """Share of the steps of the phase."""
    ends: tuple[float, float]
    """What is left of the decay of the schedule where the phase begins and where it ends: 1 before it, 0 at its end."""


def stretch(phase: Phase) -> Stretch:
    """Return the part that a phase has of its schedule."""
    schedule, steps = resolved(phase), phase.steps
    total, first = schedule.total_steps, schedule.step_offset
    decay = 1.0 - schedule.warmup_ratio - schedule.stable_ratio
    if steps == total:
        return Stretch(warmup_ratio(phase), decay, (1.0, 0.0))

    def left(step: int) -> float:
        return min(1.0, (1.0 - step / total) / decay) if decay > 0 else 1.0

    warmup = 0.0 if first else warmup_ratio(phase) * total / steps
    within = first + steps - (1.0 - decay) * total
    return Stretch(warmup, min(1.0, max(0.0, within) / steps), (left(first), left(first + steps)))


def factor(schedule: Schedule, step: int, steps: int) -> float:
    """Return what to multiply the peak learning rate by, 0 to 1.

    Args:
        schedule: its settings, of which those that another shape has do nothing; `total_steps` and `step_offset` place this phase in a longer schedule.
        step: optimizer step within the phase, from 0.
        steps: steps of the phase.

    Raises:
        ValueError: naming each setting that is out of range.
    """
    _check(schedule)
    total = schedule.total_steps or steps
    if total < 1:
        raise ValueError(f"{'schedule.total_steps' if schedule.total_steps else 'steps'} = {total}: must be 1 or more")
    schedule = limited(schedule, total)
    w = schedule.warmup_ratio
    t = schedule.step_offset + step
    n = t + 1
    if schedule.name == "poly_nvidia":
        return n / (w * total) if n < w * total else float(max(0.0, 1.0 - n / total) ** schedule.power)
    if n <= w * total:
        return n / (w * total)
    rest = 1.0 - w - (schedule.stable_ratio if schedule.name == "wsd" else 0.0)
    share = min(1.0, max(0.0, 1.0 - t / total) / rest) if rest > 0 else 1.0
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "linear":
        return share
    if schedule.name == "cosine":
        return 0.5 * (1.0 - math.cos(math.pi * share))
    return decayed(schedule, share)


@functools.lru_cache(maxsize=64)
def _check(schedule: Schedule) -> None:
    for name, (kind, _) in hints(Schedule).items():
        if kind in (int, float):
            check_setting(f"schedule.{name}", getattr(schedule, name), NUMBER)
    if problems := [*out_of_range(schedule, "schedule."), *share_problems("schedule", schedule, schedule.warmup_ratio)]:
        raise ValueError("; ".join(problems))


def decayed(schedule: Schedule, share: float) -> float:
    """Return the factor of a decay by a power or a square root, of which a share (1 to 0) is left."""
    return 1.0 - math.sqrt(1.0 - share) if (schedule.name, schedule.decay) == ("wsd", "sqrt") else float(share**schedule.power)
