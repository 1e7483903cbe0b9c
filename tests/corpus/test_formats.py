"""The table of formats: each kind is a value of `data.format`, and is recognized by its ending or its first bytes."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from overnight.config import Data
from overnight.corpus.formats import BY_KIND, FORMATS, recognized
from overnight.errors import DataError
from tests.conftest import ROOT
from tests.reading import read


def test_every_format_is_a_row_and_a_value_of_the_setting_and_stands_on_the_page_of_sources() -> None:
    kinds = [row.kind for row in FORMATS]
    assert kinds == list(get_args(get_type_hints(Data)["format"]))[1:]
    assert list(BY_KIND) == kinds
    page = (ROOT / "docs" / "sources.md").read_text(encoding="utf-8")
    assert [kind for kind in kinds if f"| `{kind}` |" not in page] == []
    assert [ending for row in FORMATS for ending in row.endings if f"`{ending}`" not in page] == []


def test_no_ending_belongs_to_two_formats() -> None:
    endings = [ending for row in FORMATS for ending in row.endings]
    assert sorted(set(endings)) == sorted(endings)


@pytest.mark.parametrize(
    ("head", "name", "kind"),
    [
        (b"", "x.CSV", "csv"),
        (b"", "d/x.tar:y.wet", "warc"),
        (b"WARC/1.0\r\n", "crawl", "warc"),
        (b"<!DOCTYPE html>", "page", "html"),
        (b"<html>", "x.txt", "html"),
        (b"<html>", "x.md", "markdown"),
        (b'<doc id="1">', "x.txt", "wiki"),
        (b"<DOC>", "x", "text"),
        (b'{"text": 1}', "x", "jsonl"),
        (b'{"text": 1}', "x.txt", "text"),
        (b"{text}", "x", "text"),
        (b"PAR1\x15", "part-0001", "parquet"),
        (b"anything", "x.unknown", "text"),
    ],
)
def test_a_file_is_recognized_by_its_ending_then_by_its_first_bytes(head: bytes, name: str, kind: str) -> None:
    assert recognized(head, name) == kind


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"%PDF-1.7\n%\xe2\xe3\n", "is a PDF; save its text as .txt, .html or .epub, or leave it out"),
        (rb"{\rtf1\ansi Words.}", r"is rich text \(RTF\); save"),
        (b"\x89PNG\r\n\x1a\n", "is a picture; leave it out"),
        (b"Rar!\x1a\x07\x01\x00", "is a RAR archive; unpack it and name the folder, or leave it out"),
    ],
)
def test_a_file_that_is_no_text_is_named_for_what_it_is_also_in_an_archive(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "a").write_bytes(content)
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("x/c", content)
    for name in ("a", "b.zip"):
        with pytest.raises(DataError, match=rf"{name}(:x/c)?: {said}.* \(data\.paths takes globs"):
            read(tmp_path / name, encoding_errors="replace")
    assert read(tmp_path / "a", encoding_errors="replace", format="text")[0]  # who says that it is text has it read as text


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.gz", "a"])
@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_a_file_that_is_packed_twice_is_named_for_it(tmp_path: Path, pack: Callable[[bytes], bytes], name: str) -> None:
    content = b'{"text": "words"}\n'
    (tmp_path / name).write_bytes(gzip.compress(pack(content)))
    with pytest.raises(DataError, match=r"is packed by (gzip|bzip2|xz) twice; unpack it once, or leave it out"):
        read(tmp_path, encoding_errors="replace")
    (tmp_path / name).write_bytes(lzma.compress(content, lzma.FORMAT_ALONE))
    with pytest.raises(DataError, match=r"is packed by lzma; unpack it, as `xz -d` does, or leave it out"):
        read(tmp_path, encoding_errors="replace")
