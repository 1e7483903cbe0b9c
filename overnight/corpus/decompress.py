"""Files of bytes, packed or not, as streams: gzip, bzip2, xz and zstandard unpacked, tar archives walked."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, cast

from overnight.corpus.data_paths import is_hidden
from overnight.errors import DataError

_PACKED_ENDINGS = {".gz": "", ".bz2": "", ".xz": "", ".zst": "", ".tgz": ".tar", ".tbz2": ".tar", ".txz": ".tar", ".tzst": ".tar"}
_BLOCK = 1 << 20
# What lies inside an archive and can only be read from its end, such as a zip archive, is copied to the disk first.
_MAX_COPY = 16 << 30
# What follows a stream is copied once for every stream, and streams may be short.
_STREAM_STEP = 1 << 16
# Zstandard's library gives all that is in what it is given: 4 bytes may be 128 kB, so this is 32 MB at most.
_ZSTD_STEP = 1 << 10
# It keeps a window of what it has unpacked in memory: 8 MB as a rule, with `zstd --long=31`, as in the dumps of Reddit, 2 GB, the most there is.
_ZSTD_WINDOW, _ZSTD_HEADER = 1 << 31, 18
# First bytes of a frame of zstandard that holds no data, but what a program has noted, as `pzstd` does before every frame (RFC 8878, 3.1.2).
_SKIPPABLE = [bytes([first]) for first in range(0x50, 0x60)]
# Of a header of a tar archive that holds a name or attributes, which are read at once.
_MAX_HEADER = 1 << 20


class TruncatedError(Exception):
    """A file ends before its format says it does."""


def unpacked(file: IO[bytes], name: str) -> tuple[io.BufferedReader, str]:
    """Return a stream with its compression undone, seen by the first bytes, and its name without the compression's ending.

    Reading from it raises `TruncatedError` when the packed data end early and `DataError` when they are damaged.
    """
    stream: io.BufferedReader[Any] = (
        io.BufferedReader(cast(io.RawIOBase, file), _BLOCK) if not isinstance(file, io.BufferedReader) else file
    )
    magic = stream.peek(6)[:6]
    opened: Any
    if magic.startswith(b"\x1f\x8b"):
        opened = gzip.GzipFile(fileobj=stream)
    elif magic.startswith(b"BZh"):
        opened = _Streams(stream, bz2.BZ2Decompressor)
    elif magic.startswith(b"\xfd7zXZ\x00"):
        opened = _Streams(stream, lzma.LZMADecompressor)
    elif magic.startswith(b"\x28\xb5\x2f\xfd") or (magic[:1] in _SKIPPABLE and magic[1:4] == b"\x2a\x4d\x18"):
        opened = _ZstdFile(stream)
    else:
        return stream, name
    inner = name
    for ending, instead in _PACKED_ENDINGS.items():
        if name.lower().endswith(ending):
            inner = name[: -len(ending)] + instead
            break
    return io.BufferedReader(_Unpacking(opened, name), _BLOCK), inner


class _Unpacking(io.RawIOBase):
    """A decompressor whose many ways to fail are two: truncated and damaged."""

    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name = file, name

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        try:
            # read1 and not read: a read that fails half-way would take what it had with it.
            block = self._file.read1(len(buffer))
        except EOFError:
            raise TruncatedError(f"{self._name}: the compressed file ends early") from None
        except _WindowError as error:
            raise DataError(f"{self._name}: {error}") from None
        except (OSError, zlib.error, lzma.LZMAError) as error:
            raise DataError(f"{self._name}: the compressed file is damaged ({error}); get it again") from None
        buffer[: len(block)] = block
        return len(block)


class _Streams:
    """Streams of bzip2 or xz one after another, as `cat a.xz b.xz` makes them, with zeros between and after them.

    The readers of Python's library take whatever follows a stream and is none, such as a damaged one, for the end of the file.
    """

    def __init__(self, file: IO[bytes], unpacker: Callable[[], bz2.BZ2Decompressor | lzma.LZMADecompressor]) -> None:
        self._file, self._new, self._stream = file, unpacker, unpacker()

    def read1(self, size: int) -> bytes:
        """Return up to `size` unpacked bytes, none at the end."""
        while True:
            packed = b""
            if self._stream.eof:
                packed = self._after_zeros(self._stream.unused_data)
                if not packed:
                    return b""
                self._stream = self._new()
            elif self._stream.needs_input:
                packed = self._file.read(_STREAM_STEP)
                if not packed:
                    raise EOFError
            if block := self._stream.decompress(packed, size):
                return block

    def _after_zeros(self, packed: bytes) -> bytes:
        """Return what follows a stream and the zeros behind it."""
        while not (rest := packed.lstrip(b"\0")):
            packed = self._file.read(_STREAM_STEP)
            if not packed:
                return b""
        return rest


class _WindowError(Exception):
    """To unpack a frame takes more memory than there is, or than is taken."""


class _ZstdFile(io.RawIOBase):
    """Zstandard frames one after another; zstandard's own reader does not say when the last one is cut."""

    def __init__(self, file: IO[bytes]) -> None:
        import zstandard

        self._file, self._module = file, zstandard
        self._frame = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj()
        self._packed, self._inside, self._ready, self._header = b"", False, b"", b""

    def read1(self, size: int) -> bytes:
        """Return up to `size` unpacked bytes, none at the end."""
        while not self._ready:
            self._packed = self._packed or self._file.read(_ZSTD_STEP)
            if not self._packed:
                if self._inside:
                    raise EOFError
                return b""
            self._inside, self._header = True, (self._header + self._packed)[:_ZSTD_HEADER]
            try:
                self._ready = self._frame.decompress(self._packed)
            except self._module.ZstdError as error:
                if "memory" in str(error):
                    raise _WindowError(
                        f"was packed with a window of {self._window() >> 20:,} MB, more than this machine's memory, or than the "
                        f"{_ZSTD_WINDOW >> 20:,} MB limit; pack it anew with a smaller one (zstd --long=27)"
                    ) from None
                raise OSError(error) from None
            self._packed = b""
            if self._frame.eof:
                self._packed = self._frame.unused_data
                self._frame = self._module.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj()
                self._inside, self._header = False, b""
        block, self._ready = self._ready[:size], self._ready[size:]
        return block

    def _window(self) -> int:
        """Return the bytes of the window of a frame, by its header (RFC 8878, 3.1.1.1.2); of a frame in one segment, all that is in it."""
        if self._header[4] & 0x20:
            return int(self._module.frame_content_size(self._header))
        exponent, mantissa = divmod(self._header[5], 8)
        return (8 + mantissa) << (7 + exponent)


def is_tar(stream: io.BufferedReader, name: str) -> bool:
    """Return whether a stream is a tar archive, by its name or its header."""
    return name.lower().endswith(".tar") or stream.peek(512)[257:262] == b"ustar"


def members(stream: io.BufferedReader, name: str) -> Iterator[tuple[str, io.BufferedReader]]:
    """Yield the regular, not hidden files of a tar stream in its order, each to be read before the next is asked for.

    Several archives one behind the other, as `cat` makes them, are read as one.

    Raises:
        TruncatedError: when the archive ends early.
        DataError: when it is no tar archive, or followed by what is none.
    """
    tail, another = _Tail(stream), True
    while another:
        try:
            with tarfile.open(fileobj=cast(IO[bytes], tail), mode="r|", tarinfo=_Header) as archive:
                for member in archive:
                    archive.members = []  # type: ignore[attr-defined]  # else every header is kept to the end
                    if member.isfile() and not is_hidden(member.name):
                        file = archive.extractfile(member)
                        assert file is not None
                        yield member.name, _Member(file, member.size, f"{name}:{member.name}").buffered()
                source = archive.fileobj
                assert source is not None
                another = _skip_zeros(tail, source.read(tail.given - source.tell()), name)
        except _HeaderError as error:
            raise DataError(f"{name}: a header of the tar archive claims {error.args[0] >> 20:,} MB of names; get it again") from None
        except tarfile.ReadError as error:
            if "end of data" in str(error) or "truncated" in str(error):
                raise TruncatedError(f"{name}: the tar archive ends early") from None
            raise DataError(f"{name}: is not a tar archive or is damaged ({error})") from None
    # Two blocks of zeros close an archive; tarfile takes its silent end for one.
    if tail.last.strip(b"\0"):
        raise TruncatedError(f"{name}: the tar archive ends early")


def _skip_zeros(tail: _Tail, ahead: bytes, name: str) -> bool:
    """Go behind the zeros at the end of an archive, of which tarfile has read some bytes too many; returns whether another archive begins there."""
    while not ahead.strip(b"\0"):
        ahead = tail.read(_BLOCK)
        if not ahead:
            return False
    ahead = ahead[(len(ahead) - len(ahead.lstrip(b"\0"))) // tarfile.BLOCKSIZE * tarfile.BLOCKSIZE :]
    ahead += tail.read(max(0, tarfile.BLOCKSIZE - len(ahead)))
    try:
        tarfile.TarInfo.frombuf(ahead[: tarfile.BLOCKSIZE], tarfile.ENCODING, "surrogateescape")
    except tarfile.HeaderError:  # type: ignore[attr-defined]
        # tarfile takes a damaged header for the end, too.
        raise DataError(
            f"{name}: the tar archive is damaged, or followed by bytes that are not part of it; get it again, or pack its files anew"
        ) from None
    tail.put_back(ahead)
    return True


class _HeaderError(Exception):
    """A header says that so many bytes of names follow."""


class _Header(tarfile.TarInfo):
    """A header of a tar archive; tarfile reads a name or attributes of any length at once, and an archive of zeros packs to nothing."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        """Return the header in 512 bytes.

        Raises:
            _HeaderError: when what follows is longer than names and attributes are.
        """
        found = super().frombuf(buf, encoding, errors)
        if found.type in _LONG_HEADERS and found.size > _MAX_HEADER:
            raise _HeaderError(found.size)
        return found


_LONG_HEADERS = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


class _Tail:
    """A stream that remembers how it ended, how much of it was given since the last archive began, and what of that was put back."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self._stream, self._ahead, self.given, self.last = stream, b"", 0, b""

    def read(self, size: int) -> bytes:
        block, self._ahead = self._ahead[:size], self._ahead[size:]
        if len(block) < size:
            new = self._stream.read(size - len(block))
            self.last = (self.last + new[-512:])[-512:]
            block += new
        self.given += len(block)
        return block

    def put_back(self, ahead: bytes) -> None:
        self._ahead, self.given = ahead + self._ahead, 0


class _Member(io.RawIOBase):
    """A member of a tar stream that notices when it is cut."""

    def __init__(self, file: IO[bytes], size: int, name: str) -> None:
        self._file, self._left, self._name = file, size, name

    def buffered(self) -> io.BufferedReader:
        # As large as the file at most: an archive may hold a hundred thousand small ones.
        return io.BufferedReader(self, max(512, min(_BLOCK, self._left)))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        try:
            block = self._file.read(min(len(buffer), self._left, 1 << 16)) if self._left else b""
        except tarfile.ReadError:
            raise TruncatedError(f"{self._name}: the tar archive ends early") from None
        if self._left and not block:
            raise TruncatedError(f"{self._name}: the tar archive ends early")
        self._left -= len(block)
        buffer[: len(block)] = block
        return len(block)


@contextlib.contextmanager
def seekable(stream: io.BufferedReader, name: str) -> Iterator[io.BufferedReader]:
    """Give a stream in which one can seek: itself, or a copy of it in a temporary file that nobody else sees.

    Raises:
        DataError: when it is too large to be copied.
    """
    if stream.seekable():
        yield stream
        return
    with tempfile.TemporaryFile() as copy:
        while block := stream.read1(_BLOCK):
            copy.write(block)
            if copy.tell() > _MAX_COPY:
                raise DataError(f"{name}: is larger than {_MAX_COPY >> 30} GB inside another archive; unpack that and name the folder")
        copy.seek(0)
        yield cast(io.BufferedReader, copy)
