"""Muon of one's own loop: 16-bit parameters, and states that are loaded."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from overnight.optim import Lamb, Muon, muon_stacks


def network(dtype: torch.dtype) -> list[Tensor]:
    """A matrix, which Muon steps, and a vector, which AdamW does."""
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(torch.bfloat16).to(dtype)) for shape in ((8, 6), (64,))]


def optimizer_of(params: list[Tensor]) -> Muon:
    groups: list[dict[str, Any]] = [{"params": params[:1]}, {"params": params[1:], "muon": False}]
    return Muon(groups, lr=1e-3)


def step(params: list[Tensor], optimizer: torch.optim.Optimizer, number: int) -> None:
    torch.manual_seed(number)
    for p in params:
        p.grad = (1e-4 * torch.randn(p.shape)).to(torch.bfloat16).to(p.dtype)
    optimizer.step()


@pytest.mark.parametrize("muon", [True, False])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
def test_tensors_that_are_not_real_floating_point_are_refused(dtype: torch.dtype, muon: bool) -> None:
    optimizer = Muon(network(torch.float32)[:1])
    with pytest.raises(ValueError, match=f"parameter 1 is {dtype}: only real floating-point tensors can be optimized"):
        optimizer.add_param_group({"params": [torch.zeros(3, 3, dtype=dtype)], "muon": muon})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_go_where_fp32_ones_go(dtype: torch.dtype) -> None:
    halves, wholes = network(dtype), network(torch.float32)
    for p, q in zip(halves, wholes, strict=True):
        q.data.copy_(p)
    ours, reference = optimizer_of(halves), optimizer_of(wholes)
    for number in range(60):
        step(halves, ours, number)
        for p, q in zip(halves, wholes, strict=True):
            assert p.grad is not None
            q.grad = p.grad.float()
        reference.step()
    for p, q in zip(halves, wholes, strict=True):
        assert torch.equal(ours.state[p]["master"], q.detach()) and torch.equal(p.detach(), q.detach().to(dtype))
        assert all(value.dtype == torch.float32 for value in ours.state[p].values())
        assert set(ours.state[p]) == {*reference.state[q], "master"}


def test_16_bit_parameters_go_on_from_a_saved_state_with_the_same_bits() -> None:
    through, resumed = network(torch.bfloat16), network(torch.bfloat16)
    ours, first = optimizer_of(through), optimizer_of(resumed)
    for number in range(4):
        step(through, ours, number)
        step(resumed, first, number)
    second = optimizer_of(resumed)
    second.load_state_dict(first.state_dict())
    for number in range(4, 8):
        step(through, ours, number)
        step(resumed, second, number)
    assert all(torch.equal(p, q) for p, q in zip(through, resumed, strict=True))
    assert all(torch.equal(ours.state[p]["master"], second.state[q]["master"]) for p, q in zip(through, resumed, strict=True))


def test_a_parameter_that_became_fp32_has_no_master_that_could_be_stale() -> None:
    params = network(torch.bfloat16)
    optimizer = optimizer_of(params)
    step(params, optimizer, 0)
    for p in params:
        p.grad = None
        p.data = p.data.float()
    step(params, optimizer, 1)
    assert all("master" not in optimizer.state[p] for p in params)


def test_a_sparse_gradient_is_refused_by_name_before_any_tensor_moves() -> None:
    table, linear = torch.nn.Embedding(5, 4, sparse=True), torch.nn.Linear(4, 4, bias=False)
    optimizer = Muon([{"params": [("linear", linear.weight)]}, {"params": [("table", table.weight)], "muon": False}])
    linear(table(torch.tensor([1]))).sum().backward()
    before = linear.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"^table has a sparse gradient: use a dense one"):
        optimizer.step()
    assert torch.equal(linear.weight, before) and not optimizer.state


def test_gradients_of_16_bits_move_fp32_parameters_as_the_same_numbers_in_fp32_do() -> None:
    ends = []
    for kind in (torch.float32, torch.bfloat16):
        params = network(torch.float32)
        optimizer = optimizer_of(params)
        for number in range(4):
            for i, p in enumerate(params):
                p.grad_dtype = kind  # type: ignore[attr-defined]
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * number + i)).to(torch.bfloat16).to(kind)
            optimizer.step()
        assert all(value.dtype == torch.float32 for state in optimizer.state.values() for value in state.values())
        assert all(p.grad is not None and p.grad.dtype == kind for p in params)
        ends.append([p.detach() for p in params])
    assert all(torch.equal(p, q) for p, q in zip(*ends, strict=True))


@pytest.mark.parametrize("first", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("then", [torch.float32, torch.float64, torch.bfloat16])
def test_a_network_that_changes_its_type_is_stepped_as_one_with_its_state_in_that_type(first: torch.dtype, then: torch.dtype) -> None:
    params = network(first)
    optimizer = optimizer_of(params)
    step(params, optimizer, 0)
    for p in params:
        p.grad = None
        p.data = p.data.to(then)
    twins = [p.detach().clone().requires_grad_() for p in params]
    twin = optimizer_of(twins)
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        if first != then:
            state.pop("master", None)
    twin.load_state_dict(saved)
    step(params, optimizer, 1)
    step(twins, twin, 1)
    assert all(torch.equal(p, q) for p, q in zip(params, twins, strict=True))
    wide = torch.float64 if then == torch.float64 else torch.float32
    assert all(value.dtype == wide for p in params for name, value in optimizer.state[p].items() if name != "step")


@pytest.mark.parametrize("other", [torch.optim.AdamW, Lamb])
def test_the_state_of_another_optimizer_is_refused_and_changes_nothing(other: Callable[[list[Tensor]], torch.optim.Optimizer]) -> None:
    params = network(torch.float32)[:1]
    theirs, ours = other(params), Muon(params, lr=0.02)
    step(params, theirs, 0)
    with pytest.raises(ValueError, match=r"this is not the state of Muon but of (another optimizer|Lamb)"):
        ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 0.02 and not ours.state
    step(params, ours, 1)


@pytest.mark.parametrize(
    ("number", "entry", "said"),
    [
        (1, "exp_avg", "parameter 1 has exp_avg_sq, step, not exp_avg, exp_avg_sq, step"),
        (1, "step", "parameter 1 has exp_avg, exp_avg_sq, not exp_avg, exp_avg_sq, step"),
        (0, "momentum_buffer", "parameter 0 has exp_avg, not momentum_buffer"),
    ],
)
def test_a_state_that_lacks_an_entry_is_refused_before_anything_changes(number: int, entry: str, said: str) -> None:
    params = network(torch.float32)
    optimizer = optimizer_of(params)
    step(params, optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    lost = saved["state"][number].pop(entry)
    if not saved["state"][number]:
        saved["state"][number]["exp_avg"] = lost
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=f"^this is not the state of Muon: {said}$"):
        optimizer.load_state_dict(saved)
    assert all(
        torch.equal(value, before["state"][i][name]) for i, s in optimizer.state_dict()["state"].items() for name, value in s.items()
    )


def test_the_state_of_groups_that_were_divided_otherwise_is_refused() -> None:
    params = network(torch.float32)[:1]
    theirs, ours = Muon(params), Muon([{"params": params, "muon": False}])
    step(params, theirs, 0)
    with pytest.raises(ValueError, match="the state is of other groups: group 0 has muon = True there and False here"):
        ours.load_state_dict(theirs.state_dict())
    assert not ours.param_groups[0]["muon"] and not ours.state


def test_matrices_of_one_shape_at_once_go_where_torch_takes_each() -> None:
    """Wide, tall and square ones, one without a gradient; on a GPU, where each would be thirty small kernels."""
    shapes = [(64, 192), (192, 64), (64, 64), (64, 192), (192, 64), (3, 5)]

    def trained(stacked: bool) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
        optimizer = torch.optim.Muon(params, lr=0.01, momentum=0.9, adjust_lr_fn="match_rms_adamw")
        for number in range(4):
            for p in params[: len(params) - number % 2]:
                p.grad = torch.randn(p.shape)
            if stacked:
                with torch.no_grad():
                    muon_stacks.step(optimizer.param_groups[0], optimizer.state)
            else:
                optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in params], [optimizer.state[p]["momentum_buffer"] for p in params]

    for found, wanted in zip(trained(True), trained(False), strict=True):
        for a, b in zip(found, wanted, strict=True):
            # The order in which a batch of products adds up may differ, in bf16.
            torch.testing.assert_close(a, b, rtol=0, atol=2e-3)


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("shape", [(3, 16, 40), (2, 40, 16), (1, 24, 24)])
def test_newton_and_schulz_follow_their_formula_in_float64(shape: tuple[int, ...], dtype: torch.dtype, near: float) -> None:
    torch.manual_seed(0)
    updates, (a, b, c) = torch.randn(shape), (3.4445, -4.775, 2.0315)
    x = updates.double() / updates.double().flatten(1).norm(dim=1)[:, None, None]
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    found = muon_stacks.orthogonalized(updates.to(dtype), (a, b, c), 5, 1e-7)
    assert found.dtype == dtype and float((found.double() - x).norm() / x.norm()) < near


@pytest.mark.parametrize("at_once", [32 << 20, 2 * 16 * 40 * 4, 1])
def test_on_a_cpu_without_bf16_a_step_is_that_of_the_formula_to_the_digits_of_fp32(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 it would be off by 2^-9; however many matrices are taken at once."""
    torch.manual_seed(0)
    monkeypatch.setattr(muon_stacks, "EMULATES_BF16", True)
    monkeypatch.setitem(muon_stacks._AT_ONCE, "cpu", at_once)
    params = [torch.nn.Parameter(torch.randn(16, 40)) for _ in range(3)]
    before, grads = [p.detach().double() for p in params], [torch.randn(16, 40) for _ in params]
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad.clone()
    Muon([{"params": params, "muon": True}], lr=0.01, momentum=0.9, weight_decay=0.1).step()
    for p, old, grad in zip(params, before, grads, strict=True):
        update = torch.lerp(grad.double(), 0.1 * grad.double(), 0.9)
        x = update / update.norm()
        for _ in range(5):
            gram = x @ x.mT
            x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
        wanted = old * (1 - 0.01 * 0.1) - 0.01 * 0.2 * math.sqrt(40) * x
        assert float((p.detach().double() - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())


@pytest.mark.parametrize("has", [True, False])
def test_matrices_are_taken_at_once_where_bf16_would_be_emulated_and_in_the_form_that_is_known(
    has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muon_stacks, "EMULATES_BF16", not has)
    p, known = torch.nn.Parameter(torch.ones(2, 2)), {"adjust_lr_fn": "match_rms_adamw", "nesterov": True, "lr": 0.1}
    assert muon_stacks.takes({"params": [p], **known}), "without a gradient there is nothing to do"
    p.grad = torch.ones(2, 2)
    assert muon_stacks.takes({"params": [p], **known}) == (not has)
    for other in ({"lr": torch.tensor(0.1)}, {"nesterov": False}, {"adjust_lr_fn": None}):
        assert not muon_stacks.takes({"params": [], **known, **other})


def test_a_step_can_be_compiled_without_a_warning() -> None:
    plain, compiled = network(torch.float32), network(torch.float32)
    for params, how in ((plain, lambda step: step), (compiled, torch.compile(backend="eager"))):
        optimizer = optimizer_of(params)
        for number in range(2):
            for p in params:
                p.grad = torch.full_like(p, number + 1.0)
            how(optimizer.step)()
    for found, wanted in zip(compiled, plain, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-3)


@pytest.mark.parametrize("muon", [True, False])
def test_the_default_device_of_torch_changes_nothing(muon: bool) -> None:
    def end(device: str) -> Tensor:
        p = network(torch.float32)[0]
        with torch.device(device):
            optimizer = Muon([{"params": [p], "muon": muon}])
        p.grad = torch.ones_like(p)
        with torch.device(device):
            optimizer.step()
        return p.detach()

    assert torch.equal(end("xla"), end("cpu")), "a device that this torch does not have"
