"""What a training step of BERT launches on a GPU that is not there, with fused layers, for tests/gpu/test_fused.py: `python -m tests.gpu.fused_worker FILE`.

Writes of a layer and of all outside the layers, of one micro-batch and of four of a step: launches and bytes of Triton's kernels and of torch's between
products and attention, and of these two.
"""

from __future__ import annotations

from tests.gpu import fake_cuda  # first of all

# isort: split
import json
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from overnight.bench.sizes import VOCABULARY, full_batch
from overnight.models import bert
from overnight.models.weight_copies import kept_copies
from tests.gpu.layers_worker import BERT, LONGEST, TOKENS
from tests.gpu.steps_worker import CUDA, faked

# Parts of the names of operators that launch nothing.
VIEWS = (
    "unbind",
    "select.",
    "view",
    "expand",
    "slice",
    "detach",
    "alias",
    "aten.t.",
    "transpose",
    "unsqueeze",
    "squeeze",
    "as_strided",
    "permute",
    "split",
    "lift",
    "empty",
    "diagonal",
    "sym_",
    "prim",
    "reshape",
)
PRODUCTS, ATTENTION = ("aten.mm", "aten.addmm", "aten.bmm"), ("attention", "attn")
# Operators that read of their first tensor, a table, only the rows that they return.
ROWS = ("aten.embedding.default", "aten.index_select")
# Those that do not read it, and those that add rows to it: they read the rows, and read and write what they meet, at most as many.
FILLED, ADDED = ("aten.zeros_like", "aten.new_zeros", "aten.ones_like"), ("aten.index_add_.default",)


class Launched(TorchDispatchMode):
    """Notes every launch with the bytes of its tensors on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def note(self, name: str, tensors: list[Any]) -> None:
        """Count a launch, of tensors that it reads or writes; one of both is there twice."""
        there = [x for x in tensors if isinstance(x, torch.Tensor) and x.device.type == "cuda"]
        if there:
            self.launches[name] += 1
            self.bytes[name] += sum(x.numel() * x.element_size() for x in there)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), str(func)
        # A cast is one, a view is none.
        if "_to_copy" in name or not any(view in name for view in VIEWS):
            given = tree_leaves((args, kwargs, result))
            if name.startswith(ROWS):
                given = [*args[1:], result, result]
            elif name.startswith(FILLED):
                given = [result]
            elif name.startswith(ADDED):
                met = args[0] if args[0].numel() < args[3].numel() else args[3]
                given = [args[2], args[3], met, met]
            self.note(name, given)
        return result

    def found(self) -> dict[str, dict[str, int]]:
        """Return launches and bytes by name."""
        return {name: {"launches": count, "bytes": self.bytes[name]} for name, count in self.launches.items()}


def step(layers: int, micro: int, fused: bool = True) -> dict[str, dict[str, int]]:
    """Forward and backward passes of a step's micro-batches."""
    given, mode = full_batch(TOKENS // LONGEST, LONGEST, 20), faked()
    seen = Launched()

    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        name = kernel.__name__
        # What is read and written; of the tables of embeddings only rows are read, of words as many fp32 as there are results, of the others less than a cache holds.
        tensors = list(args) + [args[0]] * (name in ("_gelu_backward", "_cross_entropy"))
        if name.startswith("_embed"):
            tables = slice(0, 3) if name == "_embed" else slice(1, 4)
            word = tensors[tables][0]
            tensors[tables] = [word[: tensors[tables.stop].shape[0]]]
        seen.note(name, tensors)

    from triton.runtime.jit import JITFunction

    JITFunction.run = run  # type: ignore[method-assign]
    with mode:
        with torch.device("cuda"):
            net = bert.BertForPretraining(replace(BERT, num_layers=layers), VOCABULARY)
        if fused:
            assert not net.encoder.fuse_layers(CUDA, torch.bfloat16)
        with seen, kept_copies() if micro > 1 else nullcontext():
            for _ in range(micro):
                losses, _ = net.losses(given.to(CUDA), torch.bfloat16)
                (losses["mlm"] / len(given.targets["mlm"]) + losses["nsp"] / len(given.lengths)).backward()
    return seen.found()


def less(more: dict[str, dict[str, int]], fewer: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Return what the first has beyond the second."""
    zero = {"launches": 0, "bytes": 0}
    left = {name: {what: found[what] - fewer.get(name, zero)[what] for what in zero} for name, found in more.items()}
    return {name: found for name, found in left.items() if found["launches"]}


def summary(found: dict[str, dict[str, int]]) -> dict[str, Any]:
    """Return sums of Triton's kernels, of torch's, of products and of attention, with all by name."""
    sums = {kind: {"launches": 0, "bytes": 0} for kind in ("triton", "torch", "products", "attention")}
    for name, each in found.items():
        kind = (
            "products"
            if name.startswith(PRODUCTS)
            else "attention"
            if any(a in name for a in ATTENTION)
            else "torch"
            if "." in name
            else "triton"
        )
        for what in each:
            sums[kind][what] += each[what]
    return {**sums, "names": found}


if __name__ == "__main__":
    fake_cuda.install()
    torch.set_num_threads(1)
    result = {}
    for name, (micro, fused) in {"1": (1, True), "2": (2, True), "plain": (1, False)}.items():
        one, two = step(1, micro, fused), step(2, micro, fused)
        result[name] = {"layer": summary(less(two, one)), "outside": summary(less(one, less(two, one)))}
    fake_cuda.end(sys.argv[1], json.dumps(result, indent=1))
