"""Books in EPUB: their parts in the order of the spine, and every way a book can be broken."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest

from overnight.corpus.document import Document, OpenFile
from overnight.errors import DataError
from tests.reading import read, texts

pytest.importorskip("resiliparse", reason="the extra `web` is not installed")

CONTAINER = '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles><rootfile full-path="OEBPS/p.opf"/></rootfiles></container>'
PACKAGE = """<?xml version="1.0"?><package xmlns="http://www.idpf.org/2007/opf" version="3.0"><manifest>
<item id="two" href="text/2%20b.xhtml" media-type="application/xhtml+xml"/>
<item id="one" href="../one.xhtml" media-type="application/xhtml+xml"/>
<item id="nav" href="nav.xhtml" media-type="application/xhtml+xml" properties="nav"/>
<item id="notes" href="notes.xhtml" media-type="application/xhtml+xml"/>
<item id="cover" href="cover.svg" media-type="image/svg+xml"/></manifest>
<spine><itemref idref="cover"/><itemref idref="nav"/><itemref idref="one"/><itemref idref="two"/><itemref idref="notes" linear="no"/></spine></package>"""
PART = '<?xml version="1.0" encoding="utf-8"?><html xmlns="http://www.w3.org/1999/xhtml"><head><title/></head><body><h1><a id="x"/>{}</h1><p>Grüße.</p></body></html>'
PARTS = {
    "META-INF/container.xml": CONTAINER,
    "OEBPS/p.opf": PACKAGE,
    "one.xhtml": PART.format("One"),
    "OEBPS/text/2 b.xhtml": PART.format("Two"),
    "OEBPS/nav.xhtml": PART.format("Contents"),
    "OEBPS/notes.xhtml": PART.format("Notes"),
    "OEBPS/unused.xhtml": PART.format("Unused"),
}


def write(path: Path, **changes: str | None) -> Path:
    """A book with some of its parts changed, or left out."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("mimetype", "application/epub+zip", zipfile.ZIP_STORED)
        for name, content in (PARTS | {key.replace("__", "/"): value for key, value in changes.items()}).items():
            if content is not None:
                archive.writestr(name, content)
    return path


@pytest.mark.parametrize("name", ["x.epub", "misnamed", "x.zip"])
def test_a_book_is_one_document_in_the_order_of_its_spine(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name)
    assert read(tmp_path)[0] == [Document("One\n\nGrüße.\n\nTwo\n\nGrüße.", None, str(path))]
    assert texts(tmp_path, documents="paragraph") == ["One", "Grüße.", "Two", "Grüße."]


def test_a_book_of_the_format_before_epub_is_read(tmp_path: Path) -> None:
    write(tmp_path / "x.epub", **{"OEBPS/p.opf": PACKAGE.replace("application/xhtml+xml", "text/x-oeb1-document")})
    assert texts(tmp_path) == ["One\n\nGrüße.\n\nTwo\n\nGrüße."]


def test_books_inside_archives_are_books(tmp_path: Path) -> None:
    write(tmp_path / "x.epub")
    with zipfile.ZipFile(tmp_path / "books.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(tmp_path / "x.epub", "a/x.epub")
    (tmp_path / "x.epub").unlink()
    assert texts(tmp_path) == ["One\n\nGrüße.\n\nTwo\n\nGrüße."]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"META-INF/container.xml": None}, "it lacks META-INF/container.xml"),
        ({"META-INF/container.xml": "<container/>"}, "it names no package"),
        ({"OEBPS/p.opf": None}, r"it lacks OEBPS/p\.opf"),
        ({"OEBPS/p.opf": "<package"}, r"it has a OEBPS/p\.opf that is not XML"),
        ({"OEBPS/p.opf": '<!DOCTYPE x [<!ENTITY a "b">]><package/>'}, r"it declares entities in OEBPS/p\.opf"),
        ({"OEBPS/p.opf": PACKAGE.replace('idref="one"', 'idref="gone"')}, "it has no part 'gone' of its spine"),
        ({"one.xhtml": None}, r"it lacks one\.xhtml"),
        ({"OEBPS/p.opf": PACKAGE.replace("application/xhtml+xml", "application/pdf")}, "it has no text in its spine"),
        ({"OEBPS/p.opf": re.sub("<spine>.*</spine>", "<spine/>", PACKAGE)}, "it has no text in its spine"),
        ({"OEBPS/p.opf": PACKAGE.replace("../one.xhtml", "../../../etc/passwd")}, r"it lacks \.\./\.\./etc/passwd"),
    ],
)
def test_a_book_without_one_of_its_parts_is_refused(tmp_path: Path, changes: dict[str, str | None], message: str) -> None:
    write(tmp_path / "x.epub", **changes)
    with pytest.raises(DataError, match=r"x\.epub: is not an EPUB book, or is damaged: " + message):
        read(tmp_path)


def test_a_protected_book_is_refused_and_one_with_scrambled_fonts_is_read(tmp_path: Path) -> None:
    encryption = '<encryption><EncryptedData><EncryptionMethod Algorithm="{}"/></EncryptedData></encryption>'
    write(tmp_path / "x.epub", **{"META-INF/encryption.xml": encryption.format("http://www.idpf.org/2008/embedding")})
    assert len(texts(tmp_path)) == 1
    write(tmp_path / "x.epub", **{"META-INF/encryption.xml": encryption.format("http://www.w3.org/2001/04/xmlenc#aes128-cbc")})
    with pytest.raises(DataError, match=r"x\.epub: is protected against copying"):
        read(tmp_path)


def test_a_cut_book_is_truncated(tmp_path: Path) -> None:
    path = write(tmp_path / "x.epub")
    path.write_bytes(path.read_bytes()[:-100])
    (tmp_path / "y.txt").write_text("more")
    with pytest.raises(DataError, match=r"x\.epub: the book ends early.*on_truncated_file=keep"):
        read(tmp_path)
    assert texts(tmp_path, on_truncated_file="keep") == ["more"]


def test_a_text_that_is_called_a_book_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.epub").write_text("Once upon a time")
    with pytest.raises(DataError, match=r"x\.epub: is not an EPUB book; correct data\.format"):
        read(tmp_path, on_truncated_file="keep")


def test_a_book_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenFile, "max_bytes", 1 << 20)
    write(tmp_path / "x.epub", **{"one.xhtml": "<p>" + "word " * 400_000})
    with pytest.raises(DataError, match=r"x\.epub: more than 1 MB in one book"):
        read(tmp_path)
