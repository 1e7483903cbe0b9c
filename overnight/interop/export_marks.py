"""Which model an export is of, in the header of its weights, so that an export replaces no other model unasked.

`config.json` would not do: transformers' `save_pretrained` copies keys that it does not know into the folder of what was trained from an export.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from overnight.errors import ConfigError, UserError

_RUN, _TASK = "overnight_run", "overnight_task"


def export_marks(run_dir: Path, task: str | None = None) -> dict[str, str]:
    """Return what the weights of an export say that they are of: the name of the run folder, and the task, empty of the pretrained model."""
    return {_RUN: run_dir.resolve().name, _TASK: task or ""}


def marked(weights: bytes, marks: Mapping[str, str]) -> list[bytes | memoryview]:
    """Return the bytes of a file of safetensors whose header has marks, too. safetensors itself writes several in any order, so each time other bytes."""
    length = int.from_bytes(weights[:8], "little")
    header = json.loads(weights[8 : 8 + length])
    header["__metadata__"] = {**header.get("__metadata__", {}), **marks}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    return [len(text).to_bytes(8, "little"), text, memoryview(weights)[8 + length :]]


def check_target(out: Path, run_dir: Path, task: str | None = None) -> None:
    """Check that an export replaces no other model than an earlier state of its own.

    Args:
        out: the folder to write.
        run_dir: of the run that is exported.
        task: a fine-tuned task; None is the pretrained model.

    Raises:
        ConfigError: the folder holds an export of another run or task, or a model that no export wrote, or is where another export belongs.
    """
    home, here = run_dir.resolve() / "export", out.resolve()
    if here == home and not task:  # an export of before the run folder was renamed, or by a version that left no marks
        return
    if _in_run_folder(here):
        raise ConfigError(f"{out}: is where `overnight run` exports the pretrained model of {here.parent.name}; name another folder")
    weights = here / "model.safetensors"
    file = next((path for path in (weights, here / "config.json") if path.is_file()), None)
    if file is None:
        return
    found = _marks(weights)
    if not found:
        raise ConfigError(f"{out}: holds a {file.name} that no export of a run wrote; name another folder, or delete it")
    if found != export_marks(run_dir, task):
        what = f"the task {found[_TASK]}" if found[_TASK] else "the pretrained model"
        raise ConfigError(f"{out}: holds an export of {what} of the run {found[_RUN]}; name another folder, or delete it")


def check_names(out: Path, files: Collection[str], needed: str = "") -> None:
    """Check that a folder to write is not there, or holds nothing but an earlier export.

    Args:
        out: the folder.
        files: names that an export writes.
        needed: the one without which the others may be somebody's own, as a tokenizer is; but for those in `RUN/export`, where nobody else writes.

    Raises:
        UserError: it holds something else, or a part of an export.
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file; name a folder")
    here = [f.name for f in out.iterdir()] if out.is_dir() else []
    ours = _in_run_folder(out.resolve())
    # A README.md alone is somebody's own.
    if strange := [name for name in here if name not in files or (here == ["README.md"] and not ours)]:
        raise UserError(f"{out}: exists and holds {strange[0]!r}, which no export wrote; name another folder")
    if here and needed and needed not in here and not ours:
        raise UserError(f"{out}: holds part of an export (no {needed}); delete the folder or name another")


def _in_run_folder(out: Path) -> bool:
    return out.name == "export" and (out.parent / "run.yaml").is_file()


def task_of(weights: Path) -> str:
    """Return the task whose export wrote weights; empty where none did, or that of a pretrained model."""
    return _marks(weights).get(_TASK, "")


def _marks(weights: Path) -> dict[str, str]:
    """Return what the weights of a folder say that they are of; nothing where they say nothing, or cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(weights, framework="np") as file:
            said = file.metadata() or {}
    except (OSError, SafetensorError):
        return {}
    return {key: said[key] for key in (_RUN, _TASK)} if _RUN in said and _TASK in said else {}
