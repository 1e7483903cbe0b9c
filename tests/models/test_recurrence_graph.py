"""Passes by graphs are the passes themselves; a stand-in for a graph calls them again over the same tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from overnight.engine.memory import release
from overnight.models.recurrence import Workspace, recur
from overnight.models.recurrence_graph import Graphs, Tensors
from tests.models.test_bytes import model
from tests.models.test_recurrence import ARGUMENTS, drawn, with_gradients


def record(function: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
    """As :func:`overnight.models.recurrence_graph.capture`, without a GPU; capturing computes nothing."""
    written = tuple(None if x is None else torch.full_like(x, torch.nan) for x in function())

    def replay() -> None:
        for x, to in zip(function(), written, strict=True):
            if x is not None and to is not None:
                to.copy_(x)

    return replay, written


def spoil(graphs: Graphs) -> None:
    """Overwrite what graphs hold, as the next window does."""
    for read, _, written in graphs.captured.values():
        for x in (*read, *written):
            if x is not None:
                x.fill_(torch.nan if x.is_floating_point() else -1)


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("multiplicative", [True, False])
@pytest.mark.parametrize("which", ["h", "c", "hc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_windows_by_graphs_have_the_same_bits(multiplicative: bool, which: str, dtype: torch.dtype) -> None:
    graphs, workspace = Graphs(record), Workspace()
    first, second = drawn(9, 2, 16, 4, multiplicative, torch.float32), drawn(9, 2, 16, 4, multiplicative, torch.float32)
    second = {name: x.detach().roll(1, 0).requires_grad_(x.requires_grad) if x is not None else x for name, x in second.items()}
    for given in (first, second, first):
        assert_equal(with_gradients(recur, given, which, dtype, workspace, graphs), with_gradients(recur, given, which, dtype))
        spoil(graphs)
    assert len(graphs.captured) == 2, "forward and backward, of two windows of one size"


def test_windows_under_way_do_not_share_what_a_graph_holds() -> None:
    """As two layers do, and segments."""
    graphs, workspace, layers = Graphs(record), Workspace(), [drawn(5, 2, 16, 10, True, torch.float32) for _ in range(2)]
    layers[1] = {name: x.detach().mul(-1).requires_grad_() if name != "rows" else x for name, x in layers[1].items()}
    wanted = [with_gradients(recur, given, "h", torch.float32) for given in layers]
    weights = torch.randn(5, 2, 16, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    states = [recur(*(given[name] for name in ARGUMENTS), torch.float32, workspace, graphs) for given in layers]
    for given, (h, c), single in zip(layers, states, wanted, strict=True):
        names = [name for name in ARGUMENTS if name != "rows"]
        grads = torch.autograd.grad((h.double() * weights).sum(), [given[name] for name in names])
        assert_equal({"h_T": h.detach(), "c_T": c.detach(), **dict(zip(names, grads, strict=True))}, single)
    assert len(graphs.captured) == 2


@pytest.mark.parametrize("by_graphs", [False, True])
def test_a_window_can_be_computed_again(by_graphs: bool) -> None:
    given, graphs = drawn(9, 2, 16, 4, True, torch.float32), Graphs(record) if by_graphs else None

    def again(*arguments: Any) -> tuple[Tensor, Tensor]:
        return checkpoint(recur, *arguments, torch.float32, Workspace(), graphs, use_reentrant=False)

    assert_equal(with_gradients(again, given, "hc"), with_gradients(recur, given, "hc", torch.float32))


def test_without_gradients_nothing_is_kept_but_the_states() -> None:
    given, graphs = drawn(9, 2, 16, 4, True, torch.float32), Graphs(record)
    values = [given[name] for name in ARGUMENTS]
    with torch.no_grad():
        found = recur(*values, torch.float32, None, graphs)
    assert all(torch.equal(a, b) for a, b in zip(found, recur(*values, torch.float32), strict=True))
    ((_, _, (gates, u, _, _)),) = graphs.captured.values()
    assert gates is not None and u is not None and len(gates) == len(u) == 1


def test_sizes_beyond_the_number_to_capture_are_called_as_they_are() -> None:
    graphs = Graphs(record, most=1)
    for count in (3, 4, 5, 3):
        (found,) = graphs.run("double", lambda x: (2 * x,), torch.ones(count))
        assert found.tolist() == [2.0] * count
    assert len(graphs.captured) == 1


def test_inside_another_capture_nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(record)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert graphs.run("double", lambda x: (2 * x,), torch.ones(1))[0].tolist() == [2.0]
    assert not graphs.captured


def test_functions_of_two_names_types_and_missing_tensors_are_captured_apart() -> None:
    graphs, one = Graphs(record), torch.ones(2)

    def plus(x: Tensor, y: Tensor | None) -> Tensors:
        return x if y is None else x + y, y

    assert [x.tolist() for x in graphs.run("plus", plus, one, one)] == [[2.0, 2.0], [1.0, 1.0]]
    assert graphs.run("plus", plus, one, None)[1] is None
    assert graphs.run("plus", plus, one.double(), one)[0].dtype == torch.float64
    assert graphs.run("minus", lambda x, y: (x - y,), one, one)[0].tolist() == [0.0, 0.0]
    assert len(graphs.captured) == 4


def test_a_copy_of_a_model_has_graphs_of_its_own() -> None:
    graphs = Graphs(record, most=3)
    graphs.run("same", lambda x: (x,), torch.ones(2))
    copied = copy.deepcopy(graphs)
    assert not copied.captured and copied.capture is record and copied.most == 3


def test_a_micro_batch_that_is_given_up_takes_its_graphs_with_it() -> None:
    """Else those of the trials fill all places, and what is trained afterwards has none."""
    net, graphs = model("mlstm"), Graphs(record)
    net.graphs = graphs
    with_gradients(recur, drawn(5, 2, 16, 4, True, torch.float32), "h", torch.float32, Workspace(), graphs)
    assert len(graphs.captured) == 2
    release(net, torch.device("cpu"))
    assert not graphs.captured
