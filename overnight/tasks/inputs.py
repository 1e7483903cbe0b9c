"""What a trained model is to answer: lines of text or JSON, or a table with the columns of the task, read as they come and never held whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from overnight.errors import ConfigError, DataError
from overnight.state_files import is_text, parse_json
from overnight.tasks.classification import text_columns
from overnight.tasks.conll import CONLL_ENDINGS, DOCUMENT, read_sentences
from overnight.tasks.line_fields import is_id
from overnight.tasks.rows import (
    NO_TEXT,
    LongLine,
    Row,
    as_given,
    csv_rows,
    is_too_long,
    jsonl_rows,
    numbered,
    parquet_columns,
    parquet_rows,
    raw_lines,
    text_lines,
    tsv_rows,
)
from overnight.tasks.tables import read_text

Found = TypeVar("Found")
# Rows answered at once, sorted by length among themselves: few at first, so that answers begin soon, then twice as many each time; and their characters.
_FIRST, _MOST, _CHARACTERS = 256, 4096, 1 << 24
_TABLES = ("csv", "tsv", "jsonl", "parquet")
FORMATS = (*_TABLES, "lines")
PACKED = {".gz": "zcat", ".bz2": "bzcat", ".xz": "xzcat", ".zst": "zstdcat"}
"""Endings of compressed files, which are neither read nor written here, and what unpacks them into a pipe."""


class Broken(NamedTuple):
    """A row that cannot be used."""

    id: str
    why: DataError


Given = tuple[int, str | dict[str, str] | Broken]
"""A line of text or of JSON, or the fields of a row, by the number of its line; also instead of them what is wrong."""


def read_input(path: str, spec: Mapping[str, Any], form: str = "", empty: bool = False) -> Iterator[Given | None]:
    """Yield what is to be answered for :func:`answered`: the lines of a file or of standard input, or the rows of a table.

    Cells are stripped as they are to be trained on, but for questions, whose answers are places in the context as it was given.

    The texts of a table are in the columns that the task was trained on, or in `text` (of a pair `text_a`, or `text`, and `text_b`); other
    columns, such as the labels, are ignored. A row is called by its `id`, else by its `index` (not in one's own table), or else by its number, from 0
    as in `predictions.json`; errors name the line on which it begins.

    Args:
        path: `-` is standard input.
        spec: of the task: `task`, its `labels`, whether it is of `pairs`, where one's own table has other names of columns `columns`, and the columns of the
            `texts` that it was trained on, where they are known.
        form: one of :data:`FORMATS`; by default .csv, .tsv, .jsonl and .parquet are tables by their ending, and all else is lines.
        empty: whether an empty cell of a table is a text.

    Raises:
        ConfigError: the format is none of them, or none of the task, or the file is compressed by its ending.
        DataError: the file cannot be read, is an empty table, or has no column of texts.
    """
    _refuse_packed(Path(path))
    if form and form not in FORMATS:
        raise ConfigError(f"format = {form!r}: is not one of {', '.join(FORMATS)}")
    if spec["task"] == "tokens":
        yield from _sentences(path, spec, form)
        return
    form = form or Path(path).suffix[1:].lower()
    if form not in _TABLES:
        yield from _lines(path)
        return
    choices, header = _choices(spec)
    ids = ((spec.get("columns") or {}).get("id") or "id",) if spec["task"] == "csv" else ("id", "index")
    keys = ("question", "context") if spec["task"] == "squad" else ("text_a", "text_b")
    where = "standard input" if path == "-" else path
    known, unread = parquet_columns(Path(path)) if form == "parquet" and path != "-" else ([], "")
    columns: tuple[str, ...] = ()
    place = -1
    for row in _rows(path, form, where, (choices, header), as_given if spec["task"] == "squad" else str.strip):
        if row is None:
            yield None
            continue
        number, cells = row
        place += 1
        if isinstance(cells, DataError):
            yield number, Broken(str(place), cells)
            continue
        row_id = next(filter(None, (cells.get(column, "").strip() for column in ids)), str(place))
        try:
            if form == "jsonl":  # whose rows may each have other columns
                columns = _chosen(cells, choices) or columns
            columns = columns or _columns(known or list(cells), choices, where, unread, form)
            if not is_text(row_id):
                raise DataError(f"{where}:{number}: its id {NO_TEXT}")
            yield number, {"id": row_id, **dict(zip(keys, _texts(cells, columns, f"{where}:{number}", empty), strict=False))}
        except DataError as error:
            if not columns and form != "jsonl":
                raise
            yield number, Broken(row_id if is_text(row_id) else str(place), error)


def _refuse_packed(path: Path) -> None:
    """Check that a file is not compressed by its ending: each of its lines would be answered as one that is no text.

    Raises:
        ConfigError: saying how it is read.
    """
    if (unpacks := PACKED.get(path.suffix.lower())) is None:
        return
    inner = Path(path.stem).suffix[1:].lower()
    how = f" --format={inner}" if inner in _TABLES else ""
    pipe = "" if inner in ("json", "parquet") else f", or pipe it into `predict`: {unpacks} {path} | overnight predict ...{how}"
    raise ConfigError(f"{path}: is compressed by its ending; unpack it{pipe}")


def _choices(spec: Mapping[str, Any]) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """Return what :func:`text_columns` does, the columns that the task was trained on first; of a task of pairs both of them."""
    choices: list[tuple[str, ...]]
    choices, header = text_columns(str(spec["task"]))
    names = spec.get("columns") or {}
    first, second = names.get("text"), names.get("text_b")
    if spec.get("texts"):
        choices = [tuple(spec["texts"]), *choices]
    elif first:
        choices = [(first, second) if second else (first,), *choices]
    elif second:  # as training finds the first text
        choices = [("text_a", second), ("text", second), *choices]
    if spec.get("pairs"):
        choices = [choice for choice in [*choices, ("text", "text_b")] if len(choice) == 2]
    return choices, header


def _lines(path: str) -> Iterator[Given | None]:
    """Yield lines.

    Raises:
        DataError: a .json is no JSON lines, of which each line would be taken for a text.
    """
    begins = Path(path).suffix.lower() != ".json"
    for number, line in numbered(text_lines(path)):
        if not begins and line and (text := line.strip()):
            if text.startswith("[") or text == "{":
                raise DataError(f"{path}: is one JSON value, where each line is an object of its own; write it so, as .jsonl")
            begins = True
        if isinstance(line, LongLine):
            yield number, Broken(str(number), line.problem(f"line {number}"))
        else:
            yield None if line is None else (number, line)


def _sentences(path: str, spec: Mapping[str, Any], form: str) -> Iterator[Given | None]:
    """Yield the sentences to tag: one word a line where training reads a file of such a name so, else a sentence a line, as JSON or as text.

    Raises:
        ConfigError: the format, or the ending of the file, is one of tables.
        DataError: a line of CoNLL is wrong.
    """
    if form not in ("", "lines", "jsonl"):
        raise ConfigError(f"format = {form!r}: sentences to tag are lines or jsonl, or CoNLL if the file's ending says so; leave it out")
    ending = Path(path).suffix.lower()
    trained = {Path(spec.get(key) or "").suffix.lower() for key in ("path", "dev")} - {"", ".jsonl"}
    named = ending in {*CONLL_ENDINGS, *trained} and (ending != ".txt" or _is_conll(Path(path), spec.get("labels") or ()))
    if not (form or named) and ending in (".csv", ".tsv", ".parquet"):
        raise ConfigError(
            f"{path}: has the ending of a table, and sentences to tag are lines, JSON lines or CoNLL; --format=lines reads each line as a sentence"
        )
    if form or path == "-" or not named:
        yield from _lines(path)
        return
    try:
        sentences = read_sentences(Path(path), tagged=False)
    except DataError as error:
        raise DataError(f"{error}; the file is read as CoNLL; --format=lines reads each line as a sentence") from None
    for number, sentence in enumerate(sentences, 1):
        yield number, json.dumps({"id": sentence.id, "tokens": sentence.words})


def _is_conll(path: Path, labels: Collection[str]) -> bool:
    """Return whether a text, which may have a sentence a line as well, has a word a line: alone, or as many columns in each, of which the last is a tag of the task."""
    columns = [line.split() for line in read_text(path).splitlines() if line.strip() and not line.startswith(DOCUMENT)]
    tagged = all(len(words) > 1 and words[-1] in labels for words in columns)
    return len({len(words) for words in columns}) == 1 and (tagged or len(columns[0]) == 1)


def _rows(
    path: str, form: str, where: str, names: tuple[list[tuple[str, ...]], tuple[str, ...]], cell: Callable[[str], str]
) -> Iterator[Row | None]:
    """Yield the rows of a table.

    Args:
        names: of columns of texts, and of a .tsv that is published without a line of names, as of :func:`_choices`.
        cell: as of :func:`overnight.tasks.rows.tsv_rows`.

    Raises:
        DataError: it has none.
    """
    if form == "parquet" and path == "-":
        raise DataError("standard input: a Parquet file is read from its end on; give the file by its name")
    found: Iterator[Row | None]
    if form == "parquet":
        found = parquet_rows(Path(path), cell=cell)
    elif form == "tsv":
        (choices, header), lines = names, text_lines(path)
        first = next(filter(None, lines), "")
        cells = first.rstrip("\r\n").split("\t")
        bare = len(cells) == len(header) and not any(column in cells for choice in choices for column in choice)
        found = tsv_rows(chain([first], lines), where, header if bare else (), cell)
    else:
        lines = text_lines(path)
        found = csv_rows(lines, where, cell) if form == "csv" else jsonl_rows(lines, where, cell=cell)
    some = False
    for row in found:
        some = some or row is not None
        yield row
    if not some:
        raise DataError(f"{where}: holds no rows")


def _chosen(cells: Collection[str], choices: list[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the first of some ways to name the columns of texts that a row has; none where it has none."""
    return next((choice for choice in choices if all(column in cells for column in choice)), ())


def _columns(cells: Sequence[str], choices: list[tuple[str, ...]], where: str, unread: str, form: str) -> tuple[str, ...]:
    """Return what :func:`_chosen` does; `unread` says what other columns there are.

    Raises:
        DataError: it has none.
    """
    if found := _chosen(cells, choices):
        return found
    # The task's own names come first; `text` does for every task of single texts.
    both = " and ".join(f"`{column}`" for column in choices[0])
    if len(choices[0]) == 1:
        remedy = f"rename the one with the texts to {' or '.join(f'`{name}`' for name in dict.fromkeys([*choices[0], 'text']))}"
    elif any(len(choice) == 1 for choice in choices):
        remedy = f"rename the one with the texts to `text` (of pairs: {both})"
    else:
        remedy = f"the texts of a row belong in {both}"
    if form in ("csv", "tsv") and len(cells) == 1 and not any(cells[0] in choice for choice in choices):
        remedy += "; if it holds lines of text, without a line of names, give it another ending, such as .txt"
    raise DataError(f"{where}: has the columns {', '.join(cells)}{unread}; {remedy}")


def _texts(cells: Mapping[str, str], columns: tuple[str, ...], where: str, empty: bool) -> list[str]:
    if missing := [column for column in columns if column not in cells]:
        raise DataError(f"{where}: has no {missing[0]!r} (it has {', '.join(cells)})")
    texts = [cells[column] for column in columns]
    if not (empty or any(map(str.strip, texts))):
        raise DataError(f"{where}: no text in column {columns[0]!r}")
    if not all(map(is_text, texts)):
        raise DataError(f"{where}: {NO_TEXT}")
    return texts


def read_lines(path: str) -> Iterator[str]:
    """Yield the lines of a file, or of standard input for `-`.

    Raises:
        DataError: when there is no such file, it is not UTF-8, or a line is too long.
    """
    number, where = 0, "standard input" if path == "-" else path
    try:
        for number, raw in enumerate(filter(None, raw_lines(path)), 1):
            if is_too_long(raw):
                raise LongLine().problem(f"{where}: line {number}")
            yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: line {number}: is not UTF-8 ({error.reason} at byte {error.start}); convert it") from None


def answered(
    given: Iterable[Given | None],
    read: Callable[[int, dict[str, Any]], Found],
    answer: Callable[[list[Found]], Iterator[Any]],
    keep_going: bool = False,
    empty: bool = False,
    pairs: bool = True,
) -> Iterator[Any]:
    """Answer lines and rows some at a time, in their order; memory is that of so many.

    Args:
        given: as of :func:`read_input`, without end if need be; at None what came before is answered.
        read: what is answered of a line, from its number (from 1) and its fields.
        answer: one answer a row, in order.
        keep_going: a line that cannot be read is answered by its `id`, or else its number, and `error`, which says why.
        empty: whether empty lines are answered too, and not skipped.
        pairs: whether a tab parts a plain line into two texts; else it is of the text.

    Raises:
        DataError: of the first line that cannot be read, before any of those that are answered with it; not where it keeps going.
    """
    for part in _windows(given, empty):
        rows: list[Found] = []
        broken: dict[int, dict[str, str]] = {}
        for place, (number, content) in enumerate(part):
            fields: dict[str, Any] = {}
            try:
                if isinstance(content, Broken):
                    fields = {"id": content.id}
                    raise content.why
                fields = _parse(number, content, pairs) if isinstance(content, str) else content
                rows.append(read(number, fields))
            except DataError as error:
                if not keep_going:
                    raise
                # A name of a column that is no text would keep the others from being written.
                why = str(error).encode(errors="backslashreplace").decode()
                given_id = fields.get("id")
                broken[place] = {"id": str(given_id if is_id(given_id) else number), "error": why}
        found = iter(answer(rows) if rows else ())
        for place in range(len(part)):
            yield broken[place] if place in broken else next(found)


def _windows(given: Iterable[Given | None], empty: bool) -> Iterator[list[Given]]:
    part: list[Given] = []
    most, characters = min(_FIRST, _MOST), 0
    for one in given:
        if one is not None and (empty or not isinstance(one[1], str) or one[1].strip()):
            part.append(one)
            characters += len(one[1]) if isinstance(one[1], str) else sum(map(len, one[1].values())) if isinstance(one[1], dict) else 0
        if part and (one is None or len(part) == most or characters > _CHARACTERS):
            if one is not None:
                most = min(2 * most, _MOST)
            yield part
            part, characters = [], 0
    if part:
        yield part


def _parse(number: int, text: str, pairs: bool) -> dict[str, Any]:
    if not is_text(text):
        raise DataError(f"line {number}: is not UTF-8; convert it")
    begins = text.lstrip()[:2]
    if begins == "[{" and _is_list(text):
        raise DataError(f"line {number}: is a list; give each of its objects a line of its own")
    if not begins.startswith("{"):
        text = text.strip("\r\n")
        first, tab, second = text.partition("\t")
        return {"text_a": first, "text_b": second} if pairs and tab else {"text_a": text, "text_b": None}
    try:
        fields = parse_json(text)
    except ValueError as error:
        raise DataError(f"line {number}: is not JSON ({error})") from None
    assert isinstance(fields, dict)
    if "\\ud" in text.lower() and not is_text(json.dumps(fields, ensure_ascii=False)):
        raise DataError(f"line {number}: has half of a surrogate pair, which is no character")
    return fields


def _is_list(text: str) -> bool:
    try:
        return isinstance(parse_json(text), list)
    except ValueError:
        return False
