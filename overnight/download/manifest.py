"""`download.json`: what a folder has, where each file is from and how it was when it came; and the lock of that folder."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from overnight.errors import DataError, UserError
from overnight.run_dir.atomic import write_json
from overnight.run_dir.lock import holder_of, sign, try_lock
from overnight.state_files import STRICT, read_json, sealed

NAME = "download.json"
_REMEDY = "move it away: files whose checksums are published are recognized, others are downloaded again once they are moved away too"


@dataclass(frozen=True)
class Entry:
    """A file of the folder."""

    __pydantic_config__ = STRICT
    dataset: str
    address: str
    """Where it is published, whichever mirror it came from."""
    size: int
    sha256: str
    modified_ns: int
    """When the file was last written here (nanoseconds since 1970); one that has not been written since needs no new checksum."""
    date: str
    """When it came, in universal time."""
    published_checksum: str
    """`sha1:...` or `sha256:...`, with which it agreed; empty where none is published."""
    license: str
    citation: str
    member: str = ""
    """Its name in the archive at the address, of a file that was unpacked."""


@dataclass(frozen=True)
class _Manifest:
    __pydantic_config__ = STRICT
    version: int
    files: dict[str, Entry] = field(default_factory=dict)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def now() -> str:
    """Return the date and time, as the manifest has it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class Manifest:
    """The files of a folder by their paths in it.

    Args:
        folder: where `download.json` lies, if there is one yet.

    Raises:
        DataError: when it is damaged or of another version.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.files: dict[str, Entry] = {}
        if (path := folder / NAME).exists():
            read: _Manifest = read_json(path, _Manifest, _REMEDY)
            if read.version != 1:
                raise DataError(f"{path}: has version {read.version}, and this program knows 1; {_REMEDY}")
            self.files = dict(read.files)

    def add(self, entries: dict[str, Entry]) -> None:
        """Record files that are there now, and write it down."""
        self.files |= entries
        tree = {"version": 1, "files": {path: dataclasses.asdict(self.files[path]) for path in sorted(self.files)}}
        write_json(self._folder / NAME, sealed(tree))

    def is_whole(self, path: str, again: bool) -> bool:
        """Return whether a file is there as it came.

        Args:
            path: in the folder.
            again: read it, even if it has not been written since.
        """
        entry, file = self.files.get(path), self._folder / path
        if entry is None or not file.is_file() or file.stat().st_size != entry.size:
            return False
        if file.stat().st_mtime_ns == entry.modified_ns and not again:
            return True
        if sha256_of(file) != entry.sha256:
            return False
        self.add({path: dataclasses.replace(entry, modified_ns=file.stat().st_mtime_ns)})
        return True


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Let this process alone download into a folder, which is made if absent; the lock ends with the process, however it ends.

    Raises:
        UserError: when another process has it, naming its number and host.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".download.lock").open("a+", encoding="utf-8") as file:
        if not try_lock(file):
            raise UserError(
                f"{folder}: another download writes there, {holder_of(file)}; wait until it ends, or name another folder with --to"
            )
        sign(file)
        yield
