"""The source files that a preparation has read, by their names and sizes: whether they are still the same is seen without reading them again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from overnight.config import Data
from overnight.corpus import hub, places
from overnight.corpus.named_sources import named_paths
from overnight.corpus.places import StoredFile
from overnight.corpus.readers import BUILTIN, Reading
from overnight.display import plural
from overnight.errors import UserError
from overnight.state_files import STRICT


@dataclass(frozen=True)
class SourceFiles:
    """What there was on this machine to read; what is stored elsewhere is not looked at."""

    __pydantic_config__ = STRICT
    files: int
    bytes: int
    checksum: str
    """XXH3-128 of the names and sizes, 32 hex digits; names begin at the folder that the files of a path have in common."""


def files_read(reading: Reading) -> SourceFiles:
    """Return what a preparation reads."""
    return _summed(files for source, files in zip(reading.sources, reading.files, strict=True) if _is_here(source.path))


def change(read: SourceFiles | None, data: Data, leave_out: Sequence[Path]) -> str:
    """Return how the source files differ from those that were read; nothing where they do not, are no longer there, or it is not known what was read.

    Args:
        read: what the manifest has.
        data: the paths.
        leave_out: as of :func:`readers.start_reading`.
    """
    if read is None:
        return ""
    try:
        now = _summed(places.files(path, leave_out=leave_out) for _, path in named_paths(data) if _is_here(path))
    except UserError:  # the shards are what they are, also where the text has gone since
        return ""
    return "" if now == read else f"now {plural(now.files, 'file')} of {now.bytes:,} bytes, before {read.files:,} of {read.bytes:,}"


def _is_here(path: str) -> bool:
    return path != BUILTIN and not path.startswith(hub.PREFIX) and not places.is_remote(path)


def _summed(files_of_paths: Iterable[Sequence[StoredFile]]) -> SourceFiles:
    facts: list[list[tuple[str, int]]] = []
    for files in files_of_paths:
        # Where a path begins may differ, as by `$NAME` on another machine.
        common = os.path.commonpath([os.path.dirname(file.name) for file in files]) if files else ""
        facts.append([(file.name.removeprefix(common), file.size) for file in files])
    sizes = [size for files in facts for _, size in files]
    return SourceFiles(len(sizes), sum(sizes), xxhash.xxh3_128_hexdigest(json.dumps(facts).encode()))
