"""A recipe with a key of before version 0.2 is refused with the new name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from overnight import config
from overnight.config.describe import describe
from overnight.config.old_names import RENAMED
from tests.conftest import ROOT
from tests.recipe import message, tree

OLD = [
    ({"train": {"precision": "bf16", "keep": 3}}, ["train.precision: is now precision", "train.keep: is now checkpoint.keep_latest_k"]),
    ({"train": 5}, ["train: is now the sections compute, memory, distributed, stability, checkpoint and logging"]),
    ({"model": {"width": 64, "layers": 2}}, ["model.width: is now model.hidden_size", "model.layers: is now model.num_layers"]),
    ({"phases": {"a": {"steps": 1, "global_batch": 8}}}, ["phases.a.global_batch: is now phases.a.global_batch_size"]),
    ({"phases": {"a": {"optim": {"schedule": {"name": "hold"}}}}}, ["phases.a.optim.schedule.name = 'hold': is now wsd"]),
    ({"finetune": {"names": {"batch": 8}}}, ["finetune.names.batch: is now finetune.names.global_batch_size"]),
    ({"transfer": {"sst": {"path": "x"}}}, ["transfer: is now linear_probe"]),
]


@pytest.mark.parametrize(("changes", "expected"), OLD, ids=[expected[0] for _, expected in OLD])
def test_an_old_key_is_refused_with_its_new_name(changes: dict[str, Any], expected: list[str]) -> None:
    assert message(lambda: config.build_run(tree() | changes)).splitlines()[: len(expected)] == expected


@pytest.mark.parametrize("override", ["--train.precision=bf16", "--phases.short.global_batch=8", "--phases.short.optim.trust_clip=1"])
def test_an_old_key_on_the_command_line_is_refused_with_its_new_name(tmp_path: Path, override: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree()))
    assert ": is now " in message(lambda: config.load_run(str(path), [override]))


def test_both_spellings_at_once_are_refused() -> None:
    both = {"steps": 1, "global_batch": 8, "global_batch_size": 8}
    assert message(lambda: config.build_run(tree(phases__short=both))) == "phases.short.global_batch: is now phases.short.global_batch_size"


def test_every_old_key_leads_to_a_key_that_exists() -> None:
    known = {row.key.replace("NAME", "*") for row in describe()}
    for new in RENAMED.values():
        assert new.split(" ")[0] in known or any(key.startswith(f"{new}.") for key in known), new


def test_nothing_that_the_package_says_has_an_old_key() -> None:
    old = re.compile(rf"(?<![\w.])(?:{'|'.join(re.escape(key) for key in RENAMED if '.' in key and '*' not in key)})\b|\btrain\.{{")
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "overnight").rglob("*.py") if path.name != "old_names.py"}
    assert {path.name: found for path, text in sources.items() if (found := old.findall(text))} == {}
    assert old.findall("train.device = 1; x.train.keep; `train.parallel`; train.{key}; train.csv") == [
        "train.device",
        "train.parallel",
        "train.{",
    ]
