"""One file, from its first byte or from where an earlier try ended, until it is whole and its checksum right. Only then has it its name."""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from overnight.download.connection import Answer, Source
from overnight.download.datasets import RemoteFile
from overnight.download.patience import Attempts, StoppedError, TemporaryError
from overnight.errors import DataError
from overnight.run_dir.atomic import FULL, how_to_make_room, sync, write_json
from overnight.state_files import read_json

MAX_UNANNOUNCED = 1 << 32
"""Bytes of a file whose size nobody says."""
_BLOCK = 1 << 18
# A file that changes more often than this while it is read is never whole.
_MOST_BEGINNINGS = 3
_SAME = "the same command continues"


class DiskFullError(DataError):
    """There is no room left, for this file and for any other."""


class Received(NamedTuple):
    """A file that is whole."""

    path: Path
    """Still under its name for parts; whoever asked for it renames it."""
    size: int
    sha256: str


@dataclass(frozen=True)
class _Part:
    """What is known of a file of which a part lies on the disk."""

    address: str
    etag: str
    modified: str
    total: int | None

    @property
    def validator(self) -> str:
        """What If-Range takes: an ETag that stands for the same bytes, or else the date."""
        return self.etag if self.etag.startswith('"') else self.modified

    def continues(self, file: RemoteFile) -> bool:
        """Return whether the rest of a file can be asked for: not of another address, nor where nothing would tell whether it has changed."""
        return self.address == file.address and bool(self.validator or file.checksum)


def without_room(code: int = errno.ENOSPC) -> str:
    """Return what to do where there is no room, or after another error of :data:`atomic.FULL`."""
    return f"{how_to_make_room(code)}, and {_SAME}, or name another folder with --to"


def part_path(target: Path) -> Path:
    """Return the name of a file that is not whole yet; hidden, so that whoever reads the folder meanwhile leaves it out."""
    return target.with_name(f".{target.name}.part")


def part_size(target: Path) -> int:
    """Return how many bytes of a file have come."""
    part = part_path(target)
    return part.stat().st_size if part.is_file() else 0


class Transfer:
    """One file on its way.

    Args:
        file: what is wanted.
        target: its name when it is whole.
        source: where from.
        attempts: how many tries, and the pauses between them.
        came: takes the number of bytes whenever some have come; negative where some were dropped.
        announced: takes the size of the whole, as soon as it is known; None where nobody says it.
    """

    def __init__(
        self,
        file: RemoteFile,
        target: Path,
        source: Source,
        attempts: Attempts,
        came: Callable[[int], None],
        announced: Callable[[int | None], None],
    ) -> None:
        self._file, self._source, self._attempts, self._came, self._announced = file, source, attempts, came, announced
        self._part, self._state = part_path(target), target.with_name(f".{target.name}.part.json")
        self._hash, self._hashed = hashlib.sha256(), 0
        self._published, _, self._digits = file.checksum.partition(":")
        self._is_gzip = file.path.endswith(".gz")
        self._other = hashlib.new(self._published) if self._published not in ("", "sha256") else None
        self._beginnings, self._continues = 0, True

    def receive(self) -> Received:
        """Get the file.

        Returns:
            the part, which is whole now, synced, and has the size and the checksum that are published.

        Raises:
            DataError: it cannot be had, or is not what is published; what has come is kept unless it is wrong.
            StoppedError: the command ends.
        """
        self._part.parent.mkdir(parents=True, exist_ok=True)
        while True:
            before = self._hashed
            try:
                self._try()
            except TemporaryError as error:
                self._attempts.failed(self._source.where(self._file.address), error, self._hashed > before, self._continues)
                continue
            if wrong := self._wrong():
                self._drop()
                if self._beginnings >= _MOST_BEGINNINGS - 1:
                    where = self._source.where(self._file.address)
                    raise DataError(f"{where}: {wrong}; nothing of it is kept. Try again later, or another place with --mirror")
                self._beginnings = _MOST_BEGINNINGS - 1  # once more, from the first byte
                continue
            return Received(self._part, self._hashed, self._hash.hexdigest())

    def clear(self) -> None:
        """Remove what is known of the part; it has been renamed."""
        self._state.unlink(missing_ok=True)

    def _try(self) -> None:
        """Ask once, and write what comes until the end or a failure."""
        known = self._known()
        have = self._part.stat().st_size if known else 0
        if have and known and have == known.total:  # only its end was missing: the checksum
            self._rehash(have)
            return
        answer = self._source.open(self._file.address, have, known.validator if known else "")
        try:
            if have and known and answer.total == have and answer.start == -1 and not _changed(answer, known):
                self._rehash(have)  # all had come, and only now is it said that there is no more
                return
            if have and known and (_changed(answer, known) or not answer.partial or answer.start != have):
                self._drop()
                if _changed(answer, known):
                    self._begin_anew(answer, known)
                if answer.partial:  # the rest of another file is of no use
                    raise TemporaryError("it cannot be continued and begins anew")
                have = 0
            if not have and answer.partial:
                raise DataError(f"{answer.address}: sends bytes {answer.start} and on, not all as requested; its server cannot be used")
            total = self._total(answer)
            self._announced(total)
            self._check_room((total or 0) - have)
            write_json(self._state, vars(part := _Part(self._file.address, answer.etag, answer.modified, total)))
            self._continues = part.continues(self._file)
            self._rehash(have)
            self._write(answer, total)
        finally:
            answer.close()

    def _known(self) -> _Part | None:
        """Return what is known of the part, if it can be continued."""
        if not (self._part.is_file() and self._state.is_file()):
            self._drop()
            return None
        try:
            known: _Part = read_json(self._state, _Part, "it is made anew")
        except DataError:  # a file of our own that a power cut has left half written costs no more than the part
            known = _Part("", "", "", None)
        if not known.continues(self._file):
            self._drop()
            return None
        return known

    def _begin_anew(self, answer: Answer, known: _Part) -> None:
        self._beginnings += 1
        if self._beginnings >= _MOST_BEGINNINGS:
            raise DataError(f"{self._source.where(self._file.address)}: {_change(answer, known)}")

    def _total(self, answer: Answer) -> int | None:
        """Return how many bytes the file has; what is published and what is announced must not differ."""
        if answer.kind in ("text/html", "application/xhtml+xml") and not self._file.address.endswith((".html", "/")):
            raise DataError(
                f"{answer.address}: is a page for people and not the file; log in there once, or name another place with --mirror"
            )
        wanted = self._file.size
        if wanted is not None and answer.total is not None and answer.total != wanted:
            raise DataError(
                f"{answer.address}: announces {answer.total:,} bytes where {wanted:,} are published; the file has changed, and nothing of it was downloaded"
            )
        total = answer.total if wanted is None else wanted
        if total is None and not (answer.ends or self._digits or self._is_gzip):
            text = "does not say where it ends, and neither size nor checksum is published: nothing would tell a part from the whole"
            raise DataError(f"{answer.address}: {text}. Name another place with --mirror, or do without a proxy on the way")
        return total

    def _check_room(self, wanted: int) -> None:
        free = shutil.disk_usage(self._part.parent).free
        if wanted > free:
            raise DiskFullError(
                f"{self._part.parent}: has {free / 1e6:,.0f} MB free, and {self._part.name[1:-5]} needs {wanted / 1e6:,.0f} MB; {without_room()}"
            )

    def _write(self, answer: Answer, total: int | None) -> None:
        limit = MAX_UNANNOUNCED if total is None else total
        with open(self._part, "ab", buffering=0) as part:
            while block := answer.read(_BLOCK):
                if self._source.stop.is_set():
                    raise StoppedError
                if self._hashed + len(block) > limit:
                    self._drop()
                    raise DataError(f"{answer.address}: sends more than the {limit:,} bytes that it has; nothing of it is kept")
                self._append(part, block)
            if total is not None and self._hashed < total:
                raise TemporaryError(f"it ended after {self._hashed:,} of {total:,} bytes")
            os.fsync(part.fileno())

    def _append(self, part: BinaryIO, block: bytes) -> None:
        rest = memoryview(block)
        try:
            while rest:  # a disk that fills up takes the beginning of it first
                written = part.write(rest)
                self._count(rest[:written])
                rest = rest[written:]
        except OSError as error:
            if error.errno in FULL:
                text = f"{self._part}: {error.strerror} after {self._hashed:,} bytes, which are kept; {without_room(error.errno)}"
                raise DiskFullError(text) from None
            raise DataError(f"{self._part}: cannot be written ({error.strerror}); {_SAME}") from None

    def _count(self, block: bytes | memoryview) -> None:
        self._hash.update(block)
        if self._other:
            self._other.update(block)
        self._hashed += len(block)
        self._came(len(block))

    def _rehash(self, have: int) -> None:
        """Let the checksums be those of the part, which another process may have begun."""
        if self._hashed == have:
            return
        self._reset_hash()
        with open(self._part, "rb") as part:
            while block := part.read(_BLOCK):
                if self._source.stop.is_set():
                    raise StoppedError
                self._count(block)

    def _reset_hash(self) -> None:
        self._came(-self._hashed)
        self._hash, self._hashed = hashlib.sha256(), 0
        self._other = hashlib.new(self._published) if self._other else None

    def _drop(self) -> None:
        self._reset_hash()
        self._part.unlink(missing_ok=True)
        self._state.unlink(missing_ok=True)

    def _wrong(self) -> str:
        """Return what is wrong with a file that has come to its end; nothing where it is as published."""
        if self._file.size is not None and self._hashed != self._file.size:
            return f"has {self._hashed:,} bytes where {self._file.size:,} are published"
        found = self._other.hexdigest() if self._other else self._hash.hexdigest()
        if self._digits and found != self._digits:
            return f"its {self._published} is {found}, and {self._digits} is published"
        if not self._digits and self._is_gzip:
            return _gzip_damage(self._part)
        return ""


def _changed(answer: Answer, known: _Part) -> bool:
    """Return whether the file is another one than that of which there is a part; also of a server that does not know If-Range."""
    pairs = ((known.etag, answer.etag), (known.modified, answer.modified), (known.total, answer.total))
    return any(old and new and old != new for old, new in pairs)


def _change(answer: Answer, known: _Part) -> str:
    """Return what to say of a file that is another one again and again."""
    if known.etag and known.etag == answer.etag and known.total and answer.total and known.total != answer.total:
        return f"announces {known.total:,} bytes and then {answer.total:,} of one file; name another place with --mirror"
    return "changes again and again while it is read; try again later"


def _gzip_damage(path: Path) -> str:
    """Return what is wrong with a gzip file by its own checksums, which is all there is where none is published."""
    try:
        with gzip.open(path) as stream:
            while stream.read(1 << 20):
                pass
    except (OSError, EOFError, zlib.error) as error:
        return f"is not a whole gzip file ({error})"
    return ""


def put(part: Path, target: Path) -> None:
    """Give a whole file its name, so that it survives a power cut."""
    os.replace(part, target)
    sync(target.parent)
