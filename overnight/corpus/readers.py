"""Documents out of files, archives and data sets of every format of :mod:`formats`, in an order that depends on the sources alone."""

from __future__ import annotations

import codecs
import dataclasses
import fnmatch
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from overnight.config import Data
from overnight.corpus import data_paths, decompress, file_parts, hub, places, pydocs, wikipedia_dump, zips
from overnight.corpus.decompress import TruncatedError
from overnight.corpus.document import Document, OpenFile, Reading, Source, printable
from overnight.corpus.file_parts import Part
from overnight.corpus.formats import BY_KIND, NOT_TEXT, recognized
from overnight.corpus.named_sources import named_paths, read_as
from overnight.corpus.places import StoredFile
from overnight.errors import DataError

__all__ = ["BUILTIN", "Document", "Reading", "Source", "check_found", "check_joined", "documents", "documents_and_parts", "start_reading"]

BUILTIN = "builtin:python-docs"


def documents(data: Data, reading: Reading) -> Iterator[Document]:
    """Stream the documents of `data.paths`, in order; for arguments and errors see :func:`documents_and_parts`."""
    for found in documents_and_parts(data, reading):
        if isinstance(found, Document):
            yield found
        else:
            read, counts = file_parts.read_part(found)
            reading.sources[counts.source].add(counts)
            yield from read
    check_found(reading.sources)
    check_joined(reading.sources)


def check_found(sources: list[Source]) -> None:
    """Check that each source, read to its end, has given a document.

    Raises:
        DataError: naming the one that has not.
    """
    for source in sources:
        if not source.documents:
            pages = (
                f" ({source.redirects:,} redirects and {source.other_pages:,} pages of other namespaces)"
                if source.redirects + source.other_pages
                else ""
            )
            where, kind = (f"data.sources.{source.name}.{key}" if source.name else f"data.{key}" for key in ("paths", "format"))
            raise DataError(f"{source.path}: holds no text{pages}; correct {where} or {kind}")


def check_joined(sources: list[Source]) -> None:
    """Check that each key of those that `data.field` joins was found: rows may lack one, but what all lack is misspelled, and a part of each text lost.

    Args:
        sources: all, read to their end.

    Raises:
        DataError: naming the key that no document has.
    """
    for key in sources[0].without:
        if all(source.without.get(key) == source.documents for source in sources):
            raise DataError(f"{sources[0].path}: no document has text in {key!r}; correct data.field, or leave {key!r} out of it")


def documents_and_parts(given: Data, reading: Reading) -> Iterator[Document | Part]:
    """Stream the documents of `data.paths`, in order, and dumps of Wikipedia and large files as parts that are still to be read and counted.

    Args:
        given: what to read and how.
        reading: counters, filled on the way; one source for each path.

    Raises:
        DataError: a source is missing, empty, cut, damaged, not UTF-8, has no such member, or has more bad lines than allowed.
    """
    for number, (source, files) in enumerate(zip(reading.sources, reading.files, strict=True)):
        data = read_as(given, source.name)
        found: Iterator[Document | Part]
        if source.path == BUILTIN:
            found = (Document(text, None, name) for name, text in pydocs.python_docs(data.workers))
        elif source.path.startswith(hub.PREFIX):
            found = hub.read_dataset(source.path, data, source, reading)
        else:
            found = _from_files(data, source, files, reading)
        parts = 0
        for document in found:
            if not isinstance(document, Document):
                parts += 1
                yield dataclasses.replace(document, source=number)
                continue
            source.documents += 1
            source.bytes += len(document.text.encode())
            yield document._replace(source=source.name, entry=number)
        if not parts:
            check_found([source])


def start_reading(data: Data, leave_out: Sequence[Path] = ()) -> Reading:
    """Return counters at zero and the files to read; fail at once, before any work, when a path leads nowhere.

    Args:
        data: the paths.
        leave_out: folders of this machine that are not entered on the way, since they hold what the program itself writes.
    """
    reading = Reading([Source(path, name=name) for name, path in named_paths(data)])
    for name, path in named_paths(data):
        key = f"data.sources.{name}.paths" if name else "data.paths"
        if path.startswith("builtin:") and path != BUILTIN:
            raise DataError(f"{key}: {path!r} is not built in; the only one is {BUILTIN!r}")
        if path.startswith(hub.PREFIX):
            hub.version(path)
        unlisted = path == BUILTIN or path.startswith(hub.PREFIX)
        reading.files.append([] if unlisted else places.files(path, key, leave_out))
    reading.total_bytes = sum(file.size for files in reading.files for file in files)
    if not reading.sources:
        raise DataError("data.paths is empty; name at least one file, folder or archive")
    return reading


def _from_files(data: Data, source: Source, files: Sequence[StoredFile], reading: Reading) -> Iterator[Document | Part]:
    others: list[str] = []
    for file in files:
        if wikipedia_dump.is_index(file.name):
            continue
        before, planned = reading.done_bytes, (file.size, file.version)
        with file.open() as raw:
            reader = _Reader(data, source, reading, data_paths.pattern(source.path), others)
            for document in reader.file(raw, file.name):
                reading.done_bytes = before + raw.tell()
                yield document if isinstance(document, Document) else dataclasses.replace(document, planned=planned)
            if not places.is_remote(source.path):
                places.check_unchanged(raw.fileno(), file.name, planned)
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

    def file(self, raw: io.BufferedReader, name: str) -> Iterator[Document | Part]:
        """Yield documents of a file that may be packed, and must be an archive where a pattern selects its members."""
        if self.data.format in ("auto", "mediawiki") and not self.pattern and wikipedia_dump.is_multistream(raw):
            self.source.files += 1
            yield from wikipedia_dump.stream_parts(raw, name, self.data)
            return
        try:
            stream, inner = decompress.unpacked(raw, name)
            if decompress.is_tar(stream, inner):
                yield from self.archive(decompress.members(stream, name), name)
            elif zips.is_zip(stream, inner):
                with decompress.seekable(stream, name) as found:
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
            if printable(name) not in self.source.truncated:
                self.source.truncated.append(printable(name))
            # Inside an archive everything behind the cut is lost as well: the archive's own stream says so next.

    def archive(self, members: Iterator[tuple[str, io.BufferedReader]], name: str) -> Iterator[Document | Part]:
        """Yield documents of the members of an archive that match; of an archive in it, all."""
        inside = dataclasses.replace(self, pattern="")
        for member, content in members:
            if not self.pattern or fnmatch.fnmatchcase(member, self.pattern):
                yield from inside.file(content, f"{name}:{member}")
            elif len(self.others) < 3:
                self.others.append(member)

    def plain(self, stream: io.BufferedReader, name: str) -> Iterator[Document | Part]:
        """Yield documents of an unpacked file; those without a name of their own are numbered."""
        kind = self.data.format if self.data.format != "auto" else _guess(stream, name)
        if parts := file_parts.parts(stream, name, kind, self.data):
            for part in parts:
                stream.seek(part.end)  # as far as reading has come
                yield part
            return
        file = OpenFile(name, self.data, self.source, self.reading, stream)
        found = BY_KIND[kind].read(file)
        if kind == "mediawiki":
            yield from found
        else:
            yield from file_parts.finished((document for document in found if isinstance(document, Document)), file)


def _guess(stream: io.BufferedReader, name: str) -> str:
    """Return the format of a file, by its ending, then by its first bytes."""
    if wikipedia_dump.is_dump(stream.peek(512)[:512]):
        return "mediawiki"
    head = stream.peek(512)[:512].removeprefix(codecs.BOM_UTF8).lstrip()
    kind = recognized(head, name)
    if kind == "jsonl" and Path(name).suffix.lower() == ".json" and not head.startswith(b"{"):
        raise DataError(f"{name}: is JSON but not one object a line; write it as JSON lines, as `jq -c '.[]' FILE` does of a list")
    if found := next(((what, todo) for first, what, todo in NOT_TEXT if head.startswith(first)), None):
        what, todo = found
        raise DataError(f"{name}: is {what}; {f'{todo}, or ' if todo else ''}leave it out (data.paths takes globs such as 'texts/*.txt')")
    return kind
