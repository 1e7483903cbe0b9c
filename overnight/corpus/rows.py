"""Documents of rows with named columns: JSON lines, comma- and tab-separated tables, Parquet; reviews of Amazon by the names of all its data sets."""

from __future__ import annotations

import csv
import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import IO, Any

from overnight.config import Data
from overnight.corpus import decompress
from overnight.corpus.csv_cells import SEPARATOR_ROW, next_cells
from overnight.corpus.decompress import TruncatedError
from overnight.corpus.document import Document, Input, OpenFile
from overnight.corpus.plain_text import lines
from overnight.errors import DataError
from overnight.state_files import is_text

# Numbers beyond have no place in 32 bits.
_MAX_LABEL = 3.4e38
# What the data sets of 2014 and 2018 call what that of 2023 calls text, title and rating (McAuley et al. 2015, Ni et al. 2019, Hou et al. 2024).
_NEW = {"text": "reviewText", "title": "summary", "rating": "overall"}
_REVIEW = {**_NEW, **{old: new for new, old in _NEW.items()}}
# Rows of a Parquet file in memory at once, and what is read of it in one go; pyarrow would fetch all of a column of a row group before (`pre_buffer`).
_ROWS, _BUFFER = 1000, 1 << 20


def read_json_lines(file: OpenFile) -> Iterator[Document]:
    """Yield the text of each JSON object, with its label and group where they are asked for."""
    for number, line in lines(file, are_rows=True):
        if not line.strip():
            continue
        found = _json_row(line, file)
        if isinstance(found, Document):
            yield found
        else:
            file.skip(number, found)


def read_csv(file: OpenFile) -> Iterator[Document]:
    """Yield the text of each row of a comma-separated table with a header and double quotes (RFC 4180)."""
    yield from _table(file, _csv_rows(file))


def read_tsv(file: OpenFile) -> Iterator[Document]:
    """Yield the text of each row of a tab-separated table with a header, in which a quotation mark is a character like any other."""
    yield from _table(file, ((number, 1, line.split("\t")) for number, line in lines(file, are_rows=True) if line))


def read_parquet(file: OpenFile) -> Iterator[Document]:
    """Yield the text of each row of a Parquet file, some rows at a time, whatever the size of its row groups."""
    with decompress.seekable(file.stream, file.name) as stream:
        yield from _parquet_rows(file, stream)


def document_of(file: Input, number: int, row: Mapping[str, Any]) -> Iterator[Document]:
    """Yield the document of a row, or count it as one that cannot be used."""
    found = _document(row, file)
    if isinstance(found, str):
        file.skip(number, found)
    elif len(found.text) > file.max_bytes:
        file.skip(number, f"has more than {file.max_bytes >> 20} MB of text")
    else:
        yield found


def wanted_columns(data: Data) -> set[str]:
    """Return every name that a column to be read may have."""
    keys = {data.field, *data.field.split("+"), data.label, data.group_field}
    return keys | {_REVIEW.get(key, key) for key in keys} | {"asin", "overall", "rating"}


def check_columns(file: Input, columns: Iterable[str]) -> None:
    """Check that a table has the column of the text, or all whose texts are joined.

    Raises:
        DataError: naming those there are.
    """
    row = dict.fromkeys(columns, "there")
    wanted = [file.data.field] if file.data.field in row else file.data.field.split("+")
    if absent := next((key for key in wanted if not _value(row, key)), ""):
        # Of a table without a header they are texts.
        names = [textwrap.shorten(name, 60, placeholder=" ...") for name in list(row)[:20]]
        hint = "data.field names the one to read"
        if len(row) == 1 and (mark := next((mark for mark in "\t;" if mark in next(iter(row))), "")):
            hint = (
                "they are separated by tabs: set data.format=tsv"
                if mark == "\t"
                else "they are separated by semicolons: write the table with commas"
            )
        raise DataError(f"{file.name}: has no column {absent!r}; its columns are: {', '.join(names)} ({hint})")


def _parquet_rows(file: OpenFile, stream: IO[bytes]) -> Iterator[Document]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    head = stream.read(4)
    stream.seek(0)
    try:
        table = pq.ParquetFile(stream, buffer_size=_BUFFER, pre_buffer=False)
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        # What begins as Parquet and does not end as it was cut.
        if b"PAR1".startswith(head) and ("footer" in str(error) or "smaller than" in str(error) or "file size is 0" in str(error)):
            raise TruncatedError(
                f"{file.name}: the Parquet file ends early; what it holds is listed at its end, so nothing of it can be read"
            ) from None
        raise DataError(f"{file.name}: is not Parquet or is damaged ({error}); get it again") from None
    columns = table.schema_arrow.names
    check_columns(file, columns)
    wanted = [name for name in columns if name in wanted_columns(file.data)]
    number = 0
    try:
        for batch in table.iter_batches(_ROWS, columns=wanted, use_threads=False):
            for row in batch.to_pylist():
                number += 1
                yield from document_of(file, number, row)
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise DataError(f"{file.name}: is damaged behind row {number} ({error}); get it again") from None


def _csv_rows(file: OpenFile) -> Iterator[tuple[int, int, list[str]]]:
    """Yield rows with the number of the line on which each begins, and how many it spans; broken ones are counted."""
    began = opened = 0

    def followed() -> Iterator[str]:
        """Yield lines, and remember of a row of several on which its quotation mark was opened."""
        nonlocal opened
        for number, line in lines(file):
            yield f"{line}\n"
            if number >= began and (marks := line.replace('""', "").count('"')):
                opened = number if bool(opened) != bool(marks % 2) else 0

    reader = csv.reader(followed(), strict=True)
    while True:
        began, opened = reader.line_num + 1, 0
        try:
            cells = next_cells(reader, file.max_bytes)
        except csv.Error as error:
            # The lines behind a quotation mark that is not closed are lost with its row.
            span = reader.line_num - began + 1
            more = f", up to line {reader.line_num:,}: close the quotation mark of line {opened or began:,}" if span > 1 else ""
            file.skip(began, f"is not a row of comma-separated values ({error}){more}; one inside a quoted text is written twice", span)
            continue
        if cells is None:
            return
        if cells and (began > 1 or cells != SEPARATOR_ROW):
            yield began, reader.line_num - began + 1, cells


def _table(file: OpenFile, rows: Iterator[tuple[int, int, list[str]]]) -> Iterator[Document]:
    """Yield the documents of rows, the first of which names the columns; each comes with its first line and how many it spans."""
    _, _, columns = next(rows, (0, 0, []))
    if not columns:
        return
    columns = [column.strip() for column in columns]
    if twice := next((column for column in columns if column and columns.count(column) > 1), ""):
        raise DataError(f"{file.name}:1: has two columns {twice!r}; rename one")
    check_columns(file, columns)
    hint = (
        "quote texts that hold a comma" if file.data.format == "csv" or file.name.lower().endswith(".csv") else "a text cannot hold a tab"
    )
    for number, span, cells in rows:
        if len(cells) != len(columns):
            where = f", up to line {number + span - 1:,}," if span > 1 else ""
            file.skip(
                number, f"has{where} {len(cells)} fields where the header has {len(columns)}: {', '.join(columns[:12])} ({hint})", span
            )
            continue
        row: dict[str, Any] = dict(zip(columns, cells, strict=True))
        # A column may be without a name, as the index that pandas writes.
        for key in filter(None, (file.data.label, _REVIEW.get(file.data.label))):
            if key in row:
                row[key] = _number(row[key])
        yield from document_of(file, number, row)


def _number(cell: str) -> float | str | None:
    """Return the number that a cell holds, None of an empty one, or what is there instead."""
    if "_" in cell:  # Python's own numbers may have it between digits
        return cell
    try:
        return float(cell) if cell.strip() else None
    except ValueError:
        return cell


def _json_row(line: str, file: Input) -> Document | str:
    """Return the document of a line, or what is wrong with it."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"is not JSON ({error})"
    if not isinstance(row, dict):
        return "is not a JSON object"
    data, found = file.data, _document(row, file)
    if isinstance(found, Document) and "\\u" in line and not is_text(found.text):
        if data.encoding_errors == "strict":
            return f"has half a surrogate pair in {data.field!r}"
        return found._replace(text=found.text.encode("utf-8", "replace").decode())
    return found


def _document(row: Mapping[str, Any], file: Input) -> Document | str:
    """Return the document of a row, or what is wrong with it; keys that `data.field` joins and the row lacks are counted."""
    data = file.data
    text = _text(row, data.field)
    label = _value(row, data.label) if data.label else None
    group = _value(row, data.group_field) if data.group_field else None
    if text is None:
        return f"has no text in {data.field!r}; its keys are: {', '.join(list(row)[:12])} (data.field names the one to read)"
    if isinstance(label, Decimal):  # of a Parquet file
        label = float(label)
    if label is not None and (not isinstance(label, int | float) or isinstance(label, bool) or not abs(label) <= _MAX_LABEL):
        return f"has no finite number in {data.label!r} but {label!r:.40} (data.label names it; null or no such key is no label)"
    if group is not None and (not isinstance(group, str | int) or isinstance(group, bool)):
        return f"has no text or whole number in {data.group_field!r} but {group!r:.40} (data.group_field names it)"
    for key in data.field.split("+") if "+" in data.field and data.field not in row else ():
        if not isinstance(_value(row, key), str):
            file.source.without[key] = file.source.without.get(key, 0) + 1
    return Document(text, None if label is None else float(label), group="" if group is None else str(group))


def _text(row: Mapping[str, Any], field: str) -> str | None:
    """Return the text of a row: of one key, or of several, a paragraph each."""
    if isinstance(text := _value(row, field), str):
        return text
    if "+" in field and field not in row:
        parts = [part for key in field.split("+") if isinstance(part := _value(row, key), str)]
        if parts:
            return "\n\n".join(part for part in parts if part.strip())
    # Who rates a product need not write anything; that is no broken line, and too short to be kept.
    review = "asin" in row and ("overall" in row or "rating" in row) and set(field.split("+")) <= _REVIEW.keys()
    return "" if review and text is None else None


def _value(row: Mapping[str, Any], key: str) -> Any:
    """Return what a row has under a key; of a review of Amazon also under the name that other years have for it."""
    return row.get(key) if key in row or "asin" not in row else row.get(_REVIEW.get(key, key))
