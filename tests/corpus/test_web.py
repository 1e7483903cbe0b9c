"""HTML pages in any encoding, and the archives of crawls."""

from __future__ import annotations

import gzip
import sys
import zlib
from pathlib import Path

import pytest

from overnight.corpus import web
from overnight.corpus.document import Document, OpenFile
from overnight.errors import DataError
from tests.reading import read, texts

PAGE = """<!DOCTYPE html><html><head><title>T</title><style>p {}</style><script>var x = "no";</script>{head}</head><body>
<nav><a href="/">Home</a> <a href="/b">About us</a></nav>
<main><h1>A heading</h1><p>Grüße, one   two<br>three &amp; four.</p><p>Another paragraph, long enough to be one of a page.</p></main>
<footer>Copyright 2020</footer></body></html>"""
TEXT = "A heading\n\nGrüße, one two\nthree & four.\n\nAnother paragraph, long enough to be one of a page."


def page(charset: str = "utf-8", meta: str = "") -> bytes:
    """The page in an encoding, which it says or does not say."""
    return PAGE.replace("{head}", f'<meta charset="{meta}">' if meta else "").encode(charset)


PACKED = gzip.compress(page(), mtime=0)
# As a server sends it that leaves out the header of zlib.
RAW = zlib.compress(page(), wbits=-15)


def record(kind: str, body: bytes, address: str = "https://example.org/a", content_type: str = "text/plain") -> bytes:
    """A record of a web archive."""
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: {address}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body + b"\r\n\r\n"


def response(body: bytes, headers: str = "Content-Type: text/html; charset=utf-8", status: str = "200 OK", **more: str) -> bytes:
    """A record of what a server answered."""
    http = f"HTTP/1.1 {status}\r\n{headers}\r\n\r\n".encode() + body
    return record("response", http, content_type="application/http; msgtype=response", **more)


@pytest.fixture
def resiliparse() -> None:
    pytest.importorskip("resiliparse", reason="the extra `web` is not installed")


@pytest.mark.usefixtures("resiliparse")
@pytest.mark.parametrize("name", ["x.html", "x.HTM", "page"])
def test_a_page_is_its_main_content_or_all_its_text(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(page())
    assert read(tmp_path)[0] == [Document(TEXT, None, str(tmp_path / name))]
    (whole,) = texts(tmp_path, html="all")
    assert TEXT in whole and "About us" in whole and "Copyright" in whole and "var x" not in whole
    assert texts(tmp_path, documents="paragraph") == TEXT.split("\n\n")
    assert texts(tmp_path, documents="line") == [line for line in TEXT.split("\n") if line]


@pytest.mark.usefixtures("resiliparse")
@pytest.mark.parametrize(
    ("charset", "meta", "named"),
    [
        ("latin-1", "iso-8859-1", ""),
        ("latin-1", "", "ISO-8859-1"),
        ("latin-1", "", ""),
        ("latin-1", "utf-8", "utf-8"),
        ("utf-8", "nonsense", "latin-99"),
        ("utf-16", "", ""),
        ("utf-8-sig", "", "iso-8859-1"),
        ("utf-8", "iso-8859-1", "utf-8"),
        ("utf-8", "utf-16", ""),
        ("utf-8", "UTF-16LE", ""),
        ("utf-8", "utf-16be", "nonsense"),
        ("utf-8", "unicode", ""),
        ("utf-16-le", "", "utf-16"),
        ("utf-16-be", "utf-16", "utf-16be"),
    ],
)
def test_the_encoding_is_that_of_the_mark_the_server_the_page_or_its_bytes(charset: str, meta: str, named: str) -> None:
    assert "Grüße, one" in web.decoded(page(charset, meta), named)


@pytest.mark.usefixtures("resiliparse")
@pytest.mark.parametrize(("encoding", "sentence"), [("euc_kr", "모든 국민은 신체의 자유를 가진다. "), ("iso2022_jp", "日本語の文。")])
def test_a_korean_or_japanese_page_that_names_no_encoding_is_read(encoding: str, sentence: str) -> None:
    text = f"<html><p>{sentence * 20}</p></html>"
    assert web.decoded(text.encode(encoding)) == text


@pytest.mark.usefixtures("resiliparse")
@pytest.mark.parametrize("encoding", ["", "windows-1252"])
def test_double_letters_with_accents_are_no_korean(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resiliparse.parse.encoding.detect_encoding", lambda content: encoding)
    text = "<html><p>Pää, jää, sää, öö, üüs</p></html>"
    assert text.encode("cp1252").decode("euc_kr"), "which are pairs of bytes there"
    assert web.decoded(text.encode("cp1252")) == text


@pytest.mark.usefixtures("resiliparse")
def test_one_bad_byte_does_not_make_a_page_another_encoding() -> None:
    found = web.decoded(page().replace(b"</body>", b"<p>" + "ö".encode() * 2000 + b"\xff</p></body>"), "utf-8")
    assert "Grüße" in found and found.count("\ufffd") == 1


@pytest.mark.usefixtures("resiliparse")
@pytest.mark.parametrize("apostrophes", [1, 3, 30])
def test_a_few_marks_of_windows_are_not_taken_for_errors_of_utf8(apostrophes: int) -> None:
    text = "<html><p>" + "I don\u2019t know. " * apostrophes + "All the rest is plain. " * 400 + "</p></html>"
    assert web.decoded(text.encode("cp1252")) == web.decoded(text.encode()) == text


@pytest.mark.usefixtures("resiliparse")
@pytest.mark.parametrize("encoding", ["iso-8859-1", "ISO-8859-5", "UTF-8"])
def test_a_page_may_say_its_encoding_as_xml_does(encoding: str) -> None:
    text = f'<?xml version="1.0" encoding="{encoding}"?>\n<html><p>{"дом" if encoding.endswith("5") else "café"}{" plain" * 900}</p></html>'
    assert web.decoded(text.encode(encoding)) == text


@pytest.mark.usefixtures("resiliparse")
def test_a_page_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenFile, "max_bytes", 1 << 20)
    (tmp_path / "x.html").write_bytes(b"<html>" + b"x" * (2 << 20))
    with pytest.raises(DataError, match=r"x\.html: more than 1 MB in one page"):
        read(tmp_path)


def test_without_the_extra_a_page_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resiliparse", None)
    monkeypatch.setattr(web.importlib.util, "find_spec", lambda name: None)
    (tmp_path / "x.html").write_bytes(page())
    with pytest.raises(DataError, match=r"needs the extra `web` \(pip install 'overnight\[web\]'\)"):
        read(tmp_path)
    assert "A heading" in texts(tmp_path, format="text")[0]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["x.warc.wet", "crawl"])
def test_a_wet_file_gives_its_conversions_under_their_addresses(tmp_path: Path, packed: bool, name: str) -> None:
    records = [
        record("warcinfo", b"Software-Info: x\r\n"),
        record("conversion", "Grüße\nvon hier\n".encode(), "https://example.org/a"),
        record("metadata", b"a: b"),
        record("conversion", b"Second", "<https://example.org/b>"),
    ]
    content = b"".join(gzip.compress(part) if packed else part for part in records)
    (tmp_path / (name + ".gz" if packed else name)).write_bytes(content)
    found, source = read(tmp_path)
    assert found == [Document("Grüße\nvon hier\n", None, "https://example.org/a"), Document("Second", None, "https://example.org/b")]
    assert (source.files, source.documents) == (1, 2)


def test_text_of_a_crawl_that_is_not_utf8_is_an_error_or_replaced_and_counted(tmp_path: Path) -> None:
    (tmp_path / "x.wet").write_bytes(record("conversion", b"caf\xe9 text") + record("conversion", "Grüße \ufffd".encode()))
    with pytest.raises(
        DataError, match=r"x\.wet:1: the record of https://example.org/a is not UTF-8 \(data.encoding_errors=replace reads it\)"
    ):
        read(tmp_path)
    assert texts(tmp_path, max_invalid_lines=1) == ["Grüße \ufffd"]
    found, source = read(tmp_path, encoding_errors="replace")
    assert ([document.text for document in found], source.replaced) == (["caf\ufffd text", "Grüße \ufffd"], 1)


@pytest.mark.usefixtures("resiliparse")
def test_a_warc_file_gives_the_pages_that_servers_answered_with(tmp_path: Path) -> None:
    chunked = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(part), part) for part in (page()[:100], page()[100:])) + b"0\r\n\r\n"
    records = [
        record("request", b"GET / HTTP/1.1\r\n\r\n", content_type="application/http; msgtype=request"),
        response(page()),
        response(page("latin-1"), "Content-Type: text/html; charset=ISO-8859-1", address="https://example.org/latin"),
        response(page("latin-1", "iso-8859-1"), "content-type: application/xhtml+xml"),
        response(chunked, "Content-Type: text/html\r\nTransfer-Encoding: chunked"),
        response(gzip.compress(page()), "Content-Type: TEXT/HTML\r\nContent-Encoding: gzip"),
        response(zlib.compress(page()), "Content-Type: text/html\r\nContent-Encoding: deflate"),
        response(page(), status="404 Not Found"),
        response(b"%PDF", "Content-Type: application/pdf"),
        response(page()[:-20], "Content-Type: text/html"),
        response(b"\x1f\x8bbroken", "Content-Type: text/html\r\nContent-Encoding: gzip"),
    ]
    (tmp_path / "x.warc.gz").write_bytes(b"".join(map(gzip.compress, records)))
    found, _ = read(tmp_path)
    assert [document.text for document in found[:6]] == [TEXT] * 6
    assert len(found) == 7 and found[6].text.startswith("A heading")
    assert found[1].name == "https://example.org/latin"


@pytest.mark.usefixtures("resiliparse")
@pytest.mark.parametrize(
    ("codings", "body"),
    [
        ("Content-Encoding: gzip, gzip", gzip.compress(gzip.compress(page(), mtime=0), mtime=0)),
        ("Content-Encoding: deflate , X-GZIP", gzip.compress(zlib.compress(page()), mtime=0)),
        ("Content-Encoding: deflate", RAW),
        ("Content-Encoding: gzip, deflate", zlib.compress(PACKED, wbits=-15)),
        ("Content-Encoding: gzip", gzip.compress(page()[:30], mtime=0) + gzip.compress(page()[30:], mtime=0)),
        ("Content-Encoding: identity", page()),
        ("Content-Encoding:", page()),
        ("Content-Encoding: gzip\r\nTransfer-Encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(PACKED), PACKED)),
        ("Transfer-Encoding: gzip, chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(PACKED), PACKED)),
    ],
)
def test_codings_of_a_page_are_undone_last_first(tmp_path: Path, codings: str, body: bytes) -> None:
    (tmp_path / "x.warc").write_bytes(response(body, f"Content-Type: text/html\r\n{codings}"))
    assert texts(tmp_path) == [TEXT]


@pytest.mark.usefixtures("resiliparse")
@pytest.mark.parametrize("codings", ["br", "zstd", "compress", "gzip, br", "br, gzip"])
def test_a_page_in_an_unknown_coding_is_left_out(tmp_path: Path, codings: str) -> None:
    body = gzip.compress(b"packed otherwise") if codings.endswith("gzip") else b"\x1b\x03packed otherwise"
    (tmp_path / "x.warc").write_bytes(response(body, f"Content-Type: text/html\r\nContent-Encoding: {codings}") + response(page()))
    assert texts(tmp_path) == [TEXT]


@pytest.mark.usefixtures("resiliparse")
@pytest.mark.parametrize("codings", ["br", "zstd", "gzip", "deflate"])
def test_a_page_whose_coding_the_crawler_has_undone_is_kept(tmp_path: Path, codings: str) -> None:
    (tmp_path / "x.warc").write_bytes(response(page(), f"Content-Type: text/html\r\nContent-Encoding: {codings}"))
    assert texts(tmp_path) == [TEXT]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("lost", [10, 30, 120, 300])
def test_a_cut_crawl_is_refused_and_its_whole_records_are_kept_only_if_asked(tmp_path: Path, packed: bool, lost: int) -> None:
    records = [record("conversion", bytes([65 + number]) * 200, f"https://example.org/{number}") for number in range(5)]
    content = b"".join(gzip.compress(part) if packed else part for part in records)
    (tmp_path / "x.wet").write_bytes(content[: len(content) - 4 - lost])
    with pytest.raises(DataError, match=r"ends (early|inside).*on_truncated_file=keep"):
        read(tmp_path)
    found, source = read(tmp_path, on_truncated_file="keep")
    assert 1 <= len(found) < 5 and all(document.text == chr(65 + number) * 200 for number, document in enumerate(found))
    assert source.truncated == [str(tmp_path / "x.wet")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"WARC/1.0\r\nWARC-Type: conversion\r\n\r\n", "a record has no Content-Length"),
        (b"WARC/1.0\r\nContent-Length: many\r\n\r\n", "a record has no Content-Length"),
        (record("conversion", b"x") + b"<html>", "is not a WARC file, or is damaged: a record begins with b'<html>'"),
        (b"WARC/1.0\r\n" + b"X: y\r\n" * 20_000 + b"\r\n", "more than 64 KB of headers"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.warc").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path, on_truncated_file="keep")


def test_a_record_that_is_too_long_is_counted_and_never_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenFile, "max_bytes", 1 << 20)
    (tmp_path / "x.wet").write_bytes(
        record("resource", b"x" * (2 << 20)) + record("conversion", b"x" * (2 << 20)) + record("conversion", b"next")
    )
    with pytest.raises(DataError, match=r"x\.wet:2: the record of https://example.org/a has more than 1 MB; .*max_invalid_lines=0"):
        read(tmp_path)
    found, source = read(tmp_path, max_invalid_lines=1)
    assert ([document.text for document in found], source.skipped_lines) == (["next"], 1)
