"""What steps a tensor unless one is told otherwise: the fastest that the machine has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overnight.optim import Lamb, native
from overnight.optim.batch import why_lists
from tests.optim.problem import CLASSES, fill, parameters, run
from tests.optim.test_layerwise import LONG, each


@each
def test_unless_told_otherwise_a_step_takes_the_fastest_way_that_is_there(name: str) -> None:
    settings: dict[str, Any] = {"lr": 0.01}
    found, native, lists = (
        run(CLASSES[name], 3, shapes=LONG, dtype=torch.float32, **settings, **chosen)[-1]
        for chosen in ({}, {"fused": True}, {"fused": False})
    )
    assert all(torch.equal(a, b) for a, b in zip(found, native, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(found, lists, strict=True)), "the two ways round alike, and nothing was seen"
    by_hand = run(CLASSES[name], 3, shapes=LONG, dtype=torch.float32, **settings, foreach=True)[-1]
    assert all(torch.equal(a, b) for a, b in zip(by_hand, lists, strict=True)), "foreach asks for lists"


@each
@pytest.mark.parametrize("fused", [False, True])
def test_the_default_device_of_torch_changes_nothing(name: str, fused: bool) -> None:
    settings: dict[str, Any] = {"shapes": LONG, "dtype": torch.float32, "lr": 0.01, "fused": fused}
    expected = run(CLASSES[name], 2, **settings)[-1]
    params = parameters(LONG, torch.float32)
    optimizer = CLASSES[name](params, lr=0.01, fused=fused)
    for step in range(2):
        fill(params, step)
        with torch.device("meta"):
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, expected, strict=True))


@each
@pytest.mark.parametrize("fused", [False, True])
def test_a_graph_from_before_a_step_is_refused_as_by_torchs_optimizers(name: str, fused: bool) -> None:
    params = parameters(LONG, torch.float32)
    before = sum((p * p).sum() for p in params)
    fill(params, 0)
    CLASSES[name](params, lr=0.01, fused=fused).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()


def test_without_a_compiler_a_step_goes_by_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "why_not", lambda: "there is no C compiler")
    why_lists.cache_clear()
    try:
        found = run(Lamb, 3, shapes=LONG, dtype=torch.float32)[-1]
        assert why_lists(torch.device("cpu")) == "there is no C compiler"
    finally:
        why_lists.cache_clear()
    lists = run(Lamb, 3, shapes=LONG, dtype=torch.float32, fused=False)[-1]
    assert all(torch.equal(a, b) for a, b in zip(found, lists, strict=True))


@pytest.mark.parametrize(
    ("capability", "triton", "why"),
    [
        ((9, 0), True, ""),
        ((8, 0), True, ""),
        ((7, 5), True, "Triton needs compute capability 8.0, this GPU has 7.5"),
        ((9, 0), False, "Triton is not"),
    ],
)
def test_a_gpu_is_stepped_by_kernels_where_triton_supports_it(
    capability: tuple[int, int], triton: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if triton else None)
    why_lists.cache_clear()
    try:
        assert why_lists(torch.device("cuda")).startswith(why) and bool(why_lists(torch.device("cuda"))) == bool(why)
    finally:
        why_lists.cache_clear()


@each
def test_how_a_step_is_taken_is_not_loaded_with_the_state(name: str) -> None:
    saved = CLASSES[name](parameters(), fused=False)
    loaded = CLASSES[name](parameters())
    loaded.load_state_dict(saved.state_dict())
    assert loaded.param_groups[0]["fused"] is None
