"""`overnight run` with open sizes: vocabulary, network and batch are chosen on the way, and everything after it works with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from overnight import config
from overnight.cli import time_plan
from overnight.cli.main import main
from overnight.config import BertRun
from overnight.corpus.shards import load_manifest
from overnight.engine.size_record import read_record, with_sizes
from tests.conftest import tiny_tree
from tests.engine.test_planner import FakeClock, clock
from tests.engine.test_sizing import OPTIM, Machine, machine

__all__ = ["clock", "machine"]
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def recipe(tmp_path: Path, tiny_data: Path) -> Path:
    """A recipe of raw text that leaves everything open."""
    tree = tiny_tree(tmp_path, tiny_data.parent / "topics.jsonl")
    tree["data"]["vocab_size"] = 0
    tree["model"] = {"kind": "modernbert", "size": "auto", "max_position_embeddings": 48}
    phase = {"steps": 10, "global_batch_size": 0, "seq_len": 32, "nsp": False, "max_predictions_per_seq": 5, "optim": OPTIM}
    tree |= {"phases": {"short": phase}, "budget": "3m"}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def test_the_preparation_alone_chooses_the_vocabulary_and_writes_it_down(recipe: Path, machine: Machine, capsys: Captured) -> None:
    assert main(["prepare", str(recipe)]) == 0
    assert "model.size auto: a vocabulary of 4,096" in capsys.readouterr().out
    run = config.load_run(str(recipe))
    record = read_record(run)
    assert record is not None and (record.vocabulary, record.chosen) == (4096, None)
    # The text is too short for all of them.
    manifest = load_manifest(run.data_dir)
    assert manifest.settings["vocab_size"] == 4096 > manifest.vocab_size
    assert main(["prepare", str(recipe)]) == 0 and "a vocabulary of" not in capsys.readouterr().out


def test_from_raw_text_to_the_model_with_everything_left_open(
    recipe: Path, machine: Machine, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(time_plan, "evaluation_seconds", lambda run: 5.0)
    clock.step_seconds = 10.0
    assert main(["run", str(recipe)]) == 0
    out = capsys.readouterr().out
    assert "model.size auto: a vocabulary of 4,096, for about" in out and "data.vocab_size = 4096: the text has" in out
    run = config.load_run(str(recipe))
    assert isinstance(run, BertRun)
    record = read_record(run)
    assert record is not None and record.chosen is not None and record.vocabulary == 4096
    stored = config.stored_run(run.run_dir)
    assert config.identity(stored) == config.identity(with_sizes(run, record.chosen))
    exported = json.loads((run.run_dir / "export" / "config.json").read_text())
    assert (exported["num_hidden_layers"], exported["hidden_size"]) == (record.chosen.layers, record.chosen.width)
    assert main(["run", str(recipe)]) == 0 and "as chosen before" in capsys.readouterr().out


def test_a_plan_says_that_the_vocabulary_is_chosen_and_that_no_step_fits_the_budget(
    recipe: Path, machine: Machine, capsys: Captured
) -> None:
    assert main(["plan", str(recipe)]) == 0
    out = capsys.readouterr().out
    assert "vocabulary 4,096 as chosen; the data is not prepared" in out and "the budget is too short" not in out
    assert main(["plan", str(recipe), "--data.vocab_size=4096", "--budget=0.001s"]) == 0
    out = capsys.readouterr().out
    assert "vocabulary 4,096 as the recipe says" in out and "the budget is too short: " in out
