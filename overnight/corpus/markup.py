"""What counts as a tag: markup is distinguished from text that only has `<` and `>` in it, by one rule for WordPiece tokens and bytes."""

from __future__ import annotations

import re

# Elements whose text is a paragraph of its own, and those within one: of HTML, and of the markup of wikis. By name, since `<sighs>` is text.
BREAKING = (
    "blockquote|body|br|caption|center|dd|div|dl|dt|figcaption|figure|h[1-6]|head|hr|html|li|noscript|ol|p|poem|pre|table|tbody|tfoot|thead"
    "|tr|ul"
)
INLINE = (
    "a|abbr|acronym|b|big|cite|code|col|colgroup|del|dfn|em|font|i|iframe|img|includeonly|ins|kbd|mark|meta|noinclude|nobr|nowiki"
    "|onlyinclude|q|ref|references|s|samp|script|section|small|span|strike|strong|style|sub|sup|td|th|tt|u|var|wbr"
)
DROPPED = "ref|math|gallery|script|style|timeline"
"""Elements that go with what is in them."""
# An attribute has a value, or is one of the few that never have: `<b and c>` is text. Lengths are bounded, so that a text of `<a x="` costs no more.
_VALUE = r"""(?:"[^"]{0,400}"|'[^']{0,400}'|[^\s"'=<>][^\s"'<>]{0,400})"""
_ATTRIBUTE = rf"""(?:\s{{1,9}}|(?<=["']))(?:[A-Za-z_:][\w:.-]{{0,60}}\s{{0,9}}=\s{{0,9}}{_VALUE}|(?:nowrap|noshade|compact|border|hidden|async|defer)(?![\w-]))"""
ATTRIBUTES = rf"(?:{_ATTRIBUTE}){{0,30}}\s{{0,9}}"

_COMMENT = re.compile(r"<!--.*?-->", re.S)
_DECLARATION = re.compile(r"<!doctype\s[^<>]{1,300}>|<\?xml\s[^<>]{0,300}\?>", re.I)


class Next:
    """Where a pattern comes next in a text, for places that only grow.

    Each match is looked for once: marks that are never closed would else all be followed to the end of the text.
    """

    def __init__(self, pattern: re.Pattern[str], text: str) -> None:
        self._pattern, self._text, self._place = pattern, text, -1

    def after(self, start: int) -> int:
        """Return where the first match from a place on begins, the length of the text where there is none."""
        if self._place < start:
            match = self._pattern.search(self._text, start)
            self._place = match.start() if match else len(self._text)
        return self._place


def without_comments(text: str, instead: str = "") -> str:
    """Return a text without the comments and declarations of HTML.

    Args:
        text: with or without markup.
        instead: what comes in place of each.
    """
    end = text.rfind("-->") + 3  # behind the last end, no comment ends
    if end > 2:
        text = _COMMENT.sub(instead, text[:end]) + text[end:]
    return _DECLARATION.sub(instead, text)


def tags(elements: str) -> re.Pattern[str]:
    """Return a pattern that finds the tags of some elements: opening (`<br clear="all">`), closing (`</b>`) and empty ones (`<hr/>`).

    Args:
        elements: their names, with `|` between them.
    """
    return re.compile(rf"<(?:/(?:{elements})\s{{0,9}}>|(?:{elements}){ATTRIBUTES}/?>)", re.I)
