"""Documents of text files: whole files, paragraphs or lines, Markdown, and the `<doc>` files of extracted Wikipedia."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator

from overnight.config import Data
from overnight.corpus import gutenberg
from overnight.corpus.decompress import TruncatedError
from overnight.corpus.document import Document, OpenFile
from overnight.errors import DataError

_BLOCK = 1 << 20
# Bytes by which UTF-16 and UTF-32 are told, and their marks, the longer ones first, since one begins as a shorter one does.
_HEAD = 4096
_MARKS = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# What begins a run of Japanese in ISO-2022-JP, which is ASCII as bytes.
_JAPANESE = re.compile(rb"\x1b\$[@B]")
# YAML opens with a key, after comments if any, so that a rule above prose opens none. Its other lines are keys, items, comments, blank, or continue with
# what is above.
_KEY = r"""["']?[\w.-]{1,60}["']?[ \t]{0,9}:(?:[ \t\r]|$)"""
_YAML_LINE = r"(?:[ \t\r#\]}-]|$|[^\n:]{1,100}:(?:[ \t\r]|$))"
_FRONT_MATTER = re.compile(rf"---[ \t\r]*\n(?:#.*\n)*+{_KEY}.*\n(?:{_YAML_LINE}.*\n)*+(?:---|\.\.\.)\s*", re.M)
_CLOSES = re.compile(r"(?:---|\.\.\.)\s*")
_MAX_FRONT_MATTER = 1 << 16


def read_text(file: OpenFile) -> Iterator[Document]:
    """Yield a file, its paragraphs or its lines, as `data.documents` says."""
    if file.data.documents == "file":
        yield from (Document(text, name=file.name) for text in _whole(file))
        return
    yield from _cut(file, lines(file))


def read_markdown(file: OpenFile) -> Iterator[Document]:
    """Yield what :func:`read_text` does, without the block of YAML that may open the file."""
    if file.data.documents != "file":
        yield from _cut(file, _without_front_matter(lines(file)))
        return
    for text in _whole(file):
        if text.startswith("---"):
            text = "\n".join(line for _, line in _without_front_matter(enumerate(text.split("\n"))))
        yield Document(text, name=file.name)


def _cut(file: OpenFile, found: Iterator[tuple[int, str]]) -> Iterator[Document]:
    """Yield the lines or paragraphs of numbered lines."""
    if file.data.gutenberg_license == "remove":
        found = gutenberg.without_license(found, file.source)
    if file.data.documents == "line":
        yield from (Document(line) for _, line in found if line.strip())
    else:
        yield from map(Document, _paragraphs(file, found))


def _without_front_matter(found: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a file without the block of YAML that may open it."""
    block: list[tuple[int, str]] = []
    size, closed = 0, False
    try:
        for number, line in found:
            closed = bool(block) and _CLOSES.fullmatch(line) is not None
            block.append((number, line))
            size += len(line)
            if closed or size > _MAX_FRONT_MATTER or not block[0][1].startswith("---"):
                break
    except TruncatedError:
        yield from block
        raise
    if not (closed and _FRONT_MATTER.fullmatch("\n".join(line for _, line in block))):
        yield from block
    yield from found


def read_wiki(file: OpenFile) -> Iterator[Document]:
    """Yield the text between each `<doc ...>` and `</doc>`."""
    block: list[str] | None = None
    began = number = size = 0
    name = file.name
    for number, line in lines(file):
        if line.startswith("<doc "):
            if block is not None:
                raise DataError(f"{name}:{number}: a <doc> begins before that of line {began} has ended; extract the file again")
            block, began, size = [], number, 0
        elif line.rstrip() == "</doc>":
            if block is None:
                raise DataError(f"{name}:{number}: </doc> without a <doc>; extract the file again")
            yield Document("\n".join(block))
            block = None
        elif block is not None:
            block.append(line)
            size += len(line)
            if size > file.max_bytes:
                raise file.too_long(f"{name}:{began}", "article")
        elif line.strip():
            raise DataError(f"{name}:{number}: text outside <doc> and </doc>; this is not the extracted-Wikipedia format, set data.format")
    if block is not None:
        # An article that never ends is the mark of a file cut short.
        if file.data.on_truncated_file == "keep":
            yield Document("\n".join(block))
        raise TruncatedError(f"{name}:{began}: the file ends inside this article")


def lines(file: OpenFile, are_rows: bool = False) -> Iterator[tuple[int, str]]:
    """Yield numbered lines without their end; the last one of a cut file is not whole and is left out.

    Lines end in a line feed. Those of a file without one end in carriage returns, as on an old Mac.

    Args:
        file: where they stand.
        are_rows: each is a row of its own; one that is too long is counted as one that cannot be used.

    Raises:
        DataError: when one is too long, or not UTF-8.
    """
    offset, number = file.offset, file.lines
    for line in _raw_lines(file):
        number += 1
        if len(line) > file.max_bytes:
            returns = r" (if lines end in carriage returns alone, convert them: tr '\r' '\n')" if b"\r" in line else ""
            if not are_rows:
                raise file.too_long(f"{file.name}:{number}", f"line{returns}")
            file.skip(number, f"has more than {file.max_bytes >> 20} MB{returns}")
            while line and not line.endswith(b"\n"):
                offset += len(line)
                line = file.stream.readline(_BLOCK)
            offset += len(line)
            continue
        content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        yield number, _decoded(file, content, offset + len(line) - len(content)).rstrip("\r\n")
        offset += len(line)


def _raw_lines(file: OpenFile) -> Iterator[bytes]:
    """Yield lines with their end, of one that is too long its beginning."""
    first = not file.offset
    while line := file.stream.readline(file.max_bytes + 1):
        if first and not line.endswith(b"\n") and len(line) <= file.max_bytes:  # the whole file
            yield from line.splitlines(keepends=True)
        else:
            yield line
        first = False


def parts(text: str, data: Data) -> Iterator[str]:
    """Yield a text that was made out of another format, its paragraphs or its lines, as `data.documents` says."""
    if data.documents == "file":
        yield text
    else:
        found = text.split("\n") if data.documents == "line" else re.split(r"\n\s*\n", text)
        yield from (part for part in found if part.strip())


def _whole(file: OpenFile) -> Iterator[str]:
    """Yield all of a file as one text; of a cut one what was readable, before the error."""
    blocks: list[bytes] = []
    size, truncation = 0, None
    try:
        while block := file.stream.read1(_BLOCK):
            blocks.append(block)
            size += len(block)
            if size > file.max_bytes:
                raise file.too_long(file.name, "document", "set data.documents to paragraph or line, or cut the file")
    except TruncatedError as error:
        truncation = error
    # The last character of a cut text may be cut as well.
    text = _decoded(file, b"".join(blocks).removeprefix(codecs.BOM_UTF8), 0, whole=truncation is None)
    if text and (truncation is None or file.data.on_truncated_file == "keep"):
        yield text
    if truncation:
        raise truncation


def _decoded(file: OpenFile, content: bytes, offset: int, whole: bool = True) -> str:
    """Decode UTF-8 to text; a bad byte is named by its offset in the (unpacked) file."""
    try:
        text = codecs.getincrementaldecoder("utf-8")(file.data.encoding_errors).decode(content, whole)
    except UnicodeDecodeError as error:
        todo = "convert the file, leave it out, or set data.encoding_errors=replace to put U+FFFD there"
        if not offset and content.startswith(_MARKS):
            todo = _how_to_convert(content)
        raise DataError(f"{file.name}: byte {offset + error.start} (0x{content[error.start]:02x}) is not UTF-8; {todo}") from None
    # English in UTF-16 without its mark is UTF-8, too.
    if not offset and 3 * content.count(0, 0, _HEAD) > len(content[:_HEAD]):
        raise DataError(f"{file.name}: every second byte or so is 0; {_how_to_convert(content)}")
    if b"\x1b" in content and (found := _JAPANESE.search(content)):
        how = "convert it, as `iconv -f ISO-2022-JP -t UTF-8 FILE` does"
        raise DataError(f"{file.name}: byte {offset + found.start()} (0x1b) begins Japanese; it looks like ISO-2022-JP; {how}")
    if "\ufffd" in text:
        file.source.replaced += text.count("\ufffd") - content.count("\ufffd".encode())
    return text


def _how_to_convert(content: bytes) -> str:
    """Return what to do with text in UTF-16, of which English has a 0 in every second byte, or UTF-32, of which every text has one in every fourth."""
    head = content[:_HEAD]
    is_32 = head.startswith(_MARKS[:2]) or 8 * head.count(0) > 5 * len(head)
    name = family = "UTF-32" if is_32 else "UTF-16"
    if not head.startswith(_MARKS):
        name += "BE" if head.startswith(b"\0") else "LE"
    return f"it looks like {family}; convert it, as `iconv -f {name} -t UTF-8 FILE` does"


def _paragraphs(file: OpenFile, found: Iterator[tuple[int, str]]) -> Iterator[str]:
    """Yield blocks of lines between blank ones."""
    block: list[str] = []
    size, truncation = 0, None
    while True:
        try:
            number, line = next(found, (0, ""))
        except TruncatedError as error:
            number, line, truncation = 0, "", error
        if line.strip():
            block.append(line)
            size += len(line)
            if size > file.max_bytes:
                raise file.too_long(f"{file.name}:{number}", "paragraph")
            continue
        if block and (truncation is None or file.data.on_truncated_file == "keep"):
            yield "\n".join(block)
        block, size = [], 0
        if truncation:
            raise truncation
        if not number:
            return
