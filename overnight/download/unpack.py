"""Zip archives: the members that are wanted, each under its bare name in a folder that the archive has no say in."""

from __future__ import annotations

import fnmatch
import hashlib
import shutil
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from overnight.download.transfer import DiskFullError, part_path, without_room
from overnight.errors import DataError
from overnight.run_dir.atomic import FULL

_BLOCK = 1 << 18
# No text packs better; what claims to is made to fill disks.
_MOST_RATIO = 200


class Unpacked(NamedTuple):
    """A member, under its name for parts."""

    member: str
    part: Path
    target: Path
    size: int
    sha256: str


def unpack(archive: Path, pattern: str, folder: Path, shown: str) -> list[Unpacked]:
    """Unpack the members of a zip archive whose names match.

    Args:
        archive: the file.
        pattern: a folder in the archive and a pattern of names in it, `CoLA/*.tsv`; folders below it are left out, and so are hidden files.
        folder: where to.
        shown: the archive, for errors.

    Returns:
        the members, whole and checked, to be renamed by whoever asked.

    Raises:
        DataError: no archive, damaged, nothing matches, or more unpacked than it can hold.
        DiskFullError: there is no room.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with zipfile.ZipFile(archive) as opened:
            wanted = list(_matching(opened, pattern))
            if not wanted:
                raise DataError(f"{shown}: has no {pattern} in it; the archive has changed")
            total, free = sum(info.file_size for info in wanted), shutil.disk_usage(folder).free
            if total > _MOST_RATIO * archive.stat().st_size:
                raise DataError(f"{shown}: would unpack to {total:,} bytes, more than {_MOST_RATIO} times its size; it was not unpacked")
            if total > free:
                raise DiskFullError(
                    f"{folder}: has {free / 1e6:,.0f} MB free, and {shown} unpacks to {total / 1e6:,.0f} MB; {without_room()}"
                )
            return _members(opened, wanted, folder)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise DataError(f"{shown}: is damaged or no zip archive ({error}); nothing of it is kept") from None
    except OSError as error:
        if error.errno in FULL:
            raise DiskFullError(f"{folder}: {error.strerror} for what {shown} unpacks to; {without_room(error.errno)}") from None
        raise


def _matching(opened: zipfile.ZipFile, pattern: str) -> Iterator[zipfile.ZipInfo]:
    inside, _, names = pattern.rpartition("/")
    for info in opened.infolist():
        where, _, name = info.filename.rpartition("/")
        if where == inside and fnmatch.fnmatchcase(name, names) and not name.startswith("."):
            yield info


def _members(opened: zipfile.ZipFile, wanted: list[zipfile.ZipInfo], folder: Path) -> list[Unpacked]:
    """Return the members, all or none."""
    done: list[Unpacked] = []
    try:
        for info in wanted:
            done.append(_member(opened, info, folder / info.filename.rpartition("/")[2]))
    except BaseException:
        for one in done:
            one.part.unlink(missing_ok=True)
        raise
    return done


def _member(opened: zipfile.ZipFile, info: zipfile.ZipInfo, target: Path) -> Unpacked:
    part, digest, size = part_path(target), hashlib.sha256(), 0
    try:
        with opened.open(info) as stream, open(part, "wb") as file:
            while block := stream.read(_BLOCK):  # never more than the member's stated size
                file.write(block)
                digest.update(block)
                size += len(block)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return Unpacked(info.filename, part, target, size, digest.hexdigest())
