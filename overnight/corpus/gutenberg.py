"""The license that Project Gutenberg puts before and after each text, removed by the lines that mark its ends since 1991."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from overnight.corpus.decompress import TruncatedError
from overnight.corpus.document import Source

_START = re.compile(r"\s*\*{3} ?START OF TH(?:E|IS) PROJECT GUTENBERG|\s*\*END ?\*? ?THE SMALL PRINT! FOR", re.I)
_END = re.compile(
    r"\s*\*{3} ?END OF TH(?:E|IS) PROJECT GUTENBERG|\s*(?:The )?End of (?:The |This )?Project Gutenberg(?:'s|’s)?\b"
    r"|\s*(?:Ende (?:dieses|diese|des)|Fin de|Einde van(?: het| deze)?) Proje[ck]t Gutenberg",
    re.I,
)
_NEXT_BOOK = re.compile(r"\s*\*{0,3}\s*(?:The )?Project Gutenberg(?:'s|’s)? E-?(?:Book|Text) of\b", re.I)
# Lines of the longest license before and after a text are some 400; a marker further down is part of the text.
_MOST_LINES = 600
_MOST_LINES_BEFORE_THE_NAME = 50


def remove_license(text: str, source: Source) -> str:
    """Return a text without the license before and behind it; one without its markers is returned as it is."""
    if "utenberg" not in text and "GUTENBERG" not in text:
        return text
    return "".join(line for _, line in without_license(enumerate(text.splitlines(keepends=True)), source))


def without_license(lines: Iterable[tuple[int, str]], source: Source) -> Iterator[tuple[int, str]]:
    """Yield numbered lines without those of a license; of a file with several texts, of each.

    Args:
        lines: of a text, in order.
        source: whose `licenses` is counted up for each text that had one.

    Raises:
        TruncatedError: as `lines` does, after what was readable.
    """
    where, counted, named = "before", False, False
    kept: list[tuple[int, str]] = []  # lines that are a license if its marker comes, else text
    rest = iter(lines)
    try:
        for number, line in rest:
            if where != "behind" and _END.match(line):
                yield from kept
                where, kept = "behind", [(number, line)]
            elif where == "text":
                yield number, line
            elif _START.match(line):
                _close_marker(line, rest)
                source.licenses += 1
                where, counted, kept = "text", True, []
            elif where == "behind" and _NEXT_BOOK.match(line):
                source.licenses += not counted
                where, counted, kept, named = "before", False, [(number, line)], True
            else:
                kept.append((number, line))
                named = named or "gutenberg" in line.lower()
                if len(kept) > (_MOST_LINES if named or where == "behind" else _MOST_LINES_BEFORE_THE_NAME):
                    yield from kept
                    where, kept = "text", []
    except TruncatedError:
        yield from kept if where == "before" else []
        raise
    if where == "behind":
        source.licenses += not counted
    else:
        yield from kept


def _close_marker(line: str, rest: Iterator[tuple[int, str]]) -> None:
    """Take the lines to which a marker with a long title is broken."""
    last = line.strip()
    for _ in range(3):
        if not line.strip().startswith("***") or not last or last.endswith("***"):
            return
        last = next(rest, (0, ""))[1].strip()
