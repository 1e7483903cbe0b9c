"""Zip archives as streams: nothing is extracted, what they unpack to is bounded, and of one that was cut the members before the cut are read."""

from __future__ import annotations

import io
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import IO, cast

from overnight.corpus import data_paths
from overnight.corpus.decompress import TruncatedError
from overnight.errors import DataError

_MEMBER, _END, _END_64 = b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x07"
# The record at the end, and the longest comment behind it.
_TAIL = 22 + (1 << 16)
# Text packs to a third or a tenth, logs to a fiftieth; deflate reaches 1:1,032, which only a bomb does throughout.
_MAX_RATIO, _ALWAYS_ALLOWED = 200, 100 << 20
_STEP = 1 << 14


@dataclass
class Allowance:
    """Bytes that a zip archive, with all those in it, may still unpack to: 200 for one of the archive, and at least 100 MB."""

    name: str
    size: int
    used: int = 0

    def take(self, count: int) -> None:
        """Count bytes that were unpacked.

        Raises:
            DataError: when they are more than an archive of text can hold.
        """
        self.used += count
        if self.used > max(_ALWAYS_ALLOWED, _MAX_RATIO * self.size):
            raise DataError(
                f"{self.name}: unpacks to more than {self.used >> 20:,} MB, {_MAX_RATIO} times its {self.size:,} bytes, as a zip bomb does; "
                "if it is none, unpack it and name the folder"
            )


def is_zip(stream: io.BufferedReader, name: str) -> bool:
    """Return whether a stream is a zip archive with members to read, by its first bytes; a book in EPUB is a document."""
    return stream.peek(4)[:4] in (_MEMBER, _END) and not is_epub(stream, name)


def is_epub(stream: io.BufferedReader, name: str) -> bool:
    """Return whether a stream is a book in EPUB, by its name or its first member."""
    head = stream.peek(64)[:64]
    return head.startswith(_MEMBER) and (name.lower().endswith(".epub") or head[30:58] == b"mimetypeapplication/epub+zip")


def allowance(stream: io.BufferedReader, name: str) -> Allowance:
    """Return what a zip archive may unpack to.

    Args:
        stream: one in which one can seek, at its beginning.
        name: what errors call it.
    """
    size = stream.seek(0, io.SEEK_END)
    stream.seek(0)
    return Allowance(name, size)


def members(stream: io.BufferedReader, name: str, allowed: Allowance) -> Iterator[tuple[str, io.BufferedReader]]:
    """Yield the regular, not hidden files of a zip archive in the order of its directory, each to be read before the next is asked for.

    Raises:
        TruncatedError: when the archive ends early, after its whole members.
        DataError: when it is no zip archive, or is an office document.
    """
    archive = opened(stream, name)
    if archive is None:
        yield from _before_the_cut(stream, name, allowed)
        return
    if "[Content_Types].xml" in archive.namelist():
        raise DataError(f"{name}: is an office document; save its text as .txt, .html or .epub")
    for info in archive.infolist():
        link = stat.S_ISLNK(info.external_attr >> 16)
        if info.filename and not (info.is_dir() or link or data_paths.is_hidden(info.filename)):
            yield info.filename, member(archive, info, name, allowed)


def opened(stream: io.BufferedReader, name: str) -> zipfile.ZipFile | None:
    """Return the archive, or None of one without its end.

    Raises:
        DataError: when it is damaged.
    """
    if not _has_end(stream):
        return None
    try:
        return zipfile.ZipFile(stream)
    except (zipfile.BadZipFile, struct.error, ValueError, OSError, NotImplementedError) as error:
        raise DataError(f"{name}: is not a zip archive or is damaged ({error}); get it again") from None


def _has_end(stream: io.BufferedReader) -> bool:
    """Return whether an archive has the record at its end, whole and its own: that of an archive that is a member of it counts places from there."""
    start = max(0, stream.seek(0, io.SEEK_END) - _TAIL)
    stream.seek(start)
    tail = stream.read(_TAIL)
    place = tail.rfind(_END)
    if place < 0 or len(tail) < place + 22:
        return False
    size, offset, comment = struct.unpack_from("<2IH", tail, place + 12)
    # With the records of 64 bits, which stand between, these need not say anything.
    behind_directory = start + place == offset + size or tail[max(0, place - 20) : place].startswith(_END_64)
    return behind_directory and place + 22 + comment <= len(tail)


def member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str, allowed: Allowance) -> io.BufferedReader:
    """Return the content of a member, which is opened at its first byte.

    Raises:
        DataError: on reading, when it is encrypted, damaged, packed in an unknown way, or unpacks to too much.
    """
    return _reader(lambda: archive.open(info), f"{name}:{info.filename}", info.flag_bits, allowed)


def _reader(start: Callable[[], IO[bytes]], name: str, flags: int, allowed: Allowance) -> io.BufferedReader:
    return io.BufferedReader(_Member(start, name, flags, allowed), 1 << 16)


class _Member(io.RawIOBase):
    """A member of an archive whose many ways to fail are two: truncated and damaged."""

    def __init__(self, start: Callable[[], IO[bytes]], name: str, flags: int, allowed: Allowance) -> None:
        self._start, self._name, self._encrypted, self._allowed = start, name, bool(flags & 1), allowed
        self._file: IO[bytes] | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if self._encrypted:
            raise DataError(f"{self._name}: is encrypted; unpack the archive with its password and name the folder")
        try:
            self._file = self._file or self._start()
            block = self._file.read(len(buffer))
        except EOFError:
            raise TruncatedError(f"{self._name}: the zip archive ends early") from None
        except NotImplementedError as error:
            raise DataError(
                f"{self._name}: is packed in a way that cannot be read here ({error}); unpack the archive and name the folder"
            ) from None
        except (zipfile.BadZipFile, zlib.error, OSError, struct.error, ValueError) as error:
            raise DataError(f"{self._name}: is damaged ({error}); get the archive again") from None
        self._allowed.take(len(block))
        buffer[: len(block)] = block
        return len(block)


def _before_the_cut(stream: io.BufferedReader, name: str, allowed: Allowance) -> Iterator[tuple[str, io.BufferedReader]]:
    """Yield the members of an archive without its directory, by the headers before each; links are not told from files there.

    Raises:
        TruncatedError: at its end.
    """
    cut = TruncatedError(f"{name}: the zip archive ends early")
    place = 0
    while True:
        stream.seek(place)
        header = stream.read(30)
        if len(header) < 30 or not header.startswith(_MEMBER):
            raise cut
        flags, method, packed, name_length, extra = struct.unpack("<6x2H8xI4x2H", header)
        file_name = stream.read(name_length).decode("utf-8" if flags & 0x800 else "cp437", "replace")
        stream.seek(extra, io.SEEK_CUR)
        # Behind a member whose size stands after it, and in an archive of more than 4 GB, only deflate says where the data end.
        sized = not flags & 8 and packed != 0xFFFFFFFF
        if method not in (zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED) or (method == zipfile.ZIP_STORED and not sized):
            raise cut
        start = stream.tell()
        content = _Unsure(stream, method == zipfile.ZIP_DEFLATED, packed if sized else None)
        reader = _reader(partial(cast, IO[bytes], content), f"{name}:{file_name}", flags, allowed)
        if not file_name.endswith("/") and not data_paths.is_hidden(file_name):
            yield file_name, reader
        if flags & 1 and not sized:
            raise cut
        while not flags & 1 and reader.read1(1 << 16):
            pass
        place = start + packed if sized else _next_header(stream, content.end)


class _Unsure:
    """The data of a member whose end may lie behind the end of the file."""

    def __init__(self, stream: io.BufferedReader, deflated: bool, size: int | None) -> None:
        self._stream, self._size, self.end = stream, size, stream.tell()
        self._inflate = zlib.decompressobj(-zlib.MAX_WBITS) if deflated else None
        self._ready = b""

    def read(self, count: int) -> bytes:
        """Return up to so many bytes, none at the end.

        Raises:
            EOFError: when the file ends before.
        """
        while not self._ready:
            if self._inflate.eof if self._inflate else self._size == 0:
                return b""
            self._stream.seek(self.end)
            block = self._stream.read(_STEP if self._size is None else min(_STEP, self._size))
            if not block:
                raise EOFError
            self._ready = self._inflate.decompress(block) if self._inflate else block
            used = len(block) - (len(self._inflate.unused_data) if self._inflate else 0)
            self.end += used
            self._size = None if self._size is None else self._size - used
        block, self._ready = self._ready[:count], self._ready[count:]
        return block


def _next_header(stream: io.BufferedReader, place: int) -> int:
    """Return where the header behind a member begins; the size and checksum between are 12 to 24 bytes."""
    stream.seek(place)
    return place + max(stream.read(28).find(_MEMBER), 0)
