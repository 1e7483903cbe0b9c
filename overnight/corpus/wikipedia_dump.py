"""Dumps of Wikipedia and every other MediaWiki (`pages-articles.xml`), page by page.

Unpacking and wikitext take much longer than reading, so a dump is divided into parts that tasks take to text: some MB of whole pages, or,
where the file is many bzip2 streams one after another (`pages-articles-multistream.xml.bz2`), the place of some streams in it. Parts depend on
the file alone.
"""

from __future__ import annotations

import bz2
import codecs
import io
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from overnight.config import Data
from overnight.corpus.decompress import TruncatedError
from overnight.corpus.document import printable
from overnight.corpus.wikitext import HIDDEN_NAMESPACES, plain
from overnight.errors import DataError

PART_BYTES = 8 << 20
"""XML of a part, about. Half of it is text."""
_PACKED_BYTES = 2 << 20
"""The same in bzip2."""
# A page is at most 2 MB of wikitext; one that is longer than this holds its history.
_MAX_PAGE_BYTES = 64 << 20
# That the streams of a part, with the page that is open at their end, unpack to: ten times what is usual is 200 MB.
_MAX_XML_BYTES = 512 << 20
_BLOCK = 1 << 20

_STREAM = re.compile(rb"BZh[1-9]1AY&SY")
_INDEX = re.compile(r"multistream-index\d*\.txt(-p\d+p\d+)?(\.bz2)?$")
_NAMESPACE = re.compile(rb'<namespace key="(-?\d+)"[^>]*>([^<]+)</namespace>')
_NUMBER = re.compile(rb"\s*-?\d{1,9}\s*")
_REDIRECT = re.compile(rb"\s*#redirect\b", re.I)
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_END = b"</mediawiki>"


@dataclass(frozen=True)
class DumpPart:
    """Some pages of a dump, for a task to read."""

    name: str
    """Of the dump."""
    namespaces: dict[str, int]
    """Of this wiki: their numbers by lower-case name."""
    data: Data
    xml: bytes = b""
    """Whole pages, in UTF-8; empty where they lie in a file."""
    path: str = ""
    """File of bzip2 streams."""
    folder: str = ""
    """Where a relative path begins, for workers that are elsewhere."""
    start: int = 0
    """Where in it the first stream begins."""
    end: int = 0
    """Where the last one ends. Pages that begin in these streams are of this part."""
    last: bool = False
    """Whether the file ends there."""
    source: int = 0
    """Place in `data.paths`."""
    planned: tuple[int, Any] | None = None
    """Size and version of the file when it was listed."""


@dataclass
class PartCounts:
    """What a part of a file gave."""

    source: int
    documents: int = 0
    bytes: int = 0
    redirects: int = 0
    other_pages: int = 0
    licenses: int = 0
    replaced: int = 0
    without: dict[str, int] = field(default_factory=dict)
    truncated: list[str] = field(default_factory=list)


def is_dump(head: bytes) -> bool:
    """Return whether a file begins as a dump does, in UTF-8 or UTF-16."""
    text = head[: len(head) & ~1].decode("utf-16", "ignore") if head.startswith(_UTF16) else head.decode("utf-8", "ignore")
    return re.match(r"\ufeff?\s*(<\?xml[^>]*>\s*)?<mediawiki\b", text) is not None


def is_index(name: str) -> bool:
    """Return whether a file is the index of a multistream dump, which is not needed and holds no text."""
    return _INDEX.search(name) is not None


def parts(stream: io.BufferedReader, name: str, data: Data) -> Iterator[DumpPart]:
    """Yield the parts of an unpacked dump; of one that is cut all whole pages, before the error.

    Raises:
        TruncatedError: when it ends early.
        DataError: when it is no dump, or has a page of more than 64 MB.
    """
    buffer, namespaces = b"", None
    truncation: TruncatedError | None = None
    blocks = _blocks(stream, name)
    while True:
        try:
            block = next(blocks, b"")
        except TruncatedError as error:
            block, truncation = b"", error
        buffer += block
        if namespaces is None and (b"<page>" in buffer or not block):
            if b"<mediawiki" not in buffer[:4096]:
                raise DataError(f"{name}: is not a MediaWiki dump: it does not begin with <mediawiki; correct data.format")
            namespaces = _namespaces(buffer)
        if len(buffer) >= PART_BYTES or not block:
            end = buffer.rfind(b"</page>") + 7
            if end > 6:
                yield DumpPart(name, namespaces or {}, data, buffer[:end])
                buffer = buffer[end:]
            elif len(buffer) > _MAX_PAGE_BYTES:
                raise DataError(
                    f"{name}: has a page of more than {_MAX_PAGE_BYTES >> 20} MB; is it the history of pages? Use pages-articles"
                )
        if not block:
            break
    if truncation:
        raise truncation
    if not buffer.rstrip().endswith(_END):
        raise TruncatedError(f"{name}: the dump ends early, without {_END.decode()}")


def _blocks(stream: io.BufferedReader, name: str) -> Iterator[bytes]:
    """Yield a stream as UTF-8, whatever it is in."""
    decoder = codecs.getincrementaldecoder("utf-16")() if stream.peek(2)[:2] in _UTF16 else None
    while block := stream.read1(_BLOCK):
        try:
            yield decoder.decode(block).encode() if decoder else block
        except UnicodeError as error:
            raise DataError(f"{name}: is not the UTF-16 that it begins as ({error}); get it again") from None


def is_multistream(file: io.BufferedReader) -> bool:
    """Return whether a file on the disk is a dump of many bzip2 streams; it stays at its beginning."""
    if not isinstance(file.raw, io.FileIO) or not _STREAM.match(file.peek(10)[:10]):
        return False
    head = file.read(4 * _BLOCK)
    file.seek(0)
    found = [match.start() for match in _STREAM.finditer(head)][:3]
    # Of a file that is longer the third stream is in sight too: they are short, about 1 MB.
    if len(found) < 2 or (len(found) < 3 and len(head) == 4 * _BLOCK):
        return False
    try:
        return is_dump(bz2.BZ2Decompressor().decompress(head[: found[1]], 512))
    except OSError:
        return False


def stream_parts(file: io.BufferedReader, name: str, data: Data) -> Iterator[DumpPart]:
    """Yield the parts of a dump of many bzip2 streams, from its beginning. Only their places are looked for here.

    Raises:
        DataError: when a stream is longer than 64 MB, or, before the first part, when the dump ends early and `data.on_truncated_file` is `error`.
    """
    path, folder = str(file.name), os.getcwd()
    namespaces = _namespaces(next(_unpacked(file, path))[1])
    name = name.removesuffix(".bz2")
    # The end first: hours of work lie between.
    size = file.seek(0, io.SEEK_END)
    begin = file.seek(max(size - 4 * _BLOCK, 0))
    if ends := [begin + match.start() for match in _STREAM.finditer(file.read())]:
        _readable(DumpPart(name, namespaces, data, path=path, folder=folder, start=ends[-1], end=size, last=True))
    file.seek(0)
    start = offset = 0
    carry = b""
    while block := file.read(_BLOCK):
        window = carry + block
        for match in _STREAM.finditer(window):
            place = offset - len(carry) + match.start()
            if place - start >= _PACKED_BYTES:
                yield DumpPart(name, namespaces, data, path=path, folder=folder, start=start, end=place)
                start = place
        offset += len(block)
        carry = window[-9:]
        if offset - start > _MAX_PAGE_BYTES:
            raise DataError(
                f"{name}: byte {start}: a bzip2 stream of more than {_MAX_PAGE_BYTES >> 20} MB among short ones; unpack the file"
            )
    yield DumpPart(name, namespaces, data, path=path, folder=folder, start=start, end=offset, last=True)


def read_part(part: DumpPart) -> tuple[list[str], list[str], PartCounts]:
    """Return the texts of a part, their names (`dump.xml#Title`), and what it held.

    Raises:
        DataError: when it is damaged, not UTF-8, or cut and `data.on_truncated_file` is `error`.
    """
    counts = PartCounts(part.source)
    hidden = HIDDEN_NAMESPACES | {name for name, number in part.namespaces.items() if number in (-2, 6, 14)}
    dump = printable(part.name)
    texts: list[str] = []
    names: list[str] = []
    for title, markup, _ in articles(part, counts):
        texts.append(f"# {title}\n\n{plain(markup, hidden)}")
        names.append(f"{dump}#{title}")
    counts.documents, counts.bytes = len(texts), sum(len(text.encode()) for text in texts)
    return texts, names, counts


def articles(part: DumpPart, counts: PartCounts | None = None) -> Iterator[tuple[str, str, int]]:
    """Yield the title, the wikitext and the bytes of XML of each page of a part that is in `data.namespaces` and leads to no other.

    Args:
        part: of a dump.
        counts: those that are left out are added to it.
    """
    counts = counts or PartCounts(part.source)
    xml, truncated = (part.xml, False) if not part.path else _readable(part)
    if truncated:
        counts.truncated.append(printable(part.path))
    for page in _pages(xml):
        title = _content(page, b"title", part)
        head = page[: page.find(b"<revision>")]
        markup = page[page.rfind(b"<text") :]
        markup = markup[markup.find(b">") + 1 : max(markup.find(b"</text>"), 0)]
        if b"<redirect" in head or _REDIRECT.match(markup):
            counts.redirects += 1
        elif _namespace(page, title, part) not in part.data.namespaces or (b"<model>" in page and b"<model>wikitext<" not in page):
            counts.other_pages += 1
        else:
            yield title, _decoded(markup, title, part), len(page)


def _readable(part: DumpPart) -> tuple[bytes, bool]:
    """Return the XML of a part in a file, and whether the dump ends early there, if that is allowed."""
    xml, truncated = _from_streams(part)
    if truncated and part.data.on_truncated_file == "error":
        raise DataError(f"{part.path}: the dump ends early; get it again, or set data.on_truncated_file=keep to use what is readable")
    return xml, truncated


def _from_streams(part: DumpPart) -> tuple[bytes, bool]:
    """Return XML with the pages that begin in the streams of a part, and whether the dump ends early there."""
    xml, opened = b"", -1
    with open(os.path.join(part.folder, part.path), "rb") as file:
        file.seek(part.start)
        try:
            for place, block in _unpacked(file, part.path):
                # Streams need not end where pages do (pbzip2 cuts anywhere): the page that is open at the end of the last one is read on.
                if place >= part.end and opened < 0 and (opened := _open_page(xml)) < 0:
                    break
                xml += block
                if len(xml) > _MAX_XML_BYTES:
                    raise _too_large(part.path, part.start)
                if opened >= 0 and (end := xml.find(b"</page>", opened)) >= 0:
                    xml = xml[: end + 7]
                    break
        except TruncatedError:
            return xml, part.last
    # Of a dump cut anywhere the last stream may hold no more than `iki>`.
    return xml, part.last and not _END.endswith(xml.rstrip()[-len(_END) :])


def _unpacked(file: io.BufferedReader, name: str) -> Iterator[tuple[int, bytes]]:
    """Yield where each bzip2 stream begins in a file, and what it holds; of one that is cut what is readable, before the error."""
    packed = b""
    while packed := packed or file.read(_BLOCK):
        place, unpacker, blocks, left = file.tell() - len(packed), bz2.BZ2Decompressor(), [], _MAX_XML_BYTES
        while packed and not unpacker.eof:
            try:
                blocks.append(unpacker.decompress(packed, left + 1))
            except OSError as error:
                raise DataError(f"{name}: the bzip2 stream at byte {place} is damaged ({error}); get the dump again") from None
            left -= len(blocks[-1])
            if left < 0:
                raise _too_large(name, place)
            packed = unpacker.unused_data if unpacker.eof else file.read(_BLOCK)
        yield place, b"".join(blocks)
        if not unpacker.eof:
            raise TruncatedError(name)


def _too_large(name: str, place: int) -> DataError:
    return DataError(
        f"{name}: what is packed at byte {place} is more than {_MAX_XML_BYTES >> 20} MB of XML, which no dump has; get the dump again"
    )


def _open_page(xml: bytes) -> int:
    """Return where the page begins that is not ended, or a part of its tag; -1 where there is none."""
    start = xml.rfind(b"<page>")
    if start >= 0 and xml.find(b"</page>", start) < 0:
        return start
    return next((len(xml) - size for size in range(5, 0, -1) if xml.endswith(b"<page>"[:size])), -1)


def _pages(xml: bytes) -> Iterator[bytes]:
    """Yield whole pages; `<` in them is a tag, since that of the text is written `&lt;`."""
    end = 0
    while (start := xml.find(b"<page>", end)) >= 0 and (end := xml.find(b"</page>", start)) >= 0:
        yield xml[start:end]


def _content(page: bytes, tag: bytes, part: DumpPart) -> str:
    start = page.find(b"<" + tag + b">") + len(tag) + 2
    return _decoded(page[start : page.find(b"</" + tag, start)], "?", part)


def _decoded(content: bytes, title: str, part: DumpPart) -> str:
    """Return the characters of a text in XML."""
    try:
        text = content.decode("utf-8", part.data.encoding_errors)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{part.name}: page {title!r}: byte 0x{content[error.start]:02x} is not UTF-8; get the dump again, or set "
            "data.encoding_errors=replace to put U+FFFD there"
        ) from None
    if "&" not in text:
        return text
    return text.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"').replace("&apos;", "'").replace("&amp;", "&")


def _namespace(page: bytes, title: str, part: DumpPart) -> int:
    """Return the number of the namespace of a page; dumps of before 2012 have only the prefix of its title.

    Raises:
        DataError: when it is no number.
    """
    start = page.find(b"<ns>")
    if start >= 0:
        number = page[start + 4 : page.find(b"<", start + 4)]
        if not _NUMBER.fullmatch(number):
            raise DataError(f"{part.name}: page {title!r}: its namespace is {number[:20]!r}, which is not a number; get the dump again")
        return int(number)
    prefix, colon, _ = title.partition(":")
    return part.namespaces.get(prefix.lower(), 0) if colon else 0


def _namespaces(head: bytes) -> dict[str, int]:
    """Return the numbers of namespaces by lower-case name, of the beginning of a dump."""
    return {name.decode("utf-8", "replace").lower(): int(key) for key, name in _NAMESPACE.findall(head[: head.find(b"<page>")])}
