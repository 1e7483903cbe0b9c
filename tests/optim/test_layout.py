"""The state of an optimizer follows its parameter, whatever memory format and type that takes on between two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from overnight.optim import Muon
from overnight.optim.state import fit
from tests.optim.problem import CLASSES, draw

SHAPE = (2, 3, 4, 5)
FORMATS = [torch.contiguous_format, torch.channels_last]
Make = Callable[[list[Tensor]], torch.optim.Optimizer]
MAKES: dict[str, Make] = {
    **{
        f"{name} {'fused' if fused else 'lists'}": (lambda ps, c=c, f=fused: c(ps, lr=0.1, fused=f))
        for name, c in CLASSES.items()
        for fused in (0, 1)
    },
    "muon": lambda params: Muon(params, lr=0.1, muon=False),
}


def trajectory(make: Make, formats: list[tuple[Any, Any]], dtype: torch.dtype, reload_at: int = -1) -> Tensor:
    """The end of steps on seeded gradients, with (parameter, gradient) in the memory formats given for each."""
    p = draw(*SHAPE, dtype=dtype).requires_grad_()
    optimizer = make([p])
    for at, (mine, of_grad) in enumerate(formats):
        p.data = p.data.contiguous(memory_format=mine)
        if at == reload_at:
            old, optimizer = optimizer.state_dict(), make([p])
            optimizer.load_state_dict(old)
        p.grad = draw(*SHAPE, seed=100 + at).to(torch.bfloat16).to(dtype).contiguous(memory_format=of_grad)
        optimizer.step()
    return p.detach()


@pytest.mark.parametrize("name", list(MAKES))
@given(st.lists(st.tuples(st.sampled_from(FORMATS), st.sampled_from(FORMATS)), min_size=2, max_size=5), st.integers(-1, 4), st.booleans())
@settings(max_examples=30, deadline=None)
def test_a_change_of_memory_format_between_steps_changes_no_number(name: str, formats: list[Any], reload_at: int, half: bool) -> None:
    plain = [(torch.contiguous_format, torch.contiguous_format)] * len(formats)
    dtype = torch.bfloat16 if half and name != "muon" else torch.float32
    ours, reference = trajectory(MAKES[name], formats, dtype, reload_at), trajectory(MAKES[name], plain, torch.float64)
    tolerance = 2e-6 if dtype == torch.float32 else 8e-3
    start = 1.0 if dtype == torch.float32 else 2.0  # it is rounded to bf16
    assert float((ours.double() - reference).norm()) <= start * tolerance * float(reference.norm())


@pytest.mark.parametrize("name", list(CLASSES))
def test_the_state_of_a_parameter_that_became_wider_follows_its_type(name: str) -> None:
    ends = []
    for change in (False, True):
        p = draw(3, 70).float().double().requires_grad_() if not change else draw(3, 70).float().requires_grad_()
        optimizer = CLASSES[name]([p], lr=0.01, fused=True)
        for at in range(4):
            if at == 2:
                p.data = p.data.double()
            p.grad = draw(3, 70, seed=100 + at).to(p.dtype)
            optimizer.step()
        assert all(value.dtype == torch.float64 for key, value in optimizer.state[p].items() if key != "step")
        ends.append(p.detach())
    assert float((ends[0] - ends[1]).norm()) < 1e-6 * float(ends[0].norm())


def test_moments_and_master_lie_as_the_parameter_does_for_the_kernels_that_read_addresses() -> None:
    p = draw(*SHAPE, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    state: dict[str, Any] = {}
    fit(state, p, ("exp_avg", "exp_avg_sq"))
    assert all(state[name].stride() == p.stride() for name in ("exp_avg", "exp_avg_sq", "master"))
    values = {name: value.copy_(draw(*SHAPE)).clone() for name, value in state.items() if name != "step"}
    fit(state, p.contiguous(), ("exp_avg", "exp_avg_sq"))
    for name, value in values.items():
        assert state[name].is_contiguous() and state[name].dtype == torch.float32 and torch.equal(state[name], value)
    kept = dict(state)
    fit(state, p.contiguous(), ("exp_avg", "exp_avg_sq"))
    assert all(state[name] is value for name, value in kept.items())
    # Of a parameter that is as wide as its state there is no master.
    fit(state, p.float().contiguous(), ("exp_avg", "exp_avg_sq"))
    assert "master" not in state
