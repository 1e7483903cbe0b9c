"""What Lars, Lamb and Lans share: paths that agree, state, sharding of types, and what they refuse."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from overnight.native import NoCompiler, library
from overnight.optim import Lamb, Lans, Lars
from overnight.optim.layerwise import Layerwise
from overnight.optim.telemetry import Snapshot
from tests.optim.problem import CLASSES, SHAPES, draw, fill, parameters, run

# Settings that take every branch of the equations.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "lamb": [
        {"lr": 0.02},
        {"lr": 0.02, "weight_decay": 0.1, "betas": (0.6, 0.9), "max_grad_norm": 0.7, "maximize": True},
        {"lr": 0.02, "max_trust_ratio": 0.5, "bias_correction": False},
        {"lr": 0.02, "trust_ratio": False, "weight_decay": 0.0},
    ],
    "lans": [{"lr": 0.02}, {"lr": 0.02, "weight_decay": 0.1, "betas": (0.6, 0.9), "maximize": True}, {"lr": 0.02, "trust_ratio": False}],
    "lars": [
        {"lr": 2.0},
        {"lr": 2.0, "nesterov": True, "weight_decay": 0.1, "max_grad_norm": 0.7},
        {"lr": 2.0, "lr_in_momentum": False, "trust_coefficient": 0.01, "maximize": True, "eps": 0.1},
        {"lr": 0.1, "trust_ratio": False},
    ],
}
EVERY = [(name, settings) for name, variants in VARIANTS.items() for settings in variants]
# Longer than a stretch of native.c, one element, more than one dimension.
LONG = [(40000,), (1,), (130, 131), (7, 5)]
each = pytest.mark.parametrize("name", list(CLASSES))
every = pytest.mark.parametrize(("name", "settings"), EVERY, ids=[f"{n}-{i}" for i, (n, _) in enumerate(EVERY)])


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_one_by_one_batched_and_native_are_the_same(name: str, settings: dict[str, Any], dtype: torch.dtype) -> None:
    ways = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "native": {"fused": True}}
    ends = {way: run(CLASSES[name], 6, shapes=LONG, dtype=dtype, **settings, **chosen)[-1] for way, chosen in ways.items()}
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    for way in ("foreach", "native"):
        for ours, reference in zip(ends[way], ends["loop"], strict=True):
            assert float((ours - reference).norm()) <= tolerance * float(reference.norm()), way


def test_the_native_step_does_not_depend_on_the_number_of_threads() -> None:
    before, ends = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            ends.append([run(make, 4, shapes=LONG, dtype=torch.float32, fused=True)[-1] for make in CLASSES.values()])
    finally:
        torch.set_num_threads(before)
    for other in ends[1:]:
        assert all(torch.equal(a, b) for first, second in zip(ends[0], other, strict=True) for a, b in zip(first, second, strict=True))


@each
def test_a_step_compiles_without_a_graph_break_and_gives_the_same(name: str) -> None:
    ends, told = [], []
    for compiled in (False, True):
        params = parameters(dtype=torch.float32)
        optimizer = CLASSES[name](params, lr=torch.tensor(0.02), weight_decay=0.1)
        fill(params, 0)
        optimizer.step()  # makes the state
        step = torch.compile(optimizer.step, fullgraph=True, backend="aot_eager") if compiled else optimizer.step
        for at in range(1, 5):
            optimizer.param_groups[0]["lr"].fill_(0.02 / at)
            fill(params, at)
            before = Snapshot(optimizer)
            step()
            # What a step tells of itself is of this step, also of a compiled one.
            assert [id(p) for found, _ in optimizer.ratios for p in found] == [id(p) for p in params]
            told.append([optimizer.grad_norm, torch.cat([ratios for _, ratios in optimizer.ratios]), before.after().table])
        ends.append([p.detach() for p in params])
    for ours, reference in zip(*ends, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-6, atol=1e-7)
    assert len({float(norm) for norm, *_ in told[4:]}) == 4
    for theirs, compiled_ones in zip(told[:4], told[4:], strict=True):
        torch.testing.assert_close(compiled_ones, theirs, rtol=1e-5, atol=1e-7, equal_nan=True)


@every
def test_maximize_goes_the_other_way_on_the_negated_gradient(name: str, settings: dict[str, Any]) -> None:
    one = run(CLASSES[name], 4, **settings)[-1]
    other = run(CLASSES[name], 4, scale=-1.0, **{**settings, "maximize": not settings.get("maximize", False)})[-1]
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@each
def test_a_tensor_as_learning_rate_is_the_number(name: str) -> None:
    torch.testing.assert_close(run(CLASSES[name], lr=0.5)[-1], run(CLASSES[name], lr=torch.tensor(0.5))[-1], rtol=1e-12, atol=0)


@each
@pytest.mark.parametrize("fused", [False, True])
def test_a_resumed_trajectory_is_bitwise_the_undisturbed_one(name: str, fused: bool) -> None:
    ends = []
    for restart in (False, True):
        params = parameters(LONG, torch.float32)
        optimizer = CLASSES[name](params, lr=0.1, fused=fused)
        for step in range(6):
            if restart and step == 3:
                file = io.BytesIO()
                torch.save(optimizer.state_dict(), file)
                file.seek(0)
                params = [p.detach().clone().requires_grad_() for p in params]
                optimizer = CLASSES[name](params, lr=0.7, fused=fused)
                optimizer.load_state_dict(torch.load(file, weights_only=True))
            fill(params, step)
            optimizer.step()
        ends.append([p.detach() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fused", [False, True])
def test_16_bit_parameters_follow_the_fp32_trajectory_through_saving_and_loading(name: str, dtype: torch.dtype, fused: bool) -> None:
    # Gradients of one precision, so that only the weights differ; the step is too small to move a 16-bit number at once.
    ends = []
    for kind in (torch.float32, dtype):
        params = [p.detach().to(dtype).to(kind).requires_grad_() for p in parameters(LONG, torch.float32)]
        optimizer = CLASSES[name](params, lr=1e-4, weight_decay=0.0, fused=fused)
        for step in range(20):
            if step == 10:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = CLASSES[name](params, lr=1e-4, fused=fused)
                optimizer.load_state_dict(saved)
            for i, p in enumerate(params):
                p.grad = (draw(*p.shape, seed=100 * step + i) * 0.01).to(dtype).to(kind)
            optimizer.step()
        for p in params:
            kinds = {value.dtype for value in optimizer.state[p].values()}
            assert kinds == {torch.float32} and ("master" in optimizer.state[p]) == (kind != torch.float32)
        ends.append([p.detach() if kind == torch.float32 else optimizer.state[p]["master"] for p in params])
        if kind != torch.float32:
            assert all(torch.equal(p, optimizer.state[p]["master"].to(dtype)) for p in params)
    for wide, narrow in zip(*ends, strict=True):
        torch.testing.assert_close(narrow, wide, rtol=1e-6, atol=1e-7)


@each
@pytest.mark.parametrize("fused", [False, True])
def test_a_state_of_another_memory_layout_is_loaded_as_the_same_numbers(name: str, fused: bool) -> None:
    ends = []
    for layout in (torch.contiguous_format, torch.channels_last):
        params = [draw(4, 3, 5, 5).to(memory_format=layout).requires_grad_()]
        saved = stepped(CLASSES[name], params).state_dict()
        params = [params[0].detach().contiguous().requires_grad_()]
        optimizer = CLASSES[name](params, fused=fused)
        optimizer.load_state_dict(saved)
        fill(params, 1)
        optimizer.step()
        ends.append(params[0].detach())
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-12)


@each
def test_a_deep_copy_goes_on_like_the_original(name: str) -> None:
    optimizer = stepped(lambda p: CLASSES[name](p, check_finite=True), parameters())  # type: ignore[arg-type]
    other = copy.deepcopy(optimizer)
    ends = []
    for one in (optimizer, other):
        params = one.param_groups[0]["params"]
        fill(params, 1)
        one.step()
        ends.append([p.detach() for p in params])
    assert other.check_finite and all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@each
def test_hooks_are_called_around_a_step_and_a_closure_gives_its_loss(name: str) -> None:
    params, calls = parameters(), []
    optimizer = CLASSES[name](params)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> float:
        calls.append("closure")
        loss = torch.stack([(p**2).sum() for p in params]).sum()
        optimizer.zero_grad()
        loss.backward()
        return float(loss.detach())

    expected = float(sum((p.detach() ** 2).sum() for p in params))
    assert optimizer.step(closure) == pytest.approx(expected)
    assert calls == ["before", "closure", "after"]


@each
def test_a_scheduler_and_a_gradient_scaler_of_torch_drive_it(name: str) -> None:
    params = parameters(dtype=torch.float32)
    optimizer = CLASSES[name](params, lr=0.5)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = [p.detach().clone() for p in params]
    scaler.scale(torch.ones(()))  # makes its scale
    fill(params, 0, scale=8.0)
    params[0].grad[0, 0] = math.inf  # type: ignore[index]
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True)) and scaler.get_scale() < 8.0
    fill(params, 0, scale=scaler.get_scale())
    scaler.step(optimizer)
    scheduler.step()
    assert not torch.equal(params[0], before[0]) and optimizer.param_groups[0]["lr"] == 0.375


@each
@pytest.mark.parametrize("fused", [False, True])
def test_ratios_and_the_global_norm_are_left_to_be_read(name: str, fused: bool) -> None:
    params = parameters()
    optimizer = CLASSES[name]([{"params": params[:2]}, {"params": params[2:], "trust_ratio": False}], weight_decay=0.0, fused=fused)
    fill(params, 0)
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in params if p.grad is not None))
    before = [p.detach().clone() for p in params]
    optimizer.step()
    assert optimizer.grad_norm is not None and float(optimizer.grad_norm) == pytest.approx(norm)
    ratios = {id(p): float(r) for ps, rs in optimizer.ratios for p, r in zip(ps, rs, strict=True)}
    assert [ratios[id(p)] for p in params[2:]] == [1.0, 1.0]
    for p, old in zip(params[:2], before[:2], strict=True):
        if name == "lamb":
            u = p.grad / (p.grad.abs() + 1e-6)  # type: ignore[operator, union-attr]
            assert ratios[id(p)] == pytest.approx(float(old.norm() / u.norm()), rel=1e-6)
        if name == "lars":
            assert ratios[id(p)] == pytest.approx(1e-3 * float(old.norm() / p.grad.norm()))  # type: ignore[union-attr]
        assert 0 < ratios[id(p)] != 1.0


@each
def test_check_finite_names_the_tensor_and_leaves_everything_as_it_was(name: str) -> None:
    params = parameters()
    optimizer = CLASSES[name]([(f"layer.{i}", p) for i, p in enumerate(params)], check_finite=True)
    fill(params, 0)
    optimizer.step()
    before, state = [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict())
    for bad in (math.nan, math.inf):
        fill(params, 1)
        params[1].grad[0] = bad  # type: ignore[index]
        with pytest.raises(FloatingPointError, match=r"layer\.1 is not finite"):
            optimizer.step()
        assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
        for key, entry in optimizer.state_dict()["state"].items():
            assert all(torch.equal(value, state["state"][key][part]) for part, value in entry.items())
    fresh = CLASSES[name](params, check_finite=True)
    with pytest.raises(FloatingPointError, match="parameter 1"):
        fresh.step()
    assert not fresh.state


@each
def test_a_tensor_without_a_name_goes_by_its_number_in_the_state_dict(name: str) -> None:
    params = parameters()
    optimizer = CLASSES[name]([{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0}], check_finite=True)
    fill(params, 0)
    params[3].grad[0] = math.nan  # type: ignore[index]
    with pytest.raises(FloatingPointError, match=r"the gradient of parameter 3 is not finite"):
        optimizer.step()
    with pytest.raises(ValueError, match=r"parameter 4 is torch\.int64"):
        optimizer.add_param_group({"params": [torch.zeros(2, dtype=torch.int64)]})


@each
def test_without_check_finite_a_nan_is_passed_on_not_skipped(name: str) -> None:
    params = parameters()
    optimizer = CLASSES[name](params)
    fill(params, 0)
    params[0].grad[0, 0] = math.nan  # type: ignore[index]
    optimizer.step()
    assert torch.isnan(params[0]).any() and not torch.isfinite(optimizer.grad_norm)  # type: ignore[arg-type]


@each
def test_no_gradient_at_all_one_missing_and_empty_tensors(name: str) -> None:
    empty = torch.zeros(0, 3, requires_grad=True)
    params = [*parameters(), empty]
    optimizer = CLASSES[name](params)
    optimizer.step()
    assert not optimizer.state and optimizer.ratios == []
    fill(params[:2], 0)
    empty.grad = torch.zeros(0, 3)
    before = [p.detach().clone() for p in params]
    optimizer.step()
    assert [torch.equal(p, q) for p, q in zip(params, before, strict=True)] == [False, False, True, True, True]


@each
def test_a_sparse_gradient_is_refused_by_name(name: str) -> None:
    table = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = CLASSES[name](table.named_parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="weight has a sparse gradient"):
        optimizer.step()


@each
@pytest.mark.parametrize("kind", [torch.complex64, torch.int64])
def test_tensors_that_are_not_real_floating_point_are_refused(name: str, kind: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"{kind!s}|{kind}"):
        CLASSES[name]([torch.zeros(3, dtype=kind)])


@each
@pytest.mark.parametrize("other", [torch.optim.AdamW, torch.optim.SGD])
def test_the_state_of_another_optimizer_is_refused(name: str, other: Any) -> None:
    theirs, ours = parameters(), parameters()
    foreign = other(theirs, lr=0.1)
    fill(theirs, 0)
    foreign.step()
    optimizer = CLASSES[name](ours)
    with pytest.raises(ValueError, match=f"not the state of {type(optimizer).__name__} but of another"):
        optimizer.load_state_dict(foreign.state_dict())


def stepped(make: type[Layerwise], params: list[Tensor]) -> Layerwise:
    optimizer = make(params)
    fill(params, 0)
    optimizer.step()
    return optimizer


@each
def test_the_state_of_a_sister_and_of_other_shapes_are_refused(name: str) -> None:
    state = stepped(CLASSES[name], parameters()).state_dict()
    for sister, make in CLASSES.items():
        if sister != name:
            with pytest.raises(ValueError, match="not the state of"):
                make(parameters()).load_state_dict(state)
    moved = parameters([*SHAPES[1:], SHAPES[0]])
    with pytest.raises(ValueError, match=r"parameter 0: the state's .* has shape \(5, 4\), the parameter \(3,\)"):
        CLASSES[name](moved).load_state_dict(state)


INVALID: dict[str, list[Any]] = {
    "lr": [-1.0, math.nan, math.inf, torch.tensor(-1.0), torch.zeros(2), torch.tensor([[0.1]]), 10**400, "x"],
    "weight_decay": [-0.1, math.inf, math.nan],
    "eps": [-1e-9, math.nan],
    "betas": [(1.0, 0.9), (0.9, -0.1), (0.9, math.nan), (0.9,)],
    "max_trust_ratio": [0.0, -1.0, math.nan],
    "momentum": [-0.1, 1.0, math.nan],
    "trust_coefficient": [0.0, math.inf, math.nan],
    "max_grad_norm": [0.0, -1.0, math.nan, math.inf, "x", 10**400],
}
MUST = {
    "lr": "finite and 0 or more|one number",
    "weight_decay": "finite and 0 or more",
    "eps": "finite and 0 or more",
    "betas": "two numbers, each 0 or more and below 1",
    "max_trust_ratio": "above 0, or None for no bound",
    "momentum": "0 or more and below 1",
    "trust_coefficient": "finite and above 0",
    "max_grad_norm": "finite and above 0, or None for no clipping",
}
HAS = {
    Lamb: ("lr", "weight_decay", "eps", "betas", "max_trust_ratio", "max_grad_norm"),
    Lans: ("lr", "weight_decay", "eps", "betas"),
    Lars: ("lr", "weight_decay", "eps", "momentum", "trust_coefficient", "max_grad_norm"),
}


@pytest.mark.parametrize(
    ("make", "setting", "value"), [(make, setting, value) for make, names in HAS.items() for setting in names for value in INVALID[setting]]
)
def test_a_setting_out_of_range_is_named_with_what_it_must_be(make: type[Layerwise], setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{setting} .*: must be ({MUST[setting]})$"):
        make(parameters(), **{setting: value})
    if setting != "max_grad_norm":
        optimizer = make(parameters())
        with pytest.raises(ValueError, match=f"^{setting} "):
            optimizer.add_param_group({"params": parameters(), setting: value})
        assert len(optimizer.param_groups) == 1


def test_one_by_one_and_fused_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="fused = True"):
        Lamb(parameters(), foreach=False, fused=True)


def test_without_a_compiler_fused_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    library.cache_clear()
    try:
        with pytest.raises(NoCompiler, match="needs a C compiler"):
            stepped(lambda p: Lamb(p, fused=True), parameters())  # type: ignore[arg-type]
        monkeypatch.setenv("CC", "false")
        with pytest.raises(NoCompiler, match="failed"):
            stepped(lambda p: Lamb(p, fused=True), parameters())  # type: ignore[arg-type]
    finally:
        library.cache_clear()
