"""What a recipe may leave open with `model.size: auto`, and what it must say then."""

from __future__ import annotations

from typing import Any

import pytest

from overnight import config
from overnight.config import MODELS
from tests.recipe import message

OPTIM = "{name: muon, lr: 1.0e-3, base_width: 0, schedule: {name: wsd, warmup_ratio: 0.1, stable_ratio: 0.5}}"


def test_open_sizes_are_read_and_written_without_sizes() -> None:
    run = config.load_run("night-auto")
    assert run.data.vocab_size == run.phases["short"].global_batch_size == 0
    tree = config.to_tree(run)
    assert tree["model"]["size"] == "auto" and not {"num_layers", "hidden_size", "num_heads"} & tree["model"].keys()
    assert config.build_run(tree) == run


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model.num_layers=12"], "model.num_layers = 12: model.size = auto chooses it; leave it out, or set model.size=given"),
        (["model.hidden_size=256"], "model.hidden_size = 256: model.size = auto chooses it"),
        (["model.num_heads=4"], "model.num_heads = 4: model.size = auto chooses it"),
        (["model.intermediate_size=64"], "model.intermediate_size = 64: model.size = auto chooses it"),
        (["budget="], "model.size = auto: needs the time for which the size is chosen; give --budget=8h"),
        ([f"phases.short.optim={OPTIM}"], "phases.short.optim.base_width = 0: with model.size = auto the rate must follow the width"),
        (["phases.short.optim={name: adamw, schedule: {name: wsd, stable_ratio: 0.5}}"], "phases.short.optim.base_width = 0: with"),
        (["data.vocab_size=-1"], "data.vocab_size = -1: must be 0 or more"),
    ],
)
def test_what_contradicts_open_sizes_is_refused(overrides: list[str], expected: str) -> None:
    text = message(lambda: config.load_run("night-auto", overrides))
    assert any(line.startswith(expected) for line in text.splitlines()), text


@pytest.mark.parametrize("recipe", ["night-cpu", "demo", "bert-mini-books"])
@pytest.mark.parametrize("key", ["data.vocab_size", "phases.short.global_batch_size"])
def test_nothing_is_left_open_elsewhere(recipe: str, key: str) -> None:
    text = message(lambda: config.load_run(recipe, [f"{key}=0"]))
    assert f"{key} = 0: must be above 0; only model.size = auto, of modernbert, chooses it" in text


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "modernbert"])
def test_other_networks_have_no_size_to_choose(kind: str) -> None:
    tree: dict[str, Any] = {"name": "x", "model": {"kind": kind, "size": "auto"}, "phases": {"a": {"steps": 1, "global_batch_size": 1}}}
    family = "mlstm" if kind == "lstm" else kind
    assert f"model.size = 'auto': {family} has no size; it belongs to modernbert" in message(lambda: config.build_run(tree))
