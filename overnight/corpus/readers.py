"""Documents out of text, Markdown, JSON lines and extracted Wikipedia, in an order that depends on the sources alone."""

from __future__ import annotations

import codecs
import dataclasses
import fnmatch
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from overnight.config import Data
from overnight.corpus import pydocs, streams
from overnight.corpus.streams import TruncatedError
from overnight.errors import DataError

BUILTIN = "builtin:python-docs"
# A document is held in memory several times over while it is cleaned; this keeps that to some hundred MB.
MAX_DOCUMENT_BYTES = 32 << 20
_BLOCK = 1 << 20


# Numbers beyond have no place in 32 bits.
_MAX_LABEL = 3.4e38


class Document(NamedTuple):
    """A text, the number that belongs to it, and where it is from."""

    text: str
    label: float | None = None
    name: str = ""
    """Of its file; of one with several documents with its number, from 1: `reviews.jsonl#12`."""
    group: str = ""
    """What it belongs to (`data.group_field`); empty is nothing."""


@dataclass
class Source:
    """What one entry of `data.paths` gave: counted while it is read."""

    path: str
    files: int = 0
    documents: int = 0
    bytes: int = 0
    """UTF-8 bytes of the documents, before cleaning."""
    skipped_lines: int = 0
    truncated: list[str] = field(default_factory=list)
    """Files that ended early, of which what was readable was kept."""


@dataclass
class Reading:
    """How far reading has come."""

    sources: list[Source]
    total_bytes: int = 0
    """Bytes of the source files as they lie on the disk; 0 when unknown."""
    done_bytes: int = 0


def documents(data: Data, reading: Reading) -> Iterator[Document]:
    """Stream the documents of `data.paths`, in order.

    Args:
        data: what to read and how.
        reading: counters, filled on the way; one source for each path.

    Raises:
        DataError: a source is missing, empty, cut, damaged, not UTF-8, has no such member, or has more bad lines than allowed.
    """
    for source in reading.sources:
        builtin = source.path == BUILTIN
        found = (
            (Document(text, None, name) for name, text in pydocs.python_docs(data.workers))
            if builtin
            else _from_files(data, source, reading)
        )
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
        if path != BUILTIN:
            reading.total_bytes += sum(file.stat().st_size for file in streams.expand(path))
    if not data.paths:
        raise DataError("data.paths is empty; name at least one file, folder or archive")
    return reading


def _from_files(data: Data, source: Source, reading: Reading) -> Iterator[Document]:
    others: list[str] = []
    for path in streams.expand(source.path):
        try:
            raw = open(path, "rb")  # noqa: SIM115 - closed below
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from None
        before = reading.done_bytes
        with raw:
            reader = _Reader(data, source, reading, streams.pattern(source.path), others)
            for document in reader.file(raw, str(path)):
                reading.done_bytes = before + raw.tell()
                yield document
        reading.done_bytes = before + path.stat().st_size
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

    def file(self, raw: io.BufferedReader, name: str) -> Iterator[Document]:
        """Yield documents of a file that may be packed, and must be an archive where a pattern selects its members."""
        try:
            stream, inner = streams.unpacked(raw, name)
            if streams.is_tar(stream, inner):
                yield from self.archive(stream, name)
            elif self.pattern:
                raise DataError(f"{name}: is not a tar archive, so ::{self.pattern} selects nothing in it; leave that out")
            else:
                self.source.files += 1
                yield from self.plain(stream, inner)
        except TruncatedError as error:
            if self.data.on_truncated_file == "error":
                raise DataError(f"{error}; get it again, or set data.on_truncated_file=keep to use what is readable") from None
            if name not in self.source.truncated:
                self.source.truncated.append(name)
            # Inside an archive everything behind the cut is lost as well: the archive's own stream says so next.

    def archive(self, stream: io.BufferedReader, name: str) -> Iterator[Document]:
        """Yield documents of the members of a tar archive that match; of an archive in it, all."""
        inside = dataclasses.replace(self, pattern="")
        for member, content in streams.members(stream, name):
            if not self.pattern or fnmatch.fnmatchcase(member, self.pattern):
                yield from inside.file(content, f"{name}:{member}")
            elif len(self.others) < 3:
                self.others.append(member)

    def plain(self, stream: io.BufferedReader, name: str) -> Iterator[Document]:
        """Yield documents of an unpacked file."""
        kind = self.data.format if self.data.format != "auto" else _guess(stream, name)
        found = self.json_lines(stream, name) if kind == "jsonl" else map(Document, self.texts(stream, name, kind))
        whole = kind in ("text", "markdown") and self.data.documents == "file"
        for number, document in enumerate(found, 1):
            yield document._replace(name=name if whole else f"{name}#{number}")

    def texts(self, stream: io.BufferedReader, name: str, kind: str) -> Iterator[str]:
        """Yield texts of a file of a format that has nothing beside."""
        if kind == "wiki":
            yield from self.wiki(stream, name)
        elif self.data.documents == "file":
            for text in self.whole(stream, name):
                yield _without_front_matter(text) if kind == "markdown" else text
        elif self.data.documents == "line":
            yield from (line for _, line in self.lines(stream, name) if line.strip())
        else:
            yield from self.paragraphs(stream, name)

    def whole(self, stream: io.BufferedReader, name: str) -> Iterator[str]:
        """Yield all of a file as one text; of a cut one what was readable, before the error."""
        blocks: list[bytes] = []
        size, truncation = 0, None
        try:
            while block := stream.read1(_BLOCK):
                blocks.append(block)
                size += len(block)
                if size > MAX_DOCUMENT_BYTES:
                    raise _too_long(name, "document; set data.documents to paragraph or line, or cut the file")
        except TruncatedError as error:
            truncation = error
        # The last character of a cut text may be cut as well.
        text = self.decoded(b"".join(blocks).removeprefix(codecs.BOM_UTF8), name, 0, whole=truncation is None)
        if text and (truncation is None or self.data.on_truncated_file == "keep"):
            yield text
        if truncation:
            raise truncation

    def decoded(self, content: bytes, name: str, offset: int, whole: bool = True) -> str:
        """Decode UTF-8 to text; a bad byte is named by its offset in the (unpacked) file."""
        try:
            return codecs.getincrementaldecoder("utf-8")(self.data.encoding_errors).decode(content, whole)
        except UnicodeDecodeError as error:
            hint = "; it looks like UTF-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else ""
            raise DataError(
                f"{name}: byte {offset + error.start} (0x{content[error.start]:02x}) is not UTF-8{hint}; "
                "convert the file, leave it out, or set data.encoding_errors=replace to put U+FFFD there"
            ) from None

    def lines(self, stream: io.BufferedReader, name: str) -> Iterator[tuple[int, str]]:
        """Yield numbered lines without their end; the last one of a cut file is not whole and is left out."""
        offset, number = 0, 0
        while line := stream.readline(MAX_DOCUMENT_BYTES + 1):
            number += 1
            if len(line) > MAX_DOCUMENT_BYTES:
                raise _too_long(f"{name}:{number}", "line")
            content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            yield number, self.decoded(content, name, offset + len(line) - len(content)).rstrip("\r\n")
            offset += len(line)

    def paragraphs(self, stream: io.BufferedReader, name: str) -> Iterator[str]:
        """Yield blocks of lines between blank ones."""
        block: list[str] = []
        size, truncation = 0, None
        lines = self.lines(stream, name)
        while True:
            try:
                number, line = next(lines, (0, ""))
            except TruncatedError as error:
                number, line, truncation = 0, "", error
            if line.strip():
                block.append(line)
                size += len(line)
                if size > MAX_DOCUMENT_BYTES:
                    raise _too_long(f"{name}:{number}", "paragraph")
                continue
            if block and (truncation is None or self.data.on_truncated_file == "keep"):
                yield "\n".join(block)
            block, size = [], 0
            if truncation:
                raise truncation
            if not number:
                return

    def json_lines(self, stream: io.BufferedReader, name: str) -> Iterator[Document]:
        """Yield the text of each JSON object, with its label where one is asked for."""
        for number, line in self.lines(stream, name):
            if not line.strip():
                continue
            found = self.json_line(line)
            if isinstance(found, Document):
                yield found
                continue
            self.source.skipped_lines += 1
            skipped = sum(source.skipped_lines for source in self.reading.sources)
            if skipped > self.data.max_invalid_lines:
                raise DataError(
                    f"{name}:{number}: {found}; mend it, or allow more bad lines than data.max_invalid_lines={self.data.max_invalid_lines}"
                )

    def json_line(self, line: str) -> Document | str:
        """Return the document of a line, or what is wrong with it."""
        key = self.data.field
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            return f"is not JSON ({error})"
        if not isinstance(row, dict):
            return "is not a JSON object"
        text, label = row.get(key), row.get(self.data.label) if self.data.label else None
        if not isinstance(text, str):
            return f"has no text in {key!r}; its keys are: {', '.join(list(row)[:12])} (data.field names the one to read)"
        if label is not None and (not isinstance(label, int | float) or isinstance(label, bool) or not abs(label) <= _MAX_LABEL):
            return f"has no finite number in {self.data.label!r} but {label!r:.40} (data.label names it; null or no such key is no label)"
        if "\\u" in line and not _encodable(text):
            if self.data.encoding_errors == "strict":
                return f"has half a surrogate pair in {key!r}"
            text = text.encode("utf-8", "replace").decode()
        group = row.get(self.data.group_field) if self.data.group_field else None
        return Document(text, None if label is None else float(label), group="" if group is None else str(group))

    def wiki(self, stream: io.BufferedReader, name: str) -> Iterator[str]:
        """Yield the text between each `<doc ...>` and `</doc>`."""
        block: list[str] | None = None
        began = number = size = 0
        for number, line in self.lines(stream, name):
            if line.startswith("<doc "):
                if block is not None:
                    raise DataError(f"{name}:{number}: a <doc> begins before that of line {began} has ended; extract the file again")
                block, began, size = [], number, 0
            elif line.rstrip() == "</doc>":
                if block is None:
                    raise DataError(f"{name}:{number}: </doc> without a <doc>; extract the file again")
                yield "\n".join(block)
                block = None
            elif block is not None:
                block.append(line)
                size += len(line)
                if size > MAX_DOCUMENT_BYTES:
                    raise _too_long(f"{name}:{began}", "article")
            elif line.strip():
                raise DataError(
                    f"{name}:{number}: text outside <doc> and </doc>; this is not the extracted-Wikipedia format, set data.format"
                )
        if block is not None:
            # An article that never ends is the mark of a file cut short.
            if self.data.on_truncated_file == "keep":
                yield "\n".join(block)
            raise TruncatedError(f"{name}:{began}: the file ends inside this article")


def _too_long(where: str, what: str) -> DataError:
    return DataError(f"{where}: more than {MAX_DOCUMENT_BYTES >> 20} MB in one {what}")


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_FRONT_MATTER = re.compile(r"\A---[ \t]*\n.*?\n(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.S)


def _without_front_matter(text: str) -> str:
    """Return Markdown without the block of YAML that may open it."""
    return _FRONT_MATTER.sub("", text, count=1)


_ENDINGS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".md": "markdown", ".markdown": "markdown"}


def _guess(stream: io.BufferedReader, name: str) -> str:
    """Return the format of a file, by its ending, then by its first bytes."""
    head = stream.peek(512)[:512].removeprefix(codecs.BOM_UTF8).lstrip()
    if head.startswith(b"<mediawiki"):
        raise DataError(f"{name}: is a Wikipedia dump with its markup; extract its text first (to <doc> files or JSON lines)")
    ending = Path(name).suffix.lower()
    if ending in _ENDINGS:
        return _ENDINGS[ending]
    if head.startswith(b"<doc "):
        return "wiki"
    if ending == ".json" or (head.startswith(b'{"') and ending != ".txt"):
        if not head.startswith(b"{"):
            raise DataError(f"{name}: is JSON but not one object a line; write it as JSON lines or set data.format")
        return "jsonl"
    return "text"
