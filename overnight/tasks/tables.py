"""Tables with named columns: tab-separated without quoting, comma-separated with it, JSON lines; and one's own task in them."""

from __future__ import annotations

import csv
import difflib
import io
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from overnight.config.schema import Columns
from overnight.errors import DataError
from overnight.state_files import parse_json
from overnight.tasks.examples import Example, TaskData, split

_SPLITS = {"train": ("train",), "dev": ("dev", "valid", "validation"), "test": ("test",)}
_ENDINGS = (".csv", ".tsv", ".jsonl")
# More classes than this are numbers in the wrong column, or ids.
_MOST_CLASSES = 1000

OWN_NAMES = Columns()
"""The columns are called as the task expects."""

Line = tuple[int, dict[str, str]]


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file, without a byte order mark.

    Raises:
        DataError: if it cannot be read (file), or is not UTF-8 (file, offset).
    """
    try:
        return path.read_bytes().decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.object[error.start]:#04x} at offset {error.start} is not UTF-8; convert the file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def read_tsv(path: Path, header: tuple[str, ...] = (), broken: int = 0, skipped: list[str] | None = None) -> Iterator[Line]:
    """Yield the rows of a tab-separated file in which a quotation mark is a character like any other, as in GLUE.

    Args:
        path: a UTF-8 file, one row a line.
        header: the columns of a file that has no header line.
        broken: rows with another number of fields that may be left out, for files published that way.
        skipped: receives `file:line: why` for each row left out.

    Returns:
        (line number from 1, column -> text), text stripped at both ends.

    Raises:
        DataError: naming file, line and the number of fields; or a file without rows.
    """
    # Only "\n" ends a row: str.splitlines would also cut at U+0085 and U+2028, which occur inside sentences.
    lines = read_text(path).split("\n")
    first = 0 if header else 1
    columns = header or tuple(lines[0].rstrip("\r").split("\t"))
    wrong: list[str] = []
    rows: list[Line] = []
    for number, line in enumerate(lines[first:], first + 1):
        if not line.strip():
            continue
        cells = line.rstrip("\r").split("\t")
        if len(cells) != len(columns):
            wrong.append(f"{path}:{number}: {len(cells)} tab-separated fields where {len(columns)} belong")
            continue
        rows.append((number, {c: cell.strip() for c, cell in zip(columns, cells, strict=True)}))
    if len(wrong) > broken:
        more = f" ({len(wrong)} such lines in this file)" if len(wrong) > 1 else ""
        raise DataError(f"{wrong[0]}: {', '.join(columns)}{more}; mend or remove the line")
    if not rows:
        raise DataError(f"{path}: holds no rows")
    if skipped is not None:
        skipped.extend(wrong)
    yield from rows


def read_csv(path: Path) -> Iterator[Line]:
    """Yield the rows of a comma-separated file with a header and double quotes (RFC 4180); returns and errors as :func:`read_tsv`."""
    # One module-wide setting of the standard library: texts may be longer than its 128 KiB.
    limit = csv.field_size_limit(sys.maxsize)
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    rows: list[Line] = []
    try:
        columns = [c.strip() for c in next(reader, [])]
        before = reader.line_num
        for cells in reader:
            number, before = before + 1, reader.line_num
            if not cells:
                continue
            if len(cells) != len(columns):
                raise DataError(
                    f"{path}:{number}: {len(cells)} fields where {len(columns)} belong: {', '.join(columns)}; quote texts that hold a comma"
                )
            rows.append((number, {c: cell.strip() for c, cell in zip(columns, cells, strict=True)}))
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: {error}; a quotation mark inside a quoted text is written twice") from None
    finally:
        csv.field_size_limit(limit)
    if not rows:
        raise DataError(f"{path}: holds no rows")
    yield from rows


def read_jsonl(path: Path) -> Iterator[Line]:
    """Yield the rows of a JSON-lines file of objects; numbers and booleans become their JSON text; errors as :func:`read_tsv`."""
    rows: list[Line] = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = parse_json(line)
        except ValueError as error:
            raise DataError(f"{path}:{number}: is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise DataError(f"{path}:{number}: is a JSON {type(value).__name__}, not an object with columns")
        cells: dict[str, str] = {}
        for column, cell in value.items():
            if isinstance(cell, (dict, list)):
                continue  # a nested value can be no text and no label; columns that are not used may be anything
            if cell is not None:
                cells[column] = cell.strip() if isinstance(cell, str) else json.dumps(cell)
        rows.append((number, cells))
    if not rows:
        raise DataError(f"{path}: holds no rows")
    yield from rows


def number_of(cell: str, where: str, low: float = -sys.float_info.max, high: float = sys.float_info.max) -> float:
    """Return a finite score from its text.

    Raises:
        DataError: naming where, the text and what is allowed.
    """
    try:
        value = float(cell)
    except ValueError:
        raise DataError(f"{where}: score {cell!r} is not a number") from None
    if not low <= value <= high:
        raise DataError(f"{where}: score {cell!r} is not {f'between {low:g} and {high:g}' if high < 1e300 else 'finite'}")
    return value


def load_table(path: Path, seed: int = 0, names: Columns = OWN_NAMES, dev: Path | None = None) -> TaskData:
    """Read one's own task: a csv, tsv or jsonl file, or a folder with `train.*` and, optionally, `dev.*` and `test.*`.

    The columns are `text` (or `text_a` and `text_b`), `label` for classes or `score` for numbers, and optionally `id`; others are ignored.
    A csv is read with quoting, a tsv without. Without a dev file a tenth of the rows is split off by a hash of their texts, and the notes say so.

    Args:
        path: the file or the folder.
        seed: which tenth is split off.
        names: what the columns are called, where it is not that.
        dev: the table to score on, instead of that in the folder.

    Raises:
        DataError: a file or column that is missing, a row without text or label, a class that the training rows lack; naming file and line.
    """
    files = {"train": path} if path.is_file() else {name: found for name in _SPLITS if (found := _find(path, name))}
    if "train" not in files:
        raise DataError(
            f"{path}: has no train.csv, train.tsv or train.jsonl" if path.is_dir() else f"{path}: does not exist; name a table or a folder"
        )
    if dev is not None:
        files["dev"] = dev
    columns, kind = _columns(files["train"], names)
    parts = {name: list(_examples(file, columns, names.id or "id", kind, name)) for name, file in files.items()}
    notes: tuple[str, ...] = ()
    if "dev" not in parts:
        parts["train"], parts["dev"] = split(parts["train"], seed, str(path))
        notes = (f"scored on {len(parts['dev'])} rows split off {files['train'].name} by a hash of their texts",)
    labels: tuple[str, ...] = ()
    if kind == "classification":
        labels = _classes(parts["train"], files["train"])
        for name in ("dev", "test"):
            unknown = next((r for r in parts.get(name, []) if r.label is not None and r.label not in labels), None)
            if unknown:
                raise DataError(
                    f"{files.get(name, path)}: row {unknown.id} has label {unknown.label!r}, which no training row has ({', '.join(labels[:10])})"
                )
    metric = "accuracy" if kind == "classification" else "spearman"
    return TaskData("csv", kind, labels, parts["train"], parts["dev"], parts.get("test", []), metric, notes=notes)


def _find(folder: Path, name: str) -> Path | None:
    found = [f for stem in _SPLITS[name] for ending in _ENDINGS if (f := folder / f"{stem}{ending}").is_file()]
    if len(found) > 1:
        raise DataError(f"{folder}: holds {' and '.join(f.name for f in found)}; keep one file for {name}")
    return found[0] if found else None


def _read(path: Path) -> Iterator[Line]:
    readers = {".csv": read_csv, ".tsv": read_tsv, ".jsonl": read_jsonl}
    if path.suffix not in readers:
        raise DataError(f"{path}: a table ends in {', '.join(readers)}")
    return readers[path.suffix](path)


def _columns(train: Path, names: Columns) -> tuple[tuple[str, str | None, str], Literal["classification", "regression"]]:
    """Return the columns of the texts and of the target, from the first training row, and what they make of the task."""
    _, first = next(_read(train))
    have = f"{train}: has the columns {', '.join(first)}"
    for what, column in vars(names).items():
        if column and column not in first:
            near = difflib.get_close_matches(column, first, 1)
            raise DataError(f"{have}, and no {column!r}{f' (did you mean {near[0]!r}?)' if near else ''}, which columns.{what} names")
    if names.text or names.text_b:
        texts: tuple[str, str | None] = (names.text or ("text_a" if "text_a" in first else "text"), names.text_b or None)
        if texts[0] not in first:
            raise DataError(f"{have}; name the first text of a pair with --columns.text=")
    elif "text_a" in first:
        texts = ("text_a", "text_b" if "text_b" in first else None)
    elif "text" in first:
        texts = ("text", None)
    else:
        raise DataError(f"{have}; name the text `text`, or a pair `text_a` and `text_b`, or say what they are called: --columns.text=")
    if names.label or names.score:
        return (*texts, names.label or names.score), "classification" if names.label else "regression"
    if ("label" in first) == ("score" in first):
        raise DataError(f"{have}; name the classes `label`, or the numbers `score`, one of the two, or say which it is: --columns.label=")
    return (*texts, "label" if "label" in first else "score"), "classification" if "label" in first else "regression"


def _examples(path: Path, columns: tuple[str, str | None, str], id_column: str, kind: str, name: str) -> Iterator[Example]:
    column_a, column_b, target = columns
    seen: set[str] = set()
    for index, (line, cells) in enumerate(_read(path)):
        where = f"{path}:{line}"
        for column in (column_a, column_b):
            if column and not cells.get(column):
                raise DataError(f"{where}: column {column!r} {_absent(column, cells)}")
        if not cells.get(target) and name != "test":
            raise DataError(f"{where}: column {target!r} {_absent(target, cells)}")
        row_id = cells.get(id_column) or str(index)
        if row_id in seen:
            raise DataError(f"{where}: id {row_id!r} was used before")
        seen.add(row_id)
        cell = cells.get(target)
        label = None if not cell else cell if kind == "classification" else number_of(cell, where)
        yield Example(row_id, cells[column_a], cells[column_b] if column_b else None, label)


def _absent(column: str, cells: Mapping[str, str]) -> str:
    return "is empty" if column in cells else f"is missing (there are {', '.join(cells)})"


def _classes(train: list[Example], path: Path) -> tuple[str, ...]:
    labels = sorted({str(r.label) for r in train})
    if len(labels) < 2:
        raise DataError(f"{path}: every training row has label {labels[0]!r}; a classifier needs two or more")
    if len(labels) > _MOST_CLASSES:
        raise DataError(f"{path}: {len(labels)} different labels; call the column `score` if they are numbers")
    return tuple(labels)
