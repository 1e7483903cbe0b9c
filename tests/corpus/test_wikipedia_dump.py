"""Dumps of Wikipedia: packed in every way, cut anywhere, divided among workers, and the real ones."""

from __future__ import annotations

import bz2
import dataclasses
import gzip
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from overnight.config import Data
from overnight.corpus import wikipedia_dump
from overnight.corpus.pipeline import prepare
from overnight.corpus.readers import Document, Source, documents, documents_and_parts, start_reading
from overnight.corpus.shards import save_manifest
from overnight.corpus.wikitext import plain
from overnight.errors import ConfigError, DataError
from tests.conftest import DATA

ENGLISH = DATA / "wiki/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
needs_data = pytest.mark.skipif(not ENGLISH.is_file(), reason=f"no real data at {DATA} (set OVERNIGHT_DATA)")

HEAD = (
    '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="is">\n  <siteinfo>\n    <namespaces>\n'
    '      <namespace key="0" case="first-letter" />\n      <namespace key="1" case="first-letter">Spjall</namespace>\n'
    '      <namespace key="6" case="first-letter">Mynd</namespace>\n    </namespaces>\n  </siteinfo>\n'
)
END = "</mediawiki>\n"


def page(title: str, text: str, namespace: int | None = 0, more: str = "") -> str:
    ns = "" if namespace is None else f"    <ns>{namespace}</ns>\n"
    return (
        f"  <page>\n    <title>{title}</title>\n{ns}    <id>7</id>\n{more}    <revision>\n      <id>8</id>\n      <model>wikitext</model>\n"
        f'      <text bytes="9" xml:space="preserve">{text}</text>\n      <sha1>0</sha1>\n    </revision>\n  </page>\n'
    )


def pages(count: int) -> list[str]:
    """Return pages of words that do not compress to nothing."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghilmnoprstu", k=rng.randint(2, 9))) for _ in range(500)]
    return [page(f"Page {n}", f"'''Page {n}''' is [[{' '.join(rng.choices(words, k=120))}]]. {{{{cite}}}}") for n in range(count)]


def multistream(found: list[str], a_stream: int = 3) -> bytes:
    groups = ["".join(found[start : start + a_stream]) for start in range(0, len(found), a_stream)]
    return b"".join(bz2.compress(part.encode()) for part in [HEAD, *groups, END])


def read(path: Path, **settings: Any) -> tuple[list[Document], Source]:
    data = Data(paths=[str(path)], **settings)
    reading = start_reading(data)
    return list(documents(data, reading)), reading.sources[0]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make parts of a few pages."""
    monkeypatch.setattr(wikipedia_dump, "PART_BYTES", 3000)
    monkeypatch.setattr(wikipedia_dump, "_PACKED_BYTES", 2000)
    monkeypatch.setattr(wikipedia_dump, "_BLOCK", 3000)


PACKERS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".zst": zstandard.compress}


@pytest.mark.parametrize("ending", PACKERS)
def test_pages_become_documents_with_their_title_as_heading_and_name(tmp_path: Path, ending: str) -> None:
    xml = (
        HEAD
        + page("A &amp; B", "'''A''' &lt;b&gt;is&lt;/b&gt; &amp;lt; [[b|B]] [[Mynd:x|y]] &quot;q&quot;.&lt;ref&gt;z&lt;/ref&gt;")
        + page("C", "c", more='    <redirect title="A &amp; B" />\n')
        + page("D", "#REDIRECT [[A]]")
        + page("Spjall:A", "talk", 1)
        + page("E", "Éé.")
        + END
    )
    path = tmp_path / f"iswiki.xml{ending}"
    path.write_bytes(PACKERS[ending](xml.encode()))
    found, source = read(path)
    name = str(tmp_path / "iswiki.xml")
    assert [document.name for document in found] == [f"{name}#A & B", f"{name}#E"]
    assert [document.text.split("\n\n", 1) for document in found] == [["# A & B", 'A is < B  "q".'], ["# E", "Éé."]]
    assert (source.files, source.documents, source.redirects, source.other_pages) == (1, 2, 2, 1)
    assert source.bytes == sum(len(document.text.encode()) for document in found)
    talk, source = read(path, namespaces=[1])
    assert [document.text for document in talk] == ["# Spjall:A\n\ntalk"] and source.other_pages == 2


def test_a_dump_in_utf_16_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.xml.bz2").write_bytes(bz2.compress((HEAD + page("Ж", "Ёж 𐍈.") + END).encode("utf-16")))
    assert [document.text for document in read(tmp_path / "x.xml.bz2")[0]] == ["# Ж\n\nЁж 𐍈."]


def test_old_dumps_have_the_namespace_in_the_title_and_the_last_revision_counts(tmp_path: Path) -> None:
    history = page("B", "old").replace("  </page>\n", "") + "    <revision>\n      <text>new</text>\n    </revision>\n  </page>\n"
    (tmp_path / "x.xml").write_text(
        HEAD + page("Spjall:A", "t", None) + page("What: A", "a", None) + history + page("N", "").replace("></text>", " />") + END
    )
    found, source = read(tmp_path / "x.xml")
    assert [document.text for document in found] == ["# What: A\n\na", "# B\n\nnew", "# N\n\n"]
    assert source.other_pages == 1


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("a_stream", [1, 3, 7])
def test_streams_are_read_apart_and_give_what_one_stream_gives(tmp_path: Path, a_stream: int) -> None:
    found = pages(40)
    (tmp_path / "one.xml.bz2").write_bytes(bz2.compress("".join([HEAD, *found, END]).encode()))
    (tmp_path / "many.xml.bz2").write_bytes(multistream(found, a_stream))
    one, many = read(tmp_path / "one.xml.bz2")[0], read(tmp_path / "many.xml.bz2")[0]
    assert len(one) == 40
    assert [document.text for document in one] == [document.text for document in many]
    data = Data(paths=[str(tmp_path / "many.xml.bz2")])
    parts = [part for part in documents_and_parts(data, start_reading(data)) if isinstance(part, wikipedia_dump.DumpPart)]
    assert len(parts) > 3 and all(part.path and not part.xml for part in parts)
    assert [part.start for part in parts[1:]] == [part.end for part in parts[:-1]]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("size", [97, 500, 1013, 4000])
def test_streams_that_end_within_pages_and_tags_lose_and_double_nothing(tmp_path: Path, size: int) -> None:
    """pbzip2 cuts anywhere; the first stream holds the beginning of a page too."""
    xml = "".join([HEAD, *pages(30), END]).encode()
    cuts = [0, *range(len(HEAD) + 40, len(xml), size), len(xml)]
    (tmp_path / "x.xml.bz2").write_bytes(b"".join(bz2.compress(xml[a:b]) for a, b in itertools.pairwise(cuts)))
    found, _ = read(tmp_path / "x.xml.bz2")
    assert [document.text.partition("\n")[0] for document in found] == [f"# Page {n}" for n in range(30)]


@pytest.mark.usefixtures("small_parts")
def test_the_shards_do_not_depend_on_the_workers(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "dump").mkdir(exist_ok=True)
        (tmp_path / "dump" / f"{name}.xml.bz2").write_bytes(
            multistream([*pages(40), page("R", "#redirect [[A]]"), page(name, f"Text of {name}. " * 9)])
        )
    (tmp_path / "dump" / "a-multistream-index.txt.bz2").write_bytes(bz2.compress(b"600:1:Page 0\n"))
    (tmp_path / "dump" / "z.txt").write_text("Some other text. " * 20)
    data = Data(paths=[str(tmp_path / "dump")], vocab_size=300, valid_fraction=0.2)
    lines: list[str] = []
    made = [
        prepare(dataclasses.replace(data, workers=workers), tmp_path / str(workers), lines.append, shard_tokens=2000) for workers in (1, 2)
    ]
    assert made[0] == made[1]
    assert (made[0].sources[0].redirects, made[0].sources[0].documents, made[0].sources[0].files, made[0].duplicates) == (2, 83, 3, 40)
    assert any("left out 2 redirects" in line for line in lines)
    files = [{path.name: path.read_bytes() for path in (tmp_path / workers).iterdir() if path.is_file()} for workers in "12"]
    assert files[0] == files[1] and len(files[0]) > 5


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("packed", ["plain", "bz2", "gz", "multistream"])
@pytest.mark.parametrize("share", [0.3, 0.7, 0.99])
def test_a_cut_dump_is_refused_and_its_whole_pages_kept_only_if_asked(tmp_path: Path, packed: str, share: float) -> None:
    found = pages(30)
    xml = "".join([HEAD, *found, END]).encode()
    content = {"plain": xml, "bz2": bz2.compress(xml), "gz": gzip.compress(xml), "multistream": multistream(found)}[packed]
    path = tmp_path / "cut"
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(DataError, match=r"cut.*ends early.*on_truncated_file=keep"):
        read(path)
    data = Data(paths=[str(path)], vocab_size=300, min_chars=0, valid_fraction=0, on_truncated_file="keep")
    reading = start_reading(data)
    # One block of bzip2 is all or nothing.
    if packed != "bz2":
        kept = [document.text for document in documents(data, reading)]
        assert 3 <= len(kept) < 30
        assert [text.partition("\n")[0] for text in kept] == [f"# Page {n}" for n in range(len(kept))]
        assert reading.sources[0].truncated == [str(path)]
        lines: list[str] = []
        prepare(data, tmp_path / "out", lines.append)
        assert any("1 truncated file kept as far as readable" in line for line in lines)


@pytest.mark.parametrize("more", [0, 30])
def test_a_dump_cut_at_or_behind_the_beginning_of_a_stream_is_refused_before_any_work(tmp_path: Path, more: int) -> None:
    content = multistream(pages(9))
    (tmp_path / "x.bz2").write_bytes(content[: content.rfind(b"BZh9") + more])
    data = Data(paths=[str(tmp_path / "x.bz2")])
    with pytest.raises(DataError, match=r"x\.bz2: the dump ends early"):
        next(documents_and_parts(data, start_reading(data)))


@pytest.mark.usefixtures("small_parts")
def test_an_interrupted_preparation_counts_the_parts_that_it_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.xml.bz2").write_bytes(multistream(pages(40)))
    data = Data(paths=[str(tmp_path / "x.xml.bz2")], vocab_size=300, valid_fraction=0.2, workers=1)
    whole = prepare(data, tmp_path / "whole", print)
    read_part, calls = wikipedia_dump.read_part, []

    def failing(part: wikipedia_dump.DumpPart) -> Any:
        calls.append(part)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return read_part(part)

    monkeypatch.setattr(wikipedia_dump, "read_part", failing)
    with pytest.raises(KeyboardInterrupt):
        prepare(data, tmp_path / "out", print)
    assert prepare(data, tmp_path / "out", print) == whole
    assert len([part for part in calls if part.start == 0]) == 1


def test_a_folder_prepared_before_there_were_namespaces_is_used(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("Some text. " * 50)
    data = Data(paths=[str(tmp_path / "x.txt")], vocab_size=100, valid_fraction=0, workers=1)
    manifest = prepare(data, tmp_path / "out", str)
    del manifest.settings["namespaces"]
    save_manifest(tmp_path / "out", manifest)
    assert prepare(data, tmp_path / "out", str) == manifest
    with pytest.raises(ConfigError, match=r"data\.namespaces: prepared with \[0\], now asked for \[1\]"):
        prepare(dataclasses.replace(data, namespaces=[1]), tmp_path / "out", str)


def test_damaged_streams_and_pages_are_refused_by_name(tmp_path: Path) -> None:
    content = bytearray(multistream(pages(9)))
    middle = len(content) // 2
    content[middle : middle + 20] = bytes(20)
    (tmp_path / "x.bz2").write_bytes(content)
    with pytest.raises(DataError, match=r"x\.bz2: the bzip2 stream at byte \d+ is damaged"):
        read(tmp_path / "x.bz2")
    (tmp_path / "y.xml").write_bytes((HEAD + page("A", "?") + END).encode().replace(b"?", b"\xff"))
    with pytest.raises(DataError, match=r"y\.xml: page 'A': byte 0xff is not UTF-8.*encoding_errors=replace"):
        read(tmp_path / "y.xml")
    assert read(tmp_path / "y.xml", encoding_errors="replace")[0][0].text == "# A\n\n\ufffd"


def test_a_namespace_that_is_no_number_is_refused_by_its_page(tmp_path: Path) -> None:
    text = "".join(pages(3)).replace("<ns>0</ns>", "<ns>zero</ns>", 1)
    (tmp_path / "x.xml").write_text(f"<mediawiki>{text}</mediawiki>")
    with pytest.raises(DataError, match=r"x\.xml: page '[^']+': its namespace is b'zero', which is not a number"):
        read(tmp_path / "x.xml")


@pytest.mark.usefixtures("small_parts")
def test_what_is_no_dump_of_articles_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.txt").write_text("text")
    with pytest.raises(DataError, match="is not a MediaWiki dump"):
        read(tmp_path / "x.txt", format="mediawiki")
    (tmp_path / "y.xml").write_text(HEAD + page("A", "#redirect [[B]]") + END)
    with pytest.raises(DataError, match=r"holds no text \(1 redirects"):
        read(tmp_path / "y.xml")
    with pytest.raises(DataError, match="holds no text"):
        prepare(Data(paths=[str(tmp_path / "y.xml")], workers=1), tmp_path / "out", print)
    monkeypatch.setattr(wikipedia_dump, "_MAX_PAGE_BYTES", 5000)
    (tmp_path / "z.xml").write_text(HEAD + page("A", "a" * 9000) + END)
    with pytest.raises(DataError, match="history of pages"):
        read(tmp_path / "z.xml")
    (tmp_path / "w.bz2").write_bytes(multistream(pages(9)) + bz2.compress("".join(pages(100)).encode()))
    with pytest.raises(DataError, match=r"a bzip2 stream of more than .* unpack the file"):
        read(tmp_path / "w.bz2")


@needs_data
def test_the_real_english_dump_has_106_articles_without_markup() -> None:
    found, source = read(ENGLISH)
    assert (len(found), source.redirects, source.other_pages) == (106, 100, 0)
    anarchism = next(document.text for document in found if document.name.endswith("#Anarchism"))
    assert "# Anarchism\n" in anarchism and "Anarchism is a political philosophy that advocates self-governed societies" in anarchism
    text = "\n".join(document.text for document in found)
    assert 2_700_000 < len(text) < 3_100_000
    assert not any(mark in text for mark in ("[[", "<ref", "{|", "|-"))
    assert sum(text.count(mark) for mark in ("{{", "}}", "|", "''", "==")) < 20


@needs_data
def test_the_words_of_a_parser_of_wikitext_are_kept() -> None:
    pytest.importorskip("mwparserfromhell", reason="the extra `peer` is not installed")
    from benchmarks.wikitext_peer import peer, wikitexts, words

    kept = wanted = 0
    for _, markup, _ in wikitexts([str(ENGLISH)], 4):
        there = words(peer(markup))
        kept, wanted = kept + (there & words(plain(markup))).total(), wanted + there.total()
    assert wanted > 10_000 and kept > 0.99 * wanted


@needs_data
def test_the_real_dump_in_many_streams_gives_the_same(tmp_path: Path) -> None:
    xml = bz2.decompress(ENGLISH.read_bytes()).decode()
    head, *found = xml.removesuffix("</mediawiki>\n").removesuffix("</mediawiki>").split("  <page>\n")
    streams = [head, *("".join("  <page>\n" + text for text in found[start : start + 20]) for start in range(0, len(found), 20)), END]
    (tmp_path / "x.bz2").write_bytes(b"".join(bz2.compress(part.encode()) for part in streams))
    assert [document.text for document in read(tmp_path / "x.bz2")[0]] == [document.text for document in read(ENGLISH)[0]]


@needs_data
def test_the_real_bulgarian_dump_is_utf_16_and_the_cut_one_is_refused() -> None:
    found, _ = read(DATA / "wiki/bgwiki-latest-pages-articles-shortened.xml.bz2", namespaces=[0, 4])
    assert len(found) >= 2 and "България" in "".join(document.text for document in found)
    cut = DATA / "text/enwik8-prefix.xml"
    with pytest.raises(DataError, match="ends early"):
        read(cut)
    assert len(read(cut, on_truncated_file="keep")[0]) == 248
