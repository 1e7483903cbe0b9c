"""What Inductor makes of a layer for sm_80 and sm_90: kernels, products and bytes, which a change of the model must change on purpose.

One layer of width 1024 on 16,384 tokens, in bf16, in training with dropout: 131 sequences of up to 128 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.kernels import needs_triton

FLASH, BACK, EFFICIENT = "_flash_attention_forward", "_flash_attention_backward", "_scaled_dot_product_efficient_attention"
# Case: of the forward and of the backward pass Triton kernels, products, attention, MB that the kernels read and write.
BUDGETS: dict[str, tuple[tuple[int, int, str, int], tuple[int, int, str, int]]] = {
    "bert": ((11, 4, FLASH, 613), (17, 8, BACK, 1510)),
    "bert full recomputation": ((11, 4, "", 545), (27, 12, BACK, 2274)),
    "bert padded": ((14, 4, EFFICIENT, 884), (19, 8, f"{EFFICIENT}_backward", 1648)),
    "modernbert": ((8, 4, "_varlen_attn", 750), (10, 8, "_varlen_attn_backward", 1535)),
}
# A layer is compiled once for training, forward and backward, and once for evaluation, whatever comes in a run.
COMPILATIONS = 3
# Bytes a token that an uncompiled layer keeps for its backward pass, of BERT-base (12 heads) and BERT-large: what micro-batches fill memory with.
KEPT = {"12": 29_248, "16": 38_992}


def check(found: dict[str, Any], case: str) -> None:
    """Compare a layer with its budget: fewer is as good a reason to change the table as more."""
    for name, (kernels, products, attention, megabytes) in zip(("forward", "backward"), BUDGETS[case], strict=True):
        there = found[case][name]
        assert (there["triton"], there["products"], there["attention"]) == (kernels, products, {attention: 1} if attention else {}), (
            case,
            name,
        )
        assert there["bytes"] / 1e6 == pytest.approx(megabytes, rel=0.005), (case, name)


@needs_triton
@pytest.mark.slow
def test_a_layer_takes_the_kernels_and_the_bytes_of_its_budget_and_few_compilations(on_fake_gpu: Callable[..., Any]) -> None:
    found = on_fake_gpu("layers_worker", "90", "bert", "kept")
    check(found, "bert")
    assert found["compilations"] == COMPILATIONS
    assert found["kept"] == KEPT


@needs_triton
@pytest.mark.heavy
@pytest.mark.parametrize("capability", ["80", "90"])
def test_every_kind_of_layer_takes_the_kernels_and_the_bytes_of_its_budget(capability: str, on_fake_gpu: Callable[..., Any]) -> None:
    found = on_fake_gpu("layers_worker", capability, *BUDGETS)
    for case in BUDGETS:
        check(found, case)
    # Recomputed, attention drops the same weights: its random numbers are kept in the forward pass and drawn again in the backward pass.
    again = found["bert full recomputation"]
    assert (again["forward"]["drawn"], again["backward"]["drawn"]) == ({"run_and_save_rng_state": 1}, {"run_with_rng_state": 1})
    assert not found["bert"]["forward"]["drawn"]


@needs_triton
@pytest.mark.heavy
@pytest.mark.parametrize("capability", ["70", "75"])
def test_the_kernels_of_padded_layers_in_fp16_compile_to_machine_code_for_a_gpu_without_bf16(
    capability: str, on_fake_gpu: Callable[..., Any]
) -> None:
    """A V100 and a T4, where `compute.torch_compile: auto` compiles the layers, too."""
    found = on_fake_gpu("layers_worker", capability, "machine", "bert padded", "modernbert padded")
    for case in ("bert padded", "modernbert padded"):
        forward, backward = (found[case][name]["machine code"] for name in ("forward", "backward"))
        assert len(forward) > 5 and len(backward) > 10, case
        assert any("layer_norm" in name for name in forward) and any("layer_norm_backward" in name for name in backward), case
