"""What claims or unpacks to more than memory should hold is refused while little of it is there, and no archive reaches out of itself."""

from __future__ import annotations

import bz2
import gzip
import io
import re
import tarfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from overnight.corpus import wikipedia_dump
from overnight.errors import DataError
from tests.corpus.test_readers import PACKERS, read

MEMORY = 120_000_000
UNPACKED = 160_000_000


def packed(start: bytes, pack: Callable[[bytes], bytes]) -> bytes:
    """A start and so many zero bytes, packed in one and ten equal streams, of which one has to be made."""
    return pack(start) + pack(bytes(UNPACKED // 10)) * 10


@pytest.fixture
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "documents", "message"),
    [
        ("x.txt", "file", r"x\.txt: more than 32 MB in one document"),
        ("x.txt", "line", r"x\.txt:1: more than 32 MB in one line"),
        ("x.txt", "paragraph", r"x\.txt:1: more than 32 MB in one line"),
        ("x.jsonl", "file", r"x\.jsonl:1: has more than 32 MB; correct it"),
        ("x.csv", "file", r"x\.csv:1: more than 32 MB in one line"),
        ("x.tsv", "file", r"x\.tsv:1: has more than 32 MB; correct it"),
        ("x.md", "file", r"x\.md: more than 32 MB in one document"),
    ],
)
@pytest.mark.usefixtures("little_memory")
def test_a_line_of_two_gigabytes_is_refused_with_little_memory(tmp_path: Path, name: str, documents: str, message: str) -> None:
    with open(tmp_path / name, "wb") as file:
        file.truncate(2 << 30)  # takes no room on the disk
    with pytest.raises(DataError, match=message):
        read(tmp_path / name, documents=documents)


@pytest.mark.parametrize("ending", [ending for ending in PACKERS if ending])
def test_a_packed_line_is_refused_with_little_memory(tmp_path: Path, ending: str, request: pytest.FixtureRequest) -> None:
    (tmp_path / f"x.txt{ending}").write_bytes(packed(b"", PACKERS[ending]))
    request.getfixturevalue("little_memory")
    with pytest.raises(DataError, match=r"x\.txt:1: more than 32 MB in one line"):
        read(tmp_path, documents="line")


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK])
def test_a_name_of_gigabytes_in_a_tar_archive_is_refused_with_little_memory(
    tmp_path: Path, kind: bytes, request: pytest.FixtureRequest
) -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = kind, 3 << 30
    (tmp_path / "x.tar.gz").write_bytes(packed(header.tobuf(tarfile.GNU_FORMAT), gzip.compress))
    request.getfixturevalue("little_memory")
    with pytest.raises(DataError, match=re.escape(f"{tmp_path / 'x.tar.gz'}: a header of the tar archive claims 3,072 MB of names")):
        read(tmp_path)


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_a_long_name_in_a_tar_archive_is_read(tmp_path: Path, form: int) -> None:
    with tarfile.open(tmp_path / "x.tar", "w", format=form) as archive:
        entry = tarfile.TarInfo("é" * 300 + ".txt")
        entry.size = 4
        archive.addfile(entry, io.BytesIO(b"text"))
    assert read(tmp_path)[0] == ["text"]


def test_what_a_tar_archive_links_to_or_names_outside_of_itself_is_not_touched(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "er"
    folder.mkdir(parents=True)
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    with tarfile.open(folder / "x.tar", "w") as archive:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE):
            entry = tarfile.TarInfo(f"link-{kind!r}.txt")
            entry.type, entry.linkname = kind, str(secret)
            archive.addfile(entry)
        for name in ("../../secret.txt", str(secret), "a.txt"):
            entry = tarfile.TarInfo(name)
            entry.size = 11
            archive.addfile(entry, io.BytesIO(b"overwritten"))
    texts, source = read(folder)
    assert texts == ["overwritten"] * 3 and source.files == 3
    assert secret.read_text() == "secret"
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["secret.txt", "x.tar"]


def test_a_dump_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wikipedia_dump, "_MAX_XML_BYTES", 1 << 20)
    page = b"<page><title>A</title><ns>0</ns><revision><text>%s</text></revision></page>"
    head, end = bz2.compress(b"<mediawiki>\n<siteinfo></siteinfo>\n"), bz2.compress(b"</mediawiki>\n")
    one = head + bz2.compress(page % (b"x" * (2 << 20))) + end
    many = head + bz2.compress(page % (b"y" * 300_000)) * 4 + end
    for content in (one, many):
        (tmp_path / "x.xml.bz2").write_bytes(content)
        with pytest.raises(DataError, match=r"x\.xml\.bz2: what is packed at byte \d+ is more than 1 MB of XML"):
            read(tmp_path)
    (tmp_path / "x.xml.bz2").write_bytes(head + bz2.compress(page % (b"x" * 1000)) * 4 + end)
    assert len(read(tmp_path)[0]) == 4
