"""Tables with named columns: tab-separated without quoting, comma-separated with it, JSON lines, Parquet; and one's own task in them."""

from __future__ import annotations

import difflib
import io
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from overnight.config.schema import Columns
from overnight.display import plural
from overnight.errors import ConfigError, DataError
from overnight.state_files import is_text, parse_json
from overnight.tasks.examples import Example, TaskData, split_off, strata, trained_on_note
from overnight.tasks.labels import check_labels, classes_of, label_notes
from overnight.tasks.rows import NO_TEXT, Row, csv_rows, jsonl_rows, parquet_columns, parquet_rows, tsv_rows

_SPLITS = {"train": ("train",), "dev": ("dev", "valid", "validation"), "test": ("test",)}
ENDINGS = (".csv", ".tsv", ".jsonl", ".parquet")
"""Of a table of one's own."""
_YES_NO = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}
# Of the numbers that a network answers: in 32 bits there is room for the difference of two, and for an answer beyond them.
_LARGEST = 1e37

_KINDS = {"classification": "one class a row", "multi_label": "any number of classes a row", "regression": "numbers"}

OWN_NAMES = Columns()
"""The columns are called as the task expects."""

Line = tuple[int, dict[str, str]]


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file, without a byte order mark; where its lines end in carriage returns alone, these become line feeds.

    Raises:
        DataError: if it cannot be read (file), or is not UTF-8 (file, offset).
    """
    try:
        text = path.read_bytes().decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.object[error.start]:#04x} at offset {error.start} is not UTF-8; convert the file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    return text if "\n" in text else text.replace("\r", "\n")


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
    text = read_text(path)
    columns = header or tuple(text.partition("\n")[0].rstrip("\r").split("\t"))
    rows: list[Line] = []
    wrong: list[DataError] = []
    for number, cells in filter(None, tsv_rows(text.split("\n"), str(path), header)):
        if isinstance(cells, DataError):
            wrong.append(cells)
        else:
            rows.append((number, cells))
    if len(wrong) > broken:
        more = f" ({len(wrong)} such lines in this file)" if len(wrong) > 1 else ""
        raise DataError(f"{wrong[0]}: {', '.join(columns)}{more}; correct or remove the line")
    if not rows:
        raise DataError(f"{path}: holds no rows")
    if skipped is not None:
        skipped.extend(map(str, wrong))
    yield from rows


def read_csv(path: Path) -> Iterator[Line]:
    """Yield the rows of a comma-separated file with a header and double quotes (RFC 4180); returns and errors as :func:`read_tsv`."""
    yield from _whole(csv_rows(io.StringIO(read_text(path), newline=""), str(path)), path)


def read_jsonl(path: Path, lists: str = "") -> Iterator[Line]:
    """Yield the rows of a JSON-lines file of objects; numbers and booleans, and lists in one column, become their JSON text; errors as :func:`read_tsv`."""
    yield from _whole(jsonl_rows(read_text(path).split("\n"), str(path), lists), path)


def read_parquet(path: Path, lists: str = "") -> Iterator[Line]:
    """Yield the rows of a Parquet file, numbered from 1; returns and errors as :func:`read_jsonl`."""
    yield from _whole(parquet_rows(path, lists), path)


def _whole(rows: Iterable[Row | None], path: Path) -> list[Line]:
    """Return the rows of a table in which nothing is wrong.

    Raises:
        DataError: the first thing that is wrong; or there are no rows.
    """
    good: list[Line] = []
    for number, cells in filter(None, rows):
        if isinstance(cells, DataError):
            raise cells
        good.append((number, cells))
    if not good:
        raise DataError(f"{path}: holds no rows")
    return good


def number_of(cell: str, where: str, low: float = -sys.float_info.max, high: float = sys.float_info.max, what: str = "score") -> float:
    """Return a finite number from its text.

    Raises:
        DataError: naming where, the text and what is allowed.
    """
    try:
        value = float(cell.replace("_", "no"))  # which Python takes between digits
    except ValueError:
        raise DataError(f"{where}: {what} {cell!r} is not a number") from None
    if not low <= value <= high:
        above = f"{low:g} or more, and finite" if low > -1e300 else "finite"
        raise DataError(f"{where}: {what} {cell!r} is not {f'between {low:g} and {high:g}' if high < 1e300 else above}")
    return value


class _Target(NamedTuple):
    """What a table is to be answered with."""

    kind: Literal["classification", "multi_label", "regression"]
    columns: tuple[str, ...]
    """One, or of several classes in columns of 0 and 1 those."""


def load_table(path: Path, seed: int = 0, names: Columns = OWN_NAMES, dev: Path | None = None, share: float = 0.1) -> TaskData:
    """Read one's own task: a csv, tsv, jsonl or parquet file, or a folder with `train.*` and, optionally, `dev.*` and `test.*`.

    The columns are `text` (or `text_a` and `text_b`), `label` for a class, `labels` for any number of them or `score` for a number, and
    optionally `id`; others are ignored. A csv is read with quoting, a tsv without. Without a dev file a share of the texts is split off,
    of each class alike, and the notes say so.

    Args:
        path: the file or the folder.
        seed: which part is split off.
        names: what the columns are called, where it is not that.
        dev: the table to score on, instead of that in the folder.
        share: of the texts that is split off.

    Raises:
        ConfigError: a column that is named twice.
        DataError: a file or column that is missing, a row without text or label, a class that the training rows lack; naming file and line.
    """
    files = {"train": path} if path.is_file() else {name: found for name in _SPLITS if (found := _find(path, name))}
    if "train" not in files:
        names_of = ", ".join(f"train{ending}" for ending in ENDINGS)
        raise DataError(f"{path}: has none of {names_of}" if path.is_dir() else f"{path}: does not exist; name a table or a folder")
    if dev is not None:
        files["dev"] = dev
    lists = names.labels or ("" if names.label or names.score else "labels")
    read = list(_read(files["train"], lists))
    texts, target = _columns(files["train"], read, names, lists)
    lines = {name: read if name == "train" else list(_read(file, lists)) for name, file in files.items()}
    parts = {name: list(_examples(file, lines[name], texts, target, names.id or "id", name)) for name, file in files.items()}
    labels: tuple[str, ...] = ()
    if target.kind != "regression":
        labels = target.columns if len(target.columns) > 1 else classes_of(parts["train"], files["train"], target.kind)
    if is_dev_made := "dev" not in parts:
        parts["train"], parts["dev"] = _split(parts["train"], seed, share, path)
        alike = "" if target.kind == "regression" else ", of each class alike"
        notes = (f"scored on {plural(len(parts['dev']), 'row')} split off {files['train'].name} by a hash of their texts{alike}",)
    else:
        train, dev_texts = ([(row.text_a, row.text_b) for row in parts[name]] for name in ("train", "dev"))
        notes = trained_on_note(train, dev_texts)
    if target.kind != "regression":
        for name in ("dev", "test"):
            check_labels(parts.get(name, []), labels, files.get(name, path))
    notes += label_notes(labels, parts["train"], parts["dev"], parts.get("test", []))
    metric = {"classification": "accuracy", "multi_label": "micro_f1", "regression": "spearman"}[target.kind]
    return TaskData(
        "csv",
        target.kind,
        labels,
        parts["train"],
        parts["dev"],
        parts.get("test", []),
        metric,
        notes=notes,
        columns=tuple(filter(None, texts)),
        is_dev_made=is_dev_made,
    )


def labeled_rows(path: Path, names: Columns, kind: str, labels: tuple[str, ...]) -> list[Example]:
    """Read a table that a trained model is scored on, as :func:`load_table` reads the dev rows.

    Args:
        path: a csv, tsv, jsonl or parquet file.
        names: what the columns are called, where it is not as of :func:`load_table`.
        kind: of the model's task: classification, multi_label or regression.
        labels: its classes.

    Raises:
        ConfigError: a column that is named twice.
        DataError: a file or column that is missing, a row without text or label, a class that the model does not know; naming file and line.
    """
    if not path.is_file():
        raise DataError(f"{path}: does not exist; name a table with labels")
    lists = names.labels or ("" if names.label or names.score else "labels")
    rows = list(_read(path, lists))
    texts, target = _columns(path, rows, names, lists)
    if target.kind != kind:
        raise DataError(f"{path}: its column {target.columns[0]!r} is of {_KINDS[target.kind]}, and the model answers with {_KINDS[kind]}")
    examples = list(_examples(path, rows, texts, target, names.id or "id", "dev"))
    if kind != "regression":
        check_labels(examples, labels, path)
    return examples


def _split(rows: list[Example], seed: int, share: float, path: Path) -> tuple[list[Example], list[Example]]:
    """Split off the rows to score on; returns those to train on, and those."""
    scored = split_off([f"{r.text_a}\x00{r.text_b or ''}" for r in rows], strata(rows), seed, share, str(path))
    train, dev = ([row for i, row in enumerate(rows) if (i in scored) == side] for side in (False, True))
    return train, dev


def files_called(folder: Path, names: Collection[str]) -> list[Path]:
    """Return the files of a folder that have one of some names, written in small letters here and in any there."""
    return sorted(file for file in folder.iterdir() if file.name.lower() in names and file.is_file()) if folder.is_dir() else []


def _find(folder: Path, name: str) -> Path | None:
    found = files_called(folder, [f"{stem}{ending}" for stem in _SPLITS[name] for ending in ENDINGS])
    if len(found) > 1:
        raise DataError(f"{folder}: holds {' and '.join(f.name for f in found)}; keep one file for {name}")
    return found[0] if found else None


def _read(path: Path, lists: str = "") -> Iterator[Line]:
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise DataError(f"{path}: a table ends in {', '.join(ENDINGS)}")
    if ending in (".jsonl", ".parquet"):
        return (read_jsonl if ending == ".jsonl" else read_parquet)(path, lists)
    return (read_csv if ending == ".csv" else read_tsv)(path)


def _columns(train: Path, rows: list[Line], names: Columns, lists: str) -> tuple[tuple[str, str | None], _Target]:
    """Return the columns of the texts, and the target, from the columns of the training rows."""
    ending, unread = train.suffix.lower(), ""
    # Of JSON the first row may lack some, or have null there.
    found = dict.fromkeys(column for _, cells in (rows if ending == ".jsonl" else rows[:1]) for column in cells)
    if ending == ".parquet":  # a column is there even if it is empty in the first row
        known, unread = parquet_columns(train, lists)
        found = dict.fromkeys(known)
    if ending == ".jsonl":
        unread = " (lists and objects, which are not read, apart)"
    if not found:
        raise DataError(f"{train}: has no column of texts or numbers; words with tags are --task=tokens")
    if len(found) == 1 and ending in (".csv", ".tsv") and any(mark in next(iter(found)) for mark in ";,\t|"):
        what = "commas" if ending == ".csv" else "tabs"
        raise DataError(f"{train}:1: {next(iter(found))!r} is one column; those of a {ending} are separated by {what}: convert the file")
    have = f"{train}: has the columns {', '.join(found)}{unread}"
    used: set[str] = set()
    for what, given in vars(names).items():
        for column in filter(None, given.split(",") if what == "labels" else [given]):
            if what != "id" and column in used:
                raise ConfigError(f"columns.{what} = {given!r}: {column!r} is named twice; each column is one text or one class")
            used.add(column)
            if column not in found:
                near = difflib.get_close_matches(column, found, 1)
                raise DataError(f"{have}, and no {column!r}{f' (did you mean {near[0]!r}?)' if near else ''}, which columns.{what} names")
    if names.text or names.text_b:
        texts: tuple[str, str | None] = (names.text or ("text_a" if "text_a" in found else "text"), names.text_b or None)
        if texts[0] not in found:
            raise DataError(f"{have}; name the first text of a pair with --columns.text=")
    elif "text_a" in found:
        texts = ("text_a", "text_b" if "text_b" in found else None)
    elif "text" in found:
        texts = ("text", None)
    else:
        raise DataError(f"{have}; name the text `text`, or a pair `text_a` and `text_b`, or say what they are called: --columns.text=")
    return texts, _target(found, names, have)


def _target(columns: Collection[str], names: Columns, have: str) -> _Target:
    if names.labels:
        return _Target("multi_label", tuple(names.labels.split(",")))
    if names.label or names.score:
        return _Target("classification" if names.label else "regression", (names.label or names.score,))
    found = [name for name in ("label", "labels", "score") if name in columns]
    if len(found) != 1:
        raise DataError(
            f"{have}; name the classes `label`, or the numbers `score`, or several classes `labels`, one of these, or say which it is: --columns.label="
        )
    return _Target({"label": "classification", "labels": "multi_label", "score": "regression"}[found[0]], (found[0],))  # type: ignore[arg-type]


def _examples(path: Path, rows: list[Line], texts: tuple[str, str | None], target: _Target, id_column: str, name: str) -> Iterator[Example]:
    column_a, column_b = texts
    seen: set[str] = set()
    for index, (line, cells) in enumerate(rows):
        where = f"{path}:{line}"
        for column in (column_a, column_b):
            if column and not cells.get(column):
                raise DataError(f"{where}: column {column!r} {_absent(column, cells)}{_as_often(column, rows)}")
        for column in filter(None, (column_a, column_b, id_column, *target.columns)):
            if not is_text(cells.get(column, "")):
                raise DataError(f"{where}: column {column!r} {NO_TEXT}")
        row_id = cells.get(id_column) or str(index)
        if row_id in seen:
            raise DataError(f"{where}: id {row_id!r} was used before")
        seen.add(row_id)
        if (column := _unlabeled(cells, target)) and name != "test":
            several = target.kind == "classification" and column not in cells
            more = f"; several classes a row are `labels` (--columns.labels={column})" if several else ""
            raise DataError(f"{where}: column {column!r} {_absent(column, cells)}{_as_often(column, rows)}{more}")
        label = None if column else _label(cells, target, where)
        yield Example(row_id, cells[column_a], cells[column_b] if column_b else None, label)


def _unlabeled(cells: Mapping[str, str], target: _Target) -> str:
    """Return the first column that does not say what a row is to be answered with; nothing where it is known."""
    # No class at all is an empty cell of a table; of one class or a number it says nothing.
    empty = target.kind == "multi_label" and len(target.columns) == 1
    return next((column for column in target.columns if column not in cells or not (cells[column] or empty)), "")


def _label(cells: Mapping[str, str], target: _Target, where: str) -> str | float | tuple[str, ...]:
    """Return what a row is to be answered with, which is known."""
    cell = cells[target.columns[0]]
    if target.kind == "regression":
        if abs(number := number_of(cell, where)) > _LARGEST:
            raise DataError(f"{where}: score {cell!r} is larger than a network can answer ({_LARGEST:g}); give it in a larger unit")
        return number
    if target.kind == "classification":
        return cell
    if len(target.columns) > 1:
        for column in target.columns:
            if cells[column] not in _YES_NO:
                raise DataError(f"{where}: column {column!r} is {cells[column]!r}, where 0 or 1 says whether the row has that class")
        return tuple(column for column in target.columns if _YES_NO[cells[column]])
    if not cell.startswith("["):
        return tuple(dict.fromkeys(label for part in cell.split("|") if (label := part.strip())))
    try:
        labels = parse_json(cell)
    except ValueError as error:
        raise DataError(f"{where}: column {target.columns[0]!r} is not a JSON list: {error}") from None
    if not isinstance(labels, list) or not all(_is_label(label) for label in labels):
        raise DataError(f"{where}: column {target.columns[0]!r} is {cell}, not a list of texts")
    return tuple(dict.fromkeys(label if isinstance(label, str) else json.dumps(label) for label in labels))


def _is_label(value: object) -> bool:
    """Return whether an entry of a list is a class: a text or, as in a column of one class, a whole number."""
    return isinstance(value, int) or (isinstance(value, str) and bool(value) and is_text(value))


def _absent(column: str, cells: Mapping[str, str]) -> str:
    return "is empty" if column in cells else f"is missing, null, or a list or an object (there are {', '.join(cells)})"


def _as_often(column: str, rows: list[Line]) -> str:
    """Return in how many rows a column has nothing, where that is more than one."""
    count = sum(not cells.get(column) for _, cells in rows)
    return f", as in {count:,} of {len(rows):,} rows" if count > 1 else ""
