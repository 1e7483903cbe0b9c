"""Raw text to clean paragraphs.

Every pattern is behind a cheap test for a character it needs: most text needs none of them, and this runs over all of it.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterator

from overnight.corpus import markup

# Controls, soft hyphen, zero-width and bidirectional marks, byte-order mark, lone surrogates, non-characters.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff]"
)
_ASCII_CONTROLS = {code: None for code in (*range(9), *range(14, 28), 127)} | {code: "\n" for code in (11, 12, 28, 29, 30)}
_NEW_LINES = ("\r\n", "\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029")
_ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")

_DROPPED_ELEMENT = re.compile(rf"<({markup.DROPPED}){markup.ATTRIBUTES}(?:/>|>.*?</\1\s*>)", re.S | re.I)
_BREAKING_TAG, _INLINE_TAG = markup.tags(markup.BREAKING), markup.tags(markup.INLINE)
_TEMPLATE = re.compile(r"\{\{[^{}]{0,2000}\}\}")
_TABLE = re.compile(r"^\{\|.*?^\|\}", re.S | re.M)
_WIKI_FILE = re.compile(r"\[\[(?:File|Image|Category):[^\[\]]*\]\]", re.I)
_WIKI_LINK = re.compile(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]")
_WEB_LINK = re.compile(r"\[(?:https?|ftp)://\S+(?:[ \t]+([^\[\]]*))?\]")
_WIKI_HEADING = re.compile(r"^(={2,6})[ \t]*(.*?)[ \t]*\1[ \t]*$", re.M)
_WIKI_QUOTES = re.compile(r"'''(?=\S)([^\n]*?\S)'''|''(?<!''')(?=[^\s'])([^\n]*?[^\s'])''(?!')")
_MAGIC_WORD = re.compile(r"__(?:NO)?(?:TOC|EDITSECTION|INDEX|FORCETOC|GALLERY)__")
_EMPTY_BRACKETS = re.compile(r"\((?<!\w\()[ \t,;:]*\)(?![\w(])")

_IMAGE = re.compile(r"!\[[^\[\]\n]*\]\([^()\s]*(?:[ \t]+\"[^\"\n]*\")?\)")
_LINK = re.compile(r"\[([^\[\]\n]+)\]\([^()\s]*(?:\([^()\s]*\)[^()\s]*)?(?:[ \t]+\"[^\"\n]*\")?\)")
_CODE = re.compile(r"`(?<!``)(`?)(?![`\s])([^`\n]+)(?<!\s)`\1(?!`)")
# The mark comes first and the look-behind after it: a pattern that begins with a look-behind is tried at every character.
_STRONG = re.compile(r"(\*\*|__)(?<!\w__)(?=[^\s*_])((?:[^\n]|\n(?!\n))*?)(?<=\S)\1(?!\w)")
_EMPHASIS = re.compile(r"([*_])(?<![\w*_].)(?=[^\s*_])([^*_\n]*(?:\n(?!\n)[^*_\n]*)*?)(?<=[^\s*_])\1(?![\w*_])")

_MARK_STARTS = frozenset(("", *"#-*=_~+>|`• \t0123456789"))
_RULE = re.compile(r"(?:[-*_=~+#:•][ \t]*+){3,}+$|`{3,}[\w+-]*$")
_HEADING = re.compile(r"#{1,6}[ \t]+(.*?)(?:[ \t]+#+)?[ \t]*$")
_QUOTED = re.compile(r"(?:>[ \t]?)+")
_ITEM = re.compile(r"(?:[-*+•]|\d{1,3}[.)])[ \t]+(?=\S)")


def clean(text: str) -> str:
    """Clean a document: paragraphs of one line each, a blank line between them.

    Unicode becomes NFC; characters that cannot be seen go; every white space is one space; what is left of HTML,
    wiki and Markdown markup goes and its text stays. A list item, like a heading, is a paragraph of its own.

    Args:
        text: raw text of one document.
    """
    return paragraphs(without_markup(text))


def without_markup(text: str) -> str:
    """Return a document without what is no text; its lines stay as they are, with the marks before headings and items of lists."""
    for mark in _NEW_LINES if not text.isascii() else _NEW_LINES[:2]:
        if mark in text:
            text = text.replace(mark, "\n")
    # str.translate() has a fast path for ASCII, and for ASCII only.
    text = text.translate(_ASCII_CONTROLS) if text.isascii() else _INVISIBLE.sub("", text)
    if "<" in text:
        text = _without_html(text)
    if "&" in text:
        text = _ENTITY.sub(_unescape, text)
    if "[" in text or "{" in text or "=" in text or "''" in text:
        text = _without_wiki(text)
    if "](" in text:
        text = _LINK.sub(r"\1", _IMAGE.sub("", text))
    if "`" in text:
        text = _CODE.sub(r"\2", text)
    if "**" in text or "__" in text:
        text = _STRONG.sub(_keep_dunder, text)
    if "*" in text or "_" in text:
        text = _EMPHASIS.sub(r"\2", text)
    if "(" in text and any(mark in text for mark in ("( ", "()", "(,", "(;")):
        text = _EMPTY_BRACKETS.sub("", text)
    return text


def paragraphs(text: str) -> str:
    """Return the paragraphs of what :func:`without_markup` returned, one line each, with a blank line between them."""
    # NFC comes last, because what stood between a letter and its accent may have gone.
    return unicodedata.normalize("NFC", "\n\n".join(_paragraphs(text)))


def _paragraphs(text: str) -> Iterator[str]:
    """Join the lines of each paragraph; a heading or a list item is one of its own, a rule is none."""
    lines: list[str] = []
    for line in text.split("\n"):
        if line[:1] not in _MARK_STARTS:  # most lines
            lines.append(line)
            continue
        if not line:
            yield from _one_line(" ".join(lines))
            lines = []
            continue
        line = line.strip()
        if line[:1] == ">":
            line = _QUOTED.sub("", line, count=1)
        if line[:1] == "|" and line[-1:] == "|":
            line = line.replace("|", " ").strip()
        rule = _RULE.match(line)  # `* * *` is no item
        heading = _HEADING.match(line) if line[:1] == "#" and not rule else None
        item = None if rule or heading else _ITEM.match(line)
        if not line or rule or heading or item:
            yield from _one_line(" ".join(lines))
            lines = []
            if heading:
                yield from _one_line(heading[1])
            elif item:
                lines.append(line[item.end() :])
        else:
            lines.append(line)
    yield from _one_line(" ".join(lines))


def _one_line(text: str) -> tuple[str, ...]:
    words = text.split()  # knows every white space of Unicode
    return (" ".join(words),) if words else ()


def _without_html(text: str) -> str:
    text = markup.COMMENT.sub("", text)
    text = _DROPPED_ELEMENT.sub("", text)
    text = _BREAKING_TAG.sub("\n\n", text)
    return _INLINE_TAG.sub("", text)


def _unescape(match: re.Match[str]) -> str:
    char = html.unescape(match[0])
    # A control, a surrogate or an odd space written as an entity is as unwelcome as the character itself.
    return " " if char.isspace() else _INVISIBLE.sub("", char)


def _without_wiki(text: str) -> str:
    if "{{" in text:
        for _ in range(4):  # templates nest; deeper ones are rarer than text that only looks like one
            text = _TEMPLATE.sub("", text)
    if "{|" in text:
        text = _TABLE.sub("", text)
    if "[[" in text:
        text = _WIKI_FILE.sub("", text)
        text = _WIKI_LINK.sub(r"\1", text)
    if "[http" in text or "[ftp" in text:
        text = _WEB_LINK.sub(r"\1", text)
    if "==" in text:
        text = _WIKI_HEADING.sub(r"\n\n\2\n\n", text)
    if "''" in text:
        text = _WIKI_QUOTES.sub(r"\1\2", text)
    return _MAGIC_WORD.sub("", text) if "__" in text else text


def _keep_dunder(match: re.Match[str]) -> str:
    """Return what `__bold words__` leaves without its marks; the Python name `__init__` keeps them."""
    return match[0] if match[1] == "__" and match[2].isidentifier() else match[2]
