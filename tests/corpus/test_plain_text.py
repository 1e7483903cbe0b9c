"""The block of YAML that may open a Markdown file, and what only looks like one."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tests.reading import read, texts

BLOCK = (
    "---\ntitle: A page\n# a comment\n\ntags:\n- one\n  - two\ndate created: 2026-01-01\nabstract: >\n  Several words,\n  folded.\n---\n"
)
BODY = "# Heading\nWords.\n\nMore words.\n"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("block", [BLOCK, BLOCK[:-4] + "... \n", "---  \nlayout:\n---\n", "---\n# what follows\n#\n'x' :\n\n---\n"])
def test_the_block_of_yaml_goes_whatever_a_document_is(tmp_path: Path, block: str, mark: str, end: str) -> None:
    path = tmp_path / "a.md"
    path.write_bytes((mark + block + BODY).replace("\n", end).encode())
    assert texts(path) == [BODY.replace("\n", end)]
    assert texts(path, documents="paragraph") == ["# Heading\nWords.", "More words."]
    lines = ["# Heading", "Words.", "More words."]
    assert [(each.text, each.name) for each in read(path, documents="line")[0]] == [(lines[n], f"{path}#{n + 1}") for n in range(3)]


@pytest.mark.parametrize(
    "text",
    [
        "---\nA rule and prose, before the next rule.\n---\nMore.\n",
        "---\n\ntitle: below a blank line\n---\nMore.\n",
        "---\nNote: prose that goes on\nin the next line.\n---\nMore.\n",
        "---\ntitle: without an end\n",
        "---\ntitle: without an end\n\nProse.\n",
        "---\n---\nMore.\n",
        "---\n# Heading\n- item\n---\nMore.\n",
        "---\n# Heading\n\nNote: prose.\n---\nMore.\n",
        "---\ntitle: x\n\nProse.\n\nname: y\n---\nMore.\n",
        "--- title: x\n---\nMore.\n",
        "a\n---\ntitle: x\n---\nMore.\n",
        "---\n" + "key: value\n" * 10_000 + "---\nMore.\n",
        "---",
        "---\ntitle: x",
    ],
)
def test_what_is_no_block_of_yaml_stays(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.md").write_text(text, encoding="utf-8")
    assert texts(tmp_path / "a.md") == [text]
    assert texts(tmp_path / "a.md", documents="line") == [line for line in text.split("\n") if line.strip()]


def test_a_file_that_ends_inside_its_block_keeps_the_lines_that_are_whole(tmp_path: Path) -> None:
    packed = gzip.compress(b"---\ntitle: x\nauthor: y\n", 0)
    (tmp_path / "a.md.gz").write_bytes(packed[:-8])
    assert texts(tmp_path / "a.md.gz", documents="line", on_truncated_file="keep") == ["---", "title: x", "author: y"]


def test_plain_text_keeps_what_looks_like_yaml(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(BLOCK + BODY, encoding="utf-8")
    assert texts(tmp_path / "a.txt") == [BLOCK + BODY]


def test_what_replaces_bytes_is_counted_and_what_stood_there_before_is_not(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("was \ufffd before\n".encode() * 3 + b"caf\xe9 d\xe9j\xe0 vu\n")
    for kind in ("file", "line"):
        source = read(tmp_path, documents=kind, encoding_errors="replace")[1]
        assert source.replaced == 3 and list(source.lines()) == ["bytes that are not UTF-8 replaced by U+FFFD in 3 places"]
