"""What reading gives and what it is given: documents, counters, and the open file that every reader of :mod:`formats` takes."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from overnight.config import Data
from overnight.display import plural
from overnight.errors import DataError

if TYPE_CHECKING:
    from overnight.corpus.places import StoredFile
    from overnight.corpus.wikipedia_dump import PartCounts

DOCUMENT_BYTES = 100
"""What a document counts beside its text where memory is to be bounded: millions may be empty."""


def printable(name: str) -> str:
    """Return a name as it is stored: that of a file may be no UTF-8, nor need a string in JSON be text."""
    return name.encode("utf-8", "backslashreplace").decode()


class Document(NamedTuple):
    """A text, the number that belongs to it, and where it is from."""

    text: str
    label: float | None = None
    name: str = ""
    """Of its file; of one with several documents with its number, from 1: `reviews.jsonl#12`; of a web archive its address."""
    group: str = ""
    """What it has in common with others (`data.group_field`), such as the product of a review; empty is nothing."""
    source: str = ""
    """Name of its source (`data.sources`)."""
    entry: int = 0
    """Which of all the paths it is of, from 0."""


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
    licenses: int = 0
    """Texts of which the license of Project Gutenberg was removed."""
    redirects: int = 0
    """Pages of dumps that only lead to another, left out."""
    other_pages: int = 0
    """Pages of dumps outside of `data.namespaces`, left out."""
    replaced: int = 0
    """U+FFFD in place of bytes that are not UTF-8 (`data.encoding_errors: replace`)."""
    without: dict[str, int] = field(default_factory=dict)
    """Documents that had nothing under a key that `data.field` joins with others, by the key."""
    name: str = ""
    """Of the source in `data.sources` that has the path; empty of `data.paths`."""

    @property
    def title(self) -> str:
        """What it is called: its name and its path, or its path alone where it has no name."""
        return f"{self.name}: {self.path}" if self.name else self.path

    def add(self, counts: PartCounts) -> None:
        """Count what a part of a file gave."""
        for name in ("documents", "bytes", "licenses", "redirects", "other_pages", "replaced"):
            setattr(self, name, getattr(self, name) + getattr(counts, name))
        for key, count in counts.without.items():
            self.without[key] = self.without.get(key, 0) + count
        self.truncated += [name for name in counts.truncated if name not in self.truncated]

    def lines(self) -> Iterator[str]:
        """Yield what is said of what was left out, replaced or absent, where something was."""
        if self.redirects or self.other_pages:
            yield f"left out {plural(self.redirects, 'redirect')}, {plural(self.other_pages, 'page')} of other namespaces"
        if self.truncated or self.skipped_lines:
            yield f"{plural(self.skipped_lines, 'line')} skipped, {plural(len(self.truncated), 'truncated file')} kept as far as readable"
        if self.licenses:
            yield f"the license of Project Gutenberg removed from {plural(self.licenses, 'text')}"
        if self.replaced:
            yield f"bytes that are not UTF-8 replaced by U+FFFD in {plural(self.replaced, 'place')}"
        for key, count in sorted(self.without.items()):
            yield f"{count:,} of {plural(self.documents, 'document')} without {key!r}"


@dataclass
class Reading:
    """How far reading has come."""

    sources: list[Source]
    total_bytes: int = 0
    """Bytes of the source files as they are stored; 0 when unknown."""
    done_bytes: int = 0
    files: list[list[StoredFile]] = field(default_factory=list)
    """Of each source, as they were listed once, before anything was written; none of what is built in or streamed from elsewhere by its own library."""


@dataclass
class Input:
    """What documents are read from, with the settings and the counters that its reader needs."""

    # A document is held in memory several times over while it is cleaned; this keeps that to some hundred MB.
    max_bytes: ClassVar[int] = 32 << 20

    name: str
    data: Data
    source: Source
    reading: Reading

    def skip(self, number: int | str, what: str, lines: int = 1) -> None:
        """Count a line, row or record that cannot be used.

        Args:
            number: which of the file.
            what: what is wrong with it, as a sentence of which it is the subject.
            lines: how many it takes up, all of which are lost.

        Raises:
            DataError: when those skipped are now more than `data.max_invalid_lines`.
        """
        self.source.skipped_lines += lines
        if sum(source.skipped_lines for source in self.reading.sources) > self.data.max_invalid_lines:
            raise DataError(
                f"{self.name}:{number}: {what}; correct it, or allow more bad lines than data.max_invalid_lines={self.data.max_invalid_lines}"
            )

    def too_long(self, where: str, what: str, todo: str = "cut it, or leave the file out") -> DataError:
        """Return the error of a document that memory is not to hold, with what can be done."""
        return DataError(f"{where}: more than {self.max_bytes >> 20} MB in one {what}; {todo}")


@dataclass
class OpenFile(Input):
    """An unpacked file, or a part of it."""

    stream: io.BufferedReader
    lines: int = 0
    """Of the file before the stream."""
    offset: int = 0
    """Bytes of the file before the stream."""
