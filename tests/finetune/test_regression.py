"""Numbers of any size are learned alike: prices in thousands as well as stars."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from overnight.checkpoint.run_corpus import kept_vocabulary
from overnight.cli.main import main
from overnight.finetune.encoded_task import encode_task
from overnight.finetune.predict import predict
from overnight.report.summary import tasks_text
from overnight.tasks.tables import _LARGEST
from tests.finetune.conftest import Task
from tests.finetune.test_finetune import kept, lines, train_lines, tune


def write(path: Path, scale: float, offset: float) -> Path:
    with path.open("w", newline="") as file:
        rows = [(f"class number {i % 9}", f"object {i}", offset + scale * (i % 9)) for i in range(80)]
        csv.writer(file).writerows([("text_a", "text_b", "score"), *rows])
    return path


def predictions(run: Path) -> np.ndarray:
    return np.array(list(json.loads((run / "predictions.json").read_text()).values()))


@pytest.mark.parametrize("more", [{}, pytest.param({"keep_best": True, "eval_every": 0.5, "select_on": "dev"}, marks=pytest.mark.heavy)])
def test_other_units_and_another_zero_change_the_answers_by_as_much(more: dict[str, object], with_task: Task, tmp_path: Path) -> None:
    found, losses, scores = [], [], []
    for scale, offset in ((0.5, 0.0), (4096.0, -32768.0)):
        run = with_task("csv", write(tmp_path / "scores.csv", scale, offset), epochs=6, **{"logging.log_every": 1}, **more)
        tune(run)
        found.append((predictions(kept(run)) - offset) / scale)
        losses.append([line["loss"] for line in train_lines(run)])
        scores.append(lines(run)[-1]["metrics"]["pearson"])
    np.testing.assert_allclose(found[0], found[1], atol=1e-3)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3)
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)
    assert abs(found[0].mean() - 4) < 1, "answers are around the mean of the labels"


def test_numbers_as_large_as_a_table_may_have_are_trained_on_and_answered(with_task: Task, tmp_path: Path) -> None:
    run = with_task("csv", write(tmp_path / "scores.csv", _LARGEST / 4, -_LARGEST))
    tune(run)
    found = predictions(kept(run))
    assert np.isfinite(found).all() and 0 < np.abs(found).max() < 2 * _LARGEST


def test_labels_that_are_all_the_same_number_are_answered_with_it(with_task: Task, tmp_path: Path) -> None:
    run = with_task("csv", write(tmp_path / "scores.csv", 0.0, 700.0))
    tune(run)
    np.testing.assert_allclose(predictions(kept(run)), 700.0, atol=3.0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_numbers_far_from_0_are_told_apart_in_16_bits_too(precision: str, with_task: Task, tmp_path: Path) -> None:
    run = dataclasses.replace(with_task("csv", write(tmp_path / "scores.csv", 1.0, 2000.0), epochs=6), precision=precision)
    tune(run)
    found = predictions(kept(run))
    assert len(np.unique(found)) == len(found)
    rows = [f"class number {i}\tobject {i}" for i in range(9)]
    for at_work in ("fp32", "bf16"):
        answers = [answer["score"] for answer in predict(dataclasses.replace(run, precision=at_work), "mine", rows)]
        assert len(set(answers)) == len(answers) and np.ptp(answers) < 8


def test_a_score_is_answered_with_all_its_digits(with_task: Task, tmp_path: Path) -> None:
    run = with_task("csv", write(tmp_path / "scores.csv", 1.0, 123456.0))
    tune(run)
    rows = [(row["id"], f"{row['text_a']}\t{row['text_b']}") for row in json.loads((kept(run) / "errors.json").read_text())["worst"]]
    answers = predict(run, "mine", [text for _, text in rows])
    stored = json.loads((kept(run) / "predictions.json").read_text())
    np.testing.assert_allclose([answer["score"] for answer in answers], [stored[row] for row, _ in rows], atol=0.05)


@pytest.mark.parametrize(("offset", "noted"), [(1.234e6, False), (1.234e8, True)])
def test_numbers_that_32_bits_do_not_tell_apart_are_noted(offset: float, noted: bool, with_task: Task, tmp_path: Path) -> None:
    run = with_task("csv", write(tmp_path / "scores.csv", 1.0, offset))
    notes = encode_task(run.finetune["mine"], *kept_vocabulary(run)).notes
    assert any("subtract a constant from them" in note for note in notes) is noted


def test_a_correlation_with_one_number_is_said_to_be_none_and_gives_no_verdict(
    with_task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, dev = write(tmp_path / "scores.csv", 1.0, 0.0), tmp_path / "dev.csv"
    dev.write_text("text_a,text_b,score\na class,an object,2.5\nan object,a class,2.5\n")
    run = with_task("csv", train, dev=str(dev), random_init_seeds=1)
    said = tune(run)
    assert "every row to score on has score 2.5, so no correlation with them is defined: 0.0 says nothing" in said
    assert "no verdict: all scored rows have the same number" in tasks_text(run.run_dir, "mine")
    assert {entry["undefined"] for entry in lines(run) if entry["kind"] == "finetune"} == {True}
    dev.write_text("text_a,text_b,score\na class,an object,2.5\n")
    capsys.readouterr()
    assert main(["evaluate", "--from", str(run.run_dir), "--task=mine", f"--rows={dev}"]) == 0
    assert f"{dev}: every row has score 2.5, so no correlation with them is defined" in capsys.readouterr().out
