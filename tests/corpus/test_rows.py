"""Tables: CSV, TSV, Parquet and JSON lines give the same documents, and name what is wrong with a row."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.config import Data
from overnight.corpus.document import Document, OpenFile, Reading, Source
from overnight.corpus.formats import BY_KIND
from overnight.corpus.shards import read_table
from overnight.corpus.tasks import clean_chunk, clean_task
from overnight.errors import DataError
from tests.reading import read, texts

DATA = Path(os.environ.get("OVERNIGHT_DATA", Path(__file__).parents[2] / "../shared/data"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no real data at {DATA} (set OVERNIGHT_DATA)")
ROWS: list[dict[str, Any]] = [
    {"id": 1, "body": 'said "so", and\nleft', "stars": 4.5, "product": "B0"},
    {"id": 2, "body": "", "stars": None, "product": "B0"},
    {"id": 3, "body": "zwölf\tBoxkämpfer", "stars": 1.0, "product": "B1"},
]
NAMES = {"field": "body", "label": "stars", "group_field": "product", "tokenizer": "bytes"}


def write(folder: Path, kind: str, rows: list[dict[str, Any]] = ROWS) -> Path:
    """The rows as a file of a kind."""
    path = folder / f"x.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    elif kind == "csv":
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        cells = [list(rows[0]), *([str(cell if cell is not None else "") for cell in row.values()] for row in rows)]
        path.write_text("".join("\t".join(row) + "\n" for row in cells))
    return path


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
def test_every_kind_of_table_gives_text_label_group_and_place_of_each_row(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, kind)
    found, source = read(path, **NAMES)
    assert found == [Document(row["body"], row["stars"], f"{path}#{row['id']}", row["product"]) for row in ROWS]
    assert (source.documents, source.skipped_lines) == (3, 0)
    (tmp_path / "packed").mkdir()
    packed = tmp_path / "packed" / f"x.{kind}.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert [document.text for document in read(packed, **NAMES)[0]] == [row["body"] for row in ROWS]


def test_a_tab_separated_table_has_no_quoting(tmp_path: Path) -> None:
    (tmp_path / "x.tsv").write_text('label\ttext\n1\t"so, he said\n0\tzwölf\n')
    assert texts(tmp_path) == ['"so, he said', "zwölf"]


@given(
    st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\r\n\x85"), max_size=20) | st.just('a"b,c\nd'), min_size=1, max_size=8
    )
)
def test_a_csv_reads_back_what_the_standard_library_wrote(cells: list[str]) -> None:
    buffer = io.StringIO(newline="")
    csv.writer(buffer).writerows([["n", "text"], *([str(number), cell] for number, cell in enumerate(cells))])
    data, source = Data(format="csv"), Source("x")
    stream: Any = io.BufferedReader(io.BytesIO(buffer.getvalue().encode()))  # type: ignore[arg-type]
    assert [document.text for document in BY_KIND["csv"].read(OpenFile("x", data, source, Reading([source]), stream))] == cells


@pytest.mark.parametrize(("kind", "comma"), [("csv", ","), ("tsv", "\t")])
def test_a_column_may_be_without_a_name_as_the_index_that_pandas_writes(tmp_path: Path, kind: str, comma: str) -> None:
    (tmp_path / f"x.{kind}").write_text(
        "\n".join(comma.join(row) for row in (["", "text", "stars"], ["0", "fine", "4"], ["1", "poor", "2"]))
    )
    assert texts(tmp_path) == ["fine", "poor"]
    assert [document.label for document in read(tmp_path, label="stars", tokenizer="bytes")[0]] == [4.0, 2.0]
    (tmp_path / f"x.{kind}").write_text(
        "\n".join(comma.join(row) for row in (["text", "", ""], ["spreadsheets", "", ""], ["write", "", "x"]))
    )
    assert texts(tmp_path) == ["spreadsheets", "write"]


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet"])
def test_a_column_that_is_absent_is_refused_with_those_there_are(tmp_path: Path, kind: str) -> None:
    write(tmp_path, kind, [{"id": 1, "body": "x"}])
    with pytest.raises(DataError, match=rf"x\.{kind}: has no column 'text'; its columns are: id, body \(data\.field names"):
        read(tmp_path)
    with pytest.raises(DataError, match=rf"x\.{kind}: has no column 'titel'; its columns are: id, body \(data\.field names"):
        read(tmp_path, field="titel+body")


@pytest.mark.parametrize(
    ("content", "lines", "message"),
    [
        ("id,text\n1,a\n2,b,c\n3,d\n", 1, r"x\.csv:3: has 3 fields where the header has 2: id, text \(quote texts"),
        ("id,text\n1,a\n2\n3,d\n", 1, r"x\.csv:3: has 1 fields where"),
        ('id,text\n1,a\n2,"b\nb",c\n3,d\n', 2, r"x\.csv:3: has, up to line 4, 3 fields where"),
        ('id,text\n1,a\n2,"b"c\n3,d\n', 1, r"x\.csv:3: is not a row of comma-separated values .*written twice"),
        ('id,text\n1,"a\nb"\n2,"b"c\n3,d\n', 1, r"x\.csv:4: is not a row"),
        (
            'id,text\n1,a\n3,d\n2,"b\nnever closed\n',
            2,
            r"x\.csv:4: is not a row .*, up to line 5: close the quotation mark of line 4; one inside",
        ),
        (
            'id,text\n1,a\n3,d\n"2\n","b\n\nnever closed\n',
            4,
            r"x\.csv:4: is not a row .*, up to line 7: close the quotation mark of line 5;",
        ),
        ('id,text\n1,a\n2,"b\n2,"b"\n3,d\n', 2, r"x\.csv:3: is not a row .*, up to line 4: close the quotation mark of line 3;"),
    ],
)
def test_a_broken_row_is_named_by_its_first_line_and_counted_with_all_its_lines(
    tmp_path: Path, content: str, lines: int, message: str
) -> None:
    (tmp_path / "x.csv").write_text(content)
    for allowed in range(lines):
        with pytest.raises(DataError, match=message + f".*max_invalid_lines={allowed}"):
            read(tmp_path, max_invalid_lines=allowed)
    found, source = read(tmp_path, max_invalid_lines=lines)
    assert [document.text for document in found][-1:] == ["d"]
    assert (len(found), source.skipped_lines) == (2, lines)


def test_the_rows_behind_a_quote_that_is_never_closed_are_not_lost_as_one_line(tmp_path: Path) -> None:
    rows = "".join(f"{number},text\n" for number in range(1000))
    (tmp_path / "x.csv").write_text(f'id,text\n1,good\n2,"never closed\n{rows}')
    with pytest.raises(DataError, match=r"x\.csv:3: .*, up to line 1,003: close the quotation mark of line 3; .*max_invalid_lines=5"):
        read(tmp_path, max_invalid_lines=5)
    assert read(tmp_path, max_invalid_lines=1001)[1].skipped_lines == 1001


@pytest.mark.parametrize(("mark", "said"), [(";", "semicolons: write the table with commas"), ("\t", "tabs: set data.format=tsv")])
def test_a_table_with_other_marks_than_commas_says_so(tmp_path: Path, mark: str, said: str) -> None:
    (tmp_path / "x.csv").write_text(f"title{mark}text\nA{mark}B\n")
    with pytest.raises(DataError, match=rf"has no column 'text'; its columns are: title.text \(they are separated by {said}\)"):
        read(tmp_path)


def test_of_a_table_without_a_header_the_beginning_of_each_cell_is_shown(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text('"A text\nof lines ' + "and words " * 1000 + '",3\n')
    with pytest.raises(DataError, match=r"its columns are: A text of lines (and words )+\.\.\., 3 \(data\.field names") as raised:
        read(tmp_path)
    assert len(str(raised.value).removeprefix(str(tmp_path))) < 200


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("text,text\na,b\n")
    with pytest.raises(DataError, match=r"x\.csv:1: has two columns 'text'"):
        read(tmp_path)


def test_a_label_that_is_no_number_is_a_bad_row(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("text,stars\na,1\nb,many\nc,nan\nd,\ne,1_000\n")
    with pytest.raises(DataError, match=r"x\.csv:3: has no finite number in 'stars' but 'many'"):
        read(tmp_path, label="stars")
    found, _ = read(tmp_path, label="stars", max_invalid_lines=3)
    assert [(document.text, document.label) for document in found] == [("a", 1.0), ("d", None)]


def test_a_label_of_a_parquet_file_may_be_a_decimal_number(tmp_path: Path) -> None:
    rows = [{"text": "a", "stars": Decimal("4.50")}, {"text": "b", "stars": None}]
    found, _ = read(write(tmp_path, "parquet", rows), label="stars")
    assert [(document.text, document.label) for document in found] == [("a", 4.5), ("b", None)]


def test_a_group_is_text_or_a_whole_number(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a", "of": 7}\n{"text": "b"}\n{"text": "c", "of": [1]}\n')
    with pytest.raises(DataError, match=r"x\.jsonl:3: has no text or whole number in 'of' but \[1\]"):
        read(tmp_path, group_field="of")
    assert [document.group for document in read(tmp_path, group_field="of", max_invalid_lines=1)[0]] == ["7", ""]
    assert [document.group for document in read(tmp_path)[0]] == ["", "", ""]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_line_that_tells_excel_the_separator_is_no_row(tmp_path: Path, end: str) -> None:
    (tmp_path / "x.csv").write_text(end.join(["sep=,", "n,text", '1,"a, b"', "2,c"]), newline="")
    assert texts(tmp_path) == ["a, b", "c"]


def test_a_null_in_parquet_is_a_bad_row(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", None, "c"]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x\.parquet:2: has no text in 'text'"):
        read(tmp_path)
    assert texts(tmp_path, max_invalid_lines=1) == ["a", "c"]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_cut_parquet_file_is_truncated(tmp_path: Path, share: float) -> None:
    content = write(tmp_path, "parquet").read_bytes()
    (tmp_path / "x.parquet").write_bytes(content[: int(len(content) * share)])
    (tmp_path / "y.txt").write_text("more")
    with pytest.raises(DataError, match=r"x\.parquet: the Parquet file ends early.*on_truncated_file=keep"):
        read(tmp_path, **NAMES)
    found, source = read(tmp_path, on_truncated_file="keep", **NAMES)
    assert ([document.text for document in found], source.truncated) == (["more"], [str(tmp_path / "x.parquet")])


def test_a_damaged_parquet_file_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [f"{number} some text" for number in range(5000)]}), tmp_path / "x.parquet", compression="zstd")
    content = bytearray((tmp_path / "x.parquet").read_bytes())
    content[500:900] = bytes(400)
    (tmp_path / "x.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"x\.parquet: is damaged behind row 0 .*get it again"):
        read(tmp_path)


def test_a_text_that_is_called_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_text("Once upon a time")
    with pytest.raises(DataError, match=r"x\.parquet: is not Parquet or is damaged"):
        read(tmp_path, on_truncated_file="keep")


class Logged(io.BufferedReader):
    """A file that notes how much is asked of it."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path))
        self.asked: list[int] = []

    def read(self, size: int | None = -1) -> bytes:
        self.asked.append(-1 if size is None else size)
        return super().read(size)


def test_the_memory_for_a_parquet_file_does_not_depend_on_its_row_groups(tmp_path: Path) -> None:
    text = "some words of a text " * 500
    pq.write_table(
        pa.table({"text": [f"{number} {text}" for number in range(6000)]}), tmp_path / "x.parquet", compression="none", use_dictionary=False
    )
    assert (tmp_path / "x.parquet").stat().st_size > 60e6 and pq.ParquetFile(tmp_path / "x.parquet").num_row_groups == 1
    most = 0
    source = Source("x")
    with Logged(tmp_path / "x.parquet") as stream:
        before = pa.total_allocated_bytes()
        for _ in BY_KIND["parquet"].read(OpenFile("x", Data(), source, Reading([source]), stream)):
            most = max(most, pa.total_allocated_bytes() - before)
    assert 5e6 < most < 30e6 and min(stream.asked) > 0 and max(stream.asked) < 15e6  # a page has 10 MB


def test_an_endless_line_is_refused_before_it_fills_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenFile, "max_bytes", 1 << 20)
    (tmp_path / "x.csv").write_bytes(b'text\n"' + b"x" * (2 << 20))
    with pytest.raises(DataError, match=r"x\.csv:2: more than 1 MB in one line"):
        read(tmp_path, max_invalid_lines=1)


@pytest.mark.parametrize("kind", ["tsv", "jsonl"])
@pytest.mark.parametrize("size", [(1 << 20) + 1, (2 << 20) + 1, 5 << 20])
def test_a_row_that_is_too_long_is_counted_and_never_in_memory(
    tmp_path: Path, kind: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenFile, "max_bytes", 1 << 20)
    row = (lambda text: json.dumps({"text": text})) if kind == "jsonl" else str
    head = [] if kind == "jsonl" else ["text"]
    (tmp_path / f"x.{kind}").write_text(
        "\n".join([*head, row("before"), row("x" * size), row("behind"), "\udcff"]), "utf-8", "surrogateescape"
    )
    with pytest.raises(
        DataError, match=rf"x\.{kind}:\d: has more than 1 MB; correct it, or allow more bad lines than .*max_invalid_lines=0"
    ):
        read(tmp_path)
    where = (tmp_path / f"x.{kind}").stat().st_size - 1
    with pytest.raises(DataError, match=rf"x\.{kind}: byte {where} \(0xff\) is not UTF-8"):
        read(tmp_path, max_invalid_lines=1)
    with open(tmp_path / f"x.{kind}", "r+b") as file:
        file.truncate(where)
    found, source = read(tmp_path, max_invalid_lines=1)
    assert [document.text for document in found] == ["before", "behind"] and source.skipped_lines == 1


def test_a_quote_that_is_never_closed_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenFile, "max_bytes", 1 << 20)
    (tmp_path / "x.csv").write_bytes(b'text\n"' + (b"x" * 1000 + b"\n") * 2000)
    with pytest.raises(DataError, match=r"x\.csv:2: is not a row of comma-separated values \(field larger"):
        read(tmp_path)


def test_a_table_that_is_not_utf8_is_refused_at_its_byte(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes("text\nzwölf\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"x\.csv: byte 7 \(0xf6\) is not UTF-8"):
        read(tmp_path)


def review(year: int, text: str | None = "Fine.") -> dict[str, Any]:
    """A review with the keys of the data set of that year."""
    if year == 2023:
        return {"rating": 4.0, "title": "Good", "text": text, "images": [], "asin": "B1", "parent_asin": "B0", "user_id": "U"}
    row: dict[str, Any] = {"reviewerID": "U", "asin": "B1", "reviewText": text, "overall": 4.0, "summary": "Good"}
    row |= {"helpful": [0, 0]} if year == 2014 else {"verified": True}
    return {key: value for key, value in row.items() if value is not None}


def test_clean_chunks_have_a_column_of_groups_only_where_they_are_asked_for(tmp_path: Path) -> None:
    documents = [Document("short"), Document("long enough " * 20, group="B\udc80"), Document("also long enough " * 20)]
    for name, setting in (("with", "of"), ("without", "")):
        clean_chunk(clean_task(documents, tmp_path / name, Data(group_field=setting)))
    assert read_table(tmp_path / "with").column("group").to_pylist() == ["B\\udc80", ""]
    assert read_table(tmp_path / "without").schema.names == ["hash", "text", "name", "source"]


@pytest.mark.parametrize("kind", ["auto", "amazon"])
@pytest.mark.parametrize("year", [2014, 2018, 2023])
def test_reviews_of_amazon_need_no_names_of_fields(tmp_path: Path, kind: str, year: int) -> None:
    (tmp_path / "x.json").write_text(json.dumps(review(year)) + "\n")
    settings = {"format": kind, "label": "rating", "group_field": "asin", "tokenizer": "bytes"}
    assert read(tmp_path, **settings)[0] == [Document("Fine.", 4.0, f"{tmp_path / 'x.json'}#1", "B1")]
    for field in ("title+text", "summary+reviewText"):
        assert texts(tmp_path, field=field, format=kind) == ["Good\n\nFine."]
    assert read(tmp_path, field="reviewText", label="overall", format=kind, tokenizer="bytes")[0][0][:2] == ("Fine.", 4.0)


def test_a_review_without_text_is_short_and_no_broken_line(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(review(2018, None)) + "\n" + json.dumps(review(2018)) + "\n")
    assert texts(tmp_path) == ["", "Fine."]
    assert texts(tmp_path, field="summary+reviewText") == ["Good", "Good\n\nFine."]
    with pytest.raises(DataError, match=r"x\.json:1: has no text in 'reviewtext'; its keys are: "):
        read(tmp_path, field="reviewtext")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_without_one_of_the_joined_texts_are_counted(tmp_path: Path, kind: str) -> None:
    rows: list[dict[str, Any]] = [{"id": number, "title": None if number % 4 else "A", "body": "B"} for number in range(1, 41)]
    found, source = read(write(tmp_path, kind, rows), field="title+body")
    assert [document.text for document in found[2:5]] == ["B", "A\n\nB", "B"]
    assert source.without == {"title": 30} and list(source.lines()) == ["30 of 40 documents without 'title'"]


def test_a_joined_key_that_no_row_has_is_refused(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text(json.dumps({"title": "A", "text": "B"}) + "\n")
    second.write_text(json.dumps({"text": "C"}) + "\n")
    assert texts(first, second, field="title+text") == ["A\n\nB", "C"]
    with pytest.raises(DataError, match=r"a\.jsonl: no document has text in 'titel'; correct data\.field, or leave 'titel' out of it"):
        read(first, second, field="titel+text")


@needs_data
def test_real_reviews_of_both_years_are_read_as_they_are() -> None:
    found, _ = read(DATA / "amazon/reviews_Digital_Music_5.first6908.json", label="rating", group_field="asin", tokenizer="bytes")
    by_name = read(DATA / "amazon/reviews_Digital_Music_5.first6908.json", label="overall", field="reviewText", tokenizer="bytes")[0]
    assert len(found) == 6908 and {document.label for document in found} == {1.0, 2.0, 3.0, 4.0, 5.0}
    assert [document._replace(group="") for document in found] == by_name
    assert len({document.group for document in found}) > 100
    assert len(texts(DATA / "amazon/Appliances_5.json.gz")) == 2277
