"""Text as the byte models read it: UTF-8, markup undone, one line a document."""

from __future__ import annotations

import html
import re

from overnight.corpus import markup

VOCABULARY_SIZE = 256
VOCABULARY_HASH = "utf-8 bytes"
"""Stands in a manifest where the hash of a WordPiece vocabulary would."""

FRAME = 3
"""Bytes around the text of each document."""

_TAG = markup.tags(f"{markup.BREAKING}|{markup.INLINE}")
# Python makes no number of more than 4,300 digits; one of eight or more is no character anyway.
_LONG_NUMBER = re.compile(r"&#(?=[0-9]{4000})0*+([0-9]{0,8})[0-9]*+")


def document_bytes(text: str) -> bytes:
    """Return a document as the models read it: a line feed and a space before it, a space after it (Puri et al. 2018, arXiv 1812.01466).

    HTML tags and comments become a space, then character references are unescaped, so that an escaped tag stays as text. All white
    space becomes one space. Half a surrogate pair becomes `?`.

    Args:
        text: of one document; an empty one gives the three bytes around it.
    """
    return framed(" ".join(without_markup(text).split()))


def without_markup(text: str) -> str:
    """Return a text without tags, comments and character references; its lines stay."""
    if "<" in text:
        text = _TAG.sub(" ", markup.without_comments(text, " "))
    return html.unescape(_LONG_NUMBER.sub(r"&#0\1", text)) if "&" in text else text


def framed(line: str) -> bytes:
    """Return the one line of a document with what stands around it."""
    return f"\n {line} ".encode("utf-8", "replace")
