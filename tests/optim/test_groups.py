"""Parameter groups, and the optimizers a recipe asks for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from overnight.config import Model, Optim
from overnight.models.bert import BertForPretraining
from overnight.models.heads import Classifier, SpanReader
from overnight.optim.groups import build_optimizer, parameter_groups
from overnight.optim.lamb import Lamb

MODEL = Model(layers=2, width=16, heads=2, max_length=16)


@pytest.mark.parametrize(
    "module", [BertForPretraining(MODEL, 50), Classifier(MODEL, 50, 3), SpanReader(MODEL, 50)], ids=lambda m: type(m).__name__
)
def test_biases_and_norms_are_neither_decayed_nor_adapted_and_every_parameter_is_once_in_a_group(module: torch.nn.Module) -> None:
    decayed, plain = parameter_groups(module, 0.01)
    assert decayed["weight_decay"] == 0.01 and decayed["adapt"] is True
    assert plain["weight_decay"] == 0.0 and plain["adapt"] is False
    assert all("norm" not in name and name.endswith("weight") for name in decayed["names"])
    assert all("norm" in name or name.endswith("bias") for name in plain["names"])
    named = dict(module.named_parameters())
    assert sorted(decayed["names"] + plain["names"]) == sorted(named)
    for group in (decayed, plain):
        assert all(named[name] is p for name, p in zip(group["names"], group["params"], strict=True))
    assert len({id(p) for group in (decayed, plain) for p in group["params"]}) == len(list(module.parameters()))


def test_frozen_parameters_are_left_out() -> None:
    module = Classifier(MODEL, 50, 3)
    module.encoder.word.weight.requires_grad_(False)
    assert "encoder.word.weight" not in [name for group in parameter_groups(module, 0.1) for name in group["names"]]


def small() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1))


def test_lamb_has_the_settings_of_the_recipe() -> None:
    optimizer = build_optimizer(small(), Optim(name="lamb", lr=2e-3, betas=(0.8, 0.95), eps=1e-5, weight_decay=0.1))
    assert isinstance(optimizer, Lamb) and optimizer.max_grad_norm is None, "the loop clips"
    for group, decay, adapt in zip(optimizer.param_groups, (0.1, 0.0), (True, False), strict=True):
        assert (group["lr"], group["betas"], group["eps"]) == (2e-3, (0.8, 0.95), 1e-5)
        assert (group["weight_decay"], group["adapt"]) == (decay, adapt)


def test_adamw_equals_torchs() -> None:
    optim = Optim(name="adamw", lr=3e-3, betas=(0.8, 0.95), eps=1e-5, weight_decay=0.1)
    ours, theirs = small(), small()
    first = build_optimizer(ours, optim)
    matrices = [p for p in theirs.parameters() if p.ndim > 1]
    vectors = [p for p in theirs.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    second = torch.optim.AdamW(groups, lr=3e-3, betas=(0.8, 0.95), eps=1e-5, foreach=False, fused=False)
    x, y = torch.randn(16, 4), torch.randn(16, 1)
    for _ in range(10):
        for module, optimizer in ((ours, first), (theirs, second)):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(module(x), y).backward()
            optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["lamb", "adamw"])
def test_a_step_lowers_the_loss(name: str) -> None:
    module = small()
    optimizer = build_optimizer(module, dataclasses.replace(Optim(), name=name, lr=0.01))  # type: ignore[arg-type]
    x = torch.randn(64, 4)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(module(x), x[:, :1])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
