"""Documents of the web: HTML pages, and the archives of crawls, WARC with pages and WET with their text (ISO 28500, as Common Crawl has them)."""

from __future__ import annotations

import codecs
import importlib.util
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress

from overnight.corpus.decompress import TruncatedError
from overnight.corpus.document import Document, OpenFile
from overnight.corpus.plain_text import parts
from overnight.errors import DataError

_BLOCK = 1 << 20
_META_CHARSET = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([\w.:-]{1,40})""", re.I)
_XML_CHARSET = re.compile(rb"""\s*<\?xml\s[^>]{0,200}?encoding\s*=\s*["']([\w.:-]{1,40})""")
_CHARSET = re.compile(r"""charset\s*=\s*["']?\s*([\w.:-]{1,40})""", re.I)
_HTML_TYPES = ("text/html", "application/xhtml+xml")
# Of more, the encoding that a page says it has is not the one it is in.
_MAX_REPLACED = 1 / 1000
_MAX_HEADER = 1 << 16

Headers = dict[str, str]


def read_html(file: OpenFile) -> Iterator[Document]:
    """Yield the text of an HTML page, or its paragraphs or lines, as `data.documents` and `data.html` say."""
    content, truncation = b"", None
    try:
        while block := file.stream.read1(_BLOCK):
            content += block
            if len(content) > file.max_bytes:
                raise file.too_long(file.name, "page")
    except TruncatedError as error:
        truncation = error
    if truncation is None or file.data.on_truncated_file == "keep":
        text = page_text(decoded(content), file.data.html == "main")
        whole = file.data.documents == "file"
        yield from (Document(part, name=file.name if whole else "") for part in parts(text, file.data) if part)
    if truncation:
        raise truncation


def read_warc(file: OpenFile) -> Iterator[Document]:
    """Yield the text of each `conversion` record, and of each successful `response` that is an HTML page, under its address.

    Raises:
        TruncatedError: when the file ends inside a record.
        DataError: when what should be a record is none.
    """
    for number, (headers, body) in enumerate(_records(file), 1):
        kind, address = headers.get("warc-type", ""), headers.get("warc-target-uri", "").strip("<>")
        if body is None:
            if kind in ("conversion", "response"):
                file.skip(number, f"the record of {address} has more than {file.max_bytes >> 20} MB")
            continue
        text = None
        if kind == "conversion":
            text = _text(file, number, address, body)
        elif kind == "response" and headers.get("content-type", "").startswith("application/http"):
            page = _page(body)
            text = None if page is None else page_text(page, file.data.html == "main")
        if text:
            yield from (Document(part, name=address) for part in parts(text, file.data))


def _text(file: OpenFile, number: int, address: str, body: bytes) -> str | None:
    """Return the text of a `conversion` record; None of one that is not UTF-8 and is counted, where `data.encoding_errors` is strict."""
    try:
        return body.decode()
    except UnicodeDecodeError:
        if file.data.encoding_errors == "strict":
            file.skip(number, f"the record of {address} is not UTF-8 (data.encoding_errors=replace reads it)")
            return None
    text = body.decode("utf-8", "replace")
    file.source.replaced += text.count("\ufffd") - body.count("\ufffd".encode())
    return text


def page_text(page: str, main: bool) -> str:
    """Return the text of an HTML page, a paragraph for each element that is one.

    Args:
        page: its source.
        main: without what is repeated on every page of a site, such as navigation and footers.

    Raises:
        DataError: when the extra `web` is not installed.
    """
    _check_extra()
    from resiliparse.extract.html2text import extract_plain_text

    return str(extract_plain_text(page, main_content=main, alt_texts=False, list_bullets=False))


def decoded(content: bytes, charset: str = "") -> str:
    """Return the source of a page: by its byte order mark, the encoding that its server names, that its `<meta>` or XML declaration names, or its bytes.

    A byte that is not of that encoding becomes U+FFFD, as in a browser.
    """
    _check_extra()
    from resiliparse.parse.encoding import detect_encoding, map_encoding_to_html5

    for mark, name in ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be")):
        if content.startswith(mark):
            return content[len(mark) :].decode(name, "replace")
    meta = _META_CHARSET.search(content, 0, 4096) or _XML_CHARSET.match(content)
    own = map_encoding_to_html5(meta[1].decode(), fallback_utf8=False) if meta else None
    if own and own.startswith("utf-16"):
        own = "utf-8"  # as the HTML standard has it: what can be read as ASCII is not in UTF-16
    for known in (map_encoding_to_html5(charset, fallback_utf8=False) if charset else None, own):
        if known:
            text = content.decode(known, "replace")
            if text.count("\ufffd") <= len(text) * _MAX_REPLACED:
                return text
    if content.isascii() and b"\x1b$B" in content:  # begins Japanese
        return content.decode("iso2022_jp", "replace")
    text = content.decode("utf-8", "replace")
    replaced = text.count("\ufffd")
    # Few apostrophes of Windows-1252 are few errors of UTF-8; but where it is UTF-8, more characters than errors are not of ASCII.
    if not replaced or (replaced <= len(text) * _MAX_REPLACED and sum(not c.isascii() for c in text) > 2 * replaced):
        return text
    found = detect_encoding(content)
    if found and found != "utf-8":
        return content.decode(found, "replace")
    with suppress(UnicodeDecodeError):
        korean = content.decode("euc_kr")  # which is not detected; double letters with accents, as of Finnish, would be hanja in it
        if 2 * sum("가" <= c <= "힣" for c in korean) > sum(not c.isascii() for c in korean):
            return korean
    return content.decode("windows-1252", "replace")


def _check_extra() -> None:
    if importlib.util.find_spec("resiliparse") is None:
        raise DataError(
            "the text of HTML pages and of books in EPUB needs the extra `web` (pip install 'overnight[web]'); "
            "for pages, data.format=text does without it and keeps the text between the tags"
        )


def _records(file: OpenFile) -> Iterator[tuple[Headers, bytes | None]]:
    """Yield the headers of each record, with lower-case names, and its content; None is one that is too long."""
    while line := _skip_blank(file):
        if not line.startswith(b"WARC/"):
            raise DataError(f"{file.name}: is not a WARC file, or is damaged: a record begins with {line[:20]!r}; get it again")
        headers = _headers(_until_blank(file))
        try:
            left = int(headers["content-length"])
        except (KeyError, ValueError):
            raise DataError(f"{file.name}: is damaged: a record has no Content-Length; get it again") from None
        blocks: list[bytes] | None = [] if left <= file.max_bytes else None
        while left > 0:
            block = file.stream.read(min(left, _BLOCK))
            if not block:
                raise TruncatedError(f"{file.name}: the file ends inside the record of {headers.get('warc-target-uri', 'its own')}")
            left -= len(block)
            if blocks is not None:
                blocks.append(block)
        yield headers, None if blocks is None else b"".join(blocks)


def _skip_blank(file: OpenFile) -> bytes:
    while line := file.stream.readline(_MAX_HEADER):
        if line.strip():
            return line
    return b""


def _until_blank(file: OpenFile) -> bytes:
    found = bytearray()
    while (line := file.stream.readline(_MAX_HEADER)).strip():
        found += line
        if len(found) > _MAX_HEADER:
            raise DataError(f"{file.name}: is damaged: a record has more than {_MAX_HEADER >> 10} KB of headers; get it again")
    if not line:
        raise TruncatedError(f"{file.name}: the file ends inside the headers of a record")
    return bytes(found)


def _headers(block: bytes) -> Headers:
    """Return headers by their names in lower case; of those that stand twice the last."""
    pairs = (line.partition(":") for line in block.decode("utf-8", "replace").split("\n"))
    return {name.strip().lower(): value.strip() for name, colon, value in pairs if colon}


def _page(response: bytes) -> str | None:
    """Return the HTML of an HTTP response as text, None of one that failed, is something else or cannot be unpacked."""
    end = re.search(rb"\r?\n\r?\n", response)
    if not end or not re.match(rb"HTTP/\S+ 2\d\d\b", response):
        return None
    headers = _headers(response[: end.start()])
    kind = headers.get("content-type", "")
    if not kind.lower().startswith(_HTML_TYPES):
        return None
    body: bytes | None = response[end.end() :]
    # Crawlers may keep a body as it was sent; Common Crawl has undone all codings and renamed their headers. The last was put on last.
    for coding in reversed(f"{headers.get('content-encoding', '')},{headers.get('transfer-encoding', '')}".lower().split(",")):
        body = _CODINGS.get(coding.strip(), _undone)(body) if body is not None else None
    charset = _CHARSET.search(kind)
    return None if body is None else decoded(body, charset[1] if charset else "")


def _unchunked(body: bytes) -> bytes:
    """Return a body without the sizes of its chunks; one that has none as it is."""
    found, place = bytearray(), 0
    while size := re.compile(rb"([0-9a-fA-F]{1,8})[^\r\n]{0,100}\r?\n").match(body, place):
        length = int(size[1], 16)
        found += body[size.end() : size.end() + length]
        place = size.end() + length + 2
        if not length:
            break
    return bytes(found) if found else body


def _inflated(body: bytes) -> bytes | None:
    """Return an unpacked body, None of one that is damaged or unpacks to more than a page has."""
    try:
        return _unpacked(body, zlib.MAX_WBITS | 32)
    except zlib.error:
        pass
    try:
        return _unpacked(body, -zlib.MAX_WBITS)  # `deflate` without the header of zlib, as some servers send it and browsers read it
    except zlib.error:
        return None if body[:1] != b"<" else body


def _unpacked(body: bytes, window: int) -> bytes | None:
    """Return what a body unpacks to, of all its gzip members; None of more than a page has."""
    found = b""
    while body:
        inflate = zlib.decompressobj(window)
        found += inflate.decompress(body, OpenFile.max_bytes + 1 - len(found))
        if len(found) > OpenFile.max_bytes:
            return None
        if window < 0 and not inflate.eof:
            raise zlib.error("is no raw deflate stream")
        body = inflate.unused_data if inflate.unused_data.startswith(b"\x1f\x8b") else b""
    return found


def _undone(body: bytes) -> bytes | None:
    """Return the body of a page whose coding is unknown here: what the crawler has undone begins as a page does."""
    return body if body.lstrip()[:1] == b"<" else None


_CODINGS: dict[str, Callable[[bytes], bytes | None]] = {
    "": lambda body: body,
    "identity": lambda body: body,
    "chunked": _unchunked,
    "gzip": _inflated,
    "x-gzip": _inflated,
    "deflate": _inflated,
}
