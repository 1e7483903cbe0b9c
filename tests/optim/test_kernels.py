"""The kernels for a GPU: interpreted on the CPU, compiled without a GPU, and, where there is one, run on it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import compiled_by, needs_gpu, needs_interpreter, needs_triton
from tests.optim.kernels_worker import CASES, GPUS, QUICK, SIZES, trajectory
from tests.optim.problem import CLASSES, draw

each = pytest.mark.parametrize("name", list(CLASSES))


@pytest.fixture(scope="module")
def interpreted(interpreted_by: Callable[..., Any]) -> Any:
    return interpreted_by("optim.kernels_worker")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compiled_by("optim.kernels_worker", tmp_path_factory.mktemp("compiled"))


def follows(ours: dict[str, list[Tensor]], case: str) -> None:
    """The end of a case is that of float64 but for the rounding of fp32, and for that of parameters of 16 bits."""
    loose = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
    name, settings, dtype = CASES[case]
    for what, values in trajectory(name, settings, dtype, held=torch.float64).items():
        for found, value in zip(ours[what], values, strict=True):
            assert found.dtype == (dtype if what == "params" else torch.float32), what
            assert float((found.cpu() - value).norm()) <= loose[found.dtype] * float(value.norm()), what


@needs_interpreter
@pytest.mark.parametrize("case", QUICK)
def test_interpreted_kernels_follow_the_equations_in_float64(case: str, interpreted: Any) -> None:
    follows(interpreted[case], case)


@needs_interpreter
@pytest.mark.heavy
def test_every_setting_of_the_interpreted_kernels_follows_the_equations_in_float64(interpreted_by: Callable[..., Any]) -> None:
    found = interpreted_by("optim.kernels_worker", "interpret-all")
    for case in CASES:
        follows(found[case], case)


@needs_interpreter
def test_norms_are_those_of_whole_tensors(interpreted: Any) -> None:
    reference = torch.stack([draw(size, seed=size).norm() for size in SIZES])
    torch.testing.assert_close(interpreted["norms"].double(), reference, rtol=1e-6, atol=0)
    torch.testing.assert_close(interpreted["norms of parts"].double(), 6 * reference, rtol=1e-6, atol=0)
    some, none = interpreted["norms without a part"]
    assert some.tolist() == [0.0, 4.0] and none.tolist() == [0.0]


@needs_interpreter
def test_tables_of_addresses_are_right_and_do_not_pile_up(interpreted: Any) -> None:
    errors, kept = interpreted["tables"]
    assert set(errors) == {0} and kept == 256


@needs_interpreter
def test_a_capture_before_a_first_step_is_refused(interpreted: Any) -> None:
    assert "take one step, then capture" in interpreted["captured"]


@needs_triton
@pytest.mark.heavy  # tests/gpu/test_launches.py compiles for one GPU
@pytest.mark.skipif(sys.platform != "linux", reason="Triton brings its assembler for Linux")
@pytest.mark.parametrize("gpu", GPUS)
def test_compiled_kernels_read_and_write_four_numbers_at_once(gpu: int, compiled: Any) -> None:
    """x, g, m, v and back m, v; x, m, v (and g) and back x; x, g, v and back x, v."""
    suffix = f" {gpu}"
    here = {name.removesuffix(suffix): counts for name, counts in compiled.items() if name.endswith(suffix)}
    found = {name: (counts["ld"], counts["st"]) for name, counts in here.items()}
    assert {name: found[name] for name in ("lamb moments", "lans moments")} == {"lamb moments": (4, 2), "lans moments": (4, 2)}
    assert (found["lamb"], found["lans"], found["lars"], found["norms"]) == ((3, 1), (4, 1), (3, 2), (1, 0))
    # Four numbers of 16 bits are a pair of words: the gradient and the parameter.
    assert found["lans bf16"] == (3, 1) and here["lans bf16"]["pairs"] == 2


@needs_triton
def test_tables_of_the_kernels_are_made_on_the_host_whatever_the_default_device() -> None:
    from overnight.optim import kernels

    xs = [torch.zeros(20_000), torch.zeros(3)]
    with torch.device("meta"):
        chunks, firsts, sizes = kernels._layout(xs)
        addresses = kernels._addresses(xs)
    assert (chunks.tolist(), firsts.tolist(), sizes.tolist()) == ([[0, 0], [0, 1], [1, 0]], [0, 2, 3], [20_000, 3])
    assert addresses.tolist() == [x.data_ptr() for x in xs]


def test_without_triton_one_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "overnight.optim.kernels", raising=False)
    with pytest.raises(ImportError, match=r"fused = True on a GPU needs Triton: `pip install triton`"):
        importlib.import_module("overnight.optim.kernels")


# On a GPU.

SHAPES = [(3000, 1000), (1000,), (1,), (70001,)]


def on_gpu(name: str, **settings: Any) -> tuple[list[Tensor], list[Tensor], torch.optim.Optimizer]:
    """Parameters, what their gradients are made of, and an optimizer."""
    params = [draw(*shape, seed=i, dtype=torch.float32).cuda().requires_grad_() for i, shape in enumerate(SHAPES)]
    return params, [torch.zeros_like(p) for p in params], CLASSES[name](params, fused=True, **settings)


def backward(params: list[Tensor], sources: list[Tensor]) -> None:
    """Gradients in new memory."""
    for p, source in zip(params, sources, strict=True):
        p.grad = source * 0.01


def fill(sources: list[Tensor], step: int) -> None:
    """Seeded numbers of a step."""
    for i, source in enumerate(sources):
        source.copy_(draw(*source.shape, seed=1000 + 50 * step + i))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", list(CASES))
def test_on_a_gpu_fused_steps_follow_the_equations_in_float64(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from overnight.optim import kernels

    name, settings, dtype = CASES[case]
    calls, step = [], kernels.step
    monkeypatch.setattr(kernels, "step", lambda *args: calls.append(args) or step(*args))
    fused = trajectory(name, {**settings, "fused": True}, dtype, device="cuda")
    assert len(calls) == 6, "two groups in three steps"
    follows(fused, case)
    assert all(torch.equal(p, x.to(dtype)) for p, x in zip(fused["params"], fused["xs"], strict=True))


@pytest.mark.gpu
@needs_gpu
@each
def test_on_a_gpu_a_step_gives_the_same_bits_again(name: str) -> None:
    ends = []
    for _ in range(2):
        params, sources, optimizer = on_gpu(name)
        for step in range(3):
            fill(sources, step)
            backward(params, sources)
            optimizer.step()
        ends.append([p.detach() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.gpu
@needs_gpu
@each
def test_on_a_gpu_a_step_waits_for_nothing_also_where_gradients_have_moved(name: str) -> None:
    params, sources, optimizer = on_gpu(name)
    fill(sources, 0)
    backward(params, sources)
    optimizer.step()
    held = [p.grad for p in params]  # so that the next ones lie elsewhere
    before = [p.detach().clone() for p in params]
    torch.cuda.set_sync_debug_mode("error")
    try:
        backward(params, sources)
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert held and not any(torch.equal(p, old) for p, old in zip(params, before, strict=True))


@pytest.mark.gpu
@needs_gpu
@each
@pytest.mark.parametrize("moving", [False, True])
def test_on_a_gpu_a_captured_step_replayed_is_the_eager_step(name: str, moving: bool) -> None:
    """The gradients lie in memory of the graph, or in that of the first step."""
    ends = []
    for captured in (False, True):
        params, sources, optimizer = on_gpu(name, lr=torch.tensor(0.02, device="cuda"))
        fill(sources, 0)
        backward(params, sources)

        def step(params: list[Tensor] = params, sources: list[Tensor] = sources, optimizer: torch.optim.Optimizer = optimizer) -> None:
            if moving:
                backward(params, sources)
            else:
                for p, source in zip(params, sources, strict=True):
                    torch.mul(source, 0.01, out=p.grad)
            optimizer.step()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                step()
        for at in range(1, 5):
            fill(sources, at)
            optimizer.param_groups[0]["lr"].fill_(0.02 / at)
            graph.replay() if captured else step()
        ends.append([p.detach().clone() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
