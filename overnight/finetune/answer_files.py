"""Answers of a trained model as files: JSON lines, or `{id: text}` as the scripts of SQuAD read it."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from overnight.display import json_line, plural
from overnight.errors import ConfigError, DataError
from overnight.run_dir.atomic import write_json, write_whole
from overnight.tasks.inputs import PACKED

_TABLES = (".csv", ".tsv", ".parquet")


def check_output(to: str | None) -> Path | None:
    """Return the file that answers go to; None is standard output, which `-` is too.

    Raises:
        ConfigError: its ending promises a table, or that it is compressed.
    """
    ending = Path(to or "").suffix.lower()
    if ending in _TABLES:
        raise ConfigError(f"--to = {to}: answers are lines of JSON, not a table; name a file such as answers.jsonl")
    if ending in PACKED:
        raise ConfigError(f"--to = {to}: answers are not compressed; name a file such as answers.jsonl, or print them into a pipe")
    return Path(to) if to and to != "-" else None


def by_id(answers: Sequence[Mapping[str, Any]], path: Path) -> dict[str, str]:
    """Return answers to questions as `{id: text}`.

    Raises:
        DataError: two have one id, of which one would be lost.
    """
    found = {answer["id"]: answer["answer"] for answer in answers}
    if len(found) < len(answers):
        twice = next(name for name, count in Counter(answer["id"] for answer in answers).items() if count > 1)
        raise DataError(
            f"{path}: needs one answer for each id, but several questions have the id {twice!r}; give each its own, or name a .jsonl"
        )
    return found


def write_files(folder: Path, files: Mapping[str, Any]) -> None:
    """Write files into a folder, by their names: texts as they are, other values as JSON."""
    for name, content in files.items():
        if isinstance(content, str):
            write_whole(folder / name, [content.encode()])
        else:
            write_json(folder / name, content)


def _print_error(answer: Mapping[str, Any]) -> None:
    if "error" in answer:
        print(f"{answer['id']}: {answer['error']}", file=sys.stderr)


def _print_written(path: Path, count: int) -> None:
    if path.is_file():  # else it may be /dev/stdout, whose reader waits for answers alone
        print(f"written: {path} ({plural(count, 'answer')})")


def write_answers(answers: Iterable[dict[str, Any]], path: Path | None) -> int:
    """Print answers as JSON lines, or write them to a file: whole or not at all, and as `{id: text}`, without errors, where they are texts and it is a .json.

    Returns:
        how many of them are an `error`; each is also said on standard error where the answers go to a file.

    Raises:
        DataError: two texts that are to be a `{id: text}` have one id.
    """
    count, broken = 0, 0

    def counted() -> Iterator[dict[str, Any]]:
        nonlocal count, broken
        for answer in answers:
            count, broken = count + 1, broken + ("error" in answer)
            if path is not None:
                _print_error(answer)
            yield answer

    if path is None:
        for answer in counted():
            print(json_line(answer, sys.stdout), flush=True)
        return broken
    if path.suffix == ".json":
        answers = given = list(answers)
        texts = [answer for answer in given if "answer" in answer]
        if texts or not given:  # questions, of which some may be errors: these have no text
            for answer in given:
                _print_error(answer)
            write_json(path, by_id(texts, path))
            _print_written(path, len(texts))
            return len(given) - len(texts)
    write_whole(path, (f"{json.dumps(answer, ensure_ascii=False)}\n".encode() for answer in counted()))
    _print_written(path, count)
    return broken
