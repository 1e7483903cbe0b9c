"""The faults of public implementations of LARS, LAMB and LANS: each test fails on the faulty formula.

Where the fault is a formula, it stands beside ours as `faulty`, and the test says by how much it would be wrong.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overnight.config import BertConfig, LambConfig
from overnight.models.bert import BertForPretraining
from overnight.optim import Lamb, Lans, Lars
from overnight.optim.groups import parameter_groups
from overnight.optim.layerwise import whole_norms
from overnight.optim.state import local
from tests.optim.problem import CLASSES, draw, fill, parameters, run

each = pytest.mark.parametrize("name", list(CLASSES))
fused = pytest.mark.parametrize("fused", [False, True])


def moved(points: list[list[Tensor]], i: int = 0) -> float:
    """|Δx| / |x| of the first step of a tensor."""
    return float((points[1][i] - points[0][i]).norm() / points[0][i].norm())


@fused
def test_1_the_first_step_of_lars_is_not_seeded_with_the_raw_gradient(fused: bool) -> None:
    lr, eta = 0.1, 1e-3
    ours = moved(run(Lars, 1, lr=lr, trust_coefficient=eta, weight_decay=0.0, fused=fused))
    assert math.isclose(ours, lr * eta, rel_tol=1e-9)
    g, x = draw(5, 4, seed=1000), draw(5, 4)
    faulty = float((lr * g).norm() / x.norm())  # the buffer starts as a copy of g
    assert faulty > 500 * ours


@fused
def test_2_bias_correction_is_no_hidden_warm_up(fused: bool) -> None:
    lr = 0.01
    ours = moved(run(Lamb, 1, lr=lr, weight_decay=0.0, fused=fused))
    assert math.isclose(ours, lr, rel_tol=1e-9)
    faulty = lr * math.sqrt(1 - 0.999) / (1 - 0.9)  # folded into lr, it no longer cancels in the trust ratio
    assert math.isclose(faulty / ours, 0.316, rel_tol=1e-2)
    # With decay it decides how much the gradient counts beside it.
    with_, without = (run(Lamb, 1, lr=lr, weight_decay=0.5, bias_correction=flag, fused=fused)[1][0] for flag in (True, False))
    assert (with_ - without).abs().max() > 1e-4


@fused
@pytest.mark.parametrize("make", [Lamb, Lars])
def test_3_clipping_divides_by_the_norm_over_all_groups_and_zero_is_refused(make: type[Lamb] | type[Lars], fused: bool) -> None:
    def end(bound: float | None, scale: float) -> list[Tensor]:
        params = parameters()
        fill(params, 0, scale)
        groups = [{"params": params[:1]}, {"params": params[1:], "trust_ratio": False, "weight_decay": 0.0}]
        make(groups, lr=0.01, eps=0.1, max_grad_norm=bound, fused=fused).step()
        return [p.detach() for p in params]

    params = parameters()
    fill(params, 0)
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in params if p.grad is not None))
    clipped = end(0.7, 1.0)
    torch.testing.assert_close(clipped, end(None, 0.7 / norm), rtol=1e-10, atol=1e-12)
    assert max(float((a - b).abs().max()) for a, b in zip(clipped, end(None, norm / 0.7), strict=True)) > 1e-6  # multiplied
    torch.testing.assert_close(end(2 * norm, 1.0), end(None, 1.0), rtol=0, atol=0)  # never scales up
    with pytest.raises(ValueError, match="max_grad_norm = 0"):
        make(parameters(), max_grad_norm=0.0)
    with pytest.raises(ValueError, match=r"max_grad_norm .* over all groups"):
        make([{"params": parameters(), "max_grad_norm": 1.0}])


@each
@fused
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_4_gradients_are_as_they_were_after_a_step(name: str, fused: bool, dtype: torch.dtype) -> None:
    params = parameters(dtype=dtype)
    bound = {} if name == "lans" else {"max_grad_norm": 0.1}
    optimizer = CLASSES[name](params, maximize=True, fused=fused, **bound)
    fill(params, 0)
    before = [p.grad.clone() for p in params if p.grad is not None]
    optimizer.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(params, before, strict=True) if p.grad is not None)


@each
@fused
def test_5_a_bf16_parameter_keeps_updates_of_a_thousandth_also_after_loading(name: str, fused: bool) -> None:
    p = torch.ones(64, dtype=torch.bfloat16, requires_grad=True)
    optimizer = CLASSES[name]([p], lr=1e-4, trust_ratio=False, weight_decay=0.0, fused=fused)
    lr = 1e-4 if name != "lars" else 1e-2
    for step in range(100):
        if step == 50:
            saved = optimizer.state_dict()
            optimizer = CLASSES[name]([p], lr=lr, trust_ratio=False, fused=fused)
            optimizer.load_state_dict(saved)
        optimizer.param_groups[0]["lr"] = lr
        p.grad = torch.full_like(p, 1e-3)
        optimizer.step()
    # One step of 1e-4 is a 40th of the distance between bf16 numbers at 1: added to p itself it would be lost every time.
    assert (p.detach() < 0.995).all()
    for value in optimizer.state[p].values():
        assert value.dtype == torch.float32
    if name == "lamb":
        assert (optimizer.state[p]["exp_avg_sq"] > 0).all()


@each
@fused
def test_6_an_unused_table_does_not_melt_and_no_gradients_at_all_are_no_error(name: str, fused: bool) -> None:
    def end(skip: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        p = draw(6, 4).requires_grad_()
        optimizer = CLASSES[name]([p], lr=0.5 if name == "lars" else 0.01, weight_decay=0.1, skip_zero_grad=skip, fused=fused)
        optimizer.step()
        p.grad = draw(6, 4, seed=3)
        optimizer.step()
        before = p.detach().clone()
        for _ in range(10):
            p.grad = torch.zeros_like(p)
            optimizer.step()
        return before, p.detach(), optimizer.state[p]

    before, after, state = end(skip=True)
    assert torch.equal(before, after) and float(state["step"]) == 1
    before, after, state = end(skip=False)
    assert not torch.equal(before, after) and float(state["step"]) == 11


def test_7_the_norm_is_that_of_the_whole_tensor_not_of_the_local_shard() -> None:
    # tests/optim/test_sharded.py shows it on processes; here that the two differ, by a mesh of this process alone.
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            x = draw(5, 4)
            cut = distribute_tensor(x, init_device_mesh("cpu", (1,)), [Shard(0)])
            torch.testing.assert_close(whole_norms([cut, x]), torch.stack([x.norm(), x.norm()]))
            assert type(local(cut)) is Tensor
        finally:
            dist.destroy_process_group()


@each
def test_8_a_step_reads_no_number_from_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # On the meta device there is no number to read: any .item(), float() or bool() of a tensor raises.
    params = [torch.empty(s, device="meta", requires_grad=True) for s in ((5, 4), (3,))]
    bound = {} if name == "lans" else {"max_grad_norm": 1.0}
    optimizer = CLASSES[name]([{"params": params[:1]}, {"params": params[1:], "trust_ratio": False}], **bound)
    for p in params:
        p.grad = torch.empty_like(p)
    for _ in range(3):
        optimizer.step()
    assert optimizer.grad_norm is not None and optimizer.grad_norm.is_meta


@fused
def test_9_lans_has_a_guard_at_a_gradient_of_zero(fused: bool) -> None:
    p = draw(5, 4).requires_grad_()
    optimizer = Lans([p], lr=0.01, weight_decay=0.0, skip_zero_grad=False, fused=fused)
    for step in range(3):
        p.grad = torch.zeros_like(p) if step != 1 else draw(5, 4, seed=1)
        optimizer.step()
        assert torch.isfinite(p).all()
        assert all(torch.isfinite(value).all() for value in optimizer.state[p].values())


@fused
@pytest.mark.parametrize("make", [Lamb, Lans])
@pytest.mark.parametrize("settings", [{}, {"trust_ratio": False}, {"weight_decay": 0.0}], ids=str)
def test_9_without_an_eps_a_tensor_that_is_left_alone_stays_as_it_was(
    make: type[Lamb] | type[Lans], settings: dict[str, Any], fused: bool
) -> None:
    params = [draw(5, 4), draw(3), draw(20000)]  # the last is longer than a stretch of native.c
    for p in params:
        p.requires_grad_().grad = torch.zeros_like(p)
    params[1].grad = draw(3, seed=1)
    optimizer = make(params, lr=0.01, eps=0.0, fused=fused, **settings)
    optimizer.step()
    assert torch.equal(params[0], draw(5, 4)) and torch.equal(params[2], draw(20000))
    assert torch.isfinite(params[1]).all() and not torch.equal(params[1], draw(3))
    assert all(torch.isfinite(trust).all() for _, trust in optimizer.ratios)


def test_10_a_tied_table_is_in_one_group_once_and_no_bias_is_among_the_matrices() -> None:
    net = BertForPretraining(BertConfig(num_layers=2, hidden_size=16, num_heads=2, max_position_embeddings=16), 50)
    assert any(isinstance(part, nn.Embedding) for part in net.modules())
    groups = parameter_groups(net, LambConfig())
    seen = [id(p) for group in groups for _, p in group["params"]]
    assert len(seen) == len(set(seen)) == len(list(net.parameters()))
    for group in groups:
        for label, p in group["params"]:
            assert (p.ndim < 2) == (group["name"] == "vectors") == (not group["trust_ratio"]) == (group["weight_decay"] == 0.0), label
    with pytest.raises(ValueError, match=r"more than one parameter group|duplicate"), warnings.catch_warnings():
        warnings.simplefilter("error")
        table = nn.Parameter(torch.zeros(3, 2))
        Lamb([{"params": [table]}, {"params": [table]}])
