"""Triton compiles and would launch what the code calls, with the arguments that it is called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.kernels import needs_triton

# Chunks of 16,384 elements of three tensors: one, three, one.
CHUNKS = 5


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("types", [("bf16",), pytest.param(("bf16", "fp16"), marks=pytest.mark.heavy)])
def test_what_the_code_calls_is_compiled_and_launched_on_its_grid(types: tuple[str, ...], on_fake_gpu: Callable[..., Any]) -> None:
    found = on_fake_gpu("launches_worker", "90", *types)
    names = {case: [name for name, *_ in launches] for case, launches in found.items()}
    adapted = ["_square", "_total", "_move_moments", "_total", "_move"]
    assert names["lamb fp32"] == names["lamb bf16"] == adapted * 2
    assert names["lars fp32"] == ["_square", "_total", "_square", "_total", "_lars"] * 2
    for case in ("lamb fp32", "lamb bf16", "lars fp32"):
        for name, grid, _ in found[case]:
            assert grid[0] == (3 if name == "_total" else CHUNKS), (case, name)
    assert {"_modulate", "_cell", "_cell_backward", "_modulate_backward", "_sum_places"} <= set(names["mlstm bf16"])
    assert {name: names["bert bf16"].count(name) for name in ("_embed", "_embed_backward", "_cross_entropy")} == {
        "_embed": 2,
        "_embed_backward": 2,
        "_cross_entropy": 2,
    }
    for case in (f"layer {name}" for name in types):
        forward, back = ["_norm", "_gelu", "_norm"], ["_norm_backward", "_gelu_backward", "_norm_backward", "_joined"]
        assert names[case] == forward + back, case
        # 300 rows: of norms one a program; of columns blocks of 256, and of rows 19 times 16.
        assert [grid for _, grid, _ in found[case]] == [
            [300, 1, 1], [19, 12, 1], [300, 1, 1], [300, 1, 1], [12, 19, 1], [300, 1, 1], [3, 19, 3]
        ], case  # fmt: skip
    # 5 steps of 2 layers, forward and backward, in each of two training steps.
    assert names["mlstm bf16"].count("_cell") == names["mlstm bf16"].count("_cell_backward") == 5 * 2 * 2
