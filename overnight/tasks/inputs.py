"""What a trained model is to answer: lines of text or JSON, or a table with the columns of the task."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from overnight.errors import DataError
from overnight.state_files import parse_json
from overnight.tasks.classification import text_columns
from overnight.tasks.conll import ENDINGS, Sentence, read_sentences
from overnight.tasks.examples import Example
from overnight.tasks.squad import Question
from overnight.tasks.tables import Line, read_csv, read_jsonl, read_parquet, read_text, read_tsv

Row = TypeVar("Row")
# Lines answered at once: sorted by length among themselves, answered in the order they came.
_AT_ONCE = 512
_TABLES: dict[str, Callable[[Path], Iterator[Line]]] = {".csv": read_csv, ".tsv": read_tsv, ".jsonl": read_jsonl, ".parquet": read_parquet}


def read_input(path: str, spec: Mapping[str, Any], keep_going: bool = False) -> Iterator[str]:
    """Return lines for :func:`parts`: those of a file or standard input, or the rows of a table, each as JSON.

    The texts of a table are in the columns that the task was trained on, or in `text` (`text_a` and `text_b`); other columns, such as the
    labels, are ignored. A row is called by its `id` (of the published tasks also `index`), or else by its line.

    Args:
        path: .csv, .tsv, .jsonl and .parquet are tables; any other file, and `-` (standard input), is lines.
        spec: of the task: `task`, and `columns`, where the columns of one's own table have other names.
        keep_going: as of :func:`read_lines`.

    Raises:
        DataError: naming the file and the line.
    """
    ending = Path(path).suffix
    if spec["task"] == "tokens" and path != "-":
        yield from _sentences(Path(path))
        return
    if ending not in _TABLES:
        yield from read_lines(path, keep_going)
        return
    task, names = str(spec["task"]), dict(spec.get("columns") or {})
    choices, header = text_columns(task)
    if names.get("text"):
        choices = [tuple(name for name in (names["text"], names.get("text_b")) if name), *choices]
    lines, columns = _table(Path(path), choices, header)
    keys = ("question", "context") if task == "squad" else ("text_a", "text_b")
    ids = (names.get("id") or "id",) if task == "csv" else ("index", "id")
    for number, cells in lines:
        if missing := [column for column in columns if column not in cells]:
            raise DataError(f"{path}:{number}: has no {missing[0]!r} (it has {', '.join(cells)})")
        texts = dict(zip(keys, (cells[column] for column in columns), strict=False))
        if not any(texts.values()):
            raise DataError(f"{path}:{number}: no text in column {columns[0]!r}")
        row_id = next((cells[column] for column in ids if cells.get(column)), str(number))
        yield json.dumps({"id": row_id, **texts})


def _sentences(path: Path) -> Iterator[str]:
    """Yield the sentences of a file for tagging: one word a line as in a CoNLL file, JSON lines, or by any other ending a sentence a line."""
    if path.suffix not in ENDINGS or path.suffix in (".txt", ".jsonl"):
        yield from read_lines(str(path))
        return
    for sentence in read_sentences(path, tagged=False):
        yield json.dumps({"id": sentence.id, "tokens": sentence.words})


def _table(path: Path, choices: list[tuple[str, ...]], header: tuple[str, ...]) -> tuple[list[Line], tuple[str, ...]]:
    """Return the rows of a table, and the first of some ways to name the columns of texts that it has."""
    first = read_text(path).partition("\n")[0].rstrip("\r").split("\t") if path.suffix == ".tsv" else []
    # Some are published without a line of names.
    bare = bool(first) and len(first) == len(header) and not any(column in first for choice in choices for column in choice)
    lines = list(read_tsv(path, header) if bare else _TABLES[path.suffix](path))
    have = lines[0][1]
    for choice in choices:
        if all(column in have for column in choice):
            return lines, choice
    needed = ", or ".join(" and ".join(f"`{column}`" for column in choice) for choice in choices)
    raise DataError(
        f"{path}: is read as a table by its ending, has the columns {', '.join(have)}, and needs {needed}; lines of text without names of columns "
        "go into a file of another ending, or through standard input"
    )


def read_lines(path: str, keep_going: bool = False) -> Iterator[str]:
    """Return the lines of a file, or of standard input for `-`.

    Args:
        keep_going: what is not UTF-8 is no end: it comes as lone surrogates, which :func:`answered` finds in that line.

    Raises:
        DataError: when there is no such file or it is not UTF-8.
    """
    import sys

    errors = "surrogateescape" if keep_going else "strict"

    try:
        with contextlib.nullcontext(sys.stdin.buffer) if path == "-" else Path(path).open("rb") as file:
            for number, raw in enumerate(file, 1):
                yield raw.decode("utf-8-sig" if number == 1 else "utf-8", errors)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; give a file or `-` for standard input") from None
    except UnicodeDecodeError as error:
        where = "standard input" if path == "-" else path
        raise DataError(f"{where}: line {number}: is not UTF-8 ({error.reason} at byte {error.start}); convert it") from None


def parts(lines: Iterable[str]) -> Iterator[list[tuple[int, dict[str, Any]]]]:
    """Return non-empty lines with their numbers (from 1), parsed, some at a time."""
    numbered = ((number, _parse(number, text)) for number, text in enumerate(lines, 1) if text.strip())
    while part := list(islice(numbered, _AT_ONCE)):
        yield part


def answered(
    lines: Iterable[str],
    read: Callable[[int, dict[str, Any]], Row],
    answer: Callable[[list[Row]], Iterator[Any]],
    keep_going: bool = False,
    empty: bool = False,
) -> Iterator[Any]:
    """Answer lines some at a time, in their order; memory is that of so many lines.

    Args:
        lines: without end if need be.
        read: what is answered of a line, from its number (from 1) and its fields.
        answer: one answer a row, in order.
        keep_going: a line that cannot be read is answered by its `id`, or else its number, and `error`, which says why.
        empty: whether empty lines are answered too, and not skipped.

    Raises:
        DataError: of the first line that cannot be read, before any of those that are answered with it; not where it keeps going.
    """
    numbered = ((number, text) for number, text in enumerate(lines, 1) if empty or text.strip())
    while part := list(islice(numbered, _AT_ONCE)):
        rows: list[Row] = []
        broken: dict[int, dict[str, str]] = {}
        for number, text in part:
            fields: dict[str, Any] = {}
            try:
                fields = _parse(number, text)
                rows.append(read(number, fields))
            except DataError as error:
                if not keep_going:
                    raise
                broken[number] = {"id": str(fields.get("id", number)), "error": str(error)}
        given = iter(answer(rows) if rows else ())
        for number, _ in part:
            yield broken[number] if number in broken else next(given)


def _parse(number: int, text: str) -> dict[str, Any]:
    if not is_text(text):
        raise DataError(f"line {number}: is not UTF-8; convert it")
    if not text.lstrip().startswith("{"):
        first, tab, second = text.strip("\r\n").partition("\t")
        return {"text_a": first, "text_b": second if tab else None}
    try:
        fields = parse_json(text)
    except ValueError as error:
        raise DataError(f"line {number}: is not JSON ({error})") from None
    assert isinstance(fields, dict)
    if "\\ud" in text.lower() and not is_text(json.dumps(fields, ensure_ascii=False)):
        raise DataError(f"line {number}: has half of a surrogate pair, which is no character")
    return fields


def is_text(text: str) -> bool:
    """Return whether a text can be written as UTF-8: it has no half of a surrogate pair alone, as of bytes that were none or of an escape in JSON."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def example_of(number: int, fields: Mapping[str, Any]) -> Example:
    """Return the text or pair of texts of a line.

    Raises:
        DataError: naming the line, when it has none.
    """
    text = fields.get("text_a", fields.get("text"))
    second = fields.get("text_b")
    if not isinstance(text, str) or not isinstance(second, str | None):
        raise DataError(f"line {number}: has the keys {', '.join(fields)}; it needs `text`, or `text_a` and `text_b`, as strings")
    return Example(str(fields.get("id", number)), text, second, None)


def sentence_of(number: int, fields: Mapping[str, Any]) -> Sentence:
    """Return the words of a line, which has them as `tokens` or as a text of words between blanks.

    Raises:
        DataError: naming the line, when it has none.
    """
    words, text = fields.get("tokens"), fields.get("text_a", fields.get("text"))
    if words is None and isinstance(text, str):
        words = [word for part in (text, fields.get("text_b")) for word in str(part or "").split()]
    if not isinstance(words, list) or not words or not all(isinstance(word, str) and word for word in words):
        raise DataError(f"line {number}: has the keys {', '.join(fields)}; it needs `tokens`, a list of words, or `text`")
    return Sentence(str(fields.get("id", number)), tuple(words), None)


def question_of(number: int, fields: Mapping[str, Any]) -> Question:
    """Return the question of a line, without answers.

    Raises:
        DataError: naming the line, when it has none.
    """
    question, context = fields.get("question", fields.get("text_a")), fields.get("context", fields.get("text_b"))
    if not isinstance(question, str) or not isinstance(context, str):
        raise DataError(f"line {number}: has the keys {', '.join(fields)}; it needs `question` and `context` as strings")
    return Question(str(number), "", question, context, ())
