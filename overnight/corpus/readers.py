"""Documents out of files, archives and data sets of every format of :mod:`formats`, in an order that depends on the sources alone."""

from __future__ import annotations

import codecs
import dataclasses
import fnmatch
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from overnight.config import Data
from overnight.corpus import gutenberg, hub, places, pydocs, streams, zips
from overnight.corpus.document import Document, OpenFile, Reading, Source
from overnight.corpus.formats import BY_KIND, recognized
from overnight.corpus.streams import TruncatedError
from overnight.errors import DataError

__all__ = ["BUILTIN", "Document", "Reading", "Source", "documents", "start_reading"]

BUILTIN = "builtin:python-docs"


def documents(data: Data, reading: Reading) -> Iterator[Document]:
    """Stream the documents of `data.paths`, in order.

    Args:
        data: what to read and how.
        reading: counters, filled on the way; one source for each path.

    Raises:
        DataError: a source is missing, empty, cut, damaged, not UTF-8, has no such member, or has more bad lines than allowed.
    """
    for source in reading.sources:
        found: Iterator[Document]
        if source.path == BUILTIN:
            found = (Document(text, None, name) for name, text in pydocs.python_docs(data.workers))
        elif source.path.startswith(hub.PREFIX):
            found = hub.read_dataset(source.path, data, source, reading)
        else:
            found = _from_files(data, source, reading)
        for document in found:
            source.documents += 1
            source.bytes += len(document.text.encode())
            yield document
        if not source.documents:
            raise DataError(f"{source.path}: holds no text; correct data.paths or data.format")


def start_reading(data: Data) -> Reading:
    """Return counters at zero; fail at once, before any work, when a path leads nowhere."""
    reading = Reading([Source(path) for path in data.paths])
    for path in data.paths:
        if path.startswith("builtin:") and path != BUILTIN:
            raise DataError(f"data.paths: {path!r} is not built in; the only one is {BUILTIN!r}")
        if path.startswith(hub.PREFIX):
            hub.version(path)
        elif path != BUILTIN:
            reading.total_bytes += sum(file.size for file in places.files(path))
    if not data.paths:
        raise DataError("data.paths is empty; name at least one file, folder or archive")
    return reading


def _from_files(data: Data, source: Source, reading: Reading) -> Iterator[Document]:
    others: list[str] = []
    for file in places.files(source.path):
        before = reading.done_bytes
        with file.open() as raw:
            reader = _Reader(data, source, reading, streams.pattern(source.path), others)
            for document in reader.file(raw, file.name):
                reading.done_bytes = before + raw.tell()
                yield document
        reading.done_bytes = before + file.size
    if others and not source.files:
        raise DataError(f"{source.path}: no member of the archive matches; it holds {', '.join(others)}, ...; correct what follows ::")


@dataclass
class _Reader:
    """Reads one file, be it an archive, with the settings and counters it needs at every level."""

    data: Data
    source: Source
    reading: Reading
    pattern: str
    """Of the members to read, of an archive; empty reads all."""
    others: list[str]
    """Some members that do not match the pattern."""
    allowed: zips.Allowance | None = None
    """What the zip archive around this file may still unpack to."""

    def file(self, raw: io.BufferedReader, name: str) -> Iterator[Document]:
        """Yield documents of a file that may be packed, and must be an archive where a pattern selects its members."""
        try:
            stream, inner = streams.unpacked(raw, name)
            if streams.is_tar(stream, inner):
                yield from self.archive(streams.members(stream, name), name)
            elif zips.is_zip(stream, inner):
                with streams.seekable(stream, name) as found:
                    allowed = self.allowed or zips.allowance(found, name)
                    yield from dataclasses.replace(self, allowed=allowed).archive(zips.members(found, name, allowed), name)
            elif self.pattern:
                raise DataError(f"{name}: is not a tar or zip archive, so ::{self.pattern} selects nothing in it; leave that out")
            else:
                self.source.files += 1
                yield from self.plain(stream, inner)
        except TruncatedError as error:
            if self.data.on_truncated_file == "error":
                raise DataError(f"{error}; get it again, or set data.on_truncated_file=keep to use what is readable") from None
            if name not in self.source.truncated:
                self.source.truncated.append(name)
            # Inside an archive everything behind the cut is lost as well: the archive's own stream says so next.

    def archive(self, members: Iterator[tuple[str, io.BufferedReader]], name: str) -> Iterator[Document]:
        """Yield documents of the members of an archive that match; of an archive in it, all."""
        inside = dataclasses.replace(self, pattern="")
        for member, content in members:
            if not self.pattern or fnmatch.fnmatchcase(member, self.pattern):
                yield from inside.file(content, f"{name}:{member}")
            elif len(self.others) < 3:
                self.others.append(member)

    def plain(self, stream: io.BufferedReader, name: str) -> Iterator[Document]:
        """Yield documents of an unpacked file; those without a name of their own are numbered."""
        kind = self.data.format if self.data.format != "auto" else _guess(stream, name)
        found = BY_KIND[kind].read(OpenFile(name, self.data, self.source, self.reading, stream))
        for number, document in enumerate(found, 1):
            text = gutenberg.remove_license(document.text, self.source) if self.data.gutenberg_license == "remove" else document.text
            yield document._replace(text=text, name=document.name or f"{name}#{number}")


def _guess(stream: io.BufferedReader, name: str) -> str:
    """Return the format of a file, by its ending, then by its first bytes."""
    head = stream.peek(512)[:512].removeprefix(codecs.BOM_UTF8).lstrip()
    if head.startswith(b"<mediawiki"):
        raise DataError(f"{name}: is a Wikipedia dump with its markup; extract its text first (to <doc> files or JSON lines)")
    kind = recognized(head, name)
    if kind == "jsonl" and Path(name).suffix.lower() == ".json" and not head.startswith(b"{"):
        raise DataError(f"{name}: is JSON but not one object a line; write it as JSON lines or set data.format")
    return kind
