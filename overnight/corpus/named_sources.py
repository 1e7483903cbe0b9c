"""The sources that a recipe names (`data.sources`), or the paths of one without names (`data.paths`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from overnight.config import Data

# What a source may have of its own.
_OWN = ("format", "field", "documents")


def named_paths(data: Data) -> list[tuple[str, str]]:
    """Return all paths to read, in order, each with the name of its source; the name is empty where there are only paths."""
    return [(name, path) for name, source in data.sources.items() for path in source.paths] or [("", path) for path in data.paths]


def read_as(data: Data, name: str) -> Data:
    """Return the settings with which a source is read: those of all, with its own in their place."""
    source = data.sources.get(name)
    return dataclasses.replace(data, **{key: value for key in _OWN if (value := getattr(source, key))}) if source else data


def deciding(data: Data) -> list[list[Any]]:
    """Return what of the sources decides the bytes of the shards, as the manifest has it: all but how often each is read."""
    return [[name, source.paths, *(getattr(source, key) for key in _OWN)] for name, source in data.sources.items()]


def runs_of(names: Sequence[str]) -> list[tuple[str, slice]]:
    """Return which stretches of a list are of one source, in order: its name, and where they lie."""
    starts = [at for at in range(len(names)) if not at or names[at] != names[at - 1]]
    return [(names[start], slice(start, end)) for start, end in zip(starts, [*starts[1:], len(names)], strict=True)]
