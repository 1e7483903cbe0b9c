"""A table to be answered is read by the columns of the task; what is not in them is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from overnight.byte_lm.features import read_texts
from overnight.errors import ConfigError, DataError
from overnight.tasks.classification import load_task
from overnight.tasks.inputs import Broken, read_input
from overnight.tasks.squad import question_lines


def rows(path: Path, task: str, **columns: str) -> list[dict[str, Any]]:
    """What is to be answered of a table in which nothing is wrong."""
    found = []
    for row in read_input(str(path), {"task": task, "columns": columns}):
        assert row is not None and not isinstance(row[1], str)
        if isinstance(row[1], Broken):
            raise row[1].why
        found.append(row[1])
    return found


@pytest.mark.parametrize(
    ("task", "folder", "file"),
    [
        ("cola", "glue/CoLA", "dev.tsv"),
        ("mrpc", "glue/MRPC", "dev.tsv"),
        ("rte", "glue/RTE", "dev.tsv"),
        ("stsb", "glue/STS-B", "dev.tsv"),
        ("sst2", "glue/SST-2", "dev.tsv"),
        ("wnli", "glue/WNLI", "dev.tsv"),
        ("sst", "sst", "dev_binary_sent.csv"),
    ],
)
def test_the_dev_table_of_a_published_task_has_the_texts_of_its_dev_rows(task: str, folder: str, file: str, data: Path) -> None:
    wanted = load_task(task, data / folder).dev
    found = rows(data / folder / file, task)
    assert [(row["text_a"], row.get("text_b")) for row in found] == [(row.text_a, row.text_b) for row in wanted]


@pytest.mark.parametrize(
    ("header", "task", "columns", "texts"),
    [
        ("index,sentence,label", "sst2", {}, {"text_a": "b"}),
        ("id,text,label", "sst2", {}, {"text_a": "b"}),
        ("index,sentence1,sentence2", "rte", {}, {"text_a": "b", "text_b": "c"}),
        ("id,text_a,text_b", "rte", {}, {"text_a": "b", "text_b": "c"}),
        ("id,text_a,text_b", "csv", {}, {"text_a": "b", "text_b": "c"}),
        ("id,text_a,label", "csv", {}, {"text_a": "b"}),
        ("key,body,stars", "csv", {"text": "body", "id": "key"}, {"text_a": "b"}),
        ("id,left,right", "csv", {"text": "left", "text_b": "right"}, {"text_a": "b", "text_b": "c"}),
        ("id,question,context", "squad", {}, {"question": "b", "context": "c"}),
        ("id,text_a,text_b", "squad", {}, {"question": "b", "context": "c"}),
        ("id,text,label", "imdb", {}, {"text_a": "b"}),
        ("id,text,label", "mask", {}, {"text_a": "b"}),
    ],
)
def test_the_columns_are_those_of_the_task(header: str, task: str, columns: dict[str, str], texts: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text(f"{header}\na,b,c\n")
    assert rows(tmp_path / "in.csv", task, **columns) == [{"id": "a", **texts}]


@pytest.mark.parametrize("first", ["text", "text_a"])
def test_a_task_folder_of_before_finds_the_first_text_as_training_did(first: str, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text(f"{first},reply\na,b\n")
    assert rows(tmp_path / "in.csv", "csv", text_b="reply") == [{"id": "0", "text_a": "a", "text_b": "b"}]


@pytest.mark.parametrize(("task", "texts"), [("squad", "question,context"), ("sst2", "sentence,label"), ("mask", "text,label")])
def test_a_row_is_called_by_its_id_also_beside_an_index(task: str, texts: str, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text(f"index,id,{texts}\n0,first,a,b\n1,,a,b\n")
    assert [row["id"] for row in rows(tmp_path / "in.csv", task)] == ["first", "1"]


def test_a_column_called_index_names_no_row_of_an_own_table(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("index,text\n0,one\n0,two\n")
    assert [row["id"] for row in rows(tmp_path / "in.csv", "csv")] == ["0", "1"]


@pytest.mark.parametrize(
    ("form", "content"),
    [
        ("csv", 'text\none\n"two\nlines"\n\nfour,five\nthree\n'),
        ("tsv", "text\none\ntwo lines\n\nfour\tfive\nthree\n"),
        ("jsonl", '{"text": "one"}\n{"text": "two lines"}\n\n["four"]\n{"text": "three"}\n'),
    ],
)
def test_a_row_without_an_id_is_called_by_its_number_whatever_lines_it_takes(form: str, content: str, tmp_path: Path) -> None:
    (tmp_path / f"in.{form}").write_text(content)
    found = [content for _, content in filter(None, read_input(str(tmp_path / f"in.{form}"), {"task": "csv"}))]
    assert [row.id if isinstance(row, Broken) else dict(row)["id"] for row in found if not isinstance(row, str)] == ["0", "1", "2", "3"]
    assert isinstance(found[2], Broken) and f"in.{form}:{ {'csv': 6, 'tsv': 5, 'jsonl': 4}[form] }: " in str(found[2].why)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "in.csv",
            "words,label\na,b\n",
            r"in\.csv: has the columns words, label; rename the one with the texts to `sentence` or `text`$",
        ),
        ("in.tsv", "a good one\nanother\n", r"if it holds lines of text, without a line of names, give it another ending, such as \.txt"),
        ("in.csv", "text,label\n,b\n", "in.csv:2: no text in column 'text'"),
        ("in.csv", "text\na,b\n", "in.csv:2: 2 fields where 1 belong"),
        ("in.jsonl", '{"text": "a"}\n{"words": "b"}\n', r"in\.jsonl:2: has no 'text' \(it has words\)"),
        ("in.jsonl", '{"text": "a"\n', "in.jsonl:1: is not JSON"),
        ("in.csv", "", "holds no rows"),
    ],
)
def test_what_is_wrong_with_a_table_is_named(name: str, content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=said):
        rows(tmp_path / name, "sst2")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("in.csv.gz", "zcat {} | overnight predict ... --format=csv"),
        ("in.jsonl.ZST", "zstdcat {} | overnight predict ... --format=jsonl"),
        ("in.txt.bz2", "bzcat {} | overnight predict ..."),
        ("in.xz", "xzcat {} | overnight predict ..."),
        ("in.json.gz", ""),  # of one value, which is no line
        ("in.parquet.gz", ""),
    ],
)
@pytest.mark.parametrize("task", ["csv", "squad", "tokens", "mask"])
def test_a_compressed_file_is_refused_once_and_not_line_by_line(name: str, remedy: str, task: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"\x1f\x8b\n\x08\n")
    ending = f", or pipe it into `predict`: {remedy.format(path)}" if remedy else ""
    with pytest.raises(ConfigError, match=f"^{re.escape(f'{path}: is compressed by its ending; unpack it{ending}')}$"):
        list(read_input(str(path), {"task": task}))


@pytest.mark.parametrize(
    ("spec", "remedy"),
    [
        ({"task": "csv"}, r"rename the one with the texts to `text` \(of pairs: `text_a` and `text_b`\)"),
        ({"task": "csv", "pairs": False, "texts": ["body"]}, "rename the one with the texts to `body` or `text`"),
        ({"task": "csv", "pairs": True, "texts": ["left", "right"]}, "the texts of a row belong in `left` and `right`"),
        ({"task": "squad"}, "the texts of a row belong in `question` and `context`"),
    ],
)
def test_a_table_with_other_columns_is_told_how_to_name_them(spec: dict[str, Any], remedy: str, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("story,genre\na,b\n")
    with pytest.raises(DataError, match=rf"in\.csv: has the columns story, genre; {remedy}$"):
        list(read_input(str(tmp_path / "in.csv"), spec))


@pytest.mark.parametrize(
    ("name", "spec", "conll"),
    [
        ("test.conll", {}, True),
        ("test.txt", {"labels": ["B-ORG", "B-PER", "O"]}, True),
        ("test.txt", {"labels": ["B-ORG", "O"]}, False),
        ("eng.testb", {}, True),
        ("new.ner", {"path": "data/train.ner"}, True),
        ("new.ner", {"path": "data", "dev": None}, False),
        ("lines", {}, False),
    ],
)
def test_sentences_to_tag_are_read_as_training_reads_a_file_of_their_name(
    name: str, spec: dict[str, Any], conll: bool, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text("EU B-ORG\nrejects O\n\nPeter B-PER\n")
    found = [content for _, content in filter(None, read_input(str(path), {"task": "tokens", **spec}))]
    if conll:
        assert [json.loads(str(content))["tokens"] for content in found] == [["EU", "rejects"], ["Peter"]]
    lines = ["EU B-ORG\n", "rejects O\n", "\n", "Peter B-PER\n"]
    assert found == lines or conll
    assert [content for _, content in filter(None, read_input(str(path), {"task": "tokens", **spec}, "lines"))] == lines


def test_sentences_to_tag_are_no_table_and_a_text_that_is_no_conll_says_how_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("text\na word\n")
    for form in ("csv", "tsv", "parquet"):
        with pytest.raises(ConfigError, match=f"format = '{form}': sentences to tag are lines or jsonl"):
            list(read_input(str(tmp_path / "in.csv"), {"task": "tokens"}, form))
    with pytest.raises(ConfigError, match=r"in\.csv: has the ending of a table, and sentences to tag are lines"):
        list(read_input(str(tmp_path / "in.csv"), {"task": "tokens"}))
    (tmp_path / "in.tsv").write_text("Peter\tO\n")
    assert len(list(read_input(str(tmp_path / "in.tsv"), {"task": "tokens", "path": "train.tsv"}))) == 1
    (tmp_path / "in.conll").write_text("Peter came .\nHe saw it too .\n")
    with pytest.raises(DataError, match=r"in\.conll:2: .* the file is read as CoNLL; --format=lines reads each line as a sentence"):
        list(read_input(str(tmp_path / "in.conll"), {"task": "tokens"}))


@pytest.mark.parametrize(
    ("text", "conll"), [("Peter came .\n", False), ("Peter came .\nHe saw it too .\n", False), ("Peter\ncame\n\nIt\n", True)]
)
def test_a_plain_text_to_tag_has_a_sentence_a_line(text: str, conll: bool, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text(text)
    found = [content for _, content in filter(None, read_input(str(tmp_path / "in.txt"), {"task": "tokens", "labels": ["O", "B-PER"]}))]
    assert (
        [json.loads(str(content))["tokens"] for content in found] == [["Peter", "came"], ["It"]]
        if conll
        else found == text.splitlines(True)
    )


def test_the_ending_of_a_file_may_be_in_capitals(tmp_path: Path) -> None:
    table = "text,label\n" + "".join(f"row {i},{i % 2}\n" for i in range(30))
    found = []
    for ending in (".csv", ".CSV"):
        path = tmp_path / f"t{ending}"
        path.write_text(table)
        found.append((rows(path, "csv"), load_task("csv", path).train, read_texts(str(path))))
    assert found[0] == found[1] and found[0][0][0] == {"id": "0", "text_a": "row 0"}
    (tmp_path / "t.CONLL").write_text("Ada B\nwrote O\n")
    ((_, line),) = filter(None, read_input(str(tmp_path / "t.CONLL"), {"task": "tokens"}))
    assert json.loads(str(line))["tokens"] == ["Ada", "wrote"]
    questions = {"data": [{"paragraphs": [{"context": "a b", "qas": [{"id": "1", "question": "what?"}]}]}]}
    (tmp_path / "t.JSON").write_text(json.dumps(questions))
    assert len(list(question_lines(str(tmp_path / "t.JSON")) or ())) == 1


def test_other_files_are_lines_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "in.json").write_text('{"text": "a"}\nplain\n')
    assert list(read_input(str(tmp_path / "in.json"), {"task": "csv"})) == [(1, '{"text": "a"}\n'), (2, "plain\n")]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("value", [[{"text": "a"}, {"text": "b"}], {"texts": ["a"]}])
def test_a_file_that_is_one_json_value_is_no_lines_of_text(value: Any, indent: int | None, tmp_path: Path) -> None:
    (tmp_path / "in.json").write_text("\n" + json.dumps(value, indent=indent) + "\n")
    rows = read_input(str(tmp_path / "in.json"), {"task": "csv"})
    if isinstance(value, dict) and indent is None:  # the only line
        assert len(list(rows)) == 2
        return
    with pytest.raises(DataError, match=r"in\.json: is one JSON value, where each line is an object of its own; write it so, as \.jsonl"):
        list(rows)
