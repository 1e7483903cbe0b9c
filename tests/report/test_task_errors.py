"""Where a task is wrong, in the report and in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from overnight.errors import DataError
from overnight.report.page import write_report
from overnight.report.task_errors import errors_lines, found_errors, read_errors, row_text
from tests.report.sample import metrics, write_run

LINE = {"kind": "finetune", "name": "mine", "task": "csv", "seed": 0, "init": "pretrained", "metric": "accuracy", "value": 0.5}
WORST = {"id": "7", "text": "a <b>\n bold", "label": "x", "answer": "y<", "probability": 0.125}


def _errors(folder: Path, **content: object) -> Path:
    place = folder / "finetune" / "mine"
    place.mkdir(parents=True)
    (place / "errors.json").write_text(json.dumps({"labels": ["x", "y<"], "worst": [WORST], **content}))
    return place


def test_the_report_has_the_confusion_and_the_worst_rows_of_a_task(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [*metrics(), LINE])
    place = _errors(folder, confusion=[[1234, 5], [6, 78]])
    page = write_report([folder], tmp_path / "page.html").read_text()
    assert '<th>Right, answered as</th><th class="n">x</th><th class="n">y&lt;</th>' in page
    assert "<tr><th>x</th><td>1,234</td><td>5</td></tr>" in page
    assert "<li>7: a &lt;b&gt; bold (right: x, answered: y&lt;; what is right has probability 12.5 %)</li>" in page
    lines = [line.split() for line in "\n".join(errors_lines(place)).splitlines()]
    assert ["right,", "answered", "as", "x", "y<"] in lines and ["y<", "6", "78"] in lines
    (place / "errors.json").write_text("{")
    with pytest.raises(DataError, match=r"errors\.json"):
        write_report([folder], tmp_path / "page.html")


def test_the_report_has_the_counts_of_several_classes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [*metrics(), LINE])
    place = _errors(folder, counts={"right": [1, 2], "too_many": [3, 4], "too_few": [5, 6]})
    assert "<tr><th>x</th><td>1</td><td>3</td><td>5</td></tr>" in write_report([folder], tmp_path / "page.html").read_text()
    assert ["y<", "2", "4", "6"] in [line.split() for line in "\n".join(errors_lines(place)).splitlines()]


@pytest.mark.parametrize("part", [{"confusion": [[1, 2], [3, 4]]}, {"counts": {"right": [1, 2]}}])
def test_the_names_of_classes_do_not_command_the_terminal(part: dict[str, Any]) -> None:
    shown = "\n".join(found_errors({"labels": ["a\x1b[2J", "b\nc\u202e"], "worst": [], **part}, ""))
    assert "a\ufffd[2J" in shown and "b\ufffdc\ufffd" in shown and not {"\x1b", "\u202e"} & set(shown)


def test_labels_with_other_spaces_and_joiners_keep_their_columns() -> None:
    lines = found_errors({"labels": ["東\u3000京", "می\u200cخ"], "worst": [], "confusion": [[1, 2], [3, 4]]}, "")[-1].splitlines()
    assert lines[1].split() == ["東", "京", "1", "2"] and lines[2].split() == ["می\u200cخ", "3", "4"]
    assert len({cell_len(line) for line in lines}) == 1


def test_a_task_without_errors_has_no_lines_and_rows_are_said_as_their_kind_is(tmp_path: Path) -> None:
    assert errors_lines(tmp_path) == []
    pair = {"id": "1", "text_a": "a" * 50, "text_b": "b", "label": 1.5, "answer": 2.25, "error": 0.75}
    assert row_text(pair, 10) == "1: aaaaaaaaaa… (right: 1.500, answered: 2.250; off by 0.750)"
    small = {"id": "2", "text": "a", "label": 4e-4, "answer": 1.25e12, "error": 1.25e12}
    assert row_text(small) == "2: a (right: 0.0004, answered: 1.25e+12; off by 1.25e+12)"
    several = {"id": "1", "text": "t", "label": [], "answer": ["x", "y"], "probability": 0.1}
    assert row_text(several) == "1: t (right: none, answered: x, y; what is right has probability 10.0 %)"


def test_long_labels_are_cut_like_texts_and_a_page_has_them_whole() -> None:
    row = {"id": "1", "text": "t" * 12, "label": "a" * 12, "answer": ["b" * 6, "c"], "probability": 0.1}
    cut = f"{'t' * 5}… (right: {'a' * 5}…, answered: {'b' * 5}…; "
    assert row_text(row, 5).startswith(f"1: {cut}")
    assert row_text(row).startswith(f"1: {'t' * 12} (right: {'a' * 12}, answered: {'b' * 6}, c; ")


def test_the_report_says_where_the_errors_of_a_task_are_missing(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [*metrics(), LINE])
    place = _errors(folder)
    (place / "task.json").write_text("{}")
    assert "is missing, so the errors of mine" not in write_report([folder], tmp_path / "page.html").read_text()
    (place / "errors.json").unlink()
    page = write_report([folder], tmp_path / "page.html").read_text()
    assert "errors.json is missing, so the errors of mine are not known; predictions.json beside it has the answers" in page


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"worst": 1}, r"worst: input should be a valid array"),
        ({"worst": [{"id": "1"}]}, r"worst\.0\.label: field required"),
        ({"worst": [{**WORST, "probability": "x"}]}, r"worst\.0\.probability"),
        ({"worst": [{k: v for k, v in WORST.items() if k != "probability"}]}, "a row does not say how wrong"),
        ({"confusion": [[1, 2]]}, "its counts are not of its 2 labels"),
        ({"confusion": [[1], [2]]}, "its counts are not of its 2 labels"),
        ({"counts": {"right": [1]}}, "its counts are not of its 2 labels"),
    ],
)
def test_errors_of_another_shape_are_refused_with_what_to_do(content: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"errors\.json: .*{said}.*; delete it"):
        read_errors(_errors(tmp_path, **content))
