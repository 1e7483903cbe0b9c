"""Books in EPUB: a zip archive of XHTML, read in the order of its package's spine (EPUB 2 and 3)."""

from __future__ import annotations

import posixpath
import re
import urllib.parse
import zipfile
from collections.abc import Iterator
from xml.etree import ElementTree

from overnight.corpus import decompress, zips
from overnight.corpus.decompress import TruncatedError
from overnight.corpus.document import Document, OpenFile
from overnight.corpus.plain_text import parts
from overnight.corpus.web import decoded, page_text
from overnight.errors import DataError

_CONTAINER = "META-INF/container.xml"
# The last is that of the format before EPUB, which old books still have.
_TEXT_TYPES = ("application/xhtml+xml", "text/html", "text/x-oeb1-document")
# Fonts are scrambled in many free books; text is only where it is protected.
_FONTS = re.compile(rb"http://(?:www\.idpf\.org/2008/embedding|ns\.adobe\.com/pdf/enc#RC)")
_ALGORITHM = re.compile(rb"<(?:\w+:)?EncryptionMethod[^>]*Algorithm=[\"']([^\"']*)")

# Elements that XHTML may close where they open. To a parser of HTML they stay open, and a `<title/>` takes all that follows.
_EMPTY_ELEMENT = re.compile(r"<(?!(?:area|base|br|col|embed|hr|img|input|link|meta|source|track|wbr)\b)([a-zA-Z][\w:-]*)((?:\s[^<>]*)?)/>")


def read_epub(file: OpenFile) -> Iterator[Document]:
    """Yield the text of a book, or its paragraphs or lines, as `data.documents` says.

    Raises:
        TruncatedError: when the file is cut; its list of parts stands at the end, so nothing of it is read.
        DataError: when it is protected, lacks a part, or is damaged.
    """
    if not b"PK\x03\x04".startswith(file.stream.peek(4)[:4]):
        raise DataError(f"{file.name}: is not an EPUB book; correct data.format")
    with decompress.seekable(file.stream, file.name) as stream:
        allowed = zips.allowance(stream, file.name)
        archive = zips.opened(stream, file.name)
        if archive is None:
            raise TruncatedError(f"{file.name}: the book ends early; what it holds is listed at its end, so nothing of it can be read")
        book = _Book(file, archive, allowed)
        book.check_open()
        pages = (_EMPTY_ELEMENT.sub(r"<\1\2></\1>", decoded(content)) for content in book.pages())
        text = "\n\n".join(filter(None, (page_text(page, main=False) for page in pages)))
    whole = file.data.documents == "file"
    yield from (Document(part, name=file.name if whole else "") for part in parts(text, file.data) if part)


class _Book:
    """The parts of a book, found by the paths that its package gives them."""

    def __init__(self, file: OpenFile, archive: zipfile.ZipFile, allowed: zips.Allowance) -> None:
        self._file, self._archive, self._allowed = file, archive, allowed
        self._left = file.max_bytes

    def check_open(self) -> None:
        """Check that the text is not encrypted.

        Raises:
            DataError: saying that it is.
        """
        if "META-INF/encryption.xml" in self._archive.namelist():
            algorithms = _ALGORITHM.findall(self._content("META-INF/encryption.xml"))
            if any(not _FONTS.match(algorithm) for algorithm in algorithms):
                raise DataError(f"{self._file.name}: is protected against copying (DRM); leave it out")

    def pages(self) -> Iterator[bytes]:
        """Yield the XHTML of the spine in its order, without the table of contents and what is not part of the text.

        Raises:
            DataError: when a part is missing or damaged, or there is none to yield.
        """
        root = self._xml(_CONTAINER).find(".//{*}rootfile")
        package = "" if root is None else root.get("full-path", "")
        if not package:
            raise self._damaged("names no package")
        tree = self._xml(package)
        empty, items = True, {item.get("id"): item for item in tree.iterfind("./{*}manifest/{*}item")}
        for reference in tree.iterfind("./{*}spine/{*}itemref"):
            item = items.get(reference.get("idref"))
            if item is None:
                raise self._damaged(f"has no part {reference.get('idref')!r} of its spine")
            contents = "nav" in item.get("properties", "").split()
            if reference.get("linear") != "no" and not contents and item.get("media-type") in _TEXT_TYPES:
                path = urllib.parse.unquote(item.get("href", ""))
                yield self._content(posixpath.normpath(posixpath.join(posixpath.dirname(package), path)))
                empty = False
        if empty:
            raise self._damaged("has no text in its spine")

    def _xml(self, path: str) -> ElementTree.Element:
        content = self._content(path)
        # What refers to no entity needs none declared; those that are declared may be a billion laughs.
        if b"<!ENTITY" in content:
            raise self._damaged(f"declares entities in {path}")
        try:
            return ElementTree.fromstring(content)
        except ElementTree.ParseError as error:
            raise self._damaged(f"has a {path} that is not XML ({error})") from None

    def _content(self, path: str) -> bytes:
        try:
            info = self._archive.getinfo(path)
        except KeyError:
            raise self._damaged(f"lacks {path}") from None
        content = zips.member(self._archive, info, self._file.name, self._allowed).read(self._left + 1)
        self._left -= len(content)
        if self._left < 0:
            raise self._file.too_long(self._file.name, "book")
        return content

    def _damaged(self, what: str) -> DataError:
        return DataError(f"{self._file.name}: is not an EPUB book, or is damaged: it {what}; get it again, or leave it out")
