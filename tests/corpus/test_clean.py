"""Cleaning and sentence splitting."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.corpus.clean import clean, sentences


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


@given(st.text(alphabet='aB.!?…"”) 。1\n'))
def test_sentences_lose_and_add_nothing(raw: str) -> None:
    cleaned = clean(raw)
    assert "".join(sentences(cleaned)).replace(" ", "") == cleaned.replace(" ", "").replace("\n", "")
    assert all(sentence and "\n" not in sentence for sentence in sentences(cleaned))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Mr. Smith met Dr. J. K. Jones at 3.14 p.m. on Jan. 5. He left.", 2),
        ('"Go!" she said. "No." He went.', 3),
        ("What? he said. Yes! Yes.", 3),
        ("The U.S. Army came. See Fig. 3 and No. 5. He said no. It was I. He knew.", 5),
        ("1. Introduction to it. Then more.", 2),
        ("She wrote to Messrs. Beit. They came, etc. The end.", 3),
        ("日本語。これは文です。次", 3),
        ("Привет. Как дела? Да.", 3),
        ("It cost 3.5 million. Version 2.0 came…  And so on...", 3),
        ("First paragraph\n\nsecond one", 2),
        ("(It is so.) And 'so it is.' Indeed.", 3),
    ],
)
def test_abbreviations_initials_decimals_and_quotes(text: str, count: int) -> None:
    assert len(sentences(clean(text))) == count, sentences(clean(text))
