"""The dump that is asked for is found in the layout of dumps.wikimedia.org, with its checksums."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from overnight.download.addresses import mirror_of
from overnight.download.connection import Source
from overnight.download.datasets import RemoteFile
from overnight.download.patience import Attempts
from overnight.download.wikipedia import wanted_files, wikipedia_files
from overnight.errors import ConfigError, DataError
from tests.download.conftest import Pauses
from tests.download.server import Site, cut

HOST = "dumps.wikimedia.org"
SHA1 = "0123456789abcdef0123456789abcdef01234567"


def status(wiki: str, date: str, job: str = "articlesmultistreamdump", state: str = "done") -> bytes:
    """A dumpstatus.json: of a large Wikipedia the parts are another job than the whole."""
    names = [f"{wiki}-{date}-pages-articles-multistream{end}" for end in (".xml.bz2", "-index.txt.bz2")]
    whole = {name: {"size": 100 + i, "url": f"/{wiki}/{date}/{name}", "md5": "0" * 32, "sha1": SHA1} for i, name in enumerate(names)}
    part = {f"{wiki}-{date}-pages-articles-multistream1.xml-p1p9.bz2": {"size": 1, "url": "x", "md5": "0" * 32, "sha1": SHA1}}
    jobs = (
        {"articlesmultistreamdump": {"status": "done", "updated": "2026-11-03 01:02:03", "files": part}} if job.endswith("combine") else {}
    )
    jobs |= {job: {"status": state, "updated": "2026-11-03 01:02:03", "files": whole}, "abstractsdump": {"status": "waiting"}}
    return json.dumps({"version": "0.8", "jobs": jobs}).encode()


def find(mirror: str, pauses: Pauses, language: str = "en", date: str = "latest") -> list[RemoteFile]:
    source = Source(mirror_of(mirror, "--mirror"), 5.0, pauses)
    return wikipedia_files(language, date, source, Attempts(2, pauses, lambda text: None))


def expected(wiki: str, date: str) -> list[RemoteFile]:
    stem = f"{wiki}-{date}-pages-articles-multistream"
    return [
        RemoteFile(f"https://{HOST}/{wiki}/{date}/{stem}.xml.bz2", f"wikipedia/{stem}.xml.bz2", 100, f"sha1:{SHA1}"),
        RemoteFile(f"https://{HOST}/{wiki}/{date}/{stem}-index.txt.bz2", f"wikipedia-index/{stem}-index.txt.bz2", 101, f"sha1:{SHA1}"),
    ]


@pytest.mark.parametrize("job", ["articlesmultistreamdump", "articlesmultistreamdumprecombine"])
def test_a_dated_dump_of_a_small_and_of_a_large_wikipedia(site: Site, pauses: Pauses, job: str) -> None:
    site.files[f"/{HOST}/enwiki/20261101/dumpstatus.json"] = status("enwiki", "20261101", job)
    site.faults[f"/{HOST}/enwiki/20261101/dumpstatus.json"] = [cut(20)]
    assert find(site.address, pauses, date="20261101") == expected("enwiki", "20261101")


def test_latest_is_the_newest_that_is_finished(site: Site, pauses: Pauses) -> None:
    dates = ("20261001", "20261020", "20261101", "20261120")
    links = "".join(f'<a href="{date}/">{date}/</a>\n' for date in dates)
    site.files[f"/{HOST}/zh_yuewiki/"] = f'<html><a href="../">..</a><a href="latest/">latest/</a>\n{links}</html>'.encode()
    site.files[f"/{HOST}/zh_yuewiki/20261101/dumpstatus.json"] = status("zh_yuewiki", "20261101", state="in-progress")
    site.files[f"/{HOST}/zh_yuewiki/20261020/dumpstatus.json"] = status("zh_yuewiki", "20261020")
    assert find(site.address, pauses, "zh-yue") == expected("zh_yuewiki", "20261020")


def test_without_a_status_the_file_of_checksums_is_read(site: Site, pauses: Pauses) -> None:
    stem = "enwiki-20261101-pages-articles-multistream"
    sums = f"{SHA1}  {stem}.xml.bz2\n{SHA1}  {stem}-index.txt.bz2\nno checksum\n"
    site.files[f"/{HOST}/enwiki/20261101/enwiki-20261101-sha1sums.txt"] = sums.encode()
    found = find(site.address, pauses, date="20261101")
    assert [(file.size, file.checksum) for file in found] == [(None, f"sha1:{SHA1}")] * 2


def test_a_folder_has_the_dumps_as_the_server_or_side_by_side(tmp_path: Path, pauses: Pauses) -> None:
    below = tmp_path / "tree" / HOST / "enwiki" / "20261101"
    below.mkdir(parents=True)
    (below / "dumpstatus.json").write_bytes(status("enwiki", "20261101"))
    assert find(str(tmp_path / "tree"), pauses) == expected("enwiki", "20261101")
    flat = tmp_path / "flat"
    flat.mkdir()
    stem = "enwiki-20261101-pages-articles-multistream"
    (flat / f"{stem}.xml.bz2").write_bytes(b"")
    (flat / "enwiki-20261101-sha1sums.txt").write_text(f"{SHA1}  {stem}.xml.bz2\n{SHA1}  {stem}-index.txt.bz2\n")
    assert [file.address for file in find(str(flat), pauses)] == [file.address for file in expected("enwiki", "20261101")]


def test_a_folder_without_a_dump_says_which_files_it_needs(tmp_path: Path, pauses: Pauses) -> None:
    with pytest.raises(DataError) as raised:
        find(str(tmp_path), pauses, "simple")
    assert str(raised.value) == f"{tmp_path}: has no dump of simplewiki; it needs {wanted_files('simplewiki')}"
    assert f"simplewiki-DATE-sha1sums.txt of https://{HOST}/simplewiki/DATE/" in str(raised.value)


def test_what_is_not_there_is_said(site: Site, pauses: Pauses) -> None:
    with pytest.raises(DataError, match=r"is there a Wikipedia in --language=xx[?]"):
        find(site.address, pauses, "xx")
    with pytest.raises(
        DataError,
        match=r"answers 404 Not Found; there is no such file, and --mirror names another place; https://dumps.wikimedia.org/enwiki/ lists others",
    ):
        find(site.address, pauses, date="20200101")
    site.files[f"/{HOST}/enwiki/20261101/dumpstatus.json"] = status("enwiki", "20261101", state="in-progress")
    with pytest.raises(DataError, match=r"enwiki/20261101: has no finished enwiki-20261101-pages-articles-multistream.xml.bz2"):
        find(site.address, pauses, date="20261101")
    site.files[f"/{HOST}/enwiki/"] = b'<a href="latest/">latest/</a>'
    with pytest.raises(DataError, match="lists no dumps"):
        find(site.address, pauses)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"jobs": 1}',
        b'{"jobs": {"articlesmultistreamdump": 1}}',
        status("enwiki", "20261101").replace(SHA1.encode(), b"x"),
        b"\xff",
    ],
)
def test_a_status_that_is_none_is_refused(site: Site, pauses: Pauses, content: bytes) -> None:
    site.files[f"/{HOST}/enwiki/20261101/dumpstatus.json"] = content
    with pytest.raises(DataError, match="is not the status of a dump"):
        find(site.address, pauses, date="20261101")


@pytest.mark.parametrize(
    ("language", "date"), [("../x", "latest"), ("", "latest"), ("EN", "latest"), ("en", "2026-11-01"), ("en", "../20261")]
)
def test_a_language_or_a_date_that_is_none_is_refused_before_anything_is_asked(
    site: Site, pauses: Pauses, language: str, date: str
) -> None:
    with pytest.raises(ConfigError, match="must be"):
        find(site.address, pauses, language, date)
    assert not site.asked
