"""Lines, whatever ends them; the block of YAML that may open a Markdown file, and what only looks like one."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from overnight.corpus.document import OpenFile
from overnight.errors import DataError
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


@pytest.mark.parametrize(
    ("name", "content", "documents"),
    [
        ("a.txt", "one\ntwo\n\nthree", "line"),
        ("a.txt", "one\ntwo\n\nthree\n", "paragraph"),
        ("a.md", "---\ntitle: x\n---\n# One\n\ntwo\n", "paragraph"),
        ("a.jsonl", '{"text": "one"}\n{"text": "two"}\n', "file"),
        ("a.csv", 'text,n\n"one, two",1\nthree,2\n', "file"),
        ("a.tsv", "text\tn\none\t1\ntwo\t2\n", "file"),
    ],
)
def test_lines_may_end_in_carriage_returns_alone(tmp_path: Path, name: str, content: str, documents: Any) -> None:
    found = []
    for end in ("\n", "\r"):
        (tmp_path / name).write_bytes(content.replace("\n", end).encode())
        found.append(texts(tmp_path / name, documents=documents))
    assert found[0] == found[1] and len(found[0]) > (name != "a.md")


def test_a_file_whose_lines_seem_to_have_no_end_is_told_how_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenFile, "max_bytes", 50)
    (tmp_path / "a.txt").write_bytes(b"some words\r" * 10)
    (tmp_path / "a.tsv").write_bytes(b"text\r" + b"some words\r" * 10)
    for name in ("a.txt", "a.tsv"):
        with pytest.raises(DataError, match=r"if lines end in carriage returns alone, convert them: tr '\\r' '\\n'"):
            texts(tmp_path / name, documents="line")


def test_a_line_without_a_line_feed_behind_others_keeps_its_carriage_returns(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n10%\r20%\r30%")
    assert texts(tmp_path / "a.txt", documents="line") == ["one", "10%\r20%\r30%"]
