"""A hash of the files of a task: results on other rows are other results."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from overnight.corpus import pydocs
from overnight.corpus.data_paths import every_file
from overnight.state_files import file_digest
from overnight.tasks import conll, tables
from overnight.tasks.squad import squad_files

# What readers of tasks take from a folder is called so, by its whole name; beside it may lie anything, such as answers written there.
_STEM = "train|dev|valid|validation|test|testa|testb"
_ENDING = "|".join(map(re.escape, (*tables.ENDINGS, *conll.ENDINGS, ".json")))
_FILE = re.compile(
    rf"({_STEM})({_ENDING})|.+\.({_STEM})"
    r"|(dev|test)_(mis)?matched\.tsv|dev_ids\.tsv|msr_paraphrase_(train|test)\.txt|(train|dev|test)_binary_sent\.csv"
    r"|aclImdb(_v1)?\.tar\.(gz|xz)",
    re.I,
)
_FOLDER = re.compile("train|test|aclImdb", re.I)  # of reviews


def data_hash(*paths: Path) -> str:
    """Return a hash of what files hold, and of the files of each folder that a reader of tasks takes, 16 hex digits; empty where a path is not there.

    Of folders below, such as those of IMDB's reviews, names and sizes count.
    """
    if not all(path.exists() for path in paths):
        return ""
    state = hashlib.blake2b(digest_size=8)
    for path in paths:
        for line in _lines(path):
            state.update(f"{line}\n".encode("utf-8", "surrogateescape"))
    return state.hexdigest()


def documentation_hash() -> str:
    """Return a hash of the packages of this environment whose documentation is a task, with their versions, 16 hex digits."""
    return hashlib.blake2b(json.dumps(pydocs.environment()).encode(), digest_size=8).hexdigest()


def hashed_paths(paths: Mapping[str, str], data: str, facts: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the paths of a task that count for its results: those that its model was trained by, where the same rows lie elsewhere now.

    Args:
        paths: given now, by key.
        data: :func:`data_hash` of what lies there.
        facts: of the model that is there, with its `spec` and `result`; None where there is none.
    """
    if facts is None or not data or facts["result"].get("data_hash") != data:
        return dict(paths)
    before = {key: str(facts["spec"].get(key, path)) for key, path in paths.items()}
    # The same bytes under another ending are read otherwise.
    alike = all(Path(before[key]).suffix.lower() == Path(path).suffix.lower() for key, path in paths.items())
    return before if alike else dict(paths)


def _lines(path: Path) -> Iterator[str]:
    if path.is_file():
        yield file_digest(path)
        return
    questions = squad_files(path)
    for child in sorted(child for child in path.iterdir() if _is_read(child, questions)):
        if child.is_file():
            yield f"{child.name} {file_digest(child)}"
        for file in sorted(file for file in every_file(child) if file.is_file()) if child.is_dir() else ():
            yield f"{file.relative_to(path)} {file.stat().st_size}"


def _is_read(child: Path, questions: list[Path]) -> bool:
    if child.name.startswith("."):
        return False
    return bool(_FILE.fullmatch(child.name) or child in questions) if child.is_file() else bool(_FOLDER.fullmatch(child.name))
