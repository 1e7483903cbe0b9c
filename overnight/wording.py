"""Numbers in words and lines that fit, for whatever is said to people."""

from __future__ import annotations

import shutil
import textwrap
from typing import TextIO


def plural(count: int, noun: str, many: str = "") -> str:
    """Return a count with its noun in the right form: 1 tensor, 1,200 tensors.

    Args:
        count: of things.
        noun: of one thing.
        many: of several, where it is not the noun with an s.
    """
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


def yaml_text(value: object) -> str:
    """Return a setting as a recipe would have it: true, not True; [a, b]; nothing at all as a dash."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(yaml_text, value))}]"
    return "-" if value in (None, "", {}) else str(value)


def folded(text: str, width: int) -> str:
    """Break the lines that are wider than `width` columns between words, never inside one; what goes on is indented further than its line."""
    lines = []
    for line in text.split("\n"):
        indent = " " * (min(len(line) - len(line.lstrip()), width // 2) + 2)
        pieces = textwrap.wrap(
            line, max(width, 20), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, replace_whitespace=False
        )
        lines += pieces if len(line) > width and pieces else [line]
    return "\n".join(lines)


def for_stream(text: str, stream: TextIO) -> str:
    """Break lines between words where a terminal would break them anywhere; text for a file or a pipe stays as it is."""
    return folded(text, shutil.get_terminal_size().columns) if stream.isatty() else text
