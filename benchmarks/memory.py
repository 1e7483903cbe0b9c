"""What `memory.activation_checkpointing` saves and costs: bytes kept for the backward pass, the most in use in a step, and its time.

    python benchmarks/memory.py                     # bert-mini and bert-base at length 128 and 512, a quarter of an hour on two cores
    python benchmarks/memory.py --models bert-mini

Bytes are counted, not sampled: every storage that an operation makes, until it is freed (those of the parameters and the gradients are not in
it). torch's hooks for saved tensors would not see what `checkpoint` keeps by itself. none, selective and full take turns in one process, and
dropout is on.
Into benchmarks/results/<date>-<machine>-memory/ goes result.json.
"""

from __future__ import annotations

import argparse
import json
import weakref
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, get_args

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from overnight.batches.packing import Batch
from overnight.bench.measure import Row, measure, result, time_row
from overnight.bench.sizes import MODELS, VOCABULARY, full_batch
from overnight.engine.memory import peak_gb, reset_peak
from overnight.models.bert import BertForPretraining, Recompute

KINDS: tuple[Recompute, ...] = get_args(Recompute)
SHAPES = {"bert-mini": ((32, 128), (8, 512)), "bert-base": ((8, 128), (2, 512))}
"""Sequences and length."""


class Alive(TorchDispatchMode):
    """Bytes of the storages that were made within it and are not yet freed."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in self._known | given:
                self._known.add(storage._cdata)
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.bytes)
        return made

    def _free(self, number: int, size: int) -> None:
        self._known.remove(number)
        self.bytes -= size


def losses(model: BertForPretraining, batch: Batch) -> torch.Tensor:
    """Forward."""
    return torch.stack(list(model.losses(batch, torch.float32)[0].values())).sum()


def one_pass(model: BertForPretraining, batch: Batch, kind: Recompute) -> None:
    """Forward and backward."""
    model.encoder.recompute_layers(kind)
    losses(model, batch).backward()


def bytes_of(model: BertForPretraining, batch: Batch, kind: Recompute) -> dict[str, float]:
    """MB that are kept at the end of the forward pass, and the most in a pass; GB of the process at most, as the system has it."""
    one_pass(model, batch, kind)  # with gradients there, which are added to
    reset_peak(torch.device("cpu"))
    one_pass(model, batch, kind)
    process = peak_gb(torch.device("cpu"))
    with Alive() as alive:
        loss = losses(model, batch)
        kept = alive.bytes
        loss.backward()
    return {"kept": kept / 1e6, "most": alive.most / 1e6, "process": process * 1e3}


def rows(name: str, sequences: int, length: int, repeats: int) -> list[Row]:
    """Rows of one network and shape, each compared with `none`."""
    torch.manual_seed(0)
    model = BertForPretraining(MODELS[name], VOCABULARY).train()
    batch = full_batch(sequences, length, round(0.15 * length))
    found = {kind: bytes_of(model, batch, kind) for kind in KINDS}
    passes: dict[str, Callable[[], object]] = {kind: partial(one_pass, model, batch, kind) for kind in KINDS}
    timings = measure(passes, warmup=1, repeats=repeats)
    made = []
    for kind in KINDS:
        label = f"{name} {sequences} x {length} {kind}"
        for what, title in (("kept", "kept for the backward pass"), ("most", "most in a pass"), ("process", "process at most")):
            made.append(Row(f"{label}, {title}", found[kind][what], "MB", None, "none", found["none"][what]))
        made.append(time_row(f"{label}, forward and backward", timings[kind], "none", timings["none"]))
    for row in made:
        print(f"{row.name:60} {row.value:10.1f} {row.unit}  {row.value / row.peer_value if row.peer_value else 0:.3f} of none", flush=True)
    return made


def main() -> None:
    """Measure, print, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--machine", default=f"cpu{psutil.cpu_count()}", help="word for the machine in the name of the results folder")
    options = parser.parse_args()
    found = [row for name in options.models for shape in SHAPES[name] for row in rows(name, *shape, options.repeats)]
    out = Path(__file__).parent / "results" / f"{date.today()}-{options.machine}-memory"
    out.mkdir(parents=True, exist_ok=True)
    (out / "result.json").write_text(json.dumps(result("memory", found), indent=1) + "\n", encoding="utf-8")
    print(out)


if __name__ == "__main__":
    main()
