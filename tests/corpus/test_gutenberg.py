"""The license of Project Gutenberg goes, in the forms of three decades, and nothing else does."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.corpus.document import Source
from overnight.corpus.gutenberg import remove_license
from tests.reading import read

HEADER = "The Project Gutenberg eBook of A Book, by Nobody\n\nThis eBook is for the use of anyone anywhere.\n\n"
FOOTER = "\n\nUpdated editions will replace the previous one.\n\nSTART: FULL LICENSE\n\nTHE FULL PROJECT GUTENBERG LICENSE\n"
BODY = "\n\nProduced by someone\n\nCHAPTER I\n\nIt was a dark night.\n\n"
MARKERS = [
    ("*** START OF THE PROJECT GUTENBERG EBOOK A BOOK ***\n", "*** END OF THE PROJECT GUTENBERG EBOOK A BOOK ***"),
    (
        "*** START OF THIS PROJECT GUTENBERG EBOOK A BOOK ***\n",
        "End of the Project Gutenberg EBook of A Book, by Nobody\n\n*** END OF THIS PROJECT",
    ),
    ("***START OF THE PROJECT GUTENBERG EBOOK A BOOK***\r\n", "***END OF THE PROJECT GUTENBERG EBOOK A BOOK***"),
    ("*** START OF THE PROJECT GUTENBERG EBOOK A BOOK\nWITH A VERY LONG TITLE ***\n", "End of Project Gutenberg's A Book, by Nobody"),
    ("*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n", "End of The Project Gutenberg Etext of A Book"),
    ("*END THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.03/14/00*END*\n", "End of this Project Gutenberg Etext of A Book"),
    ("*** START OF THIS PROJECT GUTENBERG EBOOK EIN BUCH ***\n", "Ende dieses Projekt Gutenberg E-Books"),
]


@pytest.mark.parametrize(("start", "end"), MARKERS)
def test_header_and_footer_of_every_form_are_removed_and_counted_once(start: str, end: str) -> None:
    source = Source("x")
    assert remove_license(HEADER + start + BODY + end + FOOTER, source) == BODY
    assert source.licenses == 1
    assert remove_license(BODY + end + FOOTER, source) == BODY
    assert remove_license(HEADER + start + BODY, source) == BODY
    assert source.licenses == 3


def test_each_text_of_a_file_with_several_loses_its_own() -> None:
    source = Source("x")
    book = HEADER + MARKERS[0][0] + BODY + MARKERS[0][1] + FOOTER
    older = "Project Gutenberg's Etext of Another\n\n" + BODY + MARKERS[4][1] + FOOTER
    assert remove_license(book + book, source) == BODY * 2 and source.licenses == 2
    assert remove_license(older + book, source).endswith(BODY * 2) and source.licenses == 4


@given(
    st.lists(
        st.sampled_from(["Gutenberg", "the Project Gutenberg License", "*** START", "*** END OF THE BOOK ***", "", "text"]), max_size=80
    ),
    st.sampled_from(["\n", "\r\n"]),
)
def test_a_text_without_markers_stays_as_it_is(lines: list[str], end: str) -> None:
    source = Source("x")
    assert remove_license(end.join(lines), source) == end.join(lines)
    assert source.licenses == 0


def test_a_marker_deep_in_a_text_and_what_follows_an_end_at_length_are_text() -> None:
    source = Source("x")
    deep = "One line of text.\n" * 700 + MARKERS[0][0] + BODY
    assert remove_license(deep, source) == deep
    long = BODY + MARKERS[0][1] + "\n" + "Another line of text.\n" * 700
    assert remove_license(long, source) == long
    assert source.licenses == 0


@pytest.mark.parametrize("kind", ["file", "paragraph", "line"])
def test_documents_of_every_size_are_without_it_unless_it_is_kept(tmp_path: Path, kind: str) -> None:
    book = HEADER + MARKERS[0][0] + BODY + MARKERS[0][1] + FOOTER
    (tmp_path / "x.txt").write_text(book)
    found, source = read(tmp_path, documents=kind)
    assert "".join(" ".join(document.text for document in found).split()) == "".join(BODY.split())
    assert source.licenses == 1
    found, source = read(tmp_path, documents=kind, gutenberg_license="keep")
    assert "".join(" ".join(document.text for document in found).split()) == "".join(book.split())
    assert source.licenses == 0


def test_the_beginning_of_a_cut_text_is_kept(tmp_path: Path) -> None:
    text = "".join(f"{number} is a line of Gutenberg's printing house, pressed in lead.\n" for number in range(300))
    packed = gzip.compress(text.encode())
    (tmp_path / "x.txt.gz").write_bytes(packed[: len(packed) // 2])
    found, source = read(tmp_path, documents="line", on_truncated_file="keep")
    assert len(found) > 20 and [document.text for document in found] == text.split("\n")[: len(found)]
    assert len(source.truncated) == 1
