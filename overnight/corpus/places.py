"""Files wherever they are stored: on this machine, or in object storage and on servers through fsspec, of which only what is read is fetched."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple
from urllib.parse import urlsplit

from overnight import config
from overnight.corpus import streams
from overnight.errors import ConfigError, DataError

# What storage calls the version of a file's content: the first that it has.
_VERSIONS = ("ETag", "etag", "md5Hash", "content_md5", "generation", "LastModified", "last_modified", "updated", "mtime", "created")
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


def files(path: str, key: str = "data.paths") -> list[StoredFile]:
    """Return the files a path of `data.paths` stands for: itself, all in the folder below it, or all that its glob matches, sorted.

    Args:
        path: the path.
        key: the setting that it is from, for messages.

    Raises:
        ConfigError: when it names an environment variable that is not set, or an address that is none.
        DataError: when there is no such file, none in the folder, or the storage cannot be reached.
    """
    if is_remote(path):
        return list(_remote(config.environment_text(path.partition("::")[0], key), key))
    found = [(file, file.stat()) for file in streams.expand(path)]
    return [StoredFile(str(file), stat.st_size, stat.st_mtime_ns, lambda file=file: _open(str(file))) for file, stat in found]  # type: ignore[misc]


def _open(name: str) -> io.BufferedReader:
    try:
        return open(name, "rb")
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror})") from None


def _remote(address: str, key: str) -> Iterator[StoredFile]:
    parts = urlsplit(address)
    shown = address.partition("?")[0]
    if "@" in parts.netloc:
        raise ConfigError(
            f"{key}: the address of {parts.scheme}://{parts.netloc.rpartition('@')[2]} has a user or key in it, which run folders would keep; "
            "leave it out, and give it as the storage's own tools take it (environment, ~/.aws, ...)"
        )
    try:
        from fsspec.core import url_to_fs

        system, inside = url_to_fs(address)
        details = _details(system, inside)
    except ImportError as error:
        raise DataError(
            f"{shown}: {error}; the extra `remote` has what S3, Google Cloud Storage and https need (pip install 'overnight[remote]')"
        ) from None
    except FileNotFoundError:
        details = {}
    except Exception as error:  # each storage has errors of its own
        raise DataError(f"{shown}: cannot be listed ({_said(error)}); correct {key}, or see that this machine may read it") from None
    if not details:
        raise DataError(f"{shown}: there is no such file or folder, or nothing in it; correct {key}")
    for name, info in sorted(details.items()):
        version = next((str(info[known]) for known in _VERSIONS if info.get(known)), "")
        shown = f"{parts.scheme}://{name.partition('?')[0].removeprefix(f'{parts.scheme}://').lstrip('/')}"
        yield StoredFile(shown, int(info.get("size") or 0), version, _opener(system, name, shown))


def _details(system: Any, inside: str) -> dict[str, dict[str, Any]]:
    """Return what is known of each file that a path inside a storage stands for."""
    if "*" in inside or "[" in inside:
        found: dict[str, dict[str, Any]] = system.glob(inside, detail=True)
        return {name: info for name, info in found.items() if info["type"] == "file"}
    info = system.info(inside)
    if info["type"] == "file":
        return {inside: info}
    found = system.find(inside, detail=True)
    below = {name: name.lstrip("/").removeprefix(inside.strip("/")).lstrip("/") for name in found}
    return {name: info for name, info in found.items() if not streams.is_hidden(below[name])}


def _opener(system: Any, name: str, shown: str) -> Callable[[], io.BufferedReader]:
    return lambda: io.BufferedReader(_Fetched(_tried(lambda: system.open(name, "rb"), shown), shown), _BLOCK)


class _Fetched(io.RawIOBase):
    """A remote file whose many ways to fail are one."""

    def __init__(self, file: IO[bytes], shown: str) -> None:
        self._file, self._shown = file, shown

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(_tried(lambda: self._file.seek(offset, whence), self._shown))

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        block = _tried(lambda: self._file.read(len(buffer)), self._shown)
        buffer[: len(block)] = block
        return len(block)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _tried(call: Callable[[], Any], shown: str) -> Any:
    try:
        return call()
    except Exception as error:  # each storage has errors of its own
        raise DataError(f"{shown}: cannot be read ({_said(error)}); run the same command again when it can") from None


def _said(error: Exception) -> str:
    """Return what an error says in one line, without the query of an address, which may be a key."""
    words = " ".join((str(error) or type(error).__name__).split()).split(" ")
    return " ".join(word.partition("?")[0] if "://" in word else word for word in words)[:300]
