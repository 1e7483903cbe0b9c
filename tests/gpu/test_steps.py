"""Whole training steps on a GPU that is not there: nothing waits for it, and the kernels are those that were meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.kernels import needs_triton

LAYERS, MICRO, STEPS = 2, 1, 2
PADDED, FLASH, VARLEN = "_scaled_dot_product_efficient_attention", "_flash_attention_forward", "_varlen_attn"
ATTENTION = {
    "bert": VARLEN,
    "bert dropout": FLASH,
    "bert dropout fp16": FLASH,
    "bert fused": FLASH,
    "bert fp32": PADDED,
    "modernbert": VARLEN,
    "modernbert fp16": VARLEN,
    "causal": VARLEN,
    "modernbert fp32": PADDED,
    "causal fp32": PADDED,
}
# Of a network, also one of bytes: matrices and embeddings have the same settings, vectors others.
BATCHES = 2
STEPPED = {
    "lamb": {"_square": 1, "_total": 2, "_move_moments": BATCHES, "_move": BATCHES},
    "lans": {"_square": 1, "_total": 2, "_move_moments": BATCHES, "_move": BATCHES},
    "lars": {"_square": 2, "_total": 2, "_lars": BATCHES},
    "adamw": {},
    "muon": {},
}
"""Launches of the optimizer in a step: the norms of all gradients at once, and those that a trust ratio takes (not of vectors)."""
NORMS = {"_foreach_norm.Scalar", "_foreach_add_.Scalar"}
LISTS = {
    "adamw": {*NORMS, "_fused_adamw_"},
    "muon": {*NORMS, "_fused_adamw_", "_foreach_lerp_.Scalar", "_foreach_lerp.Scalar", "_foreach_mul_.Scalar", "_foreach_add_.List"},
}
"""What goes through lists of tensors; the other optimizers take none."""


WAITS = {
    "a number that is read": "DataDependentOutputException",
    "a condition": "DataDependentOutputException",
    "numbers of unknown count": "DynamicOutputShapeException",
    "a copy to the host": "RuntimeError: the host waits for a copy",
    "lengths that are looked at": "RuntimeError: the host waits for the lengths",
    "a wait": "RuntimeError: the host waits for the device",
}


@pytest.fixture(scope="session")
def everything(on_fake_gpu: Callable[..., Any]) -> Any:
    return on_fake_gpu("steps_worker")


def training(found: Any) -> Any:
    """The steps of the loop alone, without what waits on purpose and without heads."""
    return {name: case for name, case in found.items() if name not in WAITS and not name.startswith("head ")}


@pytest.fixture(scope="session")
def steps(everything: Any) -> Any:
    return training(everything)


@needs_triton
@pytest.mark.parametrize("wait", list(WAITS))
def test_what_waits_for_the_device_is_found(wait: str, everything: Any) -> None:
    assert everything[wait].get("error", "").startswith(WAITS[wait])


@needs_triton
def test_no_step_waits_for_the_device_and_every_one_is_taken(steps: Any) -> None:
    """Every path of attention with every optimizer; a number that is read back and a copy that is waited for are errors."""
    assert {name: case for name, case in steps.items() if "error" in case} == {}
    names = [name.split(" | ") for name in steps]
    assert {path for path, *_ in names} == {*ATTENTION, "mlstm", "mlstm fp32"} and len(names) == 2 * len(ATTENTION) + 2 * 2
    for at, every in ((1, set(STEPPED)), (2, {"none", "selective", "full"})):
        met = {(ATTENTION[name[0]], name[at]) for name in names if name[0] in ATTENTION}
        assert met == {(operator, one) for operator in (PADDED, FLASH, VARLEN) for one in every}


@needs_triton
def test_no_head_of_fine_tuning_and_no_pooling_waits_for_the_device(everything: Any) -> None:
    heads = {name: case for name, case in everything.items() if name.startswith("head ")}
    assert len(heads) == 7 and {name: case for name, case in heads.items() if case} == {}


@needs_triton
@pytest.mark.heavy
def test_every_path_with_every_optimizer_and_every_recomputation_is_the_same(on_fake_gpu: Callable[..., Any], steps: Any) -> None:
    every = training(on_fake_gpu("steps_worker", "--all"))
    assert {name: case for name, case in every.items() if "error" in case} == {} and len(every) == len(STEPPED) * (
        3 * len(ATTENTION) + 2 * 2
    )
    assert {name: every[name] for name in steps} == steps


@needs_triton
def test_attention_takes_the_operator_that_was_meant_once_or_with_recomputation_twice(steps: Any) -> None:
    times = LAYERS * MICRO * STEPS
    for name, case in steps.items():
        path, _, recompute = name.split(" | ")
        operator = ATTENTION.get(path)
        forward = times * (1 if recompute == "none" else 2)
        assert case["attention"] == ({operator: forward, f"{operator}_backward".replace("_forward", ""): times} if operator else {}), name


@needs_triton
def test_lamb_lans_and_lars_are_stepped_by_kernels_and_by_no_list_and_muon_by_lists_of_all_its_matrices(steps: Any) -> None:
    for name, case in steps.items():
        optimizer = name.split(" | ")[1]
        ours = {
            kernel: count
            for kernel, count in case["launches"].items()
            if kernel in ("_square", "_total", "_move_moments", "_move", "_lars")
        }
        assert ours == {kernel: STEPS * count for kernel, count in STEPPED[optimizer].items()}, name
        assert set(case["lists"]) == LISTS.get(optimizer, set()), name
        assert case["batched"] == (["torch.bfloat16"] if optimizer == "muon" else []), name


@needs_triton
def test_the_recurrence_of_bytes_is_stepped_by_its_kernels(steps: Any) -> None:
    for name, case in steps.items():
        if name.startswith("mlstm"):
            assert {"_modulate", "_cell", "_cell_backward", "_modulate_backward"} <= set(case["launches"]), name


@needs_triton
def test_fused_layers_and_the_loss_over_a_vocabulary_are_computed_by_their_kernels(steps: Any) -> None:
    once = {"_embed": 1, "_embed_backward": 1, "_norm": 4, "_norm_backward": 4, "_gelu": 2, "_gelu_backward": 2, "_joined": 2}
    for name, case in steps.items():
        path, _, recompute = name.split(" | ")
        # A byte network has as many predictions as bytes: it goes stretch by stretch, and computes each again.
        assert case["launches"]["_cross_entropy"] == STEPS or path.startswith("mlstm"), name
        assert case["launches"]["_cross_entropy"] % (2 * STEPS) == 0 or not path.startswith("mlstm"), name
        again = {"_norm": 4, "_gelu": 2} if recompute != "none" else {}
        wanted = {kernel: STEPS * (count + again.get(kernel, 0)) for kernel, count in once.items()}
        assert {kernel: case["launches"].get(kernel, 0) for kernel in once} == (
            wanted if path == "bert fused" else dict.fromkeys(once, 0)
        ), name


@needs_triton
def test_a_gpu_without_bf16_trains_in_fp16_by_padded_attention_and_lists_and_muon_orthogonalizes_in_fp32(
    on_fake_gpu: Callable[..., Any],
) -> None:
    """Of compute capability 7.5, as a T4: no kernel of Triton's is launched, and nothing waits. (The loss scale of a run does, and is not among it.)"""
    found = on_fake_gpu("steps_worker", "--old")
    assert {name: case for name, case in found.items() if "error" in case} == {} and len(found) == 2 * len(STEPPED)
    times = LAYERS * MICRO * STEPS
    for name, case in found.items():
        optimizer = name.split(" | ")[1]
        assert case["attention"] == {PADDED: times, f"{PADDED}_backward": times} and case["launches"] == {}, name
        assert set(case["lists"]) == LISTS[optimizer] if optimizer in LISTS else len(case["lists"]) > len(NORMS), name
        assert case["batched"] == (["torch.float32"] if optimizer == "muon" else []), name
