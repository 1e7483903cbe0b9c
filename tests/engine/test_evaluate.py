"""The evaluation of a finished BERT is that of its training, on every example of a split."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from overnight import config
from overnight.batches.masking import context_free_loss
from overnight.cli.main import main
from overnight.config import Run
from overnight.console import Line
from overnight.corpus.shards import open_shards
from overnight.display import measures
from overnight.engine import evaluate as module
from overnight.engine.evaluate import evaluate
from overnight.engine.finite import NonFiniteError
from overnight.engine.pretrain import pretrain
from overnight.engine.workload import ByteWorkload
from overnight.errors import ConfigError, DataError
from tests.conftest import tiny_run, tiny_tree
from tests.recipe import change

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def run(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run whose training validated on all held-out examples."""
    made = tiny_run(tmp_path_factory.mktemp("evaluate"), tiny_data, {"logging.eval_examples": 10**6})
    pretrain(made, Line(io.StringIO()))
    return made


def validated(run: Run) -> dict[str, float]:
    """What training wrote of its last validation."""
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "eval"][-1]
    return {name: value for name, value in last.items() if name.endswith(("_loss", "_accuracy"))}


def test_the_numbers_are_those_of_the_last_validation_and_nothing_is_written_but_the_results(run: Run, capsys: Captured) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.run_dir.rglob("*")}
    found = evaluate(run, "valid")
    assert set(found.metrics) == {"mlm_loss", "perplexity", "mlm_accuracy", "nsp_loss", "nsp_accuracy"}
    assert {name: value for name, value in found.metrics.items() if name != "perplexity"} == validated(run)
    assert found.metrics["perplexity"] == math.exp(found.metrics["mlm_loss"])
    assert main(["evaluate", "--from", str(run.run_dir)]) == 0
    out = capsys.readouterr().out
    assert f"valid: {measures(found.metrics)} over {found.documents} documents ({found.examples} examples of phase long) in " in out
    assert "valid: bits per character " in out
    after = {path: path.stat().st_mtime_ns for path in run.run_dir.rglob("*")}
    assert after.pop(run.run_dir / "evaluation.json") and after == before


@pytest.mark.parametrize("loss", [math.nan, math.inf, 1e5])
def test_a_loss_that_is_no_number_or_has_no_perplexity_is_an_error(loss: float, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.loop, "evaluate", lambda *args: {"mlm_loss": loss, "mlm_accuracy": 0.0})
    with pytest.raises(NonFiniteError, match="computes numbers that are not finite"):
        evaluate(run, "valid")


def test_micro_batch_and_precision_change_it_by_rounding_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = validated(run)
    monkeypatch.setattr(module, "_MICRO", 7)
    long = "phases.long.micro_batch_size=0"
    for more, close in ((long, 1e-5), ("precision=tf32", 1e-5), ("precision=bf16", 1e-2), ("memory.activation_checkpointing=full", 1e-6)):
        found = evaluate(config.stored_run(run.run_dir, [more]), "valid")
        assert found.metrics["mlm_loss"] == pytest.approx(wanted["mlm_loss"], rel=close), more


def test_the_training_documents_can_be_evaluated_and_test_documents_there_are_none(run: Run, capsys: Captured) -> None:
    out = io.StringIO()
    found = evaluate(run, "train", Line(out))
    assert re.fullmatch(r"train: \d+\.\d %  [\d,]+ tokens read  [\d,]+ tokens/s  left \d+ s\n", out.getvalue())
    assert found.documents > evaluate(run, "valid").documents and 0 < found.metrics["mlm_accuracy"] < 1
    with pytest.raises(ConfigError, match="only byte models have a test split"):
        evaluate(run, "test")
    assert main(["evaluate", "--from", str(run.run_dir), "--groups", "3"]) == 2
    assert "--groups = 3: only a byte model reads groups; BERT reads every document" in capsys.readouterr().err


def test_another_vocabulary_and_a_run_without_a_checkpoint_are_refused(run: Run, tmp_path: Path, capsys: Captured) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy"
    tree = tiny_tree(tmp_path, Path(run.data.paths[0]))
    (tmp_path / "recipe.yaml").write_text(config.run_yaml(config.build_run(change(tree, {"data.vocab_size": 400}))))
    assert main(["prepare", str(tmp_path / "recipe.yaml")]) == 0
    assert main(["evaluate", "--from", str(run.run_dir), f"--data.dir={data}"]) == 1
    assert "are another vocabulary" in capsys.readouterr().err
    shutil.copytree(run.run_dir, copy)
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(DataError, match="has no checkpoint"):
        evaluate(config.stored_run(copy), "valid")


def test_each_phase_begins_with_the_loss_of_a_model_without_context(run: Run, tiny_data: Path) -> None:
    counts = [
        np.bincount(np.concatenate([shard.tokens for shard in open_shards(tiny_data, split)]), minlength=600)
        for split in ("train", "valid")
    ]
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    starts = [line for line in lines if line["kind"] == "phase" and line["event"] == "start"]
    assert [line["plateau_loss"] for line in starts] == [pytest.approx(context_free_loss(*counts), abs=1e-4)] * 2
    assert 0.5 * math.log(600) < starts[0]["plateau_loss"] < math.log(600)


def test_a_split_without_text_says_which_way_the_share_is_to_go(run: Run) -> None:
    workload = ByteWorkload.__new__(ByteWorkload)
    workload._folder, workload.shards = run.data_dir, {"train": [], "valid": []}
    with pytest.raises(DataError, match=r"holds no train text; lower data\.valid_fraction or add documents"):
        workload.split("train")
    with pytest.raises(DataError, match=r"holds no valid text; raise data\.valid_fraction or add documents"):
        workload.split("valid")
