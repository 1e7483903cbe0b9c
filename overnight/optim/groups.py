"""Parameter groups, and the optimizer a phase asks for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from overnight.config import Optim
from overnight.optim.lamb import Lamb


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices and tables, decayed and adapted; and biases and norm parameters, neither.

    A vector is a bias or a norm parameter: nothing else in these networks has fewer than two dimensions. A tied tensor
    appears once, as `named_parameters` yields it once.

    Args:
        module: the network.
        weight_decay: of the first group.

    Returns:
        two groups with `params`, `names`, `weight_decay` and `adapt`.
    """
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    groups = []
    for decayed in (True, False):
        chosen: list[tuple[str, Tensor]] = [(name, p) for name, p in named if (p.ndim > 1) == decayed]
        groups.append(
            {
                "params": [p for _, p in chosen],
                "names": [name for name, _ in chosen],
                "weight_decay": weight_decay if decayed else 0.0,
                "adapt": decayed,
            }
        )
    return groups


def build_optimizer(module: nn.Module, optim: Optim) -> torch.optim.Optimizer:
    """The optimizer of a phase over the parameters of a network; the loop clips and sets the learning rate.

    Args:
        module: the network.
        optim: settings.
    """
    groups = parameter_groups(module, optim.weight_decay)
    if optim.name == "lamb":
        return Lamb(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)
    plain = [{key: value for key, value in group.items() if key != "adapt"} for group in groups]
    return torch.optim.AdamW(plain, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
