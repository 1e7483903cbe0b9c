"""Which files an entry of `data.paths` stands for: itself, all in a folder, or all that its glob matches."""

from __future__ import annotations

import functools
import glob
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from overnight import config
from overnight.errors import ConfigError, DataError


def expand(path: str, key: str = "data.paths", leave_out: Sequence[Path] = ()) -> list[Path]:
    """Return the files a path of `data.paths` stands for: itself, all in the folder below it, or all that its glob matches, sorted.

    Hidden files and folders, whose names begin with a dot, are left out. Links are followed, but for those that lead back to a folder above them, and
    what is below a folder is taken once, however many links lead there. `::` and what follows it is about the members of archives.

    Args:
        path: the path.
        key: the setting that it is from, for messages.
        leave_out: folders that are not entered on the way; what the path itself names in one of them is taken.

    Raises:
        ConfigError: when it is empty, or names an environment variable that is not set.
        DataError: when there is no such file, none in the folder, it is a folder to leave out, a link leads nowhere, or a folder cannot be read, of whose
            texts nobody would know.
    """
    try:
        return _expanded(path, key, leave_out)
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror}); make it readable, or leave it out of {key}") from None


def _expanded(path: str, key: str, leave_out: Sequence[Path]) -> list[Path]:
    """Return what :func:`expand` does; an error of the system is raised as it is."""
    if not path.strip():  # as of "$NOT_SET" in a shell; it would be the working directory
        raise ConfigError(f"{key}: has an empty path; name a file or a folder, the working directory as '.'")
    filled = config.environment_path(_divided(path)[0], key)
    if filled.is_file():
        return [filled]
    closed = {_real(folder) for folder in leave_out}
    if filled.is_dir():
        if _real(filled) in closed:
            raise DataError(
                f"{filled}: is the folder of the prepared data or of the run (data.dir, out), so it holds no source text; correct {key}, or set data.dir or out to another folder"
            )
        found = _files_below(filled, closed)
        if not found:
            raise DataError(f"{filled}: the folder holds no files; put text files there or correct {key}")
        return found
    if filled.exists():
        raise DataError(f"{filled}: is a pipe or a device, and text is read more than once; write it into a file, or correct {key}")
    if not glob.has_magic(str(filled)):
        raise DataError(f"{filled}: there is no such file or folder; correct {key}{_several(filled, key)}")
    found = []
    for match in _matches(filled, closed):
        if match.is_dir():
            found += _files_below(match, closed)
        elif _is_file(match):
            found.append(match)
    if not found:
        raise DataError(f"{filled}: no file matches; correct {key}{_several(filled, key)}")
    return sorted(set(found))


def _several(path: Path, key: str) -> str:
    """Return how several paths are written, where a comma stands in what was taken for one."""
    return f'; several are written --{key}=\'["a", "b"]\'' if "," in str(path) and key.startswith("data.") else ""


def pattern(path: str) -> str:
    """Return which members of an archive a path of `data.paths` stands for, as :mod:`fnmatch` has it; empty for all."""
    return _divided(path)[1]


def _divided(path: str) -> tuple[str, str]:
    """Return what a path of `data.paths` says of files, and of members of archives; what is there under the whole of it, or more of it, has `::` in its name."""
    ends = [match.start() for match in re.finditer("::", path)]
    there = (end for end in (len(path), *reversed(ends)) if os.path.exists(os.path.expanduser(os.path.expandvars(path[:end]))))
    end = next(there, min(ends, default=len(path)))
    return path[:end], path[end + 2 :]


def _files_below(folder: Path, closed: set[str]) -> list[Path]:
    """Return the files below a folder that are not hidden, sorted.

    A folder to which several paths lead is entered once, by one without links if there is one; what is closed, by its real path, is not entered.
    """
    found: list[Path] = []
    entered = set(closed)
    starts = [folder]
    for start in starts:  # which grows by the links
        for name, folders, files in os.walk(start, onerror=stop):
            here, below = Path(name), [Path(name, each) for each in sorted(folders) if not is_hidden(each)]
            if _real(here) in entered:
                folders[:] = []
                continue
            entered.add(_real(here))
            links = {each.name: each for each in below if each.is_symlink()}
            folders[:] = [each.name for each in below if each.name not in links]
            starts += [each for each in links.values() if not _in_a_loop(each)]
            found += [here / each for each in files if not is_hidden(each) and _is_file(here / each)]
    return sorted(found)


def stop(error: OSError) -> None:
    """Raise an error of :func:`os.walk`, which would pass over a folder that cannot be read."""
    raise error


def every_file(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, hidden ones too.

    Raises:
        OSError: where a folder cannot be read.
    """
    for name, _, files in os.walk(folder, onerror=stop):
        yield from (Path(name, each) for each in files)


def _matches(pattern: Path, closed: set[str]) -> list[Path]:
    """Return what a glob matches outside of loops and of closed folders, sorted; :mod:`glob` passes over a folder that cannot be read, which is an error here."""

    def passed(folder: Path) -> bool:
        return not _in_a_loop(folder) and closed.isdisjoint(_matched(folder, pattern) if closed else ())

    for searched in (parent for parent, name in zip(pattern.parents, reversed(pattern.parts), strict=False) if glob.has_magic(name)):
        for folder in map(Path, glob.glob(f"{searched}/", recursive=True)):
            if passed(folder):
                os.scandir(folder).close()
    found = map(Path, sorted(glob.glob(str(pattern), recursive=True)))
    return [match for match in found if passed(match if match.is_dir() else match.parent)]


def _matched(folder: Path, pattern: Path) -> list[str]:
    """Return the real paths of the folders on the way to one that a glob has matched, but for those that the glob names."""
    named = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), pattern.parts))
    return [_real(each) for each in (folder, *folder.parents) if len(each.parts) > len(named.parts)]


def _is_file(path: Path) -> bool:
    """Return whether a path is a file; a socket or the like is none.

    Raises:
        DataError: when it is a link that leads nowhere.
    """
    if path.is_symlink() and not path.exists():
        raise DataError(f"{path}: is a link to {os.readlink(path)}, which does not exist; correct or remove it")
    return path.is_file()


def _in_a_loop(folder: Path) -> bool:
    """Return whether the path of a folder passes through one folder twice, as `**` does where a link leads back to a folder above it."""
    # Without "..", which passes through a folder twice and is no loop.
    absolute = Path(os.path.abspath(folder))
    passed = [_real(each) for each in (absolute, *absolute.parents)]
    return len(set(passed)) < len(passed)


def _real(folder: Path) -> str:
    return _resolved(str(folder.absolute()))


@functools.lru_cache(maxsize=4096)
def _resolved(folder: str) -> str:
    return os.path.realpath(folder)


def is_hidden(name: str) -> bool:
    """Return whether a path relative to its source has a part that begins with a dot, but for `.` and `..`."""
    return any(part.startswith(".") and part not in (".", "..") for part in name.split("/"))
