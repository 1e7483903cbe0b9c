"""Data of users, fine-tuned: a test that has labels is scored, and what nothing can be learned from is refused before training."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from overnight.config import Run
from overnight.display import measure, measures
from overnight.errors import ConfigError, DataError
from overnight.finetune.metrics import accuracy, score
from overnight.report.summary import tasks_text
from overnight.report.task_errors import row_text
from tests.finetune.conftest import Task
from tests.finetune.test_finetune import tune


def _result(run: Run) -> dict[str, float]:
    found: dict[str, float] = json.loads((run.run_dir / "tasks.jsonl").read_text().splitlines()[-1])["metrics"]
    return found


def test_a_test_of_which_every_row_has_a_label_is_scored_beside_dev(with_task: Task, classes: Path) -> None:
    rows = (classes / "test.csv").read_text().splitlines()
    right = ["number" if i % 3 else "text" for i in range(len(rows) - 1)]
    (classes / "test.csv").write_text("\n".join([rows[0], *(row + label for row, label in zip(rows[1:], right, strict=True))]))
    run = with_task("csv", classes)
    said, metrics = tune(run), _result(run)
    answers = [line.split("\t")[1] for line in (run.run_dir / "finetune" / "mine" / "test.tsv").read_text().splitlines()[1:]]
    assert metrics["accuracy_test"] == accuracy(right, answers) and metrics["accuracy"] != metrics["accuracy_test"]
    assert f"accuracy test {measure('accuracy_test', metrics['accuracy_test'])}" in said
    row = next(line for line in tasks_text(run.run_dir, "mine").splitlines() if line.startswith("pretrained, test"))
    assert row.split()[-2:] == measure("accuracy", metrics["accuracy_test"]).split()
    # What needs no network stands beside it, on the same rows.
    labels = {part: [row.rpartition(",")[2] for row in (classes / f"{part}.csv").read_text().splitlines()[1:]] for part in ("train", "dev")}
    most = max(labels["train"], key=labels["train"].count)
    largest = accuracy(right, [most] * len(right))
    shown = [measure(name, accuracy(gold, [most] * len(gold))) for name, gold in (("accuracy", labels["dev"]), ("accuracy_test", right))]
    assert re.search(rf"largest class  accuracy {shown[0]}  .*accuracy test {shown[1]}", said)
    row = next(line for line in tasks_text(run.run_dir, "mine").splitlines() if line.startswith("largest class, test"))
    assert row.split()[-2:] == measure("accuracy", largest).split()


def test_a_test_that_is_labeled_in_part_is_answered_and_the_reason_is_said(with_task: Task, classes: Path) -> None:
    with (classes / "test.csv").open("a") as file:
        file.write("99,a text,text\n")
    run = with_task("csv", classes)
    assert "12 of 13 test rows have no label, so they are answered and none is scored" in tune(run)
    assert not any("test" in name for name in _result(run))


def test_tagged_test_sentences_are_scored(with_task: Task, tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    for name, count in (("train", 12), ("dev", 3), ("test", 4)):
        rows = [f"the O\nclass B-X\nnumber{i} I-X\n" for i in range(count)]
        (tmp_path / "words" / f"{name}.conll").write_text("\n".join(rows))
    run = with_task("tokens", tmp_path / "words")
    said, metrics = tune(run), _result(run)
    assert {f"{name}_test" for name in ("f1", "precision", "recall", "accuracy")} < set(metrics)
    assert f"f1 test {100 * metrics['f1_test']:.1f} %" in said
    rule = next(line for line in said.splitlines() if "commonest tags" in line)
    assert "  f1 100.0 %  " in rule and "  f1 test 0.0 %  " not in rule and rule.count("test") == 4


def test_metrics_of_another_split_are_shown_as_those_of_dev() -> None:
    assert [measure(f"{name}{split}", 0.5) for name in ("micro_f1", "spearman") for split in ("", "_test")] == ["50.0 %"] * 2 + ["50.0"] * 2


def test_questions_of_which_none_can_be_trained_on_are_refused(with_task: Task, tmp_path: Path) -> None:
    folder = tmp_path / "questions"
    folder.mkdir()
    for name, start in (("train", 3), ("dev", 0)):
        qas = [{"id": "a", "question": "who?", "answers": [{"text": "class", "answer_start": start}]}]
        (folder / f"{name}.json").write_text(json.dumps({"data": [{"paragraphs": [{"context": f"class {name}", "qas": qas}]}]}))
    with pytest.raises(DataError, match="no answer to train on is at its answer_start; correct the positions"):
        tune(with_task("squad", folder, max_misplaced_answers=1.0))


def test_a_draw_with_fewer_rows_than_classes_is_refused(with_task: Task, classes: Path) -> None:
    with pytest.raises(ConfigError, match="max_train_examples = 1: leaves some of 2 classes without a row to train on; give 2 or more"):
        tune(with_task("csv", classes, max_train_examples=1))


def test_numbers_of_a_table_have_their_mean_error_in_their_own_unit() -> None:
    scores = score("csv", "regression", [1000.0, 2000.0, 4000.0], [1100.0, 2000.0, 3500.0])
    assert scores["mean_absolute_error"] == 200 and "mean_absolute_error" not in score("stsb", "regression", [1.0, 2.0], [1.0, 3.0])
    assert (
        measures({"mean_absolute_error": 200.0, "mean_absolute_error_test": 0.5})
        == "mean absolute error 200.000  mean absolute error test 0.500"
    )


def test_the_texts_of_errors_do_not_command_the_terminal() -> None:
    row = {"id": "1", "text": "a \x1b[2J\x00b", "label": "x\x07", "answer": "y", "probability": 0.5}
    assert row_text(row) == "1: a \ufffd[2J\ufffdb (right: x\ufffd, answered: y; what is right has probability 50.0 %)"
