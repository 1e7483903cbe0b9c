"""Tensors whose numbers do not lie where their address says: fake ones, wrappers of others, and zeros that were not written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from overnight.optim import native
from overnight.optim.batch import backend_of
from tests.optim.problem import CLASSES, draw
from tests.optim.test_layerwise import each


@pytest.fixture
def no_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let native.c fail a test, where it would end the process."""
    for name in ("adaptive", "lars", "norms"):
        monkeypatch.setattr(native, name, lambda *_: pytest.fail("native.c was given an address at which there is nothing"))


@each
@pytest.mark.parametrize("settings", [{}, {"fused": True}, {"fused": False}, {"foreach": False}], ids=str)
@pytest.mark.usefixtures("no_native")
def test_fake_tensors_are_stepped_without_numbers(name: str, settings: dict[str, Any]) -> None:
    bound = {} if name == "lans" else {"max_grad_norm": 1.0}
    with FakeTensorMode():
        model = nn.Linear(3, 3)
        optimizer = CLASSES[name](model.parameters(), **settings, **bound)
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
    assert isinstance(optimizer.grad_norm, FakeTensor)
    assert all(isinstance(value, FakeTensor) for state in optimizer.state.values() for value in state.values())


@each
@pytest.mark.usefixtures("no_native")
def test_a_step_that_began_with_numbers_asks_for_none_under_a_mode_of_fake_tensors(name: str) -> None:
    p = draw(3, dtype=torch.float32).requires_grad_()
    optimizer = CLASSES[name]([p])
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert backend_of(p, p, optimizer.param_groups[0]) == "lists"


@each
@pytest.mark.usefixtures("no_native")
def test_the_memory_of_a_step_can_be_tracked(name: str) -> None:
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode():
        model = nn.Linear(3, 3)
        optimizer = CLASSES[name](model.parameters())
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
    assert tracker.get_tracker_snapshot("peak")


@each
@pytest.mark.usefixtures("no_native")
def test_each_tensor_of_a_wrapper_is_stepped_as_by_itself(name: str) -> None:
    p = nn.Parameter(TwoTensor(draw(5), draw(5)))
    alone = draw(5).requires_grad_()
    for x, settings in ((p, {}), (alone, {"fused": False})):
        optimizer = CLASSES[name]([x], lr=0.1, **settings)
        for step in range(3):
            g = draw(5, seed=1 + step)
            x.grad = TwoTensor(g, g.clone()) if x is p else g
            optimizer.step()
    assert isinstance(p, TwoTensor)
    torch.testing.assert_close((p.a, p.b), (alone.detach(), alone.detach()), rtol=1e-12, atol=1e-12)


@each
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("no_native")
def test_a_gradient_of_zero_that_was_not_written_out_is_one_of_zero(name: str, skip: bool, dtype: torch.dtype) -> None:
    def end(zero: Tensor, **settings: Any) -> Tensor:
        p = draw(5, dtype=dtype).requires_grad_()
        p.grad = zero
        CLASSES[name]([p], lr=0.1, weight_decay=0.1, skip_zero_grad=skip, **settings).step()
        return p.detach()

    zero = torch.zeros(5, dtype=dtype)
    assert torch.equal(end(torch._efficientzerotensor(5, dtype=dtype)), end(zero, fused=False))  # type: ignore[attr-defined]


@each
def test_a_subclass_of_parameters_that_only_adds_to_them_takes_the_fastest_way(name: str) -> None:
    class Named(nn.Parameter):
        pass

    def end(kind: type[nn.Parameter]) -> Tensor:
        p = kind(draw(5, 4, dtype=torch.float32))
        p.grad = draw(5, 4, seed=1, dtype=torch.float32)
        optimizer = CLASSES[name]([p], lr=0.1)
        optimizer.step()
        assert backend_of(p, p.grad, optimizer.param_groups[0]) == "native"
        return p.detach()

    assert torch.equal(end(Named), end(nn.Parameter))
