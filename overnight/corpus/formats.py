"""The formats of files: one row each, so that a new one is a function that reads it and a row here (and its name in `Data.format`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from overnight.corpus.document import Document, OpenFile
from overnight.corpus.epub import read_epub
from overnight.corpus.plain_text import read_markdown, read_text, read_wiki
from overnight.corpus.rows import read_csv, read_json_lines, read_parquet, read_tsv
from overnight.corpus.web import read_html, read_warc
from overnight.corpus.wikipedia_dump import DumpPart, parts


class Format(NamedTuple):
    """How files of a kind are recognized and read."""

    kind: str
    """Value of `data.format` that names it."""
    read: Callable[[OpenFile], Iterator[Document | DumpPart]]
    """Yields the documents, or parts of a dump that hold them; those with a name of their own have it, the others are numbered by the caller."""
    endings: tuple[str, ...] = ()
    """Of the file's name without that of its compression: they decide."""
    first_bytes: tuple[bytes, ...] = ()
    """Of the content without white space before: they decide where the ending does not."""


FORMATS = (
    Format("text", read_text),
    Format("markdown", read_markdown, (".md", ".markdown")),
    Format("wiki", read_wiki, (), (b"<doc ",)),
    Format("mediawiki", lambda file: parts(file.stream, file.name, file.data)),
    Format("jsonl", read_json_lines, (".jsonl", ".ndjson", ".json"), (b'{"',)),
    Format("amazon", read_json_lines),
    Format("csv", read_csv, (".csv",)),
    Format("tsv", read_tsv, (".tsv",)),
    Format("parquet", read_parquet, (".parquet",), (b"PAR1",)),
    Format("html", read_html, (".html", ".htm", ".xhtml"), (b"<!DOCTYPE html", b"<!DOCTYPE HTML", b"<!doctype html", b"<html", b"<HTML")),
    Format("epub", read_epub, (".epub",), (b"PK\x03\x04",)),
    Format("warc", read_warc, (".warc", ".wet"), (b"WARC/",)),
)
_SAVE, _UNPACK, _TWICE = "save its text as .txt, .html or .epub", "unpack it and name the folder", "unpack it once"
NOT_TEXT = (
    (b"%PDF-", "a PDF", _SAVE),
    (b"{\\rtf", "rich text (RTF)", _SAVE),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old office document", _SAVE),
    (b"\x89PNG\r\n", "a picture", ""),
    (b"\xff\xd8\xff", "a picture", ""),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", _UNPACK),
    (b"Rar!\x1a\x07", "a RAR archive", _UNPACK),
    (b"\x1f\x8b\x08", "packed by gzip twice", _TWICE),
    (b"BZh9", "packed by bzip2 twice", _TWICE),
    (b"\xfd7zXZ\x00", "packed by xz twice", _TWICE),
    (b"\x28\xb5\x2f\xfd", "packed by zstandard twice", _TWICE),
    (b"\x5d\x00\x00", "packed by lzma", "unpack it, as `xz -d` does"),
    (b"\x04\x22\x4d\x18", "packed by lz4", "unpack it"),
    (b"SQLite format 3\x00", "a database of SQLite", "write its text as JSON lines"),
    (b"ARROW1\x00\x00", "an Arrow file", "write it as Parquet"),
)
"""First bytes of files that often lie beside texts, what they are, and what makes text of them; as text they are refused at some byte, or are noise."""
BY_KIND = {row.kind: row for row in FORMATS}


def recognized(head: bytes, name: str) -> str:
    """Return the kind of a file by the ending of its name, then by its first bytes; text of what is neither.

    Args:
        head: its first bytes, without byte order mark and white space.
        name: without the ending of its compression.
    """
    ending = Path(name).suffix.lower()
    for row in FORMATS:
        if ending in row.endings:
            return row.kind
    for row in FORMATS:
        # What is called text may begin with a brace.
        if row.first_bytes and head.startswith(row.first_bytes) and not (ending == ".txt" and row.kind == "jsonl"):
            return row.kind
    return "text"
