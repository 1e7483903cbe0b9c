"""The heat map shows every character once, with its color, and nothing of a text becomes markup."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from overnight.errors import UserError
from overnight.report.heatmap import write_heatmap


def page(tmp_path: Path, *texts: list[tuple[str, float]]) -> str:
    write_heatmap(tmp_path / "sub" / "page.html", texts, "cell 3 of <run>", "What & why.")
    return (tmp_path / "sub" / "page.html").read_text(encoding="utf-8")


def shown(page: str) -> list[list[tuple[str, str]]]:
    """Of each text the pieces with their class, as a reader sees them."""
    found = []
    for text in re.findall(r'<p class="text">(.*?)</p>', page, re.S):
        pieces = re.findall(r'<i class="(\w+)" title="[^"]*">(.*?)</i>|([^<]+)', text, re.S)
        found.append([(kind, html.unescape(marked or plain)) for kind, marked, plain in pieces])
    return found


def test_every_character_stands_once_with_the_shade_of_its_value(tmp_path: Path) -> None:
    text = [("Z", 0.0), ("o", -2.0), ("ë", 4.0), (" ", 3.95), ("🙂", 2.0), ("!", 0.01)]
    assert shown(page(tmp_path, text)) == [[("", "Z"), ("n10", "o"), ("p20", "ë "), ("p10", "🙂"), ("", "!")]]


def test_all_texts_share_one_scale(tmp_path: Path) -> None:
    assert shown(page(tmp_path, [("a", 1.0)], [("b", -2.0)])) == [[("p10", "a")], [("n20", "b")]]
    assert "-2</" not in page(tmp_path) and "+2" in page(tmp_path, [("b", -2.0)])


def test_nothing_in_a_text_or_a_title_becomes_markup(tmp_path: Path) -> None:
    evil = '</p><script>alert("x")</script><!--texts-->&amp;'
    found = page(tmp_path, [(character, 1.0) for character in evil])
    assert shown(found) == [[("p20", evil)]]
    assert "<script" not in found and "cell 3 of &lt;run&gt;" in found and "What &amp; why." in found
    assert not re.search(r"<!--(?!doctype)", found)


def test_the_page_needs_no_other_file_and_has_both_schemes(tmp_path: Path) -> None:
    found = page(tmp_path, [("a", 1.0)])
    assert not re.search(r"https?:|src=|@import|url\(", found)
    assert "prefers-color-scheme: dark" in found and 'content="light dark"' in found
    assert {f".{side}{k} " for side in "pn" for k in range(1, 21)} <= set(re.findall(r"\.[pn]\d+ ", found))


def test_no_text_and_no_value_make_a_page_and_a_folder_in_the_way_is_said(tmp_path: Path) -> None:
    assert shown(page(tmp_path)) == [] and shown(page(tmp_path, [], [("a", 0.0)])) == [[], [("", "a")]]
    with pytest.raises(UserError, match="could not be written"):
        write_heatmap(tmp_path, [], "", "")
