"""What the optimizers refuse, by name: settings that are out of range, and tensors and gradients that they cannot step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overnight.optim.state import is_sum


class Rule(NamedTuple):
    """What a setting must be: a question to its value, and the answer in words."""

    holds: Callable[[Any], bool]
    """May raise what Python does for a value of another kind."""
    text: str


AMOUNT = Rule(lambda value: 0 <= float(value) < math.inf, "finite and 0 or more")
POSITIVE = Rule(lambda value: 0 < float(value) < math.inf, "finite and above 0")
BOUND = Rule(lambda value: value is None or POSITIVE.holds(value), "finite and above 0, or None for no clipping")
NUMBER = Rule(lambda value: isinstance(float(value), float), "a number")
NO_MATRIX = Rule(lambda value: getattr(value, "ndim", 0) <= 1, "one number")
SHARE = Rule(lambda value: 0 <= value < 1, "0 or more and below 1")
BETAS = Rule(lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas), "two numbers, each 0 or more and below 1")


def check_settings(group: dict[str, Any], rules: Mapping[str, Rule]) -> None:
    """Check the settings of a group; `lr` and `weight_decay` are amounts in every optimizer.

    Raises:
        ValueError: naming the first that is wrong, and what it must be.
    """
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr has {lr.numel()} elements: must be one number")
    for name, rule in {"lr": AMOUNT, "weight_decay": AMOUNT, **rules}.items():
        check_setting(name, group[name], rule)


def check_setting(name: str, value: Any, rule: Rule) -> None:
    """Check one setting.

    Raises:
        ValueError: naming it, and what it must be.
    """
    try:
        right = not isinstance(value, str) and rule.holds(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        right = False
    if not right:
        raise ValueError(f"{name} = {value}: must be {rule.text}")


def check_tensors(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Check that named parameters are real numbers, and that the whole tensors can be told from this process's parts.

    Raises:
        ValueError: naming the first of another kind.
    """
    for name, p in tensors:
        if not p.is_floating_point():
            raise ValueError(f"{name} is {p.dtype}: only real floating-point tensors can be optimized")
        if is_sum(p):
            raise ValueError(f"{name} is a sum of which each process has a term (Partial): redistribute it to Replicate() or Shard()")
        if hasattr(p, "_fsdp_flattened"):  # which torch sets
            raise ValueError(
                f"{name} is flattened by FullyShardedDataParallel, which hides where tensors begin and end: shard by fully_shard (FSDP2)"
            )


def check_dense(name: str, grad: Tensor) -> None:
    """Check that a gradient has all its elements.

    Raises:
        RuntimeError: naming its parameter.
    """
    if grad.layout != torch.strided:
        raise RuntimeError(f"{name} has a sparse gradient: use a dense one (sparse=False), or torch.optim.SparseAdam")
