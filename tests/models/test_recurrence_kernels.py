"""The recurrence's kernels for a GPU: interpreted on the CPU, compiled without a GPU, and, where there is one, run on it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import overnight.models
from overnight.models import recurrence, recurrence_plain
from overnight.models.recurrence import Workspace, recur
from overnight.models.recurrence_graph import Graphs
from tests.kernels import compiled_by, needs_gpu, needs_interpreter, needs_triton
from tests.models.recurrence_kernels_worker import GPUS, PLACES, WINDOWS, arguments, places
from tests.models.test_recurrence import ARGUMENTS, assert_near, by_autograd, with_gradients


@pytest.fixture(scope="module")
def interpreted(interpreted_by: Callable[..., Any]) -> Any:
    return interpreted_by("models.recurrence_kernels_worker")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compiled_by("models.recurrence_kernels_worker", tmp_path_factory.mktemp("compiled"))


def follows(found: dict[str, Tensor], name: str) -> None:
    """A window is that of float64 but for the rounding of its type; the interpreter cuts bf16 off where a GPU rounds it."""
    loose = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 0.02}
    given = arguments(name)
    wide = {key: x.detach().double().requires_grad_() if x is not None and x.is_floating_point() else x for key, x in given.items()}
    _, _, which, dtype = WINDOWS[name]
    assert found["h_T"].dtype == dtype and all(x.dtype == torch.float32 for key, x in found.items() if key != "h_T")
    assert_near({key: x.cpu() for key, x in found.items()}, with_gradients(by_autograd, wide, which), loose[dtype])


@needs_interpreter
@pytest.mark.parametrize("name", list(WINDOWS))
def test_interpreted_windows_follow_the_equations_in_float64(name: str, interpreted: Any) -> None:
    follows(interpreted[name], name)


@needs_interpreter
def test_the_gradient_of_a_table_is_the_sum_over_the_places_of_each_row(interpreted: Any) -> None:
    for size, found in zip(PLACES, interpreted["tables"], strict=True):
        met, grads, rows = places(*size)
        assert torch.equal(found, torch.zeros(rows, size[2]).index_add_(0, met.flatten(), grads.flatten(0, 1))), size


@needs_interpreter
def test_nan_stays_in_the_row_of_its_place(interpreted: Any) -> None:
    row, found = interpreted["nan"]
    assert found[row].isnan().all() and not found[torch.arange(len(found)) != row].isnan().any()


@needs_interpreter
def test_sigmoid_and_tanh_are_right_to_a_millionth(interpreted: Any) -> None:
    x, gates = interpreted["activations"]
    assert gates[:, x.isnan()].isnan().all(), "NaN is not hidden"
    assert gates[:, x.isinf()].tolist() == [[1, 0], [1, 0], [1, -1], [1, 0]]
    # Below -87 a sigmoid is no normal number of fp32.
    normal = x.isfinite() & (x > -87)
    for found, wanted in ((gates[0], torch.sigmoid(x.double())), (gates[2], torch.tanh(x.double()))):
        assert float((found - wanted).div(wanted.abs().clamp(min=1e-37))[normal].abs().max()) < 1e-6


@needs_triton
@pytest.mark.heavy  # tests/gpu/test_launches.py compiles for one GPU
def test_compiled_kernels_read_and_write_four_numbers_at_once_and_add_nothing_atomically(compiled: Any) -> None:
    """By type: what is of the type of matrix products, and what is fp32. Four numbers of 16 bits are a pair of words."""
    reads = {"modulate": (1, 1), "cell": (4, 5), "cell backward": (6, 3), "modulate backward": (2, 1)}
    writes = {"modulate": (2, 0), "cell": (5, 1), "cell backward": (4, 1), "modulate backward": (3, 0)}
    for name in reads:
        for kind in [f"bf16 {gpu}" for gpu in GPUS] + ["fp16 90"]:
            counts = compiled[f"{name} {kind}"]
            assert ((counts["ld.v2"], counts["ld.v4"]), (counts["st.v2"], counts["st.v4"])) == (reads[name], writes[name]), (name, kind)
        counts = compiled[f"{name} fp32 90"]
        assert (counts["ld.v2"], counts["ld.v4"], counts["st.v2"], counts["st.v4"]) == (0, sum(reads[name]), 0, sum(writes[name])), name
    assert all(counts["ld.v4"] for name, counts in compiled.items() if name.startswith(("sum", "copy")))
    assert not any(counts["atomic"] for counts in compiled.values())


@pytest.fixture
def looked_up() -> Iterator[None]:
    recurrence._kernels.cache_clear()
    yield
    recurrence._kernels.cache_clear()


@pytest.mark.usefixtures("looked_up")
def test_on_a_gpu_without_triton_and_in_float64_torch_does_the_pointwise_part(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    assert recurrence._pointwise(SimpleNamespace(device=cuda, dtype=torch.float64), torch.float64) is recurrence_plain  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "overnight.models.recurrence_kernels", raising=False)
    monkeypatch.delattr(overnight.models, "recurrence_kernels", raising=False)
    assert recurrence._pointwise(SimpleNamespace(device=cuda, dtype=torch.float32), torch.bfloat16) is recurrence_plain  # type: ignore[arg-type]


@needs_triton
@pytest.mark.usefixtures("looked_up")
def test_on_a_gpu_with_triton_the_kernels_do_the_pointwise_part() -> None:
    found = recurrence._pointwise(SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32), torch.bfloat16)  # type: ignore[arg-type]
    assert found.__name__ == "overnight.models.recurrence_kernels"


# On a GPU.


def on_gpu(name: str, graphs: Graphs | None = None, workspace: Workspace | None = None) -> dict[str, Tensor]:
    """States and gradients of a window."""
    _, _, which, dtype = WINDOWS[name]
    given = {key: x.detach().cuda().requires_grad_(x.requires_grad) if x is not None else x for key, x in arguments(name).items()}

    def states(*tensors: Any) -> tuple[Tensor, Tensor]:
        h, c = recur(*tensors, dtype, workspace, graphs)
        return h.cpu(), c.cpu()

    return with_gradients(states, given, which)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", list(WINDOWS))
def test_on_a_gpu_windows_follow_the_equations_in_float64(name: str) -> None:
    follows(on_gpu(name), name)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("size", [*PLACES, (100_000, 256, 5000)])
def test_on_a_gpu_the_gradient_of_a_table_is_that_of_the_cpu_and_waits_for_nothing(size: tuple[int, int, int]) -> None:
    from overnight.models import recurrence_kernels

    met, grads, rows = places(*size)
    given = places(*size, "cuda")
    recurrence_kernels.table_gradient(*given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = recurrence_kernels.table_gradient(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found.cpu(), torch.zeros(rows, size[2]).index_add_(0, met.flatten(), grads.flatten(0, 1)))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", list(WINDOWS))
def test_on_a_gpu_windows_give_the_same_bits_again_and_by_graphs(name: str) -> None:
    graphs, wanted = Graphs(), on_gpu(name)
    for found in (on_gpu(name), on_gpu(name, graphs), on_gpu(name, graphs, Workspace())):
        assert all(torch.equal(found[key], value) for key, value in wanted.items())
    assert len(graphs.captured) == 2, "forward and backward"


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("by_graphs", [False, True])
def test_on_a_gpu_a_window_waits_for_nothing(by_graphs: bool) -> None:
    graphs = Graphs() if by_graphs else None
    given = [
        None if x is None else x.detach().cuda().requires_grad_(x.requires_grad) for x in (arguments("often")[key] for key in ARGUMENTS)
    ]
    recur(*given, torch.bfloat16, None, graphs)[0].float().sum().backward()  # type: ignore[arg-type]
    torch.cuda.set_sync_debug_mode("error")
    try:
        recur(*given, torch.bfloat16, None, graphs)[0].float().sum().backward()  # type: ignore[arg-type]
    finally:
        torch.cuda.set_sync_debug_mode("default")
