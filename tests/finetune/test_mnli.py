"""MNLI is evaluated on two dev sets, each scored for every seed and shown."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from overnight import config, console
from overnight.checkpoint.task_folder import read_facts, write_facts
from overnight.cli.main import main
from overnight.config import Run
from overnight.console import Line
from overnight.finetune.finetune import finetune
from overnight.report.page import write_report
from overnight.report.summary import summary_text

LABELS = ("contradiction", "entailment", "neutral")


def write_mnli(folder: Path) -> None:
    """The files of MNLI with the columns that are read; the labels of the mismatched rows are known."""
    folder.mkdir()
    for name, count in (("train", 60), ("dev_matched", 12), ("dev_mismatched", 10), ("test_matched", 3), ("test_mismatched", 3)):
        labeled = not name.startswith("test")
        rows = [f"{i}\tobject {i} is good\tobject {i % 5} is bad" + f"\t{LABELS[i % 3]}" * labeled for i in range(count)]
        head = "index\tsentence1\tsentence2" + "\tgold_label" * labeled
        (folder / f"{name}.tsv").write_text("\n".join([head, *rows]) + "\n")


def test_the_mismatched_rows_of_mnli_are_scored_and_shown(pretrained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_LINE_EVERY", 0.0)
    shutil.copytree(pretrained.run_dir, tmp_path / "run")
    write_mnli(tmp_path / "mnli")
    tree = config.to_tree(pretrained)
    spec = {"epochs": 1, "global_batch_size": 8, "micro_batch_size": 8, "lr": 3e-3, "seq_len": 24}
    tree["finetune"] = {"mnli": {**spec, "task": "mnli", "path": str(tmp_path / "mnli"), "seeds": [0, 1]}}
    run = dataclasses.replace(config.build_run(tree), out=str(tmp_path / "run"))
    (run.run_dir / "run.yaml").write_text(config.run_yaml(run))
    said = io.StringIO()
    entries = [entry for entry in finetune(run, "mnli", Line(said)) if entry["kind"] == "finetune"]
    kept = json.loads((run.run_dir / "finetune" / "mnli" / "task.json").read_text())["result"]
    answers = (run.run_dir / "finetune" / "mnli" / "dev_mismatched.tsv").read_text().splitlines()[1:]
    right = sum(line.split("\t")[1] == LABELS[i % 3] for i, line in enumerate(answers))
    assert kept["metrics"]["accuracy_mismatched"] == right / 10
    scores = sorted(entry["metrics"]["accuracy_mismatched"] for entry in entries)
    assert [set(entry["metrics"]) for entry in entries] == [{"accuracy", "accuracy_mismatched"}] * 2
    # Each once, also where the answers of the best are written.
    done = Counter(re.findall(r"^mnli seed (\d) pretrained, (\w+)  scored (?:12/12|10/10|3/3)", said.getvalue(), re.MULTILINE))
    assert {(seed, split) for seed in "01" for split in ("dev", "dev_mismatched")} < set(done) and set(done.values()) == {1}
    assert f"accuracy mismatched {100 * entries[0]['metrics']['accuracy_mismatched']:.1f} %" in said.getvalue()
    row = next(line for line in summary_text(run.run_dir).splitlines() if line.startswith("pretrained, mismatched"))
    assert row.split()[2:] == [f"{50 * sum(scores):.1f}", "%"]
    write_report([run.run_dir], tmp_path / "page.html")
    assert "accuracy_mismatched" in (tmp_path / "page.html").read_text()


def test_the_diagnostic_set_that_comes_after_the_training_is_answered_without_another(pretrained: Run, tmp_path: Path) -> None:
    shutil.copytree(pretrained.run_dir, tmp_path / "run")
    write_mnli(tmp_path / "mnli")
    command = ["finetune", "mnli", "--from", str(tmp_path / "run"), f"--path={tmp_path / 'mnli'}", "--epochs=1", "--seq_len=24"]
    assert main(command) == 0
    task = tmp_path / "run" / "finetune" / "mnli"
    log, answers = (tmp_path / "run" / "tasks.jsonl").read_bytes(), (task / "test_mismatched.tsv").read_bytes()
    (tmp_path / "diagnostic").mkdir()
    # The rows of a split that was answered with the others are answered alike.
    shutil.copy(tmp_path / "mnli" / "test_mismatched.tsv", tmp_path / "diagnostic" / "diagnostic.tsv")
    for _ in range(2):
        assert main(command) == 0
    assert (task / "diagnostic.tsv").read_bytes() == answers and len(answers.splitlines()) == 4
    assert (tmp_path / "run" / "tasks.jsonl").read_bytes() == log
    shutil.rmtree(tmp_path / "mnli")
    assert main(command) == 0


def test_a_diagnostic_set_that_was_corrected_is_answered_anew_and_once(
    pretrained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(pretrained.run_dir, tmp_path / "run")
    write_mnli(tmp_path / "mnli")
    rows = tmp_path / "mnli" / "diagnostic.tsv"
    shutil.copy(tmp_path / "mnli" / "test_mismatched.tsv", rows)
    command = ["finetune", "mnli", "--from", str(tmp_path / "run"), f"--path={tmp_path / 'mnli'}", "--epochs=1", "--seq_len=24"]
    assert main(command) == 0
    task = tmp_path / "run" / "finetune" / "mnli"
    for text, count in ((rows.read_text(), 0), (rows.read_text() + "3\tobject\tclass\n", 1), (rows.read_text().replace("good", "bad"), 1)):
        rows.write_text(text)
        capsys.readouterr()
        assert main(command) == 0 and main(command) == 0
        assert capsys.readouterr().out.count("the diagnostic set is answered") == count
        assert [line.split("\t")[0] for line in (task / "diagnostic.tsv").read_text().splitlines()[1:]] == [
            line.split("\t")[0] for line in text.splitlines()[1:]
        ]
    facts = read_facts(task)
    write_facts(task, {key: value for key, value in facts.items() if key != "diagnostic"})  # as of an earlier version
    assert main(command) == 0 and read_facts(task) == facts
