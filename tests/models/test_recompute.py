"""What is computed again in the backward pass is the same, and is what was asked for."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from overnight.models import bert
from overnight.models.attention import attention
from overnight.models.bert import Recompute
from tests.models.sample import modern, pretraining, random_batch

KINDS: tuple[Recompute, ...] = ("selective", "full")
DROPPED = {"dropout": 0.1, "attention_dropout": 0.1}
MODERN = {"make": modern, "local_attention": 16}


class Counted(TorchDispatchMode):
    """How often each operation ran."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[op.overloadpacket._qualified_op_name.split("::")[1]] += 1
        return op(*args, **(kwargs or {}))


def passes(
    kind: Recompute, dtype: torch.dtype = torch.float32, compiles: bool = False, make: Callable[..., Any] = pretraining, **sizes: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and gradients of two micro-batches."""
    model = make(**sizes)
    model.encoder.recompute_layers(kind)
    if compiles:
        model.encoder.compile_layers()
    losses: list[Tensor] = []
    torch.manual_seed(3)
    for lengths in ([20, 31, 64, 5], [64, 64]):
        found, _ = model.losses(random_batch(lengths), dtype)
        torch.stack(list(found.values())).sum().backward()
        losses += [loss.detach() for loss in found.values()]
    # What comes from the generator next: the second pass must leave it where the first one did.
    return [*losses, torch.rand(1)], [p.grad for p in model.parameters() if p.grad is not None]


def assert_equal(ours: tuple[list[Tensor], list[Tensor]], theirs: tuple[list[Tensor], list[Tensor]]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert len(mine) == len(other) and all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sizes", [{}, DROPPED, MODERN, {**MODERN, "dropout": 0.1}], ids=["bert", "bert dropout", "modern", "modern dropout"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_the_same_bits(kind: Recompute, sizes: dict[str, Any], dtype: torch.dtype) -> None:
    assert_equal(passes(kind, dtype, **sizes), passes("none", dtype, **sizes))


def test_full_does_every_product_again_and_selective_none_of_those_with_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[str, Counter[str]] = {}
    for kind in ("none", *KINDS):
        with Counted() as counted, monkeypatch.context() as patch:
            patch.setattr(bert, "attention", lambda *given, ops=counted.ops: ops.update(["attention"]) or attention(*given))
            passes(kind, **DROPPED)
        counts[kind] = counted.ops
    layers, batches = 3, 2
    product = "_linear_pointwise" if counts["none"]["_linear_pointwise"] else "addmm"
    more = {kind: {op: counts[kind][op] - counts["none"][op] for op in (product, "gelu", "attention")} for kind in KINDS}
    assert more["selective"] == {product: 0, "gelu": layers * batches, "attention": layers * batches}
    assert more["full"] == {product: 4 * layers * batches, "gelu": layers * batches, "attention": layers * batches}


def test_nothing_is_kept_or_done_again_outside_training() -> None:
    model, batch = pretraining(**DROPPED), random_batch([9, 4])
    counts = []
    for kind in ("none", "full"):
        model.encoder.recompute_layers(kind)
        with torch.no_grad(), Counted() as counted:
            model.eval().losses(batch, torch.float32)
        counts.append(counted.ops)
    assert counts[0] == counts[1]


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")  # torch warns inside its own tracing, where an error would stop it
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_layers_give_the_same_bits(kind: Recompute) -> None:
    if shutil.which("g++") is None:
        pytest.skip("torch.compile on a CPU needs a C++ compiler")
    if torch.__version__ < "2.13":
        pytest.skip("torch fails to compile what is computed again before 2.13")
    compiled = []
    for recompute in ("none", kind):
        torch._dynamo.reset()
        compiled.append(passes(recompute, compiles=True, **DROPPED))
    torch._dynamo.reset()
    assert_equal(compiled[1], compiled[0])
