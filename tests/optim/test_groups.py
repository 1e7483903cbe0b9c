"""Parameter groups, and the optimizers a recipe asks for."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from overnight.config import OPTIMIZERS, AdamWConfig, BertConfig, LambConfig, LansConfig, LarsConfig, MuonConfig
from overnight.models.bert import BertForPretraining
from overnight.models.heads import Classifier, QuestionAnswering
from overnight.optim import Lamb, Lans, Lars, Muon
from overnight.optim.groups import build_optimizer, group_lines, parameter_groups

MODEL = BertConfig(num_layers=2, hidden_size=16, num_heads=2, max_position_embeddings=16)


@pytest.mark.parametrize(
    "module", [BertForPretraining(MODEL, 50), Classifier(MODEL, 50, 3), QuestionAnswering(MODEL, 50)], ids=lambda m: type(m).__name__
)
def test_every_parameter_is_once_in_the_group_of_its_kind(module: nn.Module) -> None:
    groups = {group["name"]: group for group in parameter_groups(module, LambConfig(weight_decay=0.02))}
    assert list(groups) == ["matrices", "embeddings", "vectors"]
    named = dict(module.named_parameters())
    assert sorted(label for group in groups.values() for label, _ in group["params"]) == sorted(named)
    assert all(named[label] is p for group in groups.values() for label, p in group["params"])
    assert {label.split(".")[-2] for label, _ in groups["embeddings"]["params"]} == {"word", "position", "segment"}
    assert all(label.endswith("bias") or "norm" in label for label, _ in groups["vectors"]["params"])
    assert [(group["weight_decay"], group["trust_ratio"], group["muon"]) for group in groups.values()] == [
        (0.02, True, True),
        (0.02, True, False),
        (0.0, False, False),
    ]


@pytest.mark.parametrize(("trust_ratio", "expected"), [("matrices", [True, True, False]), ("all", [True] * 3), ("none", [False] * 3)])
def test_what_is_adapted_is_said_by_the_recipe(trust_ratio: Any, expected: list[bool]) -> None:
    assert [
        group["trust_ratio"] for group in parameter_groups(Classifier(MODEL, 50, 3), LambConfig(trust_ratio_on=trust_ratio))
    ] == expected


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"trust_ratio_on": "matrix"}, "trust_ratio_on = 'matrix': must be one of matrices, all, none"),
        ({"layer_lr_decay": 1.5}, "layer_lr_decay = 1.5: must be above 0, 1 at most"),
        ({"weight_decay": -0.1}, "weight_decay = -0.1: must be 0 or more, and finite"),
    ],
)
def test_settings_that_are_out_of_range_are_refused_by_name(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}$"):
        parameter_groups(small(), LambConfig(**settings))


def test_kernels_of_convolutions_are_decayed_and_adapted_but_not_for_muon() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    groups = {group["name"]: group for group in parameter_groups(net, LambConfig())}
    assert [label for label, _ in groups["kernels"]["params"]] == ["0.weight"] and list(groups) == ["matrices", "kernels", "vectors"]
    assert groups["kernels"]["trust_ratio"] and groups["kernels"]["weight_decay"] == 0.01 and not groups["kernels"]["muon"]
    assert group_lines(list(groups.values()))[1] == "kernels: 1 tensor, 36 parameters; decay 0.01, trust ratio, AdamW"


def test_groups_without_a_name_are_called_by_their_number() -> None:
    matrix, vector = small()[0].parameters()
    optimizer = Lans([{"params": [matrix]}, {"params": [vector], "weight_decay": 0.0, "trust_ratio": False}])
    assert group_lines(optimizer.param_groups) == [
        "group 0: 1 tensor, 32 parameters; decay 0.01, trust ratio",
        "group 1: 1 tensor, 8 parameters; no decay, no trust ratio",
    ]


def test_norms_and_biases_of_several_dimensions_are_neither_decayed_nor_taken_for_matrices() -> None:
    net = nn.ModuleList([nn.LayerNorm((3, 4)), nn.RMSNorm((2, 3, 4)), nn.MultiheadAttention(4, 2, add_bias_kv=True), nn.EmbeddingBag(5, 4)])
    net.register_parameter("bias", nn.Parameter(torch.zeros(3, 4)))
    kinds = {group["name"]: [label for label, _ in group["params"]] for group in parameter_groups(net, MuonConfig())}
    assert kinds == {
        "matrices": ["2.in_proj_weight", "2.out_proj.weight"],
        "embeddings": ["3.weight"],
        "vectors": ["bias", "0.weight", "0.bias", "1.weight", "2.in_proj_bias", "2.bias_k", "2.bias_v", "2.out_proj.bias"],
    }


def test_frozen_parameters_are_left_out() -> None:
    module = Classifier(MODEL, 50, 3)
    module.encoder.word.weight.requires_grad_(False)
    labels = [label for group in parameter_groups(module, LambConfig()) for label, _ in group["params"]]
    assert "encoder.word.weight" not in labels and "encoder.position.weight" in labels


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))


def test_every_setting_of_the_recipe_reaches_the_optimizer() -> None:
    common = {"lr": 2e-3, "weight_decay": 0.1}
    lamb = build_optimizer(
        small(), LambConfig(betas=(0.8, 0.95), eps=1e-5, max_trust_ratio=3.0, bias_correction=False, max_grad_norm=2.0, **common)
    )
    assert isinstance(lamb, Lamb) and lamb.max_grad_norm == 2.0
    lans = build_optimizer(small(), LansConfig(betas=(0.8, 0.95), eps=1e-5, skip_zero_grad=False, **common))
    assert isinstance(lans, Lans) and lans.max_grad_norm is None
    lars = build_optimizer(
        small(), LarsConfig(momentum=0.7, trust_coefficient=0.01, nesterov=True, lr_in_momentum=False, max_grad_norm=0.0, **common)
    )
    assert isinstance(lars, Lars) and lars.max_grad_norm is None
    muon = build_optimizer(small(), MuonConfig(momentum=0.7, betas=(0.8, 0.95), eps=1e-5, **common))
    assert isinstance(muon, Muon)
    expected: list[tuple[torch.optim.Optimizer, dict[str, Any]]] = [
        (lamb, {"betas": (0.8, 0.95), "eps": 1e-5, "max_trust_ratio": 3.0, "bias_correction": False, "skip_zero_grad": True}),
        (lans, {"betas": (0.8, 0.95), "eps": 1e-5, "skip_zero_grad": False}),
        (lars, {"momentum": 0.7, "trust_coefficient": 0.01, "nesterov": True, "lr_in_momentum": False}),
        (muon, {"momentum": 0.7, "betas": (0.8, 0.95)}),
    ]
    for optimizer, settings in expected:
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
        for group in optimizer.param_groups:
            assert {name: group[name] for name in settings} == settings and group["lr"] == 2e-3 and len(group["param_names"]) > 0
    assert [group["muon"] for group in muon.param_groups] == [True, False] and muon.param_groups[1]["eps"] == 1e-5


def test_no_clipping_is_zero_in_a_recipe() -> None:
    lamb = build_optimizer(small(), LambConfig(max_grad_norm=0.0))
    assert isinstance(lamb, Lamb) and lamb.max_grad_norm is None and lamb.param_groups[0]["max_trust_ratio"] is None


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 10) -> list[float]:
    generator, losses = torch.Generator().manual_seed(1), []
    x = torch.randn(64, 4, generator=generator)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(module(x), x[:, :1])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_adamw_equals_torchs() -> None:
    optim = AdamWConfig(lr=3e-3, betas=(0.8, 0.95), eps=1e-5, weight_decay=0.1)
    ours, theirs = small(), small()
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    train(ours, build_optimizer(ours, optim))
    train(theirs, torch.optim.AdamW(groups, lr=3e-3, betas=(0.8, 0.95), eps=1e-5, foreach=False, fused=False))
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()), rtol=1e-5, atol=1e-6)


def test_muon_equals_torchs_two_optimizers_also_after_loading_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overnight.optim.muon_stacks.EMULATES_BF16", False)  # else its matrices are taken in fp32
    ours, theirs = small(), small()
    optim = MuonConfig(lr=3e-3, momentum=0.9, betas=(0.8, 0.95), eps=1e-5, weight_decay=0.1)
    optimizer = build_optimizer(ours, optim)
    matrices, vectors = [[p for p in theirs.parameters() if (p.ndim == 2) == matrix] for matrix in (True, False)]
    muon = torch.optim.Muon(matrices, lr=3e-3, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(vectors, lr=3e-3, betas=(0.8, 0.95), eps=1e-5, weight_decay=0.0, fused=True)

    class Both:
        def zero_grad(self) -> None:
            theirs.zero_grad()

        def step(self) -> None:
            muon.step()
            adamw.step()

    for _ in range(2):
        train(ours, optimizer, 5)
        train(theirs, Both(), 5)  # type: ignore[arg-type]
        fresh = build_optimizer(ours, optim)
        fresh.load_state_dict(optimizer.state_dict())
        optimizer = fresh
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_a_deep_copy_of_muon_goes_on_like_the_original() -> None:
    module = small()
    optimizer = build_optimizer(module, MuonConfig(lr=3e-3))
    train(module, optimizer, 2)
    other, twin = copy.deepcopy((optimizer, module))
    train(module, optimizer, 2)
    train(twin, other, 2)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize(("width", "matrices", "embeddings"), [(16, 2.0, 4.0), (64, 1.0, 1.0), (256, 0.5, 0.25)])
def test_with_a_base_width_the_rate_of_muon_follows_the_width(width: int, matrices: float, embeddings: float) -> None:
    model = dataclasses.replace(MODEL, hidden_size=width, num_heads=2, intermediate_size=0)
    plain, scaled = (parameter_groups(Classifier(model, 50, 3), MuonConfig(base_width=base)) for base in (0, 64))
    assert {group["lr_factor"] for group in plain} == {1.0}
    assert {group["name"]: group["lr_factor"] for group in scaled} == {"matrices": matrices, "embeddings": embeddings, "vectors": 1.0}
    said = group_lines(scaled)[0]
    assert said.endswith("Muon" if matrices == 1 else f"Muon, rate times {matrices:g}")


def test_a_base_width_is_refused_of_a_network_whose_width_nothing_tells_and_holds_for_one_with_frozen_embeddings() -> None:
    with pytest.raises(ValueError, match="base_width = 64: the network has no embedding"):
        parameter_groups(nn.Linear(4, 4), MuonConfig(base_width=64))
    net = nn.Sequential(nn.Embedding(7, 16).requires_grad_(False), nn.Linear(16, 16))
    assert [group["lr_factor"] for group in parameter_groups(net, MuonConfig(base_width=64))] == [2.0, 1.0]


@pytest.mark.parametrize("width", [32, 512])
def test_an_update_changes_the_output_of_a_layer_as_much_at_every_width(width: int) -> None:
    # What the rule is for: the spectral norm of a step does not depend on the width.
    torch.manual_seed(0)
    layer = nn.Linear(width, width, bias=False)
    net = nn.Sequential(nn.Embedding(7, width), layer)
    optimizer = build_optimizer(net, MuonConfig(lr=1.0, weight_decay=0.0, base_width=64))
    before = layer.weight.detach().clone()
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * group["lr_factor"]
    net(torch.arange(7)).square().sum().backward()
    layer.weight.grad = torch.randn(width, width)
    optimizer.step()
    step = float(torch.linalg.matrix_norm(before - layer.weight.detach(), 2))
    # 0.2 of the square root of the base width; Newton and Schulz's singular values are only near 1.
    assert step == pytest.approx(0.01 * 0.2 * 8, rel=0.3)


def test_muon_refuses_what_is_no_matrix_and_settings_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"muon = True: bias has shape \(3,\) and is no matrix; put it in a group with muon = False"):
        Muon(nn.Linear(3, 3).named_parameters())
    for name, value in (("lr", -1.0), ("momentum", float("nan")), ("weight_decay", -0.1), ("eps", float("inf")), ("betas", (1.0, 0.9))):
        with pytest.raises(ValueError, match=f"^{name} = "):
            Muon([torch.zeros(3, 3, requires_grad=True)], **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "lr"), [("lamb", 0.02), ("lans", 0.02), ("lars", 0.1), ("adamw", 0.01), ("muon", 0.01)])
def test_training_lowers_the_loss(name: Any, lr: float) -> None:
    module = small()
    losses = train(module, build_optimizer(module, OPTIMIZERS[name](lr=lr, **({"trust_coefficient": 0.1} if name == "lars" else {}))), 40)
    assert losses[-1] < 0.8 * losses[0]
