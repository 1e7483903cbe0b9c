"""The learning rate falls from layer to layer, as Clark et al. 2020 (arXiv:2003.10555) say it, whatever the optimizer and the type."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from overnight import config
from overnight.config import AdamWConfig, BertConfig, LambConfig, ModernBertConfig, MuonConfig, Optim
from overnight.engine.loop import LoopConfig, training_steps
from overnight.errors import ConfigError
from overnight.finetune.encoded_examples import EncodedExamples
from overnight.models.heads import Classifier
from overnight.optim import Lamb
from overnight.optim.groups import build_optimizer, group_lines, parameter_groups

SIZES = {"num_layers": 3, "hidden_size": 16, "num_heads": 2, "max_position_embeddings": 16, "dropout": 0.0}
MODELS = {"bert": BertConfig(**SIZES, attention_dropout=0.0), "modernbert": ModernBertConfig(**SIZES)}
LR, DECAY, STEPS = 1e-2, 0.5, 3


def exponent(name: str) -> int:
    """What the decay is raised to for a parameter, written out by hand for three layers."""
    parts = name.split(".")
    if parts[0] != "encoder" or parts[1] == "final_norm":
        return 0
    return {"0": 3, "1": 2, "2": 1}[parts[2]] if parts[1] == "layers" else 4


def classifier(kind: str) -> Classifier:
    torch.manual_seed(0)
    return Classifier(MODELS[kind], 50, 3)


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
@pytest.mark.parametrize("optim", [AdamWConfig, LambConfig, MuonConfig])
def test_every_parameter_takes_the_rate_of_its_layer(kind: str, optim: type[Optim]) -> None:
    model = classifier(kind)
    groups = parameter_groups(model, optim(layer_lr_decay=0.8))
    found = {name: group["lr_factor"] for group in groups for name, _ in group["params"]}
    assert found == {name: pytest.approx(0.8 ** exponent(name)) for name, _ in model.named_parameters()}
    assert sorted(set(found.values())) == pytest.approx([0.8**4, 0.8**3, 0.8**2, 0.8, 1.0])
    # Decay, trust ratio and Muon are those of the kind, and without a decay there is a group a kind, as ever.
    plain = {group["name"]: group for group in parameter_groups(model, optim())}
    for group in groups:
        assert all(group[key] == plain[group["name"]][key] for key in ("weight_decay", "trust_ratio", "muon"))
    assert sorted(name for group in groups for name, _ in group["params"]) == sorted(
        name for group in plain.values() for name, _ in group["params"]
    )
    assert list(plain) == ["matrices", "embeddings", "vectors"]


def foreign(*path: str) -> nn.Module:
    """A network that calls its two layers otherwise: an embedding, the layers, and a head."""
    layers: nn.Module = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    for name in reversed(path):
        layers = nn.ModuleDict({name: layers})
    return nn.ModuleDict({"embeddings": nn.Embedding(7, 4), "body": layers, "head": nn.Linear(4, 2)})


@pytest.mark.parametrize("path", [("encoder", "layer"), ("layers",), ("transformer", "h"), ("blocks",)])
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_layers_of_a_network_of_ones_own_are_found_by_their_numbers(path: tuple[str, ...], wrapped: bool) -> None:
    net = nn.ModuleDict({"module": foreign(*path)}) if wrapped else foreign(*path)
    groups = parameter_groups(net, AdamWConfig(layer_lr_decay=0.5))
    found = {name.removeprefix("module."): group["lr_factor"] for group in groups for name, _ in group["params"]}
    layer = ".".join(("body", *path))
    parts = {"embeddings": 0.125, f"{layer}.0": 0.25, f"{layer}.1": 0.5, "head": 1.0}
    assert found == {name: parts[name.rsplit(".", 1)[0]] for name in found} and len(found) == 7


def test_layers_that_are_frozen_count_like_the_others() -> None:
    net = foreign("layers")
    net.get_submodule("body.layers.1").requires_grad_(False)
    found = {name: group["lr_factor"] for group in parameter_groups(net, AdamWConfig(layer_lr_decay=0.5)) for name, _ in group["params"]}
    assert found["body.layers.0.weight"] == 0.25 and found["embeddings.weight"] == 0.125


@pytest.mark.parametrize(
    ("net", "has"),
    [
        (nn.Linear(2, 2), "none"),
        (nn.ModuleDict({"decoder": foreign("layers"), "encoder": foreign("layers")}), "decoder.body.layers and encoder.body.layers"),
    ],
)
def test_a_network_without_one_stack_of_layers_is_refused_a_decay(net: nn.Module, has: str) -> None:
    with pytest.raises(ValueError, match=rf"layer_lr_decay = 0\.9: needs one stack of layers, .*; the network has {has}\. Set it to 1"):
        parameter_groups(net, AdamWConfig(layer_lr_decay=0.9))
    assert {group["lr_factor"] for group in parameter_groups(net, AdamWConfig())} == {1.0}


def test_what_is_said_of_the_groups_names_the_range_of_the_rates() -> None:
    said = group_lines(parameter_groups(classifier("bert"), AdamWConfig(layer_lr_decay=0.5)))
    assert len(said) == 3 and said[0].startswith("matrices: 14 tensors") and said[0].endswith("rate times 0.125 to 1")
    assert said[1].endswith("rate times 0.0625") and said[2].endswith("rate times 0.0625 to 1")


def examples() -> EncodedExamples:
    chance = np.random.default_rng(0)
    ids = [chance.integers(5, 50, 4 + i % 5) for i in range(16)]
    return EncodedExamples(ids, [np.zeros_like(row) for row in ids], {"label": np.arange(16) % 3})


def train_by_loop(model: Classifier, optim: Optim, dtype: torch.dtype) -> None:
    rows = examples()
    settings = LoopConfig(STEPS, lambda step: LR, 0.0, dtype, torch.device("cpu"), (0,))
    for _ in training_steps(model, model.losses, build_optimizer(model, optim), lambda t: rows.step(t, 8, 8, (0,)), settings):
        pass


def train_by_hand(model: Classifier, optimizers: list[torch.optim.Optimizer], dtype: torch.dtype) -> None:
    rows = examples()
    for step in range(STEPS):
        (batch,) = rows.step(step, 8, 8, (0,)).micro
        losses, _ = model.losses(batch, dtype)
        (losses["label"] / 8).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def by_hand(model: Classifier, optim: Optim) -> list[torch.optim.Optimizer]:
    """The optimizers with a group for each tensor, whose rate is written into it."""
    tables = {"encoder.word.weight", "encoder.position.weight", "encoder.segment.weight"}

    def groups(names: list[str], **more: Any) -> list[dict[str, Any]]:
        named: dict[str, Tensor] = dict(model.named_parameters())
        return [
            {
                "params": [named[name]],
                "lr": LR * DECAY ** exponent(name),
                "weight_decay": 0.1 if named[name].ndim > 1 else 0.0,
                **{key: value(named[name]) for key, value in more.items()},
            }
            for name in names
        ]

    names = [name for name, _ in model.named_parameters()]
    if isinstance(optim, LambConfig):
        return [Lamb(groups(names, trust_ratio=lambda p: p.ndim > 1), betas=optim.betas, eps=optim.eps, max_grad_norm=None)]
    if isinstance(optim, AdamWConfig):
        return [torch.optim.AdamW(groups(names), betas=optim.betas, eps=optim.eps, fused=True)]
    matrices = [name for name, p in model.named_parameters() if p.ndim == 2 and name not in tables]
    rest = [name for name in names if name not in matrices]
    return [
        torch.optim.Muon(groups(matrices), momentum=0.9, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups(rest), betas=(0.9, 0.999), eps=1e-6, fused=True),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["bert", "modernbert"])
@pytest.mark.parametrize("optim", [AdamWConfig, LambConfig, MuonConfig])
def test_the_steps_are_those_of_an_optimizer_with_groups_made_by_hand(
    kind: str, optim: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overnight.optim.muon_stacks.EMULATES_BF16", False)  # else its matrices are taken in fp32
    ours = classifier(kind)
    theirs, plain, before = copy.deepcopy(ours), copy.deepcopy(ours), copy.deepcopy(ours)
    settings = {"lr": LR, "weight_decay": 0.1, "max_grad_norm": 0.0}
    train_by_loop(ours, optim(**settings, layer_lr_decay=DECAY), dtype)
    train_by_hand(theirs, by_hand(theirs, optim()), dtype)
    for (name, a), b, c in zip(ours.named_parameters(), theirs.parameters(), before.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert not torch.equal(a, c), name
    train_by_loop(plain, optim(**settings), dtype)
    assert not torch.equal(ours.encoder.word.weight, plain.encoder.word.weight)


def test_a_decay_of_one_makes_the_groups_of_none() -> None:
    net: nn.Module = classifier("bert")
    first, second = (build_optimizer(net, AdamWConfig(**more)).param_groups for more in ({}, {"layer_lr_decay": 1.0}))
    assert len(first) == len(second) == 3
    assert all(a["param_names"] == b["param_names"] and a["lr_factor"] == b["lr_factor"] == 1.0 for a, b in zip(first, second, strict=True))


def test_a_phase_of_bytes_has_no_layers_to_decay_over() -> None:
    with pytest.raises(ConfigError, match=r"layer_lr_decay = 0.9: is for the layers of an encoder"):
        config.load_run("mlstm-small", ["phases.main.optim.layer_lr_decay=0.9"])
    with pytest.raises(ConfigError, match=r"layer_lr_decay = 1.5"):
        config.load_run("bert-base", ["phases.short.optim.layer_lr_decay=1.5"])
