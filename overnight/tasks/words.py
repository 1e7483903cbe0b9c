"""The words of a text, as rules without a network count them."""

from __future__ import annotations

import re
import unicodedata
from functools import cache

from overnight.corpus.shingles import ALONE

# Thai and Lao, Burmese, Khmer, Burmese again, ideographs of compatibility, katakana of half the width.
_WITHOUT_SPACES = (
    *ALONE,
    (0x0E00, 0x0F00),
    (0x1000, 0x10A0),
    (0x1780, 0x1800),
    (0xA9E0, 0xAA00),
    (0xAA60, 0xAA80),
    (0xF900, 0xFB00),
    (0xFF66, 0xFFA0),
)


@cache
def word_pattern() -> re.Pattern[str]:
    r"""Return what matches a word: a run of letters, digits, `_` and the marks upon them, or of a script without spaces one character with its marks.

    Where there are no marks and no such script, these are the matches of `\w+`.
    """
    alone = "".join(f"{chr(first)}-{chr(end - 1)}" for first, end in _WITHOUT_SPACES)
    # Marks beyond the 16 bits for which a set of characters is one look-up are of scripts that hardly anybody writes.
    marks = "".join(chr(code) for code in range(0x10000) if unicodedata.category(chr(code)).startswith("M"))
    return re.compile(rf"(?=\w)[{alone}][{marks}]*|[^\W{alone}]+(?:[{marks}]+[^\W{alone}]*)*")
