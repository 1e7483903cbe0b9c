"""Files wherever they are stored: on this machine, or in object storage and on servers through fsspec, of which only what is read is fetched."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import urlsplit

from overnight import config
from overnight.corpus import data_paths, linked_files
from overnight.errors import ConfigError, DataError

# What storage calls the version of a file's content: the first that it has.
_VERSIONS = (
    "ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "generation", "LastModified", "Last-Modified", "last_modified", "updated", "mtime", "created",
)  # fmt: skip
_BLOCK = 1 << 20


class StoredFile(NamedTuple):
    """A file that can be opened."""

    name: str
    """What errors and documents call it; without what may be a key to it."""
    size: int
    """Bytes; 0 when unknown."""
    version: Any
    """Changes when the content does."""
    open: Callable[[], io.BufferedReader]
    """Returns its bytes as a stream in which one can seek."""


def is_remote(path: str) -> bool:
    """Return whether a path of `data.paths` is an address, such as `s3://bucket/folder`."""
    return "://" in path.partition("::")[0]


class Hopeless(DataError):
    """No further try can help: nothing here knows that kind of storage, or its library is missing."""


class NothingThere(Hopeless):
    """Storage says that it has nothing at an address."""


class GoneOrChanged(DataError):
    """A file of this machine has changed since it was listed, or cannot be read."""


def files(path: str, key: str = "data.paths", leave_out: Sequence[Path] = ()) -> list[StoredFile]:
    """Return the files a path of `data.paths` stands for: itself, all in the folder below it, or all that its glob matches, sorted.

    Args:
        path: the path.
        key: the setting that it is from, for messages.
        leave_out: folders of this machine that are not entered on the way.

    Raises:
        ConfigError: when it names an environment variable that is not set, or an address that is none.
        DataError: when there is no such file, none in the folder (of storage: a :class:`NothingThere`), or the storage cannot be reached.
    """
    if is_remote(path):
        return list(_remote(config.environment_text(path.partition("::")[0], key), key))
    found = [(str(file), file.stat()) for file in data_paths.expand(path, key, leave_out)]
    return [StoredFile(name, stat.st_size, stat.st_mtime_ns, partial(_open, name)) for name, stat in found]


def _open(name: str) -> io.BufferedReader:
    try:
        return open(name, "rb")
    except OSError as error:
        raise GoneOrChanged(f"{name}: cannot be read ({error.strerror})") from None


def check_unchanged(file: int | str, name: str, planned: tuple[int, Any]) -> None:
    """Check that a file of this machine is still what it was when it was listed: a text of which a part is gone looks like one that is whole.

    Args:
        file: its descriptor, or where it lies.
        name: what errors call it.
        planned: size and version of its :class:`StoredFile`.

    Raises:
        GoneOrChanged: when it is not.
    """
    try:
        now = os.stat(file)
    except OSError as error:
        raise GoneOrChanged(f"{name}: cannot be read ({error.strerror})") from None
    if (now.st_size, now.st_mtime_ns) != planned:
        raise changed(name)


def changed(name: str) -> GoneOrChanged:
    """Return the error of a file that something else writes."""
    return GoneOrChanged(f"{name}: has changed while it was read; run the same command again once it is complete")


def _remote(address: str, key: str) -> Iterator[StoredFile]:
    parts = urlsplit(address)
    shown, is_server = address.partition("?")[0], parts.scheme in ("http", "https")
    if "@" in parts.netloc:
        raise ConfigError(
            f"{key}: the address of {parts.scheme}://{parts.netloc.rpartition('@')[2]} has a user or key in it, which run folders would keep; "
            "leave it out, and give it as the storage's own tools take it (environment, ~/.aws, ...)"
        )
    try:
        from fsspec.core import url_to_fs

        system, inside = url_to_fs(address)
        details = linked_files.details(system, inside) if is_server else _details(system, inside)
    except DataError:
        raise
    except ImportError as error:
        raise Hopeless(
            f"{shown}: {error}; the extra `remote` has what S3, Google Cloud Storage and https need (pip install 'overnight[remote]')"
        ) from None
    except Exception as error:  # each storage has errors of its own
        absent = isinstance(error, FileNotFoundError)
        # Of a server that does not answer, or refuses, fsspec says so too.
        cause = error.__cause__ if absent and is_server else None
        if not absent or (cause and not linked_files.status_of_absent(cause)):
            kind = Hopeless if str(error).startswith("Protocol not known") else DataError  # a ValueError of fsspec, as many are
            raise kind(
                f"{shown}: cannot be listed ({_said(cause or error)}); correct {key}, or see that this machine may read it"
            ) from None
        details = {}
    if not details:
        raise NothingThere(f"{shown}: there is no such file or folder, or nothing in it; correct {key}")
    for name, info in sorted(details.items()):
        shown = f"{parts.scheme}://{name.partition('?')[0].removeprefix(f'{parts.scheme}://').lstrip('/')}"
        size = int(info.get("size") or 0)
        yield StoredFile(shown, size, _version(info), _opener(system, name, shown, is_server, size))


def _details(system: Any, inside: str) -> dict[str, dict[str, Any]]:
    """Return what is known of each file that a path inside a storage stands for."""
    found: dict[str, dict[str, Any]]
    if "*" in inside or "[" in inside:
        found = system.glob(inside, detail=True)
        # As here: what begins with a dot must be asked for by name.
        folder = re.split(r"[*[]", inside)[0].rpartition("/")[0]
        asked = data_paths.is_hidden(_below(inside, folder))
        return {
            name: info
            for name, info in found.items()
            if info["type"] == "file" and (asked or not data_paths.is_hidden(_below(name, folder)))
        }
    if (info := system.info(inside))["type"] == "file":
        return {inside: info}
    found = system.find(inside, detail=True)
    return {name: info for name, info in found.items() if not data_paths.is_hidden(_below(name, inside))}


def _below(name: str, folder: str) -> str:
    """Return the name of a file relative to a folder of a storage."""
    return name.lstrip("/").removeprefix(folder.strip("/")).lstrip("/")


def _version(info: dict[str, Any]) -> str:
    """Return what changes when the content of a file does; empty where its storage says nothing of that kind."""
    return next((str(info[known]) for known in _VERSIONS if info.get(known)), "")


def _opener(system: Any, name: str, shown: str, is_server: bool, size: int) -> Callable[[], io.BufferedReader]:
    def current() -> tuple[str, Any]:
        system.invalidate_cache()
        info = system.info(name)
        return _version(info), info.get("size")

    def opened() -> Any:
        file = system.open(name, "rb")
        if is_server and _in_parts(file):
            try:
                file._fetch_range(1, 2)
            except ValueError:  # it serves no parts; as one stream, then
                return system.open(name, "rb", block_size=0)
        return file

    return lambda: io.BufferedReader(_Fetched(_tried(opened, shown), shown, current, size), _BLOCK)


def _in_parts(file: Any) -> bool:
    """Return whether a file is fetched by more than one request."""
    size = getattr(file, "size", None)
    return size is not None and size > getattr(file, "blocksize", size)


class _Fetched(io.RawIOBase):
    """A remote file whose many ways to fail are one.

    A file that is fetched by several requests may change between them: its version at its end must be that of its beginning.
    """

    def __init__(self, file: IO[bytes], shown: str, current: Callable[[], tuple[str, Any]], size: int) -> None:
        """Begin at the first byte of a file; `current` returns its version and size as they are now, `size` is that of its :class:`StoredFile`."""
        self._file, self._shown, self._current = file, shown, current
        self._size: int | None = getattr(file, "size", None)
        # A stream knows no size, and has more bytes than the server has said where those were packed on the way.
        self._least = size if self._size is None else self._size
        self._begun = _tried(current, shown) if _in_parts(file) else None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        # A server that serves no part of a file, or does not say its size, gives a stream that claims to seek.
        return self._size is not None and bool(self._file.seekable())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(_tried(lambda: self._file.seek(offset, whence), self._shown))

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        block = _tried(lambda: self._file.read(len(buffer)), self._shown)
        buffer[: len(block)] = block
        if not block and len(buffer):
            self._check_end()
        return len(block)

    def _check_end(self) -> None:
        if self._file.tell() < self._least:
            raise DataError(f"{self._shown}: ended after {self._file.tell():,} of {self._least:,} bytes; run the same command again")
        if self._begun is not None and _tried(self._current, self._shown) != self._begun:
            raise changed(self._shown)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _tried(call: Callable[[], Any], shown: str) -> Any:
    try:
        return call()
    except Exception as error:  # each storage has errors of its own
        raise DataError(f"{shown}: cannot be read ({_said(error)}); run the same command again when it can") from None


def _said(error: BaseException) -> str:
    """Return what an error says in one line, without the query of an address, which may be a key."""
    words = " ".join((str(error) or type(error).__name__).split()).split(" ")
    return " ".join(word.partition("?")[0] if "://" in word else word for word in words)[:300]
