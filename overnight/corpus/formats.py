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


class Format(NamedTuple):
    """How files of a kind are recognized and read."""

    kind: str
    """Value of `data.format` that names it."""
    read: Callable[[OpenFile], Iterator[Document]]
    """Yields the documents; those with a name of their own have it, the others are numbered by the caller."""
    endings: tuple[str, ...] = ()
    """Of the file's name without that of its compression: they decide."""
    first_bytes: tuple[bytes, ...] = ()
    """Of the content without white space before: they decide where the ending does not."""


FORMATS = (
    Format("text", read_text),
    Format("markdown", read_markdown, (".md", ".markdown")),
    Format("wiki", read_wiki, (), (b"<doc ",)),
    Format("jsonl", read_json_lines, (".jsonl", ".ndjson", ".json"), (b'{"',)),
    Format("amazon", read_json_lines),
    Format("csv", read_csv, (".csv",)),
    Format("tsv", read_tsv, (".tsv",)),
    Format("parquet", read_parquet, (".parquet",), (b"PAR1",)),
    Format("html", read_html, (".html", ".htm", ".xhtml"), (b"<!DOCTYPE html", b"<!DOCTYPE HTML", b"<!doctype html", b"<html", b"<HTML")),
    Format("epub", read_epub, (".epub",), (b"PK\x03\x04",)),
    Format("warc", read_warc, (".warc", ".wet"), (b"WARC/",)),
)
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
