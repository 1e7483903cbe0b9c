"""The comparison with mwparserfromhell: the same words of the same pages, and words that are lost are found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from overnight.corpus import wikitext

pytest.importorskip("mwparserfromhell", reason="the extra `peer` is not installed")

from benchmarks import wikitext_peer

PAGE = """'''Albedo''' ({{IPAc-en|a}}) is the ''[[diffuse reflection]]'' of [[Sun|light]].<ref>{{cite book|x}}</ref> [[File:a.jpg|thumb|Unseen]]
== Values ==
{|
| unseen
|}
* Snow: [http://x.org white] [[Category:Unseen]][[fr:Unseen]]
"""


def test_the_peer_shows_what_a_reader_of_sentences_sees() -> None:
    assert wikitext_peer.words(wikitext_peer.peer(PAGE)) == wikitext_peer.words(wikitext.plain(PAGE))
    assert "unseen" not in wikitext_peer.words(wikitext_peer.peer(PAGE))


def test_lost_words_and_markup_that_is_left_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PAGE.replace("<", "&lt;").replace(">", "&gt;")
    page = f"<page><title>A</title><ns>0</ns><id>1</id><revision><text>{text}</text></revision></page>"
    (tmp_path / "x.xml").write_text(f"<mediawiki>\n{page}\n</mediawiki>\n")
    monkeypatch.setattr("sys.argv", ["wikitext_peer", str(tmp_path / "x.xml"), "--repeats", "1", "--lost", "3"])
    wikitext_peer.main()
    values = [row["value"] for row in json.loads(capsys.readouterr().out)["rows"]]
    assert values[3:] == [100, 0, 0]
    monkeypatch.setattr(wikitext, "plain", lambda text: "{{x is the diffuse reflection of light. Another word.")
    wikitext_peer.main()
    *lost, last = capsys.readouterr().out.splitlines()
    values = [row["value"] for row in json.loads(last)["rows"]]
    assert values[3] < 70 and values[4] > 10 and values[5] == 50
    assert any("A: albedo" in line for line in lost) and "- {{x is the diffuse reflection of light." in lost
