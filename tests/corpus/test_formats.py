"""The table of formats: each kind is a value of `data.format`, and is recognized by its ending or its first bytes."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest

from overnight.config import Data
from overnight.corpus.formats import BY_KIND, FORMATS, recognized
from tests.conftest import ROOT


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
