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

COMMENT = re.compile(r"<!--.*?-->|<!doctype\s[^<>]{1,300}>|<\?xml\s[^<>]{0,300}\?>", re.S | re.I)


def tags(elements: str) -> re.Pattern[str]:
    """Return a pattern that finds the tags of some elements: opening (`<br clear="all">`), closing (`</b>`) and empty ones (`<hr/>`).

    Args:
        elements: their names, with `|` between them.
    """
    return re.compile(rf"<(?:/(?:{elements})\s{{0,9}}>|(?:{elements}){ATTRIBUTES}/?>)", re.I)
