"""Lines and rows as they arrive, from a file or from standard input: what is wrong with a row stands in its place, and the others follow.

Of a file only what a row needs is held. Where lines come through a pipe, None stands wherever no further one has come for a while, so that what did come
can be answered.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import select
import stat
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import IO, Any

from overnight.corpus.csv_cells import SEPARATOR_ROW, next_cells
from overnight.errors import DataError
from overnight.state_files import kind_of, parse_json

Row = tuple[int, dict[str, str] | DataError]
"""The line on which a row begins (from 1), and column → text, or what is wrong with it."""

# Bytes of a line, and characters of a field: what is longer is an error, of which no more is held.
_LONGEST = 1 << 24
# Bytes of a pipe at a time.
_CHUNK = 1 << 16
# Without a further line for so long (s), what came is answered.
_PAUSE = 0.05
# Rows of a Parquet file in memory at once, and what is read of it in one go; pyarrow would fetch all of a column of a row group before (`pre_buffer`).
_ROWS, _BUFFER = 1000, 1 << 20
NO_TEXT = "is no text: bytes that are not UTF-8, or half of a surrogate pair; convert it"
_QUOTED = "a quotation mark inside a quoted text is written twice"


class LongLine(str):
    """Stands for a line of more bytes than a line may have."""

    def problem(self, where: str) -> DataError:
        """Return what is wrong with it, by where it stands."""
        how = r"cut the text, or if lines end in carriage returns alone, convert them: tr '\r' '\n'"
        return DataError(f"{where}: has more than {_LONGEST:,} bytes, and no line may; {how}")


def is_too_long(raw: bytes) -> bool:
    """Return whether a line of :func:`raw_lines` is the beginning of one that has more bytes than a line may."""
    return len(raw) - raw.endswith(b"\n") > _LONGEST


def raw_lines(path: str) -> Iterator[bytes | None]:
    """Yield the lines of a file, or of standard input for `-`, and None where the next one does not come at once; see :func:`is_too_long`.

    Raises:
        DataError: when there is no such file, or standard input is closed.
    """
    if path == "-" and sys.stdin is None:
        raise DataError("standard input: is closed; give a file, or lines through a pipe")
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if path == "-" else Path(path).open("rb") as file:
            try:
                stored = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            except io.UnsupportedOperation:  # not of the system
                stored = True
            yield from _with_line_feeds(_stored(file) if stored else _arriving(file.fileno()))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; give a file or `-` for standard input") from None


def _with_line_feeds(lines: Iterable[bytes | None]) -> Iterator[bytes | None]:
    """Yield lines; of a text without a line feed, whose lines end in carriage returns alone, those, as training reads them."""
    first = True
    for line in lines:
        if line is None:
            yield None
            continue
        if first and not line.endswith(b"\n") and not is_too_long(line):  # the whole text
            yield from line.replace(b"\r", b"\n").splitlines(keepends=True)
        else:
            yield line
        first = False


def _stored(file: IO[bytes]) -> Iterator[bytes]:
    most = _LONGEST + 1  # its end
    while line := file.readline(most):
        rest = line
        while len(rest) == most and not rest.endswith(b"\n"):
            rest = file.readline(most)
        yield line


def _arriving(descriptor: int) -> Iterator[bytes | None]:
    begun = bytearray()
    while True:
        if not select.select([descriptor], [], [], _PAUSE)[0]:
            yield None
        chunk = os.read(descriptor, _CHUNK)
        *whole, rest = chunk.split(b"\n")
        for part in whole:
            yield bytes(begun) + part + b"\n"
            begun.clear()
        begun += rest[: _LONGEST + 1 - len(begun)]
        if not chunk:
            break
    if begun:
        yield bytes(begun)


def text_lines(path: str) -> Iterator[str | None]:
    """Yield lines as :func:`raw_lines` does, as text; bytes that are not UTF-8 become lone surrogates, which :func:`is_text` finds.

    For a line that is too long stands a :class:`LongLine`.
    """
    first = True
    for raw in raw_lines(path):
        if raw is None:
            yield None
            continue
        yield LongLine("...") if is_too_long(raw) else raw.decode("utf-8-sig" if first else "utf-8", "surrogateescape")
        first = False


def numbered(lines: Iterable[str | None]) -> Iterator[tuple[int, str | None]]:
    """Yield lines with their numbers, from 1; None has that of the line before it."""
    number = 0
    for line in lines:
        number += line is not None
        yield number, line


def as_given(cell: str) -> str:
    """Return a cell without stripping it: places in it count from its first character."""
    return cell


def tsv_rows(
    lines: Iterable[str | None], where: str, header: tuple[str, ...] = (), cell: Callable[[str], str] = str.strip
) -> Iterator[Row | None]:
    """Yield the rows of tab-separated lines in which a quotation mark is a character like any other, as in GLUE.

    Args:
        lines: ended by "\\n" alone: U+0085 and U+2028 occur inside sentences.
        where: the file, for errors.
        header: the columns of a file that has no header line.
        cell: what is done to each text: stripped at both ends, or :func:`as_given`.

    Raises:
        DataError: two columns have one name.
    """
    columns = header
    check_header(columns, where)
    for number, line in numbered(lines):
        if line is None:
            yield None
            continue
        cells = line.rstrip("\r\n").split("\t")
        if isinstance(line, LongLine):
            if not columns:
                raise line.problem(f"{where}:{number}")
            yield number, line.problem(f"{where}:{number}")
        elif not line.strip():
            continue
        elif not columns:
            columns = tuple(map(str.strip, cells))
            check_header(columns, where)
        elif len(cells) != len(columns):
            yield number, DataError(f"{where}:{number}: {len(cells)} tab-separated fields where {len(columns)} belong")
        else:
            yield number, dict(zip(columns, map(cell, cells), strict=True))


def csv_rows(lines: Iterable[str | None], where: str, cell: Callable[[str], str] = str.strip) -> Iterator[Row | None]:
    """Yield the rows of comma-separated lines with a header and double quotes (RFC 4180); arguments and errors as :func:`tsv_rows`.

    A quotation mark that is never closed would take all further rows into its own: the lines behind the first of a broken row are read once more,
    each as the beginning of a row.
    """
    source, again = _returned(lines), deque[str]()

    def following(taken: list[str]) -> Iterator[str]:
        while line := again.popleft() if again else next(filter(None, source), ""):
            taken.append(line)
            if isinstance(line, LongLine):
                raise line.problem(f"{where}:{number + len(taken) - 1}")
            yield line

    columns: list[str] | None = None
    number = 1
    while True:
        if not again:
            line = next(source, "")
            if line is None:
                yield None
                continue
            if not line:
                return
            again.append(line)
        taken: list[str] = []
        begin = number
        try:
            cells = next_cells(csv.reader(following(taken), strict=True), _LONGEST) or []
            number += len(taken)
        except (csv.Error, DataError) as error:
            wrong = error if isinstance(error, DataError) else DataError(f"{where}:{begin}: {error}; {_QUOTED}")
            if columns is None:
                raise wrong from None
            again.extendleft(reversed(taken[1:]))
            number += 1
            yield begin, wrong
            continue
        if columns is None:
            columns = [name.strip() for name in cells if begin > 1 or cells != SEPARATOR_ROW] or None
            check_header(columns or (), where)
        elif cells and len(cells) != len(columns):
            belong = f"{len(columns)} belong: {', '.join(columns)}"
            yield begin, DataError(f"{where}:{begin}: {len(cells)} fields where {belong}; quote texts that hold a comma")
        elif cells:
            yield begin, dict(zip(columns, map(cell, cells), strict=True))


def _returned(lines: Iterable[str | None]) -> Iterator[str | None]:
    """Yield lines that end at a carriage return too, as those of a table do."""
    for line in lines:
        if line is not None and "\r" in line.rstrip("\r\n"):
            yield from io.StringIO(line, newline="")
        else:
            yield line


def jsonl_rows(lines: Iterable[str | None], where: str, lists: str = "", cell: Callable[[str], str] = str.strip) -> Iterator[Row | None]:
    """Yield the rows of JSON objects; numbers and booleans, and lists in one column, become their JSON text.

    Args:
        lines, where, cell: as of :func:`tsv_rows`.
        lists: the column of lists.
    """
    for number, line in numbered(lines):
        if line is None:
            yield None
        elif isinstance(line, LongLine):
            yield number, line.problem(f"{where}:{number}")
        elif line.strip():
            yield number, _of_json(number, line, where, lists, cell)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON.

    Raises:
        KeyError: a key that it has twice, of which one value would be lost.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        raise KeyError(next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1))
    return found


_EACH_ONCE = json.JSONDecoder(object_pairs_hook=_each_once)


def _of_json(number: int, line: str, where: str, lists: str, cell: Callable[[str], str]) -> dict[str, str] | DataError:
    try:
        value = parse_json(line, _EACH_ONCE)
    except ValueError as error:
        return DataError(f"{where}:{number}: is not JSON: {error}")
    except KeyError as error:
        return DataError(f"{where}:{number}: has the key {error} twice; which one is meant? Give each a name of its own")
    if not isinstance(value, dict):
        return DataError(f"{where}:{number}: is {kind_of(value)}, not an object with columns")
    return _plain(value, lists, cell)


def parquet_rows(path: Path, lists: str = "", cell: Callable[[str], str] = str.strip) -> Iterator[Row]:
    """Yield the rows of a Parquet file, numbered from 1, as :func:`jsonl_rows` does; columns of other types are left out.

    Raises:
        DataError: it is none, or damaged, or two columns that are read have one name.
    """
    number = 0
    with _parquet(path) as file:
        read = [place for place, field in enumerate(file.schema_arrow) if field.name == lists or _is_read(field.type)]
        check_header([file.schema_arrow.names[place] for place in read], str(path))
        for batch in file.iter_batches(_ROWS, use_threads=False):
            for row in _rows_of(batch.select(read)):
                number += 1
                yield number, DataError(f"{path}:{number}: column {row!r} {NO_TEXT}") if isinstance(row, str) else _plain(row, lists, cell)


def _rows_of(batch: Any) -> list[dict[str, Any] | str]:
    """Return the rows of a part of a Parquet file; of one whose text is not UTF-8 the name of that column."""
    try:
        found: list[dict[str, Any] | str] = batch.to_pylist()
    except UnicodeDecodeError:
        found = [_row_of(batch, place) for place in range(len(batch))]
    return found


def _row_of(batch: Any, place: int) -> dict[str, Any] | str:
    row: dict[str, Any] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            row[name] = column[place].as_py()
        except UnicodeDecodeError:
            return str(name)
    return row


def parquet_columns(path: Path, lists: str = "") -> tuple[list[str], str]:
    """Return the columns of a Parquet file that are read, and what is to be said of the others.

    Raises:
        DataError: as :func:`parquet_rows`.
    """
    with _parquet(path) as file:
        fields = list(file.schema_arrow)
    read = [field.name for field in fields if field.name == lists or _is_read(field.type)]
    others = ", ".join(f"{field.name}: {field.type}" for field in fields if field.name not in read)
    return read, f" (and, neither texts nor numbers and so not read, {others})" if others else ""


@contextlib.contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}") from None


def _is_read(kind: Any) -> bool:
    import pyarrow.types as types

    if types.is_dictionary(kind):
        return _is_read(kind.value_type)
    # pyarrow 16 has no is_string_view.
    known = (types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_decimal, types.is_boolean)
    return str(kind) == "string_view" or any(is_of(kind) for is_of in known)


def check_header(columns: Sequence[str], where: str) -> None:
    """Check that the names of columns differ.

    Raises:
        DataError: naming one that is there twice.
    """
    twice = [name for name, count in Counter(columns).items() if name and count > 1]
    if twice:
        raise DataError(
            f"{where}:1: has {columns.count(twice[0])} columns called {twice[0]!r}; which one is meant? Give each a name of its own"
        )


def _plain(row: Mapping[str, Any], lists: str, text: Callable[[str], str]) -> dict[str, str]:
    """Return the cells of a row as texts; what is empty (of a number also NaN) or nested is left out, but for the column of lists, which is JSON."""
    cells: dict[str, str] = {}
    for column, cell in row.items():
        if isinstance(cell, str):
            cells[column] = text(cell)
        elif isinstance(cell, Decimal):
            cells[column] = str(cell)
        elif isinstance(cell, Real):
            if cell == cell:  # NaN is not
                cells[column] = json.dumps(cell, default=float)
        # Else a nested value can be no text and no label; columns that are not used may be anything.
        elif column == lists and isinstance(cell, list):
            cells[column] = json.dumps(cell, default=str)
    return cells
