"""What a step of BERT-large launches with fused layers: one layer and 16,384 tokens, in bf16, with dropout, 128 sequences of 128 tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.kernels import needs_triton

# Of one micro-batch, forward and backward: launches and MB of Triton's kernels, and of torch's beside products and attention (casts of weights, sums of partial sums, seeds).
LAYER = {"triton": (7, 1424), "torch": (10, 90), "products": (12, 1778), "attention": (2, 405)}
# What one more micro-batch of a step adds: no cast, and gradients are added to those before.
MORE = {"triton": (7, 1424), "torch": (17, 166), "products": (12, 1778), "attention": (2, 405)}

# Outside the layers: embeddings, the vocabulary head at 15 % of the places, losses. A further micro-batch casts no weight of them either (0.19 GB less), and adds its gradients.
OUTSIDE = {"triton": (3, 591), "torch": (59, 872), "products": (12, 785), "attention": (0, 0)}
# Of layers that are neither fused nor compiled.
PLAIN = {"triton": (0, 0), "torch": (39, 3465), "products": (12, 1711), "attention": (2, 405)}


@pytest.fixture(scope="module")
def counted(on_fake_gpu: Callable[..., Any]) -> Any:
    return on_fake_gpu("fused_worker")


def sums(found: Any) -> dict[str, tuple[int, int]]:
    """Launches and MB of each kind."""
    return {kind: (each["launches"], round(each["bytes"] / 1e6)) for kind, each in found.items() if kind != "names"}


@needs_triton
def test_a_fused_layer_takes_the_launches_and_the_bytes_of_its_budget(counted: Any) -> None:
    layer = counted["1"]["layer"]
    assert sums(layer) == LAYER
    kernels = {name: each["launches"] for name, each in layer["names"].items() if "." not in name}
    assert kernels == {"_norm": 2, "_gelu": 1, "_norm_backward": 2, "_gelu_backward": 1, "_joined": 1}


@needs_triton
def test_weights_are_cast_once_a_step_whatever_its_micro_batches(counted: Any) -> None:
    one, two = (counted[micro]["layer"] for micro in ("1", "2"))
    casts = [found["names"]["aten._to_copy.default"]["launches"] for found in (one, two)]
    assert casts == [5, 5]  # four matrices, and the bias that its product adds
    more = {kind: (two[kind]["launches"] - one[kind]["launches"], round((two[kind]["bytes"] - one[kind]["bytes"]) / 1e6)) for kind in LAYER}
    assert more == MORE


@needs_triton
def test_outside_the_layers_no_copy_of_the_logits_is_made_and_no_segment_is_added_atomically(counted: Any) -> None:
    outside = counted["1"]["outside"]
    assert sums(outside) == OUTSIDE
    names = set(outside["names"])
    assert outside["names"]["aten.zeros_like.default"]["bytes"] < 3e6  # of the positions: the table of the words has one gradient
    assert {"_embed", "_embed_backward", "_cross_entropy"} <= names and "aten.embedding_dense_backward.default" not in names
    # What is cast: the weights, and of the head's tensors of [predicted, width] some; 2,560 x 30,528 logits would be 469 MB.
    assert outside["names"]["aten._to_copy.default"]["bytes"] < 270e6
    assert outside["names"]["aten.index_add_.default"]["launches"] == 3  # words, positions, and the hidden states that the heads look at


@needs_triton
def test_a_plain_layer_is_what_a_fused_one_is_compared_with(counted: Any) -> None:
    assert sums(counted["plain"]["layer"]) == PLAIN
