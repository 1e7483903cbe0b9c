"""LAMB by its formula: published vectors, invariants, and the traps of public implementations."""

from __future__ import annotations

import json
import math
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from overnight.optim.lamb import Lamb

VECTORS = Path(os.environ.get("OVERNIGHT_VECTORS", Path(__file__).parents[2].parent / "shared" / "vectors")) / "optimizers_f64.json"
CASES = [
    "lamb",
    "lamb_ramped_lr",
    "lamb_betas_wd",
    "lamb_no_bias_correction",
    "nvlamb_all_adapted",
    "nvlamb_groups",
    "lambc",
]


def problem() -> dict[str, Any]:
    if not VECTORS.is_file():
        pytest.skip(f"no optimizer vectors at {VECTORS}; set OVERNIGHT_VECTORS")
    return dict(json.loads(VECTORS.read_text(encoding="utf-8")))


def tensors(values: list[Any]) -> list[Tensor]:
    return [torch.tensor(value, dtype=torch.float64) for value in values]


@pytest.mark.parametrize("name", CASES)
def test_matches_the_vectors(name: str) -> None:
    data = problem()
    case, settings_ = data["cases"][name], dict(data["cases"][name]["settings"])
    assert settings_.pop("optimizer") == "lamb"
    params, a, b = (tensors(data[key]) for key in ("x0", "A", "B"))
    each = {key: settings_.pop(key) for key in list(settings_) if isinstance(settings_[key], list) and key != "betas"}
    groups = [{"params": [p], **{key: values[i] for key, values in each.items()}} for i, p in enumerate(params)]
    optimizer = Lamb(groups if each else params, **{key: tuple(v) if key == "betas" else v for key, v in settings_.items()})
    assert data["steps"] == len(case["lr"]) == 20
    for step, lr in enumerate(case["lr"]):
        for p, a_i, b_i, noise in zip(params, a, b, tensors(data["noise"][step]), strict=True):
            p.grad = a_i * (p - b_i) + noise
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    for p, end in zip(params, tensors(case["end"]), strict=True):
        torch.testing.assert_close(p, end, rtol=1e-12, atol=1e-12)


def test_every_lamb_case_of_the_vectors_is_tried() -> None:
    assert sorted(CASES) == sorted(name for name, case in problem()["cases"].items() if case["settings"]["optimizer"] == "lamb")


def parameter(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    p = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()
    p.grad = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1)).to(dtype)
    return p


def run(steps: int, scale: float = 1.0, **settings_: Any) -> list[Tensor]:
    """Points of a trajectory on seeded gradients."""
    p = parameter(5, 4)
    optimizer = Lamb([p], **settings_)
    points = [p.detach().clone()]
    for step in range(steps):
        p.grad = parameter(5, 4, seed=50 + step).detach() * scale
        optimizer.step()
        points.append(p.detach().clone())
    return points


@settings(max_examples=40)
@given(st.floats(1e-4, 0.1), st.floats(0, 0.3), st.booleans(), st.sampled_from([(0.9, 0.999), (0.6, 0.9), (0.0, 0.0)]))
def test_an_adapted_tensor_moves_by_lr_times_its_norm(lr: float, decay: float, corrected: bool, betas: tuple[float, float]) -> None:
    points = run(6, lr=lr, weight_decay=decay, bias_correction=corrected, betas=betas)
    for before, after in pairwise(points):
        assert math.isclose(float((after - before).norm()), lr * float(before.norm()), rel_tol=1e-9)


@settings(max_examples=30)
@given(st.floats(1e-3, 1e6), st.booleans())
def test_the_scale_of_the_gradient_does_not_matter(scale: float, corrected: bool) -> None:
    plain, scaled = (run(5, s, lr=0.01, eps=0.0, bias_correction=corrected) for s in (1.0, scale))
    torch.testing.assert_close(plain[-1], scaled[-1], rtol=1e-10, atol=1e-12)


def test_bias_correction_is_no_hidden_warm_up() -> None:
    # Folded into lr it would cancel in the trust ratio: 0.32 of the step at t = 1.
    before, after = run(1, lr=0.01, weight_decay=0.0)
    assert math.isclose(float((after - before).norm()), 0.01 * float(before.norm()), rel_tol=1e-9)
    # And with decay it decides how much the gradient counts beside it.
    with_, without = (run(1, lr=0.01, weight_decay=0.5, bias_correction=flag)[1] for flag in (True, False))
    assert (with_ - without).abs().max() > 1e-4


def test_unadapted_tensors_take_the_plain_adam_step() -> None:
    p, q = parameter(5, 4), parameter(5, 4)
    ours = Lamb([p], lr=0.01, weight_decay=0.0, adapt=False)
    adam = torch.optim.Adam([q], lr=0.01, eps=1e-6)
    for step in range(5):
        p.grad, q.grad = (parameter(5, 4, seed=9 + step).detach() for _ in range(2))
        ours.step()
        adam.step()
    torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_clipping_is_by_the_norm_over_all_groups_and_leaves_the_gradients() -> None:
    def points(max_grad_norm: float | None, scale: float) -> list[Tensor]:
        params = [parameter(5, 4), parameter(3, seed=5)]
        for p in params:
            p.grad = p.grad * scale if p.grad is not None else None
        groups = [{"params": [params[0]]}, {"params": [params[1]], "adapt": False, "weight_decay": 0.0}]
        before = [p.grad.clone() for p in params if p.grad is not None]
        optimizer = Lamb(groups, lr=0.01, eps=0.1, max_grad_norm=max_grad_norm)
        optimizer.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(params, before, strict=True) if p.grad is not None)
        return [p.detach() for p in params]

    norm = float(torch.cat([p.grad.flatten() for p in (parameter(5, 4), parameter(3, seed=5)) if p.grad is not None]).norm())
    by_hand, clipped = points(None, 0.7 / norm), points(0.7, 1.0)
    torch.testing.assert_close(clipped, by_hand, rtol=1e-12, atol=1e-14)
    # Below the bound nothing changes: it never scales up.
    torch.testing.assert_close(points(2 * norm, 1.0), points(None, 1.0), rtol=0, atol=0)
    assert (clipped[0] - points(None, 1.0)[0]).abs().max() > 1e-6


def test_the_clipped_ratio_bounds_the_step() -> None:
    free, bound = (run(1, lr=0.01, trust_clip=clip) for clip in (None, 0.01))
    assert float((free[1] - free[0]).norm()) > float((bound[1] - bound[0]).norm()) > 0
    torch.testing.assert_close(run(3, trust_clip=1e9)[-1], run(3)[-1], rtol=0, atol=0)


def test_a_tensor_of_zeros_starts_to_move() -> None:
    p = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    p.grad = torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)
    Lamb([p], lr=0.1, weight_decay=0.0).step()
    torch.testing.assert_close(p.detach(), torch.tensor([-0.1, 0.1, 0.0], dtype=torch.float64), rtol=1e-5, atol=0)


def test_no_gradient_at_all_and_one_missing() -> None:
    p, q = parameter(4), parameter(4, seed=3)
    p_before, q_before, q.grad = p.detach().clone(), q.detach().clone(), None
    optimizer = Lamb([p, q], lr=0.1, max_grad_norm=1.0)
    optimizer.step()
    assert torch.equal(q.detach(), q_before) and not torch.equal(p.detach(), p_before) and q not in optimizer.state
    p.grad, p_before = None, p.detach().clone()
    optimizer.step()
    assert torch.equal(p.detach(), p_before) and optimizer.state[p]["step"] == 1


def test_a_closure_is_called_with_gradients_on_and_its_loss_returned() -> None:
    p = torch.ones(3, requires_grad=True)

    def closure() -> float:
        p.grad = None
        loss = (p**2).sum()
        loss.backward()
        return float(loss.detach())

    assert Lamb([p], lr=0.1).step(closure) == 3.0
    assert p.grad is not None and (p < 1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_moments_are_fp32_also_after_loading_a_state(dtype: torch.dtype) -> None:
    p = parameter(5, 4, dtype=dtype)
    optimizer = Lamb([p], lr=0.1, max_grad_norm=1.0)
    p.grad = (p.detach() * 1e-3).to(dtype)
    optimizer.step()
    state = optimizer.state[p]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32 and p.dtype == dtype
    # About 1e-10: below what fp16 can hold.
    assert (state["exp_avg_sq"] > 0).all()
    other = Lamb([p.detach().clone().requires_grad_()], lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    (loaded,) = other.state.values()
    assert loaded["step"] == 1
    for name in ("exp_avg", "exp_avg_sq"):
        assert loaded[name].dtype == torch.float32 and torch.equal(loaded[name], state[name])


def test_a_resumed_trajectory_is_bitwise_the_uninterrupted_one() -> None:
    points, optimizer = [], None
    for restart in (False, True):
        p = parameter(5, 4, dtype=torch.float32)
        optimizer = Lamb([p], lr=0.01)
        for step in range(6):
            if restart and step == 3:
                saved = optimizer.state_dict()
                p = p.detach().clone().requires_grad_()
                optimizer = Lamb([p], lr=0.01)
                optimizer.load_state_dict(saved)
            p.grad = parameter(5, 4, seed=step, dtype=torch.float32).detach()
            optimizer.step()
        points.append(p.detach())
    assert torch.equal(*points)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *[("lr", v) for v in (-1.0, float("nan"), float("inf"))],
        *[("eps", v) for v in (-1e-9, float("nan"))],
        *[("weight_decay", v) for v in (-0.1, float("inf"))],
        *[("betas", v) for v in ((1.0, 0.9), (0.9, -0.1), (0.9, float("nan")))],
        *[("trust_clip", v) for v in (0.0, -1.0, float("nan"))],
        *[("max_grad_norm", v) for v in (0.0, -1.0, float("nan"))],
    ],
)
def test_a_setting_out_of_range_is_named(setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{setting} = "):
        Lamb([parameter(2)], **{setting: value})
    if setting != "max_grad_norm":
        with pytest.raises(ValueError, match=f"^{setting} = "):
            Lamb([{"params": [parameter(2)], setting: value}])
        optimizer = Lamb([parameter(2)])
        with pytest.raises(ValueError, match=f"^{setting} = "):
            optimizer.add_param_group({"params": [parameter(2)], setting: value})
        assert len(optimizer.param_groups) == 1
