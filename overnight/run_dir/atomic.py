"""Files that are whole or absent: written to a temporary name, synced, renamed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from overnight.errors import ConfigError

_UNFINISHED = re.compile(r".+\.\d+-[0-9a-f]{8}\.tmp", re.S)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a write for which there is no room."""


def how_to_make_room(code: int | None) -> str:
    """Return what to do after an error of :data:`FULL`: where a limit is reached, free room on the disk does not help."""
    if code == errno.ENOSPC:
        return "make room"
    return "a limit on the size of files (ulimit -f, the file system) or a quota is reached: raise it"


@contextlib.contextmanager
def naming(path: Path | None) -> Iterator[None]:
    """Let an error that is raised within it name the file that is written: the system names only files that it cannot open."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or (path and str(path))
        raise


def check_writable(folder: Path, key: str) -> None:
    """Check that files can be written into a folder, or that it can be made, before work begins whose result goes there. Nothing is left behind.

    Args:
        folder: it may be absent, and so may the folders that it lies in.
        key: of the setting that names it.

    Raises:
        ConfigError: it cannot be written, for another reason than that there is no room, which may be made.
    """
    try:
        absolute = folder.absolute()
        there = next(parent for parent in (absolute, *absolute.parents) if os.path.lexists(parent))
        if not there.exists():
            raise ConfigError(f"{key} = {folder}: {there} is a link to {os.readlink(there)}, which does not exist; is its disk mounted?")
        longest = os.pathconf(there, "PC_NAME_MAX")  # the system says so only once the folder above is there
        if any(len(os.fsencode(name)) > longest for name in absolute.relative_to(there).parts):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        with tempfile.TemporaryDirectory(dir=there, prefix="."):
            pass
    except OSError as error:
        if error.errno not in FULL:
            raise ConfigError(f"{key} = {folder}: cannot be written ({error.strerror}); name another folder") from None


def write_whole(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file so that its name appears only when all of it is on the disk.

    Args:
        path: where it goes; an older file of that name is replaced, of a link the file that it leads to. A pipe or a device (`/dev/stdout`) is written into as it is.
        parts: its bytes, in order.

    Raises:
        OSError: as the system says it (a full disk), with the name of the file; nothing is left behind.
    """
    with whole_file(path) as file:
        for part in parts:
            file.write(part)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write whose name appears when all is done; after an error nothing is left behind. As :func:`write_whole`, for what is not written from front to end."""
    if path.exists() and not path.is_file() and not path.is_dir():  # a rename would put a file in the place of the device
        with open(path, "wb") as file:
            yield file
        return
    asked, path = path, path.resolve() if path.is_symlink() else path
    path.parent.mkdir(parents=True, exist_ok=True)
    # A process number is unique on one machine only, and processes of many may write the same file.
    beside = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    assert is_unfinished(beside), beside
    try:
        with naming(asked), open(beside, "wb") as file:
            with contextlib.suppress(OSError):  # of a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with this process: see remove_unfinished
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        if isinstance(error, OSError) and error.filename in (str(beside), beside):  # a name that nobody knows
            error.filename = str(asked)
            del error.filename2  # of the rename
        raise
    sync(path.parent)


def is_unfinished(path: Path) -> bool:
    """Return whether a name is that of a file which :func:`whole_file` writes, or was writing when its process was killed."""
    return bool(_UNFINISHED.fullmatch(path.name))


def remove_unfinished(folder: Path) -> None:
    """Remove from a folder what processes left that were killed while they wrote a file; what a living one is writing stays."""
    for path in folder.glob("*.tmp"):
        if is_unfinished(path) and path.is_file() and not _is_being_written(path):
            path.unlink(missing_ok=True)


def _is_being_written(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            # Shared, as a file that is open for reading has no other lock on NFS.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # it has gone, or there are no locks here
        return False
    return False


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON with the keys in the order given (bytes depend on the value alone)."""
    write_whole(path, [(json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()])


def sync(path: Path) -> None:
    """Let what was written to a file, or the renames in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
