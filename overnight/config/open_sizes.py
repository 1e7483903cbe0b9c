"""What a recipe leaves open with `model.size: auto`, and what it must say then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from overnight.config.optimizers import MuonConfig
from overnight.config.schema import BertRun, ModernBertConfig, Run

CHOSEN = ("num_layers", "hidden_size", "num_heads", "intermediate_size")
"""Settings of the network that are chosen together."""


def given_sizes(tree: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each size that a recipe names although it leaves them open; a default cannot be told from a choice later."""
    model = tree.get("model")
    if isinstance(model, Mapping) and model.get("size") == "auto":
        for name in CHOSEN:
            if name in model:
                yield f"model.{name} = {model[name]!r}: model.size = auto chooses it; leave it out, or set model.size=given"


def without_sizes(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe as it may be read again: without the sizes that it leaves open."""
    if tree["model"].get("size") == "auto":
        tree["model"] = {name: value for name, value in tree["model"].items() if name not in CHOSEN}
    return tree


def size_problems(run: Run) -> Iterator[str]:
    """Yield what keeps the sizes of a run from being chosen, and what is left open although nobody chooses it."""
    auto = isinstance(run.model, ModernBertConfig) and run.model.size == "auto"
    if not auto:
        if isinstance(run, BertRun) and run.data.vocab_size == 0:
            yield "data.vocab_size = 0: must be above 0; only model.size = auto, of modernbert, chooses it"
        for name, phase in run.phases.items():
            if phase.global_batch_size == 0:
                yield f"phases.{name}.global_batch_size = 0: must be above 0; only model.size = auto, of modernbert, chooses it"
        return
    if not run.budget:
        yield "model.size = auto: needs the time for which the size is chosen; give --budget=8h"
    if run.data.vocab_size == 0 and run.data.vocab_file:
        yield f"data.vocab_size = 0: {run.data.vocab_file} has a vocabulary already; give its number of tokens"
    for name, phase in run.phases.items():
        if not (isinstance(phase.optim, MuonConfig) and phase.optim.base_width):
            yield f"phases.{name}.optim.base_width = 0: with model.size = auto the rate must follow the width; use muon, and name the width for which its lr was tuned"
