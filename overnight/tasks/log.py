"""`tasks.jsonl` of a run folder: one line for every task, seed and initialisation."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def read_log(path: Path) -> list[dict[str, Any]]:
    """All lines, none where there is no file; a last line that was cut short is none."""
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0] if path.exists() else ""
    return [json.loads(text) for text in whole.splitlines()]


def lines_of(path: Path, name: str, tag: str) -> list[dict[str, Any]]:
    """The lines of a task with the same settings."""
    return [entry for entry in read_log(path) if entry["name"] == name and entry["tag"] == tag]


def append(path: Path, entry: dict[str, Any]) -> dict[str, Any]:
    """Add a line, in the place of a last one that was cut short."""
    with path.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write((json.dumps(entry) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())
    return entry
