"""What `precision: auto` means where a run began already."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from overnight.config.fields import hints
from overnight.config.schema import Run
from overnight.errors import ConfigError
from overnight.state_files import read_yaml


def begun_precision(folder: Path) -> str:
    """Return the precision in which the run of a folder began; empty where none did, or its settings cannot be read, which is said where they are needed.

    Raises:
        ConfigError: they can be read, and it is none.
    """
    path, found = folder / "run.yaml", dict[str, Any]()
    with contextlib.suppress(ConfigError):
        found = read_yaml(path, "", ConfigError)[0] if path.is_file() else {}
    begun, allowed = found.get("precision", ""), get_args(hints(Run)["precision"][0])
    if begun not in ("", *allowed):
        raise ConfigError(f"{path}: precision = {begun!r}: must be one of {', '.join(allowed)}; correct it, or put it back")
    return str(begun)


def without_auto(overrides: Sequence[str]) -> list[str]:
    """Return overrides of a model that is trained, of which `precision=auto` says nothing."""
    return [override for override in overrides if override != "precision=auto"]
