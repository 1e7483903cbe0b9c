"""`tasks.jsonl` of a run folder: one line for every task, seed and initialization."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overnight.state_files import fitted, read_lines, sealed

REMEDY = "delete that line, and the task is done again, or put the file back"


@dataclass(frozen=True)
class _Entry:
    """What a line must have; there is more, by its kind."""

    kind: str
    name: str
    value: float
    config_hash: str = ""
    init: str = ""
    seed: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    unit: dict[str, Any] | None = None


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return all lines, none where there is no file; a last line that was cut short is none.

    Raises:
        DataError: naming the line that is damaged, was changed since it was written, or is of no task.
    """
    entries = []
    for number, entry in read_lines(path, REMEDY) if path.exists() else ():
        if entry is not None:
            fitted(entry, _Entry, f"{path}:{number}", REMEDY)
            entries.append(entry)
    return entries


def results_of(path: Path, name: str, config_hash: str) -> list[dict[str, Any]]:
    """Return the lines of a task with some settings; where others have put a model into its folder since, only those behind that."""
    mine = [entry for entry in read_results(path) if entry["name"] == name]
    others = (place for place, entry in enumerate(mine, 1) if entry.get("init") == "pretrained" and entry.get("config_hash") != config_hash)
    return [entry for entry in mine[max(others, default=0) :] if entry.get("config_hash") == config_hash]


def scored_seeds(run_dir: Path, result: Mapping[str, Any]) -> list[int]:
    """Return the seeds among which the model of a task is the best: those that were scored, now or in a command after it.

    Args:
        run_dir: the run folder.
        result: of the model, as its `task.json` has it.

    Raises:
        DataError: as of :func:`read_results`.
    """
    scored = results_of(run_dir / "tasks.jsonl", str(result.get("name", "")), str(result.get("config_hash", "")))
    return sorted({result["seed"], *(entry["seed"] for entry in scored if entry.get("init") == "pretrained")})


def append_result(path: Path, entry: dict[str, Any]) -> dict[str, Any]:
    """Add a line with its own checksum, in the place of a last one that was cut short; returns what was given."""
    with path.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write((json.dumps(sealed(entry)) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())
    return entry
