"""Raw text to clean paragraphs.

Every pattern is behind a cheap test for a character it needs: most text needs none of them, and this runs over all of it.
Each is linear in the length of the text, whatever it holds: what is never closed is not followed to the end of the text from every mark.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterator, Mapping

from overnight.corpus import markup

# Controls, soft hyphen, zero-width and bidirectional marks, byte-order mark, lone surrogates, non-characters.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff]"
)
_ASCII_CONTROLS = {code: None for code in (*range(9), *range(14, 28), 127)} | {code: "\n" for code in (11, 12, 28, 29, 30)}
_NEW_LINES = ("\r\n", "\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029")
_ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")

_DROPPED_ELEMENT = re.compile(rf"<((?a:{markup.DROPPED})){markup.ATTRIBUTES}/?>", re.I)
_DROPPED_END = {name: re.compile(rf"</{name}\s*>", re.I) for name in markup.DROPPED.split("|")}
_BREAKING_TAG, _INLINE_TAG = markup.tags(markup.BREAKING), markup.tags(markup.INLINE)
_TEMPLATE = re.compile(r"\{\{[^{}]{0,2000}\}\}")
_TABLE = re.compile(r"^\{\|.*?^\|\}", re.S | re.M)
_WIKI_FILE = re.compile(r"\[\[(?:File|Image|Category):[^\[\]]*\]\]", re.I)
_WIKI_LINK = re.compile(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]")
_WEB_LINK = re.compile(r"\[(?:https?|ftp)://(?:[^\s\[]|\[(?!(?:https?|ftp)://)){1,2000}(?:[ \t]++([^\[\]]*+))?\]")
_WIKI_HEADING = re.compile(r"^==.*$", re.M)
_WIKI_QUOTES = re.compile(r"'''(?=\S)|''(?<!''')(?=[^\s'])")
_WIKI_QUOTES_END = {"'''": re.compile(r"'''(?<=\S''')"), "''": re.compile(r"''(?<=[^\s']'')(?!')")}
_MAGIC_WORD = re.compile(r"__(?:NO)?(?:TOC|EDITSECTION|INDEX|FORCETOC|GALLERY)__")
_EMPTY_BRACKETS = re.compile(r"\((?<!\w\()[ \t,;:]*\)(?![\w(])")

_IMAGE = re.compile(r"!\[[^\[\]\n]*\]\([^()\s]*(?:[ \t]+\"[^\"\n]*\")?\)")
_LINK = re.compile(r"\[([^\[\]\n]+)\]\([^()\s]*(?:\([^()\s]*\)[^()\s]*)?(?:[ \t]+\"[^\"\n]*\")?\)")
_CODE = re.compile(r"`(?<!``)(`?)(?![`\s])([^`\n]+)(?<!\s)`\1(?!`)")
# The mark comes first and the look-behind after it: a pattern that begins with a look-behind is tried at every character.
_STRONG = re.compile(r"(?:\*\*|__)(?<!\w__)(?=[^\s*_])")
_STRONG_END = {"**": re.compile(r"\*\*(?<=\S\*\*)(?!\w)"), "__": re.compile(r"__(?<=\S__)(?!\w)")}
_LINE_END, _PARAGRAPH_END = re.compile(r"\n"), re.compile(r"\n\n")
_EMPHASIS = re.compile(r"([*_])(?<![\w*_].)(?=[^\s*_])([^*_\n]*+(?:\n(?!\n)[^*_\n]*+)*?)(?<=[^\s*_])\1(?![\w*_])")

_MARK_STARTS = frozenset(("", *"#-*=_~+>|`• \t0123456789"))
_RULE = re.compile(r"(?:[-*_=~+#:•][ \t]*+){3,}+$|`{3,}[\w+-]*$")
_HEADING = re.compile(r"#{1,6}[ \t]+(.*)")
_QUOTED = re.compile(r"(?:>[ \t]?)+")
_ITEM = re.compile(r"(?:[-*+•]|\d{1,3}[.)])[ \t]+(?=\S)")
# Characters of a line that are split into words at once.
_PART = 1 << 16


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
        text = _without_marks(text, _STRONG, _STRONG_END, _PARAGRAPH_END, keep_names=True)
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
                title = heading[1].rstrip("#")
                yield from _one_line(title if title.endswith((" ", "\t")) else heading[1])
            elif item:
                lines.append(line[item.end() :])
        else:
            lines.append(line)
    yield from _one_line(" ".join(lines))


def _one_line(text: str) -> tuple[str, ...]:
    if len(text) > _PART:
        # A document may be one line of millions of words, each of which as a string takes ten times its letters.
        text = " ".join(filter(None, (" ".join(part.split()) for part in _parts(text))))
        return (text,) if text else ()
    words = text.split()  # knows every white space of Unicode
    return (" ".join(words),) if words else ()


def _parts(text: str) -> Iterator[str]:
    """Yield a text in parts that begin at spaces, of some :data:`_PART` characters each."""
    start = 0
    while (stop := text.find(" ", start + _PART)) > 0:
        yield text[start:stop]
        start = stop
    yield text[start:]


def _without_html(text: str) -> str:
    text = _without_elements(markup.without_comments(text))
    text = _BREAKING_TAG.sub("\n\n", text)
    return _INLINE_TAG.sub("", text)


def _without_elements(text: str) -> str:
    """Return a text without the elements that go with what is in them; one that is never closed stays."""
    ends = {name: markup.Next(pattern, text) for name, pattern in _DROPPED_END.items()}
    out: list[str] = []
    kept = at = 0
    while match := _DROPPED_ELEMENT.search(text, at):
        end = match.end()
        if not match[0].endswith("/>"):
            closing = ends[match[1].lower()].after(end)
            end = text.find(">", closing) + 1
        at = end or match.start() + 1
        if end:
            out.append(text[kept : match.start()])
            kept = end
    return "".join(out) + text[kept:]


def _unescape(match: re.Match[str]) -> str:
    char = html.unescape(match[0])
    # A control, a surrogate or an odd space written as an entity is as unwelcome as the character itself.
    return " " if char.isspace() else _INVISIBLE.sub("", char)


def _without_wiki(text: str) -> str:
    if "{{" in text:
        for _ in range(4):  # templates nest; deeper ones are rarer than text that only looks like one
            text = _TEMPLATE.sub("", text)
    if "{|" in text:
        end = text.rfind("\n|}") + 3  # behind it, no table ends
        text = _TABLE.sub("", text[:end]) + text[end:]
    if "[[" in text:
        text = _WIKI_FILE.sub("", text)
        text = _WIKI_LINK.sub(r"\1", text)
    if "[http" in text or "[ftp" in text:
        text = _WEB_LINK.sub(r"\1", text)
    if "==" in text:
        text = _WIKI_HEADING.sub(_wiki_heading, text)
    if "''" in text:
        text = _without_marks(text, _WIKI_QUOTES, _WIKI_QUOTES_END, _LINE_END)
    return _MAGIC_WORD.sub("", text) if "__" in text else text


def _wiki_heading(match: re.Match[str]) -> str:
    """Return the title of a line in two to six `=` on each side between blank lines, nothing of a line that underlines a title; another line as it is."""
    line = match[0].rstrip(" \t")
    if not line.strip("="):
        return "\n\n"
    left, right = len(line) - len(line.lstrip("=")), len(line) - len(line.rstrip("="))
    level = min(left, right, 6, len(line) // 2)
    return "\n\n" + line[level:-level].strip(" \t") + "\n\n" if level > 1 else match[0]


def _without_marks(
    text: str, opening: re.Pattern[str], closings: Mapping[str, re.Pattern[str]], limit: re.Pattern[str], keep_names: bool = False
) -> str:
    """Return a text without the marks of bold and italic.

    Args:
        text: with them.
        opening: finds a mark that begins something.
        closings: find, for each mark, one that ends it.
        limit: ends all that is open.
        keep_names: leave the Python name `__init__` as it is; of `__bold words__` the marks go.
    """
    ends = {mark: markup.Next(pattern, text) for mark, pattern in closings.items()}
    limits = markup.Next(limit, text)
    out: list[str] = []
    kept = at = 0
    while match := opening.search(text, at):
        mark, (start, begin) = match[0], match.span()
        end = ends[mark].after(begin + 1)
        if end >= limits.after(begin):
            at = start + 1
            continue
        at = end + len(mark)
        if not (keep_names and mark == "__" and text[begin:end].isidentifier()):
            out += (text[kept:start], text[begin:end])
            kept = at
    return "".join(out) + text[kept:]
