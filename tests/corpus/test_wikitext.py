"""Wikitext to plain text: every construct, text that only looks like markup, and pages that are broken on purpose."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.corpus.clean import clean
from overnight.corpus.wikitext import plain


def read(wikitext: str) -> str:
    """Return the text as preparation has it: paragraphs, a blank line between them."""
    return clean(plain(wikitext))


@pytest.mark.parametrize(
    ("wikitext", "text"),
    [
        # Links.
        ("a [[b]] c", "a b c"),
        ("a [[b|c d]]s e", "a c ds e"),
        ("[[b#part|c]] [[:Category:D]] [[:fr:E]]", "c Category:D fr:E"),
        ("a [[File:x.jpg|thumb|200px|Caption with [[b|a link]].]]b", "a b"),
        ("a [[Файл:x.jpg|мини|Кот]]b [[Category:C]]", "a b"),
        ("[[fr:Chat]][[zh-min-nan:Niau]]a [[doi:10.1/x|paper]] [[wikt:cat|cat]]", "a paper cat"),
        ("[[a|b [[c]] d]]", "b c d"),
        ("[[a\nb]] c", "a b c"),
        ("[[A (b)|]] c", "A (b) c"),
        ("[http://x.org a site] [https://y.org] [//z.org z] [mailto:a@b.c mail]", "a site z mail"),
        ("[[[http://x.org a]]]", "[a]"),
        ("an array[3] and a [note]", "an array[3] and a [note]"),
        # Templates.
        ("a {{b|{{c|d}}|[[e]]}}, f", "a, f"),
        ("a {{nowrap|b [[c|d]] {{lang|fr|mot}}}} e", "a b d mot e"),
        ("a {{unknown|{{nowrap|b}}}}c", "a c"),
        ("{{Infobox\n| a = [[b]]\n| c = {{d}}\n}}\nText.", "Text."),
        ("{{{1|default}}} x {{{2}}}", "default x"),
        ("{{#if: a | b}}c {{lc:ABC}} {{formatnum:1000}}", "c abc 1000"),
        ("Foo (; {{IPA|x}}, born 1900) is", "Foo (born 1900) is"),
        ("Foo ({{IPA|x}}) is", "Foo is"),
        # Tables.
        ("a\n{| class=x\n|-\n| b || c\n{|\n| d\n|}\n|}\ne", "a\n\ne"),
        ("a\n:{|\n| b\n|}\nc {{x|y=\n|}} d", "a\n\nc d"),
        ("<table><tr><td>b<table><tr><td>c</td></tr></table></td></tr></table>d", "d"),
        # Elements.
        ("a<ref>b {{c}}</ref>d<ref name=x />e<ref name='y'>{{</ref>.", "ade."),
        ("a<ref>never closed b<ref>c</ref>d", "anever closed bd"),
        ("a<!-- b -->c<!-- d", "ac"),
        ("a\n<!-- b -->\nc", "a c"),
        ("a<math>\\frac{{1}}{2}</math>b<gallery>\nc.jpg|d\n</gallery>e", "abe"),
        ("a<br />b<small>c</small> H<sub>2</sub>O<references/>", "a\n\nbc H2O"),
        ("if a <b and c> d, a < b, <sighs>", "if a d, a < b, <sighs>"),
        ("a&nbsp;b &ndash; c &amp; d &notanentity e", "a b – c & d &notanentity e"),
        ("a -{zh-hans:b; zh-hant:c}- -{zh|d}- -{{x}}-f", "a b d --f"),
        ("__NOTOC__a __init__ __FORCETOC__", "a __init__"),
        # Quotes.
        ("'''a''' ''b'' '''''c''''' it's", "a b c it's"),
        ("l'''amour'' et '''''mort'''''", "l'amour et mort"),
        ("the dog''''s''' day", "the dog's day"),
        # Lines.
        ("== A ==\ntext\n===B=== \n\n==C==\nmore", "A\n\ntext\n\nC\n\nmore"),
        ("==A==\n{{reflist}}\n==B==\n[[Category:C]]", ""),
        ("* a\n** b [[c]]\n# d\n: e\n; f : g\n----\nh", "a\n\nb c\n\nd\n\ne\n\nf : g\n\nh"),
        ("a\nb\n\n c", "a b\n\nc"),
        ("a = b == c", "a = b == c"),
    ],
)
def test_text(wikitext: str, text: str) -> None:
    assert read(wikitext) == text


def test_what_is_not_to_be_parsed_is_text() -> None:
    text = plain("<nowiki>''a'' [[b]] {| <b> &amp;</nowiki> c<pre>\n== d ==\n* {{e}}</pre>")
    assert text.split() == ["''a''", "[[b]]", "{|", "<b>", "&", "c", "==", "d", "==", "*", "{{e}}"]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{convert|5|km}}", "5 km"),
        ("{{convert|5|to|10.5|km2|sqmi|abbr=on}}", "5 to 10.5 km²"),
        ("{{cvt|5|ft|6|in|m}}", "5 ft 6 in"),
        ("{{convert|20|C}}", "20 °C"),
        ("{{lang|fr|mot}} {{lang-de|Wort}} {{langx|de|Wort}}", "mot Wort Wort"),
        ("{{Nowrap|1=a = b}}", "a = b"),
        ("{{frac|1|2}} {{frac|3|1|2}} {{frac|4}}", "1/2 3 1/2 1/4"),
        ("{{val|5|2|e=3|u=km}}", "5±2×10^3 km"),
        ("{{as of|2007|3}} {{as of|2008|lc=y}}", "As of March 2007 as of 2008"),
        ("{{circa|1900}} {{c.|1900|1910}}", "c. 1900 c. 1900 – c. 1910"),
        ("{{USS|Enterprise|CVN-65}} {{HMS|Victory||2}} {{ship|SS|Bremen}}", "USS Enterprise (CVN-65) HMS Victory SS Bremen"),
        ("{{nihongo|Tokyo|東京|Tōkyō}} {{transl|ja|Tōkyō}}", "Tokyo (東京, Tōkyō) Tōkyō"),
        ("a{{snd}}b{{'s}} c{{!}}d 1{{=}}2 {{gaps|1|000}}", "a – b's c|d 1=2 1000"),
        ("{{flag|France}} {{flagicon|France}}x {{color|red|y}} {{abbr|a|b}} {{ill|A|fr|B}}", "France x y a A"),
        ("x\n{{quote|To be, [[or]] not.|Hamlet}}\ny", "x\n\nTo be, or not.\n\ny"),
        ("{{cquote|quote=Never.}}", "Never."),
        ("{{ubl|a|b}}", "a\n\nb"),
        ("{{US$|5}} {{gloss|cat}} {{angbr|a}} {{sic|teh}}", "US$5 ‘cat’ ⟨a⟩ teh"),
        ("{{ nowrap\n|a}}", "a"),
        ("{{chem|H|2|O}} {{abs|x}} {{bracket|y}}a{{mdashb}}b", "H2O |x| [y]a—b"),
    ],
)
def test_templates_that_are_words_of_a_sentence_are_rendered(template: str, text: str) -> None:
    assert read(template) == text


@pytest.mark.parametrize(
    "wikitext", ["{{Infobox\n| a = b\n| c\nText.", "{|\n| a\n|-\n! b\nText.", "a ]] Text.", "[[a Text.", "}} |} Text."]
)
def test_what_is_never_closed_hides_no_text_behind_it(wikitext: str) -> None:
    text = read(wikitext)
    assert text.endswith("Text.") and not any(mark in text for mark in ("[[", "]]", "{{", "}}", "{|", "|}"))


def test_the_names_of_files_and_categories_of_another_language_can_be_given() -> None:
    assert plain("[[Mynd:x.jpg|a]]b", frozenset({"mynd"})) == "b"


# Brackets, and marks that mean something within them.
WORDS = st.sampled_from(
    [
        "a",
        "b c",
        "|",
        "\n",
        "\n\n",
        "nowrap|",
        "File:x|",
        "=",
        "'''",
        "''",
        "* ",
        ":",
        "&lt;",
        "<br>",
        "<ref>",
        "</ref>",
        "<!--",
        "-->",
        "[",
        "]",
        "{",
        "}",
        "é",
    ]
)
BALANCED = st.recursive(
    st.sampled_from(["a", "b c ", "|", "nowrap|", "lang|fr|", "File:x|", "'''", "x=", "convert|5|km", "<small>", "&amp;", "\n"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        .map("".join)
        .flatmap(lambda text: st.sampled_from([f"[[{text}]]", f"{{{{{text}}}}}", f"\n{{|\n{text}\n|}}\n", text]))
    ),
    max_leaves=20,
)


@given(
    st.lists(
        st.one_of(WORDS, st.sampled_from(["[[", "]]", "{{", "}}", "\n{|", "\n|}", "{{{", "}}}", "<nowiki>", "</nowiki>", "<table>"])),
        max_size=40,
    ).map("".join)
)
def test_no_text_is_too_broken(wikitext: str) -> None:
    text = plain(wikitext)
    # One bracket left of others may meet another, and what is written as text stays: neither here.
    if "nowiki" not in wikitext and "&" not in wikitext:
        assert text.count("{{") <= wikitext.count("{") and "\x00" not in text
    assert plain(wikitext) == text


@given(st.text(max_size=200))
def test_text_of_any_characters_is_read(wikitext: str) -> None:
    assert len(plain(wikitext)) <= 2 * len(wikitext) + 20


@given(BALANCED)
def test_balanced_brackets_leave_none(wikitext: str) -> None:
    text = plain(wikitext)
    assert "[[" not in text and "{{" not in text and "]]" not in text and "}}" not in text


@given(st.lists(st.text("abcdefgh ,.", min_size=1, max_size=30), max_size=8))
def test_text_without_markup_is_as_it_was(lines: list[str]) -> None:
    text = "\n".join(lines)
    assert plain(text).split() == text.split()


HOSTILE = [
    *(
        "[[",
        "]]",
        "{{",
        "}}",
        "{{{",
        "}}}",
        "\n{|",
        "\n|}",
        "[[a|",
        "{{nowrap|",
        "{{a|[[",
        "\n{|{{[[",
        "[",
        "{",
        "<",
        "<ref>",
        "<ref",
        "</ref>",
        "<ref>a</ref>",
    ),
    *(
        "<ref name=",
        "<!--",
        "-->",
        "<nowiki>",
        "<nowiki>[",
        "<a ",
        "'''",
        "''",
        "'",
        "=",
        "\n==",
        "\n=a=",
        "[http://a ",
        "[http://",
        "[[[http:",
        "(,",
        "(",
        "( ",
        "&",
        "&a",
        "_",
    ),
    *(
        "__",
        "__A",
        "{{convert|1|",
        "{{a|b=",
        "{{{a|",
        "\n*",
        "\n:",
        "[[:",
        "[[a:",
        "|",
        "\n|",
        "<table>",
        "</table>",
        "<br>",
        "{{as of|",
        "<ref><ref />",
        "<math>",
        "[[File:a|[[b]]",
    ),
]


@pytest.mark.parametrize("piece", HOSTILE)
def test_a_page_of_one_mark_is_read_in_linear_time(piece: str) -> None:
    """Each page is 100 kB: the square of its marks would be an hour."""
    count = 100_000 // len(piece)
    closing = {"{{nowrap|": "}}", "[[a|": "]]", "{{": "}}", "[[": "]]", "{{convert|1|": "}}", "\n{|": "\n|}", "{{{a|": "}}}"}.get(piece, "")
    plain(piece * count)
    assert "{{" not in plain(piece * (count // 2) + "x" + closing * (count // 2)) or not closing
