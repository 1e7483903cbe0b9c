"""A large file of lines in parts of some MB that tasks read themselves, with the documents, names and errors of one reading.

Only JSON lines and plain text (`data.documents: line` or `paragraph`), unpacked and on a disk, can be cut without being understood: the command looks for ends of lines and
counts. Of other files the command takes the documents, and deals them in tasks of equal size, too. Parts depend on the file alone.
"""

from __future__ import annotations

import codecs
import io
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from overnight.config import Data
from overnight.corpus import gutenberg, places, wikipedia_dump
from overnight.corpus.document import DOCUMENT_BYTES, Document, OpenFile, Reading, Source
from overnight.corpus.formats import BY_KIND
from overnight.corpus.wikipedia_dump import DumpPart, PartCounts

PART_BYTES = 5 << 20
"""Of a part, about; it has less where its documents are many."""
_BLOCK = 1 << 20

# All that `str.strip` takes off, but the end of a line; there is none behind U+3000. Those of several bytes are looked at only where such a character begins.
_SPACES = [c.encode() for c in map(chr, range(0x3001)) if c.isspace() and c != "\n"]
_FIRST = re.escape(b"".join(sorted({space[:1] for space in _SPACES if len(space) > 1})))
_SPACE = b"(?:[%s]|(?=[%s])(?:%s))*" % (
    re.escape(b"".join(space for space in _SPACES if len(space) == 1)),
    _FIRST,
    b"|".join(re.escape(space) for space in _SPACES if len(space) > 1),
)
_BLANK = rb"\n" + _SPACE + rb"(?=\n|\Z)"
_BLANK_LINE = re.compile(_BLANK)
_BLANK_LINES = re.compile(_BLANK + b"(?:" + _BLANK + b")*")  # begins with a character, to which the search can jump
_END_OF_PARAGRAPH = re.compile(rb"\n" + _SPACE + rb"\n")


@dataclass(frozen=True)
class FilePart:
    """Some documents of a file, for a task to read."""

    name: str
    """Of the file."""
    kind: str
    data: Data
    path: str
    folder: str
    """Where a relative path begins, for workers that are elsewhere."""
    start: int
    """First byte."""
    end: int
    """Last byte + 1."""
    lines: int
    """Of the file before it."""
    documents: int
    """Of the file before it."""
    source: int = 0
    """Place in `data.paths`."""
    planned: tuple[int, Any] | None = None
    """Size and version of the file when it was listed."""


Part = DumpPart | FilePart


def parts(file: io.BufferedReader, name: str, kind: str, data: Data) -> list[FilePart]:
    """Return the parts of a file, or none where it is small or cannot be cut; it is at its beginning then.

    Args:
        file: at its beginning.
        name: what documents and errors call it.
        kind: of :mod:`formats`.
        data: settings.
    """
    paragraphs = kind == "text" and data.documents == "paragraph"
    # Where lines may be skipped, how many documents come before a part is known only when they are read.
    whole_lines = (
        paragraphs or (kind == "text" and data.documents == "line") or (kind in ("jsonl", "amazon") and not data.max_invalid_lines)
    )
    if not whole_lines or not isinstance(file.raw, io.FileIO) or file.tell() or os.fstat(file.fileno()).st_size < 2 * PART_BYTES:
        return []
    found: list[FilePart] = []
    start = lines = documents = 0
    for span in _spans(file, paragraphs):
        # What is license is seen only from the lines before; what has no end is too long, which the reader of the whole file says there.
        if len(span) > _most() or (kind == "text" and data.gutenberg_license == "remove" and _names_gutenberg(span)):
            file.seek(0)
            return []
        found.append(FilePart(name, kind, data, str(file.name), os.getcwd(), start, start + len(span), lines, documents))
        documents += _documents(span.removeprefix(codecs.BOM_UTF8) if not start else span, paragraphs)
        start += len(span)
        lines += span.count(b"\n")
    return found


def _spans(file: io.BufferedReader, paragraphs: bool) -> Iterator[bytes]:
    """Yield the bytes of a file, cut behind the first end of a document after :data:`PART_BYTES`, or earlier where documents are small; where it does not come, the last is too long."""
    rest, more = b"", PART_BYTES + _BLOCK
    while block := file.read(more):
        rest += block
        while end := _end(rest, paragraphs):
            yield rest[:end]
            rest = rest[end:]
        if len(rest) > _most():
            break
        # Twice as much where there was no end, and no more than shows that there is none.
        more = max(PART_BYTES + _BLOCK - len(rest), min(len(rest), _most() + 1 - len(rest)))
    if rest:
        yield rest


def _most() -> int:
    """Return what a part of lines that may be read has at most: the last of them begins within :data:`PART_BYTES`."""
    return PART_BYTES + OpenFile.max_bytes


def _end(content: bytes, paragraphs: bool) -> int:
    """Return where to cut, 0 where that is not yet to be seen."""
    seen = min(len(content), PART_BYTES)
    documents = content.count(b"\n\n" if paragraphs else b"\n", 0, seen)
    least = PART_BYTES * seen // max(seen + DOCUMENT_BYTES * documents, 1)
    if paragraphs:
        match = _END_OF_PARAGRAPH.search(content, least)
        return match.end() if match else 0
    return content.find(b"\n", least) + 1


def _documents(span: bytes, paragraphs: bool) -> int:
    """Return how many documents a part has: lines that are not blank, or what is between such."""
    content = b"\n" + span.removesuffix(b"\n")
    if not paragraphs:
        return content.count(b"\n") - sum(1 for _ in _BLANK_LINE.finditer(content))
    runs = [match.span() for match in _BLANK_LINES.finditer(content)]
    opens, closes = (runs[0][0] == 0, runs[-1][1] == len(content)) if runs else (False, False)
    return len(runs) + 1 - opens - closes


def _names_gutenberg(span: bytes) -> bool:
    lower = span.lower()
    return b"gutenberg" in lower or b"small print" in lower


def read_part(part: Part) -> tuple[list[Document], PartCounts]:
    """Return the documents of a part, and what it held.

    Raises:
        DataError: what reading all of the file would raise here, or the file has changed since it was listed.
    """
    try:
        return _read_part(part)
    finally:
        if part.path and part.planned:
            places.check_unchanged(os.path.join(part.folder, part.path), part.name, part.planned)


def _read_part(part: Part) -> tuple[list[Document], PartCounts]:
    if isinstance(part, DumpPart):
        texts, names, counts = wikipedia_dump.read_part(part)
        return [Document(text, None, name) for text, name in zip(texts, names, strict=True)], counts
    source = Source(part.name)
    with open(os.path.join(part.folder, part.path), "rb") as raw:
        raw.seek(part.start)
        stream: io.BufferedReader = io.BufferedReader(_Span(raw, part.end - part.start, part.name), _BLOCK)
        file = OpenFile(part.name, part.data, source, Reading([source]), stream, part.lines, part.start)
        found = list(finished((each for each in BY_KIND[part.kind].read(file) if isinstance(each, Document)), file, part.documents))
    size = sum(len(document.text.encode()) for document in found)
    return found, PartCounts(part.source, len(found), size, licenses=source.licenses, replaced=source.replaced, without=source.without)


def finished(found: Iterable[Document], file: OpenFile, before: int = 0) -> Iterator[Document]:
    """Yield documents without the license of Project Gutenberg, and those without a name of their own with their number.

    Args:
        found: by a reader of :mod:`formats`.
        file: that they are from.
        before: documents of the file that come before.
    """
    for number, document in enumerate(found, before + 1):
        text = gutenberg.remove_license(document.text, file.source) if file.data.gutenberg_license == "remove" else document.text
        yield document._replace(text=text, name=document.name or f"{file.name}#{number}")


class _Span(io.RawIOBase):
    """The next bytes of a file, so many."""

    def __init__(self, file: io.BufferedReader, size: int, name: str) -> None:
        self._file, self._left, self._name = file, size, name

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        block = self._file.read(min(len(buffer), self._left))
        if self._left and not block:
            raise places.changed(self._name)
        self._left -= len(block)
        buffer[: len(block)] = block
        return len(block)
