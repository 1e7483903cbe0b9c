"""Sources that a server of HTTP has, which serves them well or badly."""

from __future__ import annotations

import gzip
import os
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from overnight.config import Data
from overnight.corpus import places
from overnight.corpus.pipeline import prepare
from overnight.errors import DataError
from tests.corpus.test_rows import write
from tests.corpus.test_zips import zip_of
from tests.download.server import Handler, Site, cut, no_ranges, serving, status
from tests.reading import texts

pytest.importorskip("fsspec", reason="fsspec is not installed")
pytest.importorskip("aiohttp", reason="aiohttp is not installed")

LARGE = "\n".join(f"line {number} of a file that is fetched in parts" for number in range(200_000))


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serving(Site()) as found:
        yield found


def test_files_archives_folders_and_globs_of_a_server_are_read(site: Site, tmp_path: Path) -> None:
    site.files = {
        "/a.txt": b"one",
        "/b/": b'<html><a href="c.txt.gz">c</a> <a href="d.md">d</a></html>',
        "/b/c.txt.gz": gzip.compress(b"two"),
        "/b/d.md": b"three",
        "/e.zip": zip_of({"in.txt": b"four", "other.md": b"five"}),
        "/f.parquet": write(tmp_path, "parquet", [{"text": "six"}]).read_bytes(),
        "/large.txt": LARGE.encode(),
    }
    address = site.address
    assert texts(f"{address}/a.txt", f"{address}/b/", f"{address}/e.zip::*.txt", f"{address}/f.parquet") == [
        "one",
        "two",
        "three",
        "four",
        "six",
    ]
    assert texts(f"{address}/b/*.md") == ["three"]
    assert texts(f"{address}/large.txt") == [LARGE]
    assert len(site.ranges("/large.txt")) > 2


def lost(handler: Handler, content: bytes) -> None:
    """End the connection as a network does that fails."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


TREE = {
    "/b/": b'<a href="../">up</a> <a href="one.txt">1</a> <a href="c/">c</a> <a href="/elsewhere/no.txt">no</a> <a href="./">here</a>',
    "/b/one.txt": b"one",
    "/b/c/": b'<a href="../../">up</a> <a href="../">b</a> <a href="/b/c/two.txt">2</a> <a href="./d/three.txt">3</a> <a href=".e/">e</a>',
    "/b/c/two.txt": b"two",
    "/b/c/d/three.txt": b"three",
    "/b/c/.e/": b'<a href="four.txt">4</a>',
    "/b/c/.e/four.txt": b"four",
    "/b/f/": b"no page links here",
    "/elsewhere/no.txt": b"no",
}


def test_a_folder_of_a_server_is_what_its_pages_link_to_below_it(site: Site) -> None:
    site.files = TREE
    address = site.address
    assert sorted(texts(f"{address}/b/")) == sorted(texts(f"{address}/b/**/*.txt")) == ["one", "three", "two"]
    assert texts(f"{address}/b/*.txt") == ["one"]
    assert texts(f"{address}/b/*/*.txt") == texts(f"{address}/b/c/t*.txt") == ["two"]
    assert texts(f"{address}/b/c/.e/*") == texts(f"{address}/b/c/.*/*") == ["four"]


@pytest.mark.parametrize("order", ["?C=N;O=D", "?C=M&amp;O=A", "?C=S&O=A"])
def test_a_page_in_another_order_is_no_text_of_its_folder(site: Site, order: str) -> None:
    page = f'<a href="{order}">Name</a> <a href="one.txt">1</a>'.encode()
    site.files = {"/b/": page, f"/b/{order}": page, "/b/one.txt": b"one"}
    assert texts(f"{site.address}/b/") == texts(f"{site.address}/b/*") == ["one"]


@pytest.mark.parametrize("path", ["/b/", "/b/**", "/b/*/*.txt"])
def test_a_folder_whose_connection_is_lost_is_never_left_out(site: Site, path: str) -> None:
    site.files = TREE
    site.faults["/b/c"] = site.faults["/b/c/"] = [lost] * 10
    with pytest.raises(DataError, match=rf"{re.escape(path)}: cannot be listed \(.*or see that this machine may read it"):
        texts(site.address + path)


def test_a_folder_whose_server_is_down_cannot_be_listed() -> None:
    with serving(Site(TREE)) as site:
        address = site.address
    for path in ("/b/", "/b/*.txt"):
        with pytest.raises(DataError, match=r"cannot be listed \(Cannot connect to host"):
            texts(address + path)


def test_a_link_of_a_page_to_what_is_not_there_is_named(site: Site) -> None:
    site.files = {**TREE, "/b/g/": b'<a href="gone.txt?key=secret">x</a>', "/b/": TREE["/b/"] + b'<a href="g/">g</a>'}
    with pytest.raises(DataError, match=r"/b/g/: links to gone\.txt, which is not there \(404\); correct the page, or name the files$"):
        texts(f"{site.address}/b/")
    assert texts(f"{site.address}/b/*.txt") == ["one"]
    del site.files["/b/g/"]
    with pytest.raises(DataError, match=r"/b/: links to g/, which is not there \(404\); correct the page, or name the files$"):
        texts(f"{site.address}/b/")


def test_pages_that_lead_in_a_circle_are_an_error(site: Site) -> None:
    site.files = {"/b/" + "again/" * number: b'<a href="again/">again</a>' for number in range(100)}
    with pytest.raises(DataError, match=r"/b/again/.*/: is 50 folders below \S+/b/, as in a circle; correct the pages, or name the files"):
        texts(f"{site.address}/b/")


def test_of_a_large_archive_of_a_server_only_what_is_asked_for_is_fetched(site: Site) -> None:
    site.files["/a.zip"] = zip_of({"a.bin": os.urandom(14_000_000), "b.txt": b"wanted"})
    assert texts(f"{site.address}/a.zip::b.txt") == ["wanted"]
    fetched = [range.removeprefix("bytes=").split("-") for range in site.ranges("/a.zip")]
    assert sum(int(last) - int(first) + 1 for first, last in fetched) < 8_000_000


def test_a_server_that_serves_no_parts_is_read_as_a_stream(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "serve", lambda handler, content: no_ranges()(handler, content))
    site.files = {"/large.txt": LARGE.encode(), "/a.zip": zip_of({"a.bin": os.urandom(7_000_000), "b.txt": b"wanted"})}
    assert texts(f"{site.address}/large.txt") == [LARGE]
    assert texts(f"{site.address}/a.zip::b.txt") == ["wanted"]


def test_a_server_that_does_not_say_how_long_a_file_is_is_read_to_its_end(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def unannounced(handler: Handler, content: bytes) -> None:
        handler.start(200, content, None)
        handler.wfile.write(content)

    monkeypatch.setattr(Handler, "do_HEAD", lambda handler: handler.start(405, b""))
    monkeypatch.setattr(Handler, "serve", unannounced)
    site.files["/large.txt"] = LARGE.encode()
    assert texts(f"{site.address}/large.txt") == [LARGE]


def test_a_stream_that_ends_before_the_size_that_was_told_is_an_error(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends_early(handler: Handler, content: bytes) -> None:
        handler.start(200, content, None)
        handler.wfile.write(content[:-10])

    monkeypatch.setattr(Handler, "serve", ends_early)
    site.files["/a.txt"] = b"many words " * 600_000
    with pytest.raises(DataError, match=r"/a\.txt: ended after 6,599,990 of 6,600,000 bytes; run the same command again"):
        texts(f"{site.address}/a.txt")


def test_a_stream_that_is_packed_on_the_way_may_be_longer_than_told(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def packed(handler: Handler, content: bytes) -> None:
        handler.start(200, content, len(content), {"Content-Encoding": "gzip"})
        handler.wfile.write(content)

    monkeypatch.setattr(Handler, "serve", packed)
    text = os.urandom(5_000_000).hex()
    site.files["/a.txt"] = gzip.compress(text.encode(), 1)
    assert texts(f"{site.address}/a.txt") == [text]


def test_a_file_that_changes_between_two_parts_is_an_error(site: Site) -> None:
    def replaced(handler: Handler, content: bytes) -> None:
        site.files["/large.txt"] = content.replace(b"line", b"LINE")  # before the answer: the next part is asked for at its end
        handler.serve(content)

    site.files["/large.txt"] = LARGE.encode()
    site.faults["/large.txt"] = [Handler.serve, replaced]  # the first tells whether there are parts
    with pytest.raises(DataError, match=r"/large\.txt: has changed while it was read; run the same command again once it is complete"):
        texts(f"{site.address}/large.txt")
    assert texts(f"{site.address}/large.txt") == [LARGE.replace("line", "LINE")]


def test_a_file_that_is_cut_between_two_parts_is_an_error(site: Site) -> None:
    def shortened(handler: Handler, content: bytes) -> None:
        site.files["/large.txt"] = content[:1000]
        handler.serve(content)

    site.files["/large.txt"] = LARGE.encode()
    site.faults["/large.txt"] = [Handler.serve, shortened]
    with pytest.raises(DataError, match=r"/large\.txt: ended after [\d,]+ of [\d,]+ bytes; run the same command again"):
        texts(f"{site.address}/large.txt")


@pytest.mark.parametrize("path", ["/large.txt", "/a.txt"])
def test_an_answer_that_breaks_off_is_never_taken_for_the_file(site: Site, path: str) -> None:
    site.files = {"/large.txt": LARGE.encode(), "/a.txt": b"some words " * 1000}
    for position in range(3):
        site.faults[path] = [Handler.serve] * position + [cut(500)]
        try:
            found = texts(site.address + path)
        except DataError as error:
            assert f"{path}: cannot be read" in str(error)
        else:
            assert found == [site.files[path].decode()]
        site.faults.clear()


def test_what_a_server_refuses_is_said(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.files["/a.txt"] = b"one"
    with pytest.raises(DataError, match=r"/gone\.txt: there is no such file or folder"):
        texts(f"{site.address}/gone.txt")
    for code, said in {403: "403, message='Forbidden'", 500: "500, message='Internal Server Error'"}.items():
        site.faults["/a.txt"] = [status(code)] * 10
        with pytest.raises(DataError, match=rf"/a\.txt: cannot be read \({said}"):
            texts(f"{site.address}/a.txt")
    monkeypatch.setattr(Handler, "do_HEAD", lambda handler: handler.start(403, b""))
    site.faults["/a.txt?token=secret"] = [status(403)] * 10
    with pytest.raises(
        DataError, match=r"/a\.txt: cannot be listed \(403, message='Forbidden'.*or see that this machine may read it"
    ) as refused:
        texts(f"{site.address}/a.txt?token=secret")
    assert "secret" not in str(refused.value)


def test_a_server_that_is_down_is_not_taken_for_one_without_the_file() -> None:
    with serving(Site({"/a.txt": b"one"})) as site:
        address = site.address
    with pytest.raises(DataError, match=r"/a\.txt: cannot be listed \(Cannot connect to host"):
        texts(f"{address}/a.txt")


def test_versions_of_a_servers_files_tell_those_that_have_changed(site: Site, tmp_path: Path) -> None:
    text = "Some words of a text that is long enough to be kept by the cleaning, in a sentence or two. And one more of them."
    site.files = {f"/b/{number}.txt": f"{number} {text}".encode() for number in range(40)}
    site.files["/b/"] = "".join(f'<a href="{number}.txt">{number}</a>' for number in range(40)).encode()
    data = Data(paths=[f"{site.address}/b/"], vocab_size=100, valid_fraction=0.2, workers=1)
    assert prepare(data, tmp_path / "out", lambda line: None).sources[0].documents == 40
    before = places.files(data.paths[0])
    assert {file.size for file in before} <= {len(content) for content in site.files.values()}
    site.files["/b/7.txt"] = b"changed"
    assert [a.name for a, b in zip(before, places.files(data.paths[0]), strict=True) if a.version != b.version] == [
        f"{site.address}/b/7.txt"
    ]
