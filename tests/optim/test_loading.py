"""States that are loaded, with the hooks of torch, and gradients that lie in memory otherwise than they read."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from overnight.optim import Lamb, Lans, Lars, Muon

MAKES: dict[str, Any] = {"lamb": Lamb, "lans": Lans, "lars": Lars, "muon": Muon}
MOMENT = {"lamb": "exp_avg", "lans": "exp_avg", "lars": "momentum_buffer", "muon": "momentum_buffer"}
each = pytest.mark.parametrize("name", list(MAKES))


def stepped(name: str, shape: tuple[int, int] = (5, 4), dtype: torch.dtype = torch.float32) -> tuple[Tensor, torch.optim.Optimizer]:
    """A matrix and its optimizer after a step."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(shape).to(dtype))
    optimizer = MAKES[name]([p], lr=0.01)
    p.grad = torch.randn(shape).to(dtype)
    optimizer.step()
    return p, optimizer


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_hook_makes_of_a_state_before_it_is_loaded_is_what_is_loaded(name: str, dtype: torch.dtype) -> None:
    p, optimizer = stepped(name, dtype=dtype)

    def hook(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        changed = copy.deepcopy(state)
        changed["state"][0][MOMENT[name]].fill_(0.7)
        return changed

    optimizer.register_load_state_dict_pre_hook(hook)
    optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(optimizer.state[p][MOMENT[name]], torch.full((5, 4), 0.7))


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_hook_does_after_loading_stays(name: str, dtype: torch.dtype) -> None:
    p, optimizer = stepped(name, dtype=dtype)
    optimizer.register_load_state_dict_post_hook(lambda own: own.state[p][MOMENT[name]].zero_())
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer.state[p][MOMENT[name]].any()


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("muon", [True, False])
def test_a_state_can_be_loaded_again_and_again(name: str, dtype: torch.dtype, muon: bool) -> None:
    p = torch.nn.Parameter(torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).to(dtype))
    optimizer = MAKES[name]([{"params": [p], **({"muon": muon} if name == "muon" else {})}], lr=0.01)
    p.grad = torch.ones_like(p)
    optimizer.step()
    kept = optimizer.state_dict()
    numbers = {entry: value.clone() for entry, value in kept["state"][0].items()}
    for _ in range(2):
        optimizer.load_state_dict(kept)
        optimizer.step()
        assert all(torch.equal(kept["state"][0][entry], value) for entry, value in numbers.items())


@each
def test_a_state_that_is_refused_leaves_no_hook_behind(name: str) -> None:
    (p, optimizer), (_, other) = stepped(name), stepped(name, (4, 5))
    before = optimizer.state[p][MOMENT[name]].clone()
    with pytest.raises(ValueError, match=r"parameter 0: the state's .* has shape \(4, 5\), the parameter \(5, 4\)"):
        optimizer.load_state_dict(other.state_dict())
    assert torch.equal(optimizer.state[p][MOMENT[name]], before)
    assert not optimizer._optimizer_load_state_dict_pre_hooks and not optimizer._optimizer_load_state_dict_post_hooks


@each
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_gradient_through_the_conjugate_of_a_complex_number_is_followed_down(name: str, shape: tuple[int, ...]) -> None:
    p = torch.nn.Parameter(torch.full(shape, 0.5))
    z = torch.complex(torch.ones(shape), p).conj()
    (z * torch.tensor(1 + 2j)).abs().sum().backward()
    assert p.grad is not None and p.grad.is_neg() and p.grad.item() > 0
    optimizer = MAKES[name]([{"params": [p], **({"muon": False} if name == "muon" else {})}], lr=0.01)
    optimizer.step()
    assert p.item() < 0.5


@each
@pytest.mark.parametrize(
    ("setting", "value"), [("lr", "0.1"), ("weight_decay", None), ("weight_decay", [0.1]), ("eps", "x"), ("betas", 0.9)]
)
def test_a_setting_of_another_kind_is_named(name: str, setting: str, value: Any) -> None:
    if (name, setting) != ("lars", "betas"):
        with pytest.raises(ValueError, match=f"^{setting} = "):
            MAKES[name]([torch.zeros(2, 2)], **{setting: value})


@pytest.mark.parametrize(
    ("setting", "value"), [("momentum", 1.0), ("momentum", -0.1), ("betas", (0.9,)), ("betas", (0.9, 1.0)), ("lr", torch.zeros(2))]
)
def test_a_setting_of_muon_out_of_range_is_named(setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{setting} (= .*|has 2 elements): must be"):
        Muon([torch.zeros(2, 2)], **{setting: value})
