"""Parameter groups, and the optimizer a phase asks for."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from overnight.config import AdamWConfig, LambConfig, LansConfig, LarsConfig, MuonConfig, Optim
from overnight.config.fields import out_of_range
from overnight.config.optimizers import LayerwiseOptim
from overnight.display import plural
from overnight.optim.lamb import Lamb
from overnight.optim.lans import Lans
from overnight.optim.lars import Lars
from overnight.optim.muon import Muon

# A parameter of a layer: which layers these are, and its number.
_LAYER = re.compile(r"((?:.*?\.)??(?:layers?|blocks?|h))\.(\d+)\.")
# Also `bias_k` and `bias_v` of torch's attention.
_BIAS = re.compile(r"(^|\.)bias(_\w+)?$")


def parameter_groups(module: nn.Module, optim: Optim) -> list[dict[str, Any]]:
    """Return the parameters of a network by kind: matrices, embeddings, kernels (of convolutions) and vectors (biases and norms of any shape, and what has one dimension).

    Vectors are not decayed and, unless `trust_ratio_on` is `all`, not adapted. A tied tensor appears once, under its first name, as
    `named_parameters` yields it; frozen ones do not appear.

    Args:
        module: the network. A `layer_lr_decay` needs one stack of layers, as numbered modules of a `layer`, `layers`, `block`, `blocks` or `h`; what is defined before them is
            below them, and what is defined after them above. A `base_width` needs an embedding, which is as wide as the network.
        optim: decay, and what is adapted.

    Returns:
        a group for each kind that there is, and with a `layer_lr_decay` for each rate of each kind, with `name` (of the kind), `params` (name, tensor), `weight_decay`, `trust_ratio` (whether the trust
        ratio applies), `muon` (whether Muon can step it) and `lr_factor` (what the loop multiplies its learning rate by).

    Raises:
        ValueError: naming the settings that are out of range, or the one for which the network lacks layers or embeddings.
    """
    if problems := list(out_of_range(optim)):
        raise ValueError("; ".join(problems))
    embeddings, norms = (
        {id(p) for part in module.modules() if isinstance(part, types) for p in part.parameters(recurse=False)}
        for types in ((nn.Embedding, nn.EmbeddingBag), (nn.LayerNorm, nn.RMSNorm))
    )

    def kind(label: str, p: Tensor) -> str:
        # Norms over several dimensions, and some biases, have as many themselves.
        if p.ndim < 2 or id(p) in norms or _BIAS.search(label):
            return "vectors"
        return "kernels" if p.ndim > 2 else "embeddings" if id(p) in embeddings else "matrices"

    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    factors = _width_factors(optim, [p for p in module.parameters() if id(p) in embeddings])
    layer_factors = _layer_factors([label for label, _ in module.named_parameters()], optim.layer_lr_decay)
    ratio_on = optim.trust_ratio_on if isinstance(optim, LayerwiseOptim) else "none"
    groups: dict[tuple[str, float], dict[str, Any]] = {}
    for name in ("matrices", "embeddings", "kernels", "vectors"):
        for label, p in named:
            if kind(label, p) != name:
                continue
            vectors = name == "vectors"
            group: dict[str, Any] = {
                "name": name,
                "params": [],
                "weight_decay": 0.0 if vectors else optim.weight_decay,
                "trust_ratio": ratio_on == "all" or (ratio_on == "matrices" and not vectors),
                "muon": name == "matrices",
                "lr_factor": factors.get(name, 1.0) * layer_factors[label],
            }
            groups.setdefault((name, layer_factors[label]), group)["params"].append((label, p))
    return list(groups.values())


def _layer_factors(names: Sequence[str], decay: float) -> dict[str, float]:
    """Return what the learning rate of each parameter is multiplied by for its place in a network (Clark et al. 2020, arXiv:2003.10555).

    Of layer i of L, from 0, it is decay^(L-i), of what is below them decay^(L+1), of what is above them 1.
    """
    if decay == 1:
        return dict.fromkeys(names, 1.0)
    found = {name: (match[1], int(match[2])) for name in names if (match := _LAYER.match(name))}
    stacks = sorted({stack for stack, _ in found.values()})
    if len(stacks) != 1:
        raise ValueError(
            f"layer_lr_decay = {decay}: needs one stack of layers, numbered modules of a `layer`, `layers`, `block`, `blocks` or `h`; "
            f"the network has {' and '.join(stacks) or 'none'}. Set it to 1, and give your groups rates of their own"
        )
    layers, factors, below = 1 + max(number for _, number in found.values()), {}, True
    for name in names:
        below = below and name not in found
        layer = found[name][1] if name in found else -1 if below else layers
        factors[name] = decay ** (layers - layer)
    return factors


def _width_factors(optim: Optim, embeddings: Sequence[Tensor]) -> dict[str, float]:
    """Return what the learning rate is multiplied by where a network is not of the width that it was tuned for, by kind of parameters.

    An update of Muon has spectral norm `lr`·0.2·√(longer side), and a layer of any width should change its output as much: the spectral norm
    of its change must stay, so the rate falls as 1/√width. A row of the decoder is summed over the width, to which AdamW gives each time the same
    step: there it falls as 1/width. Vectors act on one unit each.
    """
    if not (isinstance(optim, MuonConfig) and optim.base_width):
        return {}
    if not embeddings:
        raise ValueError(f"base_width = {optim.base_width}: the network has no embedding, whose width would be its own; set it to 0")
    ratio = optim.base_width / embeddings[0].shape[1]
    return {"matrices": math.sqrt(ratio), "embeddings": ratio}


def build_optimizer(module: nn.Module, optim: Optim) -> torch.optim.Optimizer:
    """Return the optimizer of a phase over the parameters of a network; the loop sets the learning rate.

    LAMB, LANS and LARS step by the fastest that the machine has: native.c on a CPU with a C compiler, Triton's kernels on a GPU, else lists.
    LAMB and LARS clip by `max_grad_norm` themselves, which saves passes over the gradients; LANS has no use for it; for the others the
    loop clips.

    Args:
        module: the network.
        optim: settings.
    """
    groups = parameter_groups(module, optim)

    def only(*keys: str) -> list[dict[str, Any]]:
        return [{key: group[key] for key in ("name", "params", "weight_decay", "lr_factor", *keys)} for group in groups]

    if isinstance(optim, LambConfig):
        return Lamb(
            only("trust_ratio"),
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            bias_correction=optim.bias_correction,
            max_trust_ratio=optim.max_trust_ratio or None,
            max_grad_norm=optim.max_grad_norm or None,
            skip_zero_grad=optim.skip_zero_grad,
        )
    if isinstance(optim, LansConfig):
        return Lans(only("trust_ratio"), lr=optim.lr, betas=optim.betas, eps=optim.eps, skip_zero_grad=optim.skip_zero_grad)
    if isinstance(optim, LarsConfig):
        return Lars(
            only("trust_ratio"),
            lr=optim.lr,
            momentum=optim.momentum,
            trust_coefficient=optim.trust_coefficient,
            nesterov=optim.nesterov,
            lr_in_momentum=optim.lr_in_momentum,
            max_grad_norm=optim.max_grad_norm or None,
            skip_zero_grad=optim.skip_zero_grad,
        )
    if isinstance(optim, MuonConfig):
        return Muon(only("muon"), lr=optim.lr, momentum=optim.momentum, betas=optim.betas, eps=optim.eps)
    assert isinstance(optim, AdamWConfig)
    return torch.optim.AdamW(only(), lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)


def group_lines(groups: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line on each kind of groups, of :func:`parameter_groups` or of an optimizer: tensors, parameters, what is done to them.

    A group without a `name` is a kind of its own, called by its number.
    """
    lines = []
    kinds: dict[str, list[dict[str, Any]]] = {}
    for number, group in enumerate(groups):
        kinds.setdefault(group.get("name", f"group {number}"), []).append(group)
    for kind, alike in kinds.items():
        group, factors = alike[0], sorted({group.get("lr_factor", 1.0) for group in alike})
        tensors = [p[1] if isinstance(p, tuple) else p for group in alike for p in group["params"]]
        done = [f"decay {group['weight_decay']:g}" if group["weight_decay"] else "no decay"]
        if "trust_ratio" in group:
            done.append("trust ratio" if group["trust_ratio"] else "no trust ratio")
        if "muon" in group:
            done.append("Muon" if group["muon"] else "AdamW")
        if factors != [1.0]:
            done.append(f"rate times {' to '.join(f'{factor:.3g}' for factor in dict.fromkeys((factors[0], factors[-1])))}")
        lines.append(f"{kind}: {plural(len(tensors), 'tensor')}, {plural(sum(p.numel() for p in tensors), 'parameter')}; {', '.join(done)}")
    return lines
