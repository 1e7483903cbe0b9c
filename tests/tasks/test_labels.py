"""The classes of one's own table, and what is said of them beside a score, since it changes what the score means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from overnight.errors import DataError
from overnight.tasks.tables import load_table


def _notes(folder: Path, train: list[str], dev: list[str] | None = None) -> tuple[str, ...]:
    for name, labels in (("train", train), ("dev", dev)):
        if labels is not None:
            (folder / f"{name}.tsv").write_text(" text\tlabel \r\n" + "".join(f"{name} {i}\t{label}\r\n" for i, label in enumerate(labels)))
    return load_table(folder).notes


def test_a_class_of_which_no_row_is_scored_is_named(tmp_path: Path) -> None:
    train = ["x", "y"] * 20 + ["rare"]
    assert _notes(tmp_path, train) == (
        "scored on 4 rows split off train.tsv by a hash of their texts, of each class alike",
        "no row to score on has 1 class of 3: rare",
    )
    assert _notes(tmp_path, train, ["y"]) == ("no row to score on has 2 classes of 3: rare, x",)
    assert _notes(tmp_path, train, ["rare", "x", "y"]) == ()


@pytest.mark.parametrize(
    ("labels", "said"),
    [(["pos", "POS"], "'POS' and 'pos'"), (["1", "1.0"], "'1' and '1.0'"), (["a b", "a  b"], "'a  b' and 'a b'"), (["1", "2"], "")],
)
def test_classes_that_are_written_nearly_alike_are_named(labels: list[str], said: str, tmp_path: Path) -> None:
    notes = _notes(tmp_path, labels * 5, labels)
    assert notes == ((f"{said} are different classes, though written nearly alike",) if said else ())


def test_whole_numbers_in_a_list_are_classes_as_they_are_in_a_cell(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"text": f"t{i}", "labels": [27, i % 2]}) + "\n" for i in range(20)))
    read = load_table(path)
    assert read.labels == ("0", "1", "27") and {row.label for row in read.train} == {("27", "0"), ("27", "1")}
    path.write_text('{"text": "a", "labels": [0.5]}\n')
    with pytest.raises(DataError, match=r"t\.jsonl:1: column 'labels' is \[0\.5\], not a list of texts"):
        load_table(path)


def test_rows_that_all_have_the_same_classes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("text,labels\n" + "".join(f"t{i},{'x|y' if i % 2 else 'y|x'}\n" for i in range(20)))
    with pytest.raises(DataError, match=r"every training row has the same classes \(x, y\); there is nothing to learn"):
        load_table(tmp_path / "t.csv")


def test_a_table_whose_classes_have_one_text_each_cannot_be_split(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("text,label\n" + "".join(f"t{i},c{i}\n" for i in range(30)))
    with pytest.raises(DataError, match="none of the 30 classes has two texts, one to train on and one to split off"):
        load_table(tmp_path / "t.csv")


def test_numbers_that_are_all_the_same_are_noted(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("text,score\n" + "".join(f"t{i},3.0\n" for i in range(20)))
    assert load_table(tmp_path / "t.csv").notes[1:] == ("every training row has score 3, so there is nothing to learn",)
