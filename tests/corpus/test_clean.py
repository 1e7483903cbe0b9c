"""Cleaning, and what counts as a tag for both ways of preparing."""

from __future__ import annotations

import re
import time
import tracemalloc
import unicodedata

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from overnight.corpus import clean as cleaning
from overnight.corpus.bytes import document_bytes
from overnight.corpus.clean import clean


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("# Title #\nText", "Title\n\nText"),
        ("a **bold _nested_** word and *it*", "a bold nested word and it"),
        ("keep snake_case, __init__, 2 * 3 * 4", "keep snake_case, __init__, 2 * 3 * 4"),
        ("see [the link](http://x.y/z_(a)) ![img](u).", "see the link ."),
        ("> quoted\n> more", "quoted more"),
        ("list:\n- one\n- two\n1. three", "list:\n\none\n\ntwo\n\nthree"),
        ("above\n\n-----\n\nbelow", "above\n\nbelow"),
        *(
            (f"A.\n\n{rule}\n\nB.\n{rule}\nC.", "A.\n\nB.\n\nC.")
            for rule in ("* * *", "- - -", "• • •", "+ + +", "*  *\t*", "> * * *", "•••", "- --", "# # #")
        ),
        ("- - a\n* *b*\n1. ---x\n•", "- a\n\nb\n\n---x •"),
        ("use `x` and ``y``", "use x and y"),
        ("```python\ncode\n```", "code"),
        ("== Head ==\n'''bold''' ''it'' [[a|b]] [[c]] {{t|{{u}}}}", "Head\n\nbold it b c"),
        ("<b>x</b> y<br />z <class 'int'> a < b", "x y\n\nz <class 'int'> a < b"),
        ("fish &amp; chips&nbsp;now &lt;b&gt; AT&T; R&D", "fish & chips now <b> AT&T; R&D"),
        ("born (, ) in f() and g( )", "born in f() and g( )"),
        ("zero\u200bwidth nb\xa0sp soft\u00adhyphen \x00end", "zerowidth nb sp softhyphen end"),
        ("e\u0301", "\u00e9"),
        ("one\r\ntwo\rthree\u2028four", "one two three four"),
        ("wrapped\nline\n\n  next \t para  ", "wrapped line\n\nnext para"),
        ("| a | b |\n|---|---|\n", "a b"),
        ("text <ref name='x'>gone</ref> stays<!-- gone -->", "text stays"),
        ("a<ref name=x/> b <REF>c</Ref >d <math>e <ref>f</ref>g", "a b d <math>e g"),
        ("a<script>b <\u017fcript>c</script>d <\u017ftyle>", "ad"),
        ("<!-- a --><!doctype html>b <!-- c", "b <!-- c"),
        ("{|\na\n|}\nb\n{|\nc", "b {| c"),
        ("**a **b** __c__ __d e__ **f\n\ng** a__h i__", "a **b __c__ d e **f\n\ng** a__h i__"),
        ("''a b'' '''c ''d''' e\n''f\n'''g''' h", "a b c ''d e ''f g h"),
        ("[http://x.org/a[1] b] [http://y.org] [ftp://z c", "b [ftp://z c"),
        ("=== a ==\n== b ===\n== c\n=====\n# d #e ##\n# f#", "= a\n\nb =\n\n== c\n\nd #e\n\nf#"),
    ],
)
def test_markup_goes_and_text_stays(raw: str, expected: str) -> None:
    assert clean(raw) == expected


@given(st.text())
def test_clean_text_has_the_shape_the_other_stages_rely_on(raw: str) -> None:
    cleaned = clean(raw)
    assert unicodedata.is_normalized("NFC", cleaned)
    assert not any(ord(char) < 32 and char != "\n" for char in cleaned)
    for paragraph in cleaned.split("\n\n") if cleaned else []:
        assert paragraph == " ".join(paragraph.split()) != ""
    cleaned.encode()


TAGS = [
    "<b>",
    "</b>",
    "<br/>",
    "<br clear=all />",
    '<a href="x?a=1&b=<2>" target=_blank>',
    "</a >",
    "<td nowrap>",
    "<!-- a\nb -->",
    "<IMG src='y'alt='z'>",
]
TAGS += ['<?xml version="1.0"?>', "<!DOCTYPE html>", "<html>", "<font color=red size=+1>"]
TEXTS = [
    "a<b and c>d",
    "if (i<p && q>r)",
    "<sighs>",
    "<class 'int'>",
    "x <= y >= z",
    "<3",
    "a < b > c",
    "<b and c>",
    "<p x >= 3>",
    "<u@example.org>",
]
TEXTS += [
    "#include <math.h> and </math.h>",
    "List<String>",
    "<a-b>",
    "p<q=r>s",
    "<",
    "a <table of contents> b",
    "<hr-rule>",
    "<ref and> no",
]


@pytest.mark.parametrize("tag", TAGS)
def test_a_tag_goes_on_both_paths(tag: str) -> None:
    assert clean(f"one{tag}two").split() in (["onetwo"], ["one", "two"])
    assert document_bytes(f"one{tag}two") == b"\n one two "


@pytest.mark.parametrize("text", TEXTS)
def test_what_only_looks_like_a_tag_stays_on_both_paths(text: str) -> None:
    assert clean(f"so {text} on") == f"so {text} on"
    assert document_bytes(f"so {text} on").decode() == f"\n so {text} on "


@given(st.lists(st.sampled_from(["a", "b", "p", "i", "q", "td", "table", "ref", "and", "x", "3", " ", "<", ">", "<=", ">=", "<<", "/"])))
def test_comparisons_lose_nothing(parts: list[str]) -> None:
    text = "so " + "".join(parts)
    assume(not re.search(r"<\s*/?\s*\w+\s*/?\s*>", text))
    assert clean(text).split() == text.split() == document_bytes(text).decode().split()


HOSTILE = [
    *("**ERROR 2026-11-01 connection 1 to host lost, retrying\n", "**a ", "__x ", "**", "'''a ", "''a ", "*a\n", "_a ", "`a "),
    *("<!-- a ", "<ref>a ", "<ref name=a>", "</ref ", "<math>", "<a x=", "{| a\n", "{{a", "[[a|", "[http://", "[a](b "),
    *("\n== a =", "\n#  a", "* ", "(, ", "&a"),
]


@pytest.mark.parametrize("piece", HOSTILE)
def test_what_is_never_closed_is_cleaned_in_linear_time(piece: str) -> None:
    """Eight times the text takes 8 times as long, or 64 times where time goes by its square. Below a fiftieth of a second there is nothing to compare."""

    def seconds(size: int) -> float:
        text, start = piece * (size // len(piece)), time.process_time()
        clean(text)
        document_bytes(text)
        return time.process_time() - start

    small = min(seconds(125_000), seconds(125_000))
    assert seconds(1_000_000) < 20 * max(small, 0.02)


@pytest.mark.parametrize("start", ["# a", "== a", "== ", "[http://a", "* ", "<ref>"])
def test_a_long_gap_is_cleaned_in_linear_time(start: str) -> None:
    assert clean(start + " " * 1_000_000 + "x").split()[-1] == "x"


@given(st.text("ab \t\u00a0\u3000", max_size=60))
def test_a_long_line_is_cleaned_in_parts_as_it_is_in_one(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cleaning, "_PART", 4)
        assert clean(text) == " ".join(text.split())


def test_a_document_of_one_line_is_cleaned_in_some_times_its_size() -> None:
    text = "ab cd efg " * 100_000
    tracemalloc.start()
    cleaned = clean(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert cleaned == text.strip()
    assert peak < 6 * len(text)  # all of its words at once take 18 times as much
