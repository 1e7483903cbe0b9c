"""One's own table: formats, columns, splits, and what is refused."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import json
import math
import random
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.config.schema import Columns
from overnight.errors import ConfigError, DataError
from overnight.tasks import tables
from overnight.tasks.classification import load_task
from overnight.tasks.examples import TaskData, drawn, in_validation, split_off, strata
from overnight.tasks.inputs import Broken, read_input

ROWS = [(f"text number {i}, with a comma", "good" if i % 3 else "bad") for i in range(200)]


def _write(path: Path, rows: list[tuple[str, str]], target: str = "label") -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        if path.suffix == ".jsonl":
            file.writelines(json.dumps({"text": text, target: label, "other": [1]}) + "\n" for text, label in rows)
        elif path.suffix == ".tsv":
            file.write(f"text\t{target}\n" + "".join(f"{text}\t{label}\n" for text, label in rows))
        else:
            csv.writer(file).writerows([("text", target), *rows])
    return path


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl"])
def test_a_table_is_the_same_task_in_every_format(ending: str, tmp_path: Path) -> None:
    read = load_task("csv", _write(tmp_path / f"mine{ending}", ROWS))
    assert read.kind == "classification" and read.labels == ("bad", "good") and read.main_metric == "accuracy"
    assert sorted((r.text_a, r.label) for r in read.train + read.dev) == sorted(ROWS)
    assert 5 <= len(read.dev) <= 40 and read.notes[0].startswith(f"scored on {len(read.dev)} rows split off")


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl"])
def test_a_table_is_read_once(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = _write(tmp_path / f"mine{ending}", ROWS), list[Path]()
    real = tables.read_text
    monkeypatch.setattr(tables, "read_text", lambda path: (read.append(path), real(path))[1])
    load_task("csv", path)
    assert read == [path]


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl"])
def test_lines_may_end_in_a_carriage_return_alone(ending: str, tmp_path: Path) -> None:
    path = _write(tmp_path / f"mine{ending}", ROWS)
    wanted = load_task("csv", path)
    path.write_bytes(path.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r"))
    assert load_task("csv", path) == wanted


def test_files_named_by_split_are_the_splits_and_test_labels_are_optional(tmp_path: Path) -> None:
    _write(tmp_path / "train.csv", ROWS)
    _write(tmp_path / "valid.tsv", ROWS[:3])
    (tmp_path / "test.jsonl").write_text('{"text": "unlabeled", "id": 7}\n')
    read = load_task("csv", tmp_path)
    assert (len(read.train), len(read.dev), read.is_dev_made) == (200, 3, False)
    assert read.notes == ("the text of 3 of 3 rows to score on is also trained on, so their score says little about others",)
    assert [(r.id, r.text_a, r.label) for r in read.test] == [("7", "unlabeled", None)]


def test_files_named_by_split_may_be_in_capitals(tmp_path: Path) -> None:
    _write(tmp_path / "train.csv", ROWS).rename(tmp_path / "train.CSV")
    _write(tmp_path / "dev.tsv", ROWS[:3]).rename(tmp_path / "DEV.TSV")
    assert [len(part) for part in (load_task("csv", tmp_path).train, load_task("csv", tmp_path).dev)] == [200, 3]
    _write(tmp_path / "train.tsv", ROWS)
    with pytest.raises(DataError, match=r"holds train\.CSV and train\.tsv; keep one file for train"):
        load_task("csv", tmp_path)


def test_pairs_and_scores_make_a_regression_on_pairs(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("text_a,text_b,score\n" + "".join(f"a{i},b{i},{i / 10}\n" for i in range(50)))
    read = load_task("csv", tmp_path / "t.csv")
    assert read.kind == "regression" and read.labels == () and read.main_metric == "spearman"
    assert {(r.text_a, r.text_b, r.label) for r in read.train + read.dev} == {(f"a{i}", f"b{i}", i / 10) for i in range(50)}


@pytest.mark.parametrize("second", [{}, {"text_b": None}])
def test_a_second_text_that_the_first_row_of_json_lacks_is_not_lost_for_the_others(second: dict[str, None], tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"text_a": "a", "label": i % 2, **({"text_b": "b"} if i else second)}) + "\n" for i in range(20)))
    with pytest.raises(DataError, match=r"t.jsonl:1: column 'text_b' is missing, null, or a list or an object \(there are text_a, label\)"):
        load_task("csv", path)
    first, *others = (content for _, content in filter(None, read_input(str(path), {"task": "csv"})))
    assert first == {"id": "0", "text_a": "a"} and [row["text_b"] for row in others if isinstance(row, dict)] == ["b"] * 19


def test_equal_texts_are_never_on_both_sides_of_the_split_and_the_seed_chooses(tmp_path: Path) -> None:
    path = _write(tmp_path / "t.csv", ROWS + ROWS)
    first, second = load_task("csv", path, seed=0), load_task("csv", path, seed=1)
    assert not {r.text_a for r in first.train} & {r.text_a for r in first.dev}
    assert {r.text_a for r in first.dev} != {r.text_a for r in second.dev}
    assert [r.id for r in load_task("csv", path, seed=0).dev] == [r.id for r in first.dev]


@given(st.lists(st.text(max_size=20), min_size=1, max_size=10), st.text(max_size=20))
def test_adding_rows_never_moves_a_row_to_the_other_side(texts: list[str], more: str) -> None:
    before = [in_validation(t, 3) for t in texts]
    assert [in_validation(t, 3) for t in [more, *texts]][1:] == before
    assert not any(in_validation(t, 3, share=0.0) for t in texts) and all(in_validation(t, 3, share=1.0) for t in texts)


def test_the_validation_share_is_a_tenth() -> None:
    count = sum(in_validation(str(i), 0) for i in range(20_000))
    assert abs(count - 2000) < 4 * (20_000 * 0.1 * 0.9) ** 0.5


BAD = {
    "no text column": ("t.csv", "words,label\na,1\n", r"columns words, label; name the text `text`"),
    "no target": ("t.csv", "text,class\na,1\n", r"columns text, class; name the classes `label`, or the numbers `score`"),
    "both targets": ("t.csv", "text,label,score\na,1,2\n", r"one of these"),
    "empty text": ("t.csv", "text,label\na,1\n ,2\n", r"t\.csv:3: column 'text' is empty"),
    "empty label": ("t.tsv", "text\tlabel\na\t1\nb\t\n", r"t\.tsv:3: column 'label' is empty$"),
    "empty labels": ("t.tsv", "text\tlabel\na\t1\nb\t\nc\t\n", r"t\.tsv:3: column 'label' is empty, as in 2 of 3 rows"),
    "semicolons": ("t.csv", "text;label\na;1\n", r"t\.csv:1: 'text;label' is one column; those of a \.csv are separated by commas"),
    "commas in tabs": ("t.tsv", "text,label\na,1\n", r"t\.tsv:1: 'text,label' is one column; those of a \.tsv are separated by tabs"),
    "a key twice": ("t.jsonl", '{"text": "a", "label": "x", "label": "y"}\n', r"t\.jsonl:1: has the key 'label' twice"),
    "comma without quotes": ("t.csv", "text,label\na,1\nb,c,2\n", r"t\.csv:3: 3 fields where 2 belong: text, label; quote"),
    "line after a quoted line break": ("t.csv", 'text,label\n"a\nb",1\nc\n', r"t\.csv:4: 1 fields"),
    "not json": ("t.jsonl", '{"text": "a", "label": "x"}\n{"text": \n', r"t\.jsonl:2: is not JSON"),
    "json but no object": ("t.jsonl", "[1]\n", r"t\.jsonl:1: is a list"),
    "json field absent": (
        "t.jsonl",
        '{"text": "a", "label": "x"}\n{"label": "y"}\n',
        r"2: column 'text' is missing, null, .* \(there are label\)",
    ),
    "a label of several": (
        "t.jsonl",
        '{"text": "a", "label": "x"}\n{"text": "b", "label": ["x", "y"]}\n',
        r"t\.jsonl:2: column 'label' is missing, null, or a list .*\(there are text\); several classes .* \(--columns\.labels=label\)",
    ),
    "labels of several": ("t.jsonl", '{"text": "a", "label": ["x"]}\n', r"columns text \(lists and objects, which are not read, apart\)"),
    "score is no number": ("t.csv", "text,score\na,1\nb,many\n", r"t\.csv:3: score 'many' is not a number"),
    "score is a code": ("t.csv", "text,score\na,1\nb,2020_1\n", r"t\.csv:3: score '2020_1' is not a number"),
    "score is infinite": ("t.csv", "text,score\na,1\nb,inf\n", r"t\.csv:3: score 'inf' is not finite"),
    "score is huge": ("t.csv", "text,score\na,1\nb,-2e37\n", r"t\.csv:3: score '-2e37' is larger than a network can answer"),
    "id twice": ("t.csv", "id,text,label\n1,a,x\n1,b,y\n", r"t\.csv:3: id '1' was used before"),
    "another ending": ("t.xls", "text,label\n", r"t\.xls: a table ends in \.csv, \.tsv, \.jsonl"),
    "no rows": ("t.csv", "text,label\n", r"t\.csv: holds no rows"),
    "nothing": ("t.csv", "", r"t\.csv: holds no rows"),
    "a column twice": ("t.csv", "text,label,label\na,x,y\nb,y,x\n", r"t\.csv:1: has 2 columns called 'label'; which one is meant"),
    "a column twice in tabs": ("t.tsv", "text\ttext\tlabel\na\tb\tx\nb\tc\ty\n", r"t\.tsv:1: has 2 columns called 'text'"),
    "a quotation mark that never ends": ("t.csv", 'text,label\n"a,x\nb,y\n', r"t\.csv:2: .*inside a quoted text is written twice"),
    "too few to split": (
        "t.csv",
        "text,label\na,x\nb,y\n",
        r"none of the 2 classes has two texts.*, as dev\.\* and train\.\* in a folder",
    ),
    "half a character": (
        "t.jsonl",
        '{"text": "a\\ud83d", "label": "x"}\n',
        r"t\.jsonl:1: column 'text' is no text: .*half of a surrogate pair",
    ),
    "half a character of a label": ("t.jsonl", '{"text": "a", "label": "\\ud83d"}\n', r"t\.jsonl:1: column 'label' is no text"),
    "half a character in a list": (
        "t.jsonl",
        '{"text": "a", "labels": ["\\ud83d"]}\n',
        r"t\.jsonl:1: column 'labels' is .*, not a list of texts",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_table_is_refused_with_its_place(case: str, tmp_path: Path) -> None:
    name, text, message = BAD[case]
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        load_task("csv", tmp_path / name)


def test_columns_may_have_other_names(tmp_path: Path) -> None:
    rows = "".join(f"{i},body {i},answer {i},{i % 2},{i / 10}\n" for i in range(60))
    path = tmp_path / "t.csv"
    path.write_text("key,body,reply,stars,grade\n" + rows)

    def read(**names: str) -> TaskData:
        return load_task("csv", path, columns=Columns(**names))

    single, pairs = read(text="body", label="stars", id="key"), read(text="body", text_b="reply", score="grade")
    assert (single.kind, single.labels) == ("classification", ("0", "1")) and pairs.kind == "regression"
    assert {(r.id, r.text_a, r.text_b, r.label) for r in single.train + single.dev} == {
        (str(i), f"body {i}", None, str(i % 2)) for i in range(60)
    }
    assert {(r.text_a, r.text_b, r.label) for r in pairs.train + pairs.dev} == {(f"body {i}", f"answer {i}", i / 10) for i in range(60)}
    for names, message in (
        (
            {"text": "bdoy", "label": "stars"},
            "columns key, body, reply, stars, grade, and no 'bdoy' .did you mean 'body'.., which columns.text",
        ),
        ({"text": "body"}, "or say which it is: --columns.label="),
        ({"label": "stars"}, "or say what they are called: --columns.text="),
        ({"text_b": "reply", "label": "stars"}, "name the first text of a pair with --columns.text="),
    ):
        with pytest.raises(DataError, match=message):
            read(**names)


def test_words_with_tags_are_no_table(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"tokens": ["a"], "tags": ["O"]}\n')
    with pytest.raises(DataError, match=r"t.jsonl: has no column of texts or numbers; words with tags are --task=tokens"):
        load_task("csv", tmp_path / "t.jsonl")


@pytest.mark.parametrize("names", [Columns(labels="a,b,a"), Columns(text="a", label="a"), Columns(text="b", text_b="b")])
def test_a_column_that_is_named_twice_is_refused(names: Columns, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("text,a,b\n" + "".join(f"t{i},{i % 2},{i % 3 % 2}\n" for i in range(60)))
    with pytest.raises(ConfigError, match=r"columns\.\w+ = .*: '[ab]' is named twice"):
        load_task("csv", tmp_path / "t.csv", columns=names)
    assert load_task("csv", tmp_path / "t.csv", columns=Columns(labels="a,b", id="text")).labels == ("a", "b")


def test_a_table_to_score_on_is_named_beside_that_to_train_on(tmp_path: Path) -> None:
    train, dev = _write(tmp_path / "a.csv", ROWS), _write(tmp_path / "b.tsv", ROWS[:9])
    read = load_task("csv", train, dev=dev)
    assert (len(read.train), len(read.dev)) == (200, 9) and not read.is_dev_made
    with pytest.raises(DataError, match=r"nowhere\.csv: cannot be read"):
        load_task("csv", train, dev=tmp_path / "nowhere.csv")


def test_rows_of_many_sets_of_classes_are_split_off_and_drawn_with_each_class_in_its_share(tmp_path: Path) -> None:
    chance, names = random.Random(0), [f"c{i}" for i in range(14)]
    sets = [[] if chance.random() < 0.6 else [name for name in names if chance.random() < 0.4] for _ in range(1000)]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {i}", "labels": each}) + "\n" for i, each in enumerate(sets)))
    read = load_task("csv", path)
    fewer = [read.train[i] for i in drawn([row.text_a for row in read.train], 200, 0, strata(read.train))]
    assert (len(read.train), len(read.dev), len(fewer)) == (900, 100, 200)
    for part in (read.train, read.dev, fewer):
        empty, classes = sum(not row.label for row in part) / len(part), sum(len(row.label) for row in part) / len(part)  # type: ignore[arg-type]
        assert empty == pytest.approx(sum(not each for each in sets) / 1000, abs=0.05)
        assert classes == pytest.approx(sum(map(len, sets)) / 1000, abs=0.3)
    # Every set is another one.
    path.write_text(
        "".join(json.dumps({"text": f"row {i}", "labels": [f"c{j}" for j in range(9) if (i + 1) >> j & 1]}) + "\n" for i in range(300))
    )
    assert len(load_task("csv", path).dev) == 30


def test_one_class_and_too_many_classes_are_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "t.csv", [(text, "same") for text, _ in ROWS])
    with pytest.raises(DataError, match="every training row has label 'same'"):
        load_task("csv", path)
    path = _write(tmp_path / "t.csv", [(f"t{i}", str(i)) for i in range(2000)])
    with pytest.raises(DataError, match="different labels; call the column `score`"):
        load_task("csv", path)


def test_a_label_that_training_lacks_two_files_of_a_split_and_no_train_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has none of train\.csv"):
        load_task("csv", tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        load_task("csv", tmp_path / "nowhere")
    _write(tmp_path / "train.csv", ROWS)
    _write(tmp_path / "dev.csv", [("new", "unseen")])
    with pytest.raises(DataError, match=r"dev\.csv: row 0 has label 'unseen', which no training row has \(bad, good\)"):
        load_task("csv", tmp_path)
    _write(tmp_path / "dev.csv", [*ROWS[:3], ("new", "unseen"), ("newer", "also"), ("newest", "unseen")])
    with pytest.raises(
        DataError, match=r"row 3 has label 'unseen', .*; 3 of 6 rows have one of these: 'unseen', 'also'\. Take such rows out"
    ):
        load_task("csv", tmp_path)
    _write(tmp_path / "dev.tsv", ROWS[:3])
    with pytest.raises(DataError, match=r"holds dev\.csv and dev\.tsv"):
        load_task("csv", tmp_path)


def test_a_text_longer_than_the_csv_modules_limit_is_read_and_the_limit_is_put_back(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    long = "word " * 60_000
    read = load_task("csv", _write(tmp_path / "t.csv", [*ROWS, (long, "good")]))
    assert long.strip() in {r.text_a for r in read.train + read.dev}
    assert csv.field_size_limit() == limit


def test_a_parquet_file_is_the_same_task_as_json_lines(tmp_path: Path) -> None:
    rows = [{"id": i, "text": f"text {i}", "label": "ab"[i % 2], "when": datetime.date(2020, 1, 1), "more": [i]} for i in range(40)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({**row, "when": "2020-01-01"}) + "\n" for row in rows))
    first, second = (load_task("csv", tmp_path / f"t.{ending}") for ending in ("parquet", "jsonl"))
    assert dataclasses.replace(first, notes=()) == dataclasses.replace(second, notes=())
    assert (len(first.train), len(first.dev)) == (36, 4)
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "t.parquet").read_bytes()[:-9])
    with pytest.raises(DataError, match=r"cut\.parquet: cannot be read as Parquet"):
        load_task("csv", tmp_path / "cut.parquet")


def test_decimals_are_numbers_and_other_types_are_refused_where_they_are_named(tmp_path: Path) -> None:
    path, days, marks = tmp_path / "t.parquet", [datetime.date(2020, 1, 1 + i) for i in range(20)], [float(i % 2) for i in range(20)]
    table = {
        "text": [f"text {i}" for i in range(20)],
        "score": [Decimal(f"{i}.50") for i in range(20)],
        "day": days,
        "at": pa.array([1 + i for i in range(20)], pa.timestamp("ns")),
        "mark": [None, math.nan, *marks[2:]],
    }
    pq.write_table(pa.table(table), path)
    read = load_task("csv", path)
    assert sorted(row.label for row in read.train + read.dev) == [i + 0.5 for i in range(20)]  # type: ignore[type-var]
    refused = r"t\.parquet: has the columns text, score, mark \(and, neither texts nor numbers and so not read, day: date32\[day\], at: "
    with pytest.raises(DataError, match=refused + r".*\), and no 'day', which columns\.label names"):
        load_task("csv", path, columns=Columns(label="day"))
    # Neither nothing nor NaN is a class, in whatever row it stands.
    with pytest.raises(DataError, match=r"t\.parquet:1: column 'mark' is missing"):
        load_task("csv", path, columns=Columns(label="mark"))
    pq.write_table(pa.table({name: values[1:] for name, values in table.items()}), path)
    with pytest.raises(DataError, match=r"t\.parquet:1: column 'mark' is missing"):
        load_task("csv", path, columns=Columns(label="mark"))
    pq.write_table(pa.table({"score": marks, "text": days}), path)
    with pytest.raises(DataError, match=r"has the columns score \(and, .* text: date32\[day\]\); rename the one with the texts to `text`"):
        list(read_input(str(path), {"task": "csv"}))


def test_an_empty_text_in_the_first_row_of_a_parquet_file_costs_that_row_alone(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [None, "b"]}), tmp_path / "t.parquet")
    first, second = (content for _, content in filter(None, read_input(str(tmp_path / "t.parquet"), {"task": "csv"})))
    assert isinstance(first, Broken) and second == {"id": "1", "text_a": "b"}


@pytest.mark.parametrize("how", ["list", "joined", "columns", "json in csv"])
def test_several_classes_of_a_row_are_a_list_a_joined_cell_or_columns(how: str, tmp_path: Path) -> None:
    sets: list[list[str]] = [["a"], [], ["a", "b, c"], ["b, c"]] * 10
    names = Columns()
    path = tmp_path / ("t.jsonl" if how == "list" else "t.csv")
    if how == "list":
        path.write_text("".join(json.dumps({"text": f"t{i}", "labels": each}) + "\n" for i, each in enumerate(sets)))
    else:
        cells = {
            "joined": lambda each: ["|".join(each)],
            "json in csv": lambda each: [json.dumps(each)],
            "columns": lambda each: [int("a" in each), str("b, c" in each).lower()],
        }[how]
        with path.open("w", newline="") as file:
            head = ["a", "b+c"] if how == "columns" else ["labels"]
            csv.writer(file).writerows([["text", *head], *([f"t{i}", *cells(each)] for i, each in enumerate(sets))])
    if how == "columns":
        names = Columns(labels="a,b+c")
    read = load_task("csv", path, columns=names)
    other = "b+c" if how == "columns" else "b, c"
    assert (read.kind, read.labels, read.main_metric) == ("multi_label", ("a", other), "micro_f1")
    found = {int(r.text_a[1:]): r.label for r in read.train + read.dev}
    assert [found[i] for i in range(40)] == [tuple(other if label == "b, c" else label for label in each) for each in sets]
    assert sorted(map(str, (r.label for r in read.dev))) == sorted(map(str, [("a",), (), ("a", other), (other,)]))  # of each alike


@pytest.mark.parametrize(
    ("name", "text", "names", "message"),
    [
        ("t.jsonl", '{"text": "a", "labels": ["x"]}\n{"text": "b"}\n', Columns(), r"t\.jsonl:2: column 'labels' is missing"),
        (
            "t.jsonl",
            '{"text": "a", "labels": ["x", 3.5]}\n',
            Columns(),
            r't\.jsonl:1: column \'labels\' is \["x", 3\.5\], not a list of texts',
        ),
        ("t.csv", 'text,labels\na,"[x"\n', Columns(), r"t\.csv:2: column 'labels' is not a JSON list"),
        ("t.csv", "text,x,y\na,1,0\nb,2,0\n", Columns(labels="x,y"), r"t\.csv:3: column 'x' is '2', where 0 or 1 says"),
        ("t.csv", "text,x,y\na,1,\n", Columns(labels="x,y"), r"t\.csv:2: column 'y' is empty"),
        ("t.csv", "text,x,y\na,1,0\n", Columns(labels="x,z"), "no 'z', which columns.labels names"),
        ("t.csv", "text,labels\na,\nb,\n", Columns(), "no training row has a label"),
    ],
)
def test_bad_classes_of_a_row_are_refused_with_their_place(name: str, text: str, names: Columns, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        load_task("csv", tmp_path / name, columns=names)


@given(st.lists(st.integers(0, 30), min_size=4, max_size=80), st.integers(0, 5), st.floats(0.05, 0.95))
def test_what_is_split_off_has_each_label_in_its_share_and_leaves_one_of_each(texts: list[int], seed: int, share: float) -> None:
    labels = ["c" if text % 5 == 0 else "ab"[text % 2] for text in texts]
    words, by_label = (
        [str(text) for text in texts],
        {label: {t for t, of in zip(texts, labels, strict=True) if of == label} for label in labels},
    )
    if all(len(found) == 1 for found in by_label.values()):
        return
    rows = split_off(words, labels, seed, share, "")
    taken = {texts[i] for i in rows}
    assert not taken & {text for i, text in enumerate(texts) if i not in rows}
    assert all(found - taken for found in by_label.values())
    mixed = sorted(range(len(texts)), key=lambda i: (texts[i] * 7) % 31)
    again = split_off([words[i] for i in mixed], [labels[i] for i in mixed], seed, share, "")
    assert {texts[mixed[i]] for i in again} == taken
    if share <= 0.5 and len(taken) > len(by_label):
        assert all(abs(len(found & taken) - share * len(found)) <= 2 for found in by_label.values())
