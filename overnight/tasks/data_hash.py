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

# What readers of tasks take from a folder is called so, or is what IMDB is downloaded as; beside it may lie anything, such as answers written there.
_SPLIT = re.compile(r"train|dev|valid|test|^aclImdb", re.I)


def data_hash(*paths: Path) -> str:
    """Return a hash of what files hold, and of the files of each folder that are of a split by their name, or all of IMDB, 16 hex digits; empty where a path is not there.

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
    for child in sorted(child for child in path.iterdir() if _SPLIT.search(child.name)):
        if child.is_file():
            yield f"{child.name} {file_digest(child)}"
        for file in sorted(file for file in every_file(child) if file.is_file()) if child.is_dir() else ():
            yield f"{file.relative_to(path)} {file.stat().st_size}"
