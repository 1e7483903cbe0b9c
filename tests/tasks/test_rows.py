"""Rows come one at a time, the same as of a whole file, and what is wrong with one costs no other."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.errors import ConfigError, DataError
from overnight.tasks import inputs, rows
from overnight.tasks.inputs import Broken, Given, answered, read_input, read_lines
from overnight.tasks.rows import csv_rows, is_too_long, jsonl_rows, parquet_rows, raw_lines, text_lines, tsv_rows
from overnight.tasks.tables import read_csv, read_jsonl, read_parquet, read_tsv

CELL = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)


@given(st.lists(st.tuples(CELL, CELL), min_size=1, max_size=8))
def test_rows_of_a_csv_are_those_that_were_written(cells: list[tuple[str, str]]) -> None:
    written = io.StringIO(newline="")
    csv.writer(written, quoting=csv.QUOTE_ALL).writerows([("text", "label"), *cells])
    found = list(csv_rows(io.StringIO(written.getvalue(), newline=""), "t.csv"))
    assert [row and row[1] for row in found] == [{"text": a.strip(), "label": b.strip()} for a, b in cells]


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30), max_size=8).map("\n".join))
def test_no_line_of_a_csv_is_lost_whatever_is_wrong_with_it(content: str) -> None:
    begun = [row[0] for row in csv_rows(io.StringIO(f"text,label\n{content}", newline=""), "t.csv") if row]
    lines = list(io.StringIO(f"text,label\n{content}", newline=""))
    assert begun == sorted(set(begun)) and all(2 <= number <= len(lines) for number in begun)
    # A line that begins no row is empty, or is within the quotation marks of the row before it.
    for before, number in itertools.pairwise([*begun, len(lines) + 1]):
        assert number == before + 1 or '"' in lines[before - 1] or not any(line.strip("\r\n") for line in lines[before : number - 1])


@given(CELL, st.sampled_from(["csv", "tsv", "jsonl", "parquet"]))
def test_a_context_is_read_as_it_was_given_since_answers_are_places_in_it(context: str, form: str) -> None:
    if form == "tsv":
        context = re.sub(r"[\t\r\n]", " ", context)
    row = {"id": " a ", "question": "who?", "context": context}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"t.{form}")
        if form == "parquet":
            pq.write_table(pa.table({name: [cell] for name, cell in row.items()}), path)
        elif form == "jsonl":
            path.write_text(json.dumps(row))
        else:
            with path.open("w", newline="", encoding="utf-8") as file:
                quoting = csv.QUOTE_NONE if form == "tsv" else csv.QUOTE_ALL
                writer = csv.writer(
                    file, delimiter="\t" if form == "tsv" else ",", quoting=quoting, quotechar=None if form == "tsv" else '"'
                )
                writer.writerows([row.keys(), row.values()])
        found = [content for _, content in filter(None, read_input(str(path), {"task": "squad"}))]
        assert found == [{**row, "id": "a"}]
        trained = {"csv": read_csv, "tsv": read_tsv, "jsonl": read_jsonl, "parquet": read_parquet}[form](path)
        assert next(iter(trained))[1]["context"] == context.strip()


def test_lines_of_a_csv_may_end_in_a_carriage_return_alone(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b'text,label\ra,x\r"b\rc",y\r\nd,z')
    found = list(csv_rows(text_lines(str(tmp_path / "t.csv")), "t"))
    assert found == list(read_csv(tmp_path / "t.csv")) and [number for number, _ in filter(None, found)] == [2, 3, 5]


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.jsonl", "cola.tsv", "t.txt"])
def test_lines_to_be_answered_may_end_in_carriage_returns_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, bare = tmp_path / name, {"cola.tsv": "gj04\t1\t\tone\ngj04\t0\t*\ttwo\n", "t.txt": "one\ntwo\n"}
    content = bare.get(name, '{"text": "one"}\n{"text": "two"}\n' if name == "t.jsonl" else "text\none\ntwo\n").encode()
    spec, form = {"task": path.stem if name == "cola.tsv" else "csv"}, path.suffix[1:].replace("txt", "lines")
    path.write_bytes(content)
    expected = list(read_input(str(path), spec))
    path.write_bytes(content.replace(b"\n", b"\r"))
    assert len(expected) == 2 and list(read_input(str(path), spec)) == expected
    reading, writing = os.pipe()
    os.write(writing, path.read_bytes())
    os.close(writing)
    with open(reading, "rb") as file:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(file))
        assert list(filter(None, read_input("-", spec, form))) == expected


def test_a_carriage_return_inside_a_line_of_a_tsv_is_of_its_text(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_bytes(b"text\tlabel\none\rstill one\tx\ntwo\ty\r\n")
    found = list(tsv_rows(text_lines(str(tmp_path / "t.tsv")), "t"))
    assert (
        found == list(read_tsv(tmp_path / "t.tsv")) == [(2, {"text": "one\rstill one", "label": "x"}), (3, {"text": "two", "label": "y"})]
    )


@pytest.mark.parametrize("read", [csv_rows, tsv_rows])
def test_empty_lines_before_the_names_of_the_columns_are_none(read: Any) -> None:
    mark = "," if read is csv_rows else "\t"
    assert list(read(["\n", "\r\n", f"text{mark}label\n", f"a{mark}x\n"], "t")) == [(4, {"text": "a", "label": "x"})]


def test_a_quotation_mark_that_is_never_closed_takes_its_own_line_alone() -> None:
    content = 'text,label\n"a\nb",x\n"open,y\nc,z\nd "e",w\n"f"g,v\nh,u\n'
    found = dict(filter(None, csv_rows(io.StringIO(content, newline=""), "t.csv")))
    good = {number: cells for number, cells in found.items() if not isinstance(cells, DataError)}
    assert {n: cells["text"] for n, cells in good.items()} == {2: "a\nb", 5: "c", 6: 'd "e"', 8: "h"}
    assert [str(found[n]) for n in (4, 7)] == [
        "t.csv:4: ',' expected after '\"'; a quotation mark inside a quoted text is written twice",
        "t.csv:7: ',' expected after '\"'; a quotation mark inside a quoted text is written twice",
    ]


@pytest.fixture
def limit() -> Iterator[int]:
    """The limit of the module as it is at first; it is one for the process, in which others may have set it."""
    first = 1 << 17
    before = csv.field_size_limit(first)
    yield first
    csv.field_size_limit(before)


def test_a_text_may_be_longer_than_the_limit_of_the_module_and_a_mark_without_end_reads_no_more_than_ours(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    assert dict(filter(None, csv_rows(iter(["text\n", f'"{"a" * 2 * limit}"\n']), "t")))[2] == {"text": "a" * 2 * limit}
    monkeypatch.setattr(rows, "_LONGEST", 100)
    read = 0

    def endless() -> Iterator[str]:
        nonlocal read
        yield from ("text\n", '"open\n')
        while True:
            read += 1
            yield "a line\n"

    found = csv_rows(endless(), "t")
    number, wrong = next(filter(None, found))
    assert number == 2 and "field larger than field limit (100)" in str(wrong) and read < 20
    assert list(itertools.islice(found, 30)) == [(n, {"text": "a line"}) for n in range(3, 33)]
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize(
    ("ending", "whole"),
    [
        ("csv", lambda lines: csv_rows(lines, "t")),
        ("tsv", lambda lines: tsv_rows(lines, "t")),
        ("jsonl", lambda lines: jsonl_rows(lines, "t")),
    ],
)
def test_rows_that_arrive_are_those_of_the_whole_file(ending: str, whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = [{"text": f"é {n}\u2028, of \u0085 a row{'x' * n}", "label": str(n)} for n in range(40)]
    path = tmp_path / f"t.{ending}"
    if ending == "jsonl":
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in table)
    elif ending == "tsv":
        content = "text\tlabel\n" + "".join("\t".join(row.values()) + "\r\n" for row in table)
    else:
        content = "text,label\n" + "".join(f'"{row["text"]}",{row["label"]}\r\n' for row in table)
    path.write_bytes(b"\xef\xbb\xbf" + content.encode())
    read = {"csv": read_csv, "tsv": read_tsv, "jsonl": read_jsonl}[ending]
    expected = list(read(path))
    assert [cells for _, cells in expected] == table
    reading, writing = os.pipe()
    with open(writing, "wb") as file:
        file.write(path.read_bytes())
    monkeypatch.setattr(rows, "_CHUNK", 7)
    with open(reading, "rb") as file:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(file))
        assert list(filter(None, whole(text_lines("-")))) == expected
    assert list(whole(text_lines(str(path)))) == expected


def test_where_no_line_follows_at_once_what_came_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with open(writing, "wb", buffering=0) as pipe, open(reading, "rb") as file:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(file))
        given = read_input("-", {"task": "csv"}, "csv")
        found = answered(given, lambda number, fields: fields["text_a"], lambda texts: iter([(t, len(texts)) for t in texts]))
        pipe.write(b'text\none\ntwo\n"thr')
        assert [next(found), next(found)] == [("one", 2), ("two", 2)]
        pipe.write(b'ee"\n')
        assert next(found) == ("three", 1)
        pipe.close()
        assert list(found) == []


def test_a_standard_input_that_is_closed_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)  # what Python makes of `<&-`
    with pytest.raises(DataError, match="standard input: is closed; give a file"):
        list(read_input("-", {"task": "mask"}))


def test_no_more_is_held_of_a_line_that_is_too_long_and_the_next_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_LONGEST", 10)
    content = b"a" * 35 + b"\n" + b"b" * 9 + b"\n" + b"c" * 10 + b"\nd"
    (tmp_path / "lines").write_bytes(content)
    expected = [b"a" * 11, b"b" * 9 + b"\n", b"c" * 10 + b"\n", b"d"]
    assert list(raw_lines(str(tmp_path / "lines"))) == expected
    reading, writing = os.pipe()
    os.write(writing, content)
    os.close(writing)
    with open(reading, "rb") as file:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(file))
        found = list(filter(None, raw_lines("-")))
    assert [line[:11] for line in found] == expected and list(map(is_too_long, found)) == list(map(is_too_long, expected)) == [
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("name", "content", "broken"),
    [
        ("t.txt", "one\n{long}\nthree\n", [2]),
        ("t.csv", "text\none\n{long}\nthree\n", [3]),
        ("t.csv", 'text\n"one\n{long}\n"\nthree\n', [2, 3, 4]),
        ("t.tsv", "text\none\n{long}\nthree\n", [3]),
        ("t.jsonl", '{{"text": "one"}}\n{{"text": "{long}"}}\n{{"text": "three"}}\n', [2]),
    ],
)
def test_a_line_that_is_too_long_is_an_error_in_its_place(
    name: str, content: str, broken: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "_LONGEST", 40)
    (tmp_path / name).write_text(content.format(long="a" * 60))
    found = dict(filter(None, read_input(str(tmp_path / name), {"task": "csv"})))
    assert [number for number, given in found.items() if isinstance(given, Broken)] == broken
    assert "has more than 40 bytes, and no line may; cut the text, or if lines end in carriage returns alone" in "".join(
        str(given.why) for given in found.values() if isinstance(given, Broken)
    )
    assert "three" in str(list(found.values())[-1]) or broken[-1] == 4
    with pytest.raises(DataError, match=r"line \d: has more than 40 bytes"):
        list(read_lines(str(tmp_path / name)))


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_a_header_that_is_too_long_is_refused(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_LONGEST", 40)
    (tmp_path / f"t.{ending}").write_text("a" * 60 + "\none\n")
    with pytest.raises(DataError, match=rf"t\.{ending}:1: has more than 40 bytes"):
        list(read_input(str(tmp_path / f"t.{ending}"), {"task": "csv"}))


def test_the_line_that_tells_excel_the_separator_is_no_row(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"sep=,\r\ntext,label\r\na,x\r\n")
    assert list(read_csv(tmp_path / "t.csv")) == [(3, {"text": "a", "label": "x"})]


def test_a_parquet_file_is_read_some_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_ROWS", 4)
    asked = []
    whole = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile, "iter_batches", lambda file, n, **more: map(lambda b: asked.append(len(b)) or b, whole(file, n, **more))
    )
    pq.write_table(pa.table({"text": [f"row {n}" for n in range(20)]}), tmp_path / "t.parquet", row_group_size=10)
    found = parquet_rows(tmp_path / "t.parquet")
    assert next(found) == (1, {"text": "row 0"}) and asked == [4]
    assert len(list(found)) == 19 and sum(asked) == 20


def test_the_memory_for_a_parquet_file_does_not_depend_on_its_row_groups(tmp_path: Path) -> None:
    table = pa.table({"text": [f"{number} {'some words ' * 100}" for number in range(20_000)]})
    pq.write_table(table, tmp_path / "t.parquet", compression="none", use_dictionary=False)
    del table
    before = pa.total_allocated_bytes()
    assert max(pa.total_allocated_bytes() - before for _ in parquet_rows(tmp_path / "t.parquet")) < 12e6  # of 22 MB


def test_a_text_of_a_parquet_file_that_is_not_utf8_costs_its_row_alone(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    texts = pa.Array.from_buffers(pa.string(), 3, [None, pa.py_buffer(np.array([0, 1, 3, 4], np.int32)), pa.py_buffer(b"a\xff\xfeb")])
    pq.write_table(pa.table({"text": texts, "label": ["x", "y", "x"]}), path)
    first, bad, last = (content for _, content in filter(None, read_input(str(path), {"task": "csv"})))
    assert first == {"id": "0", "text_a": "a"} and last == {"id": "2", "text_a": "b"}
    assert isinstance(bad, Broken) and "t.parquet:2: column 'text' is no text: bytes that are not UTF-8" in str(bad.why)
    with pytest.raises(DataError, match=r"t.parquet:2: column 'text' is no text"):
        list(read_parquet(path))
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), path)
    with pytest.raises(DataError, match="has 2 columns called 'text'"):
        list(read_parquet(path))


def test_windows_begin_small_and_stay_bounded_on_rows_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, sizes = 0, []

    def endless() -> Iterator[Given]:
        nonlocal taken
        for taken in itertools.count(1):
            yield taken, {"text": f"row {taken}"}

    def answer(found: list[int]) -> Iterator[int]:
        sizes.append(len(found))
        return iter(found)

    answers = answered(endless(), lambda number, fields: number, answer)
    assert next(answers) == 1 and taken == 256
    assert list(itertools.islice(answers, 20_000)) == list(range(2, 20_002))
    assert sizes == [256, 512, 1024, 2048, 4096, 4096, 4096, 4096] and taken == sum(sizes)
    monkeypatch.setattr(inputs, "_CHARACTERS", 50)
    sizes.clear()
    assert next(answered(endless(), lambda number, fields: number, answer)) == 1 and sizes == [10]


def test_rows_of_json_may_differ_and_those_of_another_table_may_not(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"other": 1}\n{"text": "a", "id": "x"}\n{"words": "b"}\n{"text": "\\ud800"}\n')
    found = [row for row in read_input(str(tmp_path / "t.jsonl"), {"task": "csv"}) if row]
    assert [isinstance(content, Broken) for _, content in found] == [True, False, True, True]
    assert [str(content.why).split("t.jsonl")[1][:20] for _, content in found if isinstance(content, Broken)] == [
        ": has the columns ot",
        ":3: has no 'text' (i",
        ":4: is no text: byte",
    ]
    with pytest.raises(DataError, match="standard input: a Parquet file is read from its end on"):
        list(read_input("-", {"task": "csv"}, "parquet"))
    with pytest.raises(ConfigError, match="format = 'xls': is not one of csv, tsv, jsonl, parquet, lines"):
        list(read_input("-", {"task": "csv"}, "xls"))
