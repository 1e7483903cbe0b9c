"""Read a run folder: `run.yaml`, `env.json`, `metrics.jsonl`, `tasks.jsonl`, `samples.json`. The report meets the trainer only in these files."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overnight.errors import DataError

Record = dict[str, Any]

# Keys without which a line of its kind cannot be shown. Other kinds, and other keys, are ignored.
_NEEDED: dict[str, dict[str, type | tuple[type, ...]]] = {
    "train": {"phase": str, "global_step": int, "seconds": (int, float), "loss": (int, float)},
    "eval": {"phase": str, "global_step": int, "seconds": (int, float)},
    "tensors": {"phase": str, "global_step": int, "seconds": (int, float), "tensors": dict},
    "noise": {"phase": str, "global_step": int, "seconds": (int, float), "batch": int, "groups": dict},
    "phase": {"phase": str, "global_step": int, "event": str},
    "finetune": {"name": str, "seed": int, "init": str, "metric": str, "value": (int, float)},
    "transfer": {"name": str, "seed": int, "init": str, "metric": str, "value": (int, float)},
    "baseline": {"name": str, "what": str, "metric": str, "value": (int, float)},
    "event": {"what": str},
}


@dataclass(frozen=True)
class RunFolder:
    """What a run folder holds, as read."""

    path: Path
    settings: Record
    """The resolved recipe."""
    environment: Record | None
    """The machine, or None where `env.json` is absent."""
    records: dict[str, list[Record]]
    """Lines of `metrics.jsonl` by kind, in the order of the steps, and of `tasks.jsonl`."""
    notes: list[str] = field(default_factory=list)
    """What was found incomplete, for the reader of the report."""
    samples: Record = field(default_factory=dict)
    """What a finished run shows of itself, empty where `samples.json` is absent."""

    @property
    def name(self) -> str:
        """Name of the run."""
        return str(self.settings.get("name") or self.path.name)


def read_folder(path: Path) -> RunFolder:
    """A run folder's settings, environment and metrics.

    A cut last line, as a kill leaves it, is left out and noted.

    Raises:
        DataError: when the folder, `run.yaml` or `metrics.jsonl` is absent, or a file cannot be read; with the file and the line.
    """
    if not path.is_dir():
        raise DataError(f"{path}: no such run folder")
    settings = _settings(path / "run.yaml")
    records, notes = _metrics(path / "metrics.jsonl", path / "tasks.jsonl")
    environment, samples = (_json_object(path / name) for name in ("env.json", "samples.json"))
    if environment is None:
        notes.append("env.json is absent: the machine is not known")
    return RunFolder(path, settings, environment, records, notes, samples or {})


def _text(path: Path, why: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"{path} does not exist: {why}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def _settings(path: Path) -> Record:
    import yaml

    text = _text(path, f"{path.parent} is not a run folder; name one that `overnight run` or `overnight pretrain` has made")
    try:
        settings = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise DataError(f"{path} is not YAML: {error}") from None
    if not isinstance(settings, dict):
        raise DataError(f"{path} holds no settings")
    return settings


def _json_object(path: Path) -> Record | None:
    if not path.exists():
        return None
    try:
        found = json.loads(_text(path, ""))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno} is not JSON: {error.msg}; remove the file to go on without it") from None
    if not isinstance(found, dict):
        raise DataError(f"{path} does not hold one JSON object; remove the file to go on without it")
    return found


def _metrics(path: Path, tasks: Path) -> tuple[dict[str, list[Record]], list[str]]:
    notes: list[str] = []
    records: dict[str, list[Record]] = {kind: [] for kind in _NEEDED}
    _read(path, _text(path, "nothing was trained in this folder yet; `overnight run` or `overnight pretrain` begins it"), records, notes)
    if tasks.exists():
        _read(tasks, _text(tasks, ""), records, notes)
    if not any(records.values()):
        notes.append("metrics.jsonl is empty: nothing was measured yet")
    for kind in ("train", "eval", "tensors", "noise"):
        records[kind] = _newest(records[kind])
    for kind in ("finetune", "transfer", "baseline"):
        records[kind] = _same_settings(records[kind])
    return records, notes


def _read(path: Path, text: str, records: dict[str, list[Record]], notes: list[str]) -> None:
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            # Only the line that a kill cut short has no end.
            if number == len(lines):
                notes.append(f"the last line of {path.name} (line {number}) is cut and left out: the run was stopped while writing it")
                continue
            raise DataError(f"{path}:{number} is not JSON: {error.msg} at column {error.colno}") from None
        _check(record, f"{path}:{number}")
        if record["kind"] in records:
            records[record["kind"]].append(record)


def _check(record: Any, where: str) -> None:
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        raise DataError(f"{where}: is not a JSON object with a `kind`")
    for key, kinds in _NEEDED.get(record["kind"], {}).items():
        value = record.get(key)
        if not isinstance(value, kinds) or isinstance(value, bool):
            found = f"is {value!r}" if key in record else "is missing"
            raise DataError(f"{where}: {key!r} of a {record['kind']!r} line {found}")


def _newest(records: list[Record]) -> list[Record]:
    """One line a step, the last that was written: a run that went back to an older checkpoint repeats steps."""
    by_step = {record["global_step"]: record for record in records}
    return [by_step[step] for step in sorted(by_step)]


def _same_settings(records: list[Record]) -> list[Record]:
    """Of each task the lines that were made with the settings, and from the checkpoint, of its last line."""
    newest = {record["name"]: record.get("tag") for record in records}
    return [record for record in records if record.get("tag") == newest[record["name"]]]
