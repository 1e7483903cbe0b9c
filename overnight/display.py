"""Numbers, phrases and lines as people read them, in one form wherever they are shown: 14.6 %, 1,800, 3 min 05 s. Files keep the plain values."""

from __future__ import annotations

import codecs
import json
import re
import shutil
import textwrap
import unicodedata
from collections.abc import Mapping
from typing import TextIO

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that a terminal obeys, but for tabs and line ends."""
_JOINERS = "\u200c\u200d"
_SHARES = ("accuracy", "f1", "exact_match", "precision", "recall")
# Shown times 100, as GLUE does, but no per cent.
_CORRELATIONS = ("mcc", "pearson", "spearman")


def share(value: float | None, scale: int = 100, unit: str = " %") -> str:
    """Return a share as per cent with one decimal; a dash where it was not measured."""
    return "-" if value is None else f"{value * scale:.1f}{unit}"


def points(value: float | None, scale: int = 100) -> str:
    """Return a difference of shares in points of per cent; a dash for a single seed."""
    return share(value, scale, "")


def number(value: float | None, decimals: int) -> str:
    """Return a number with thousands separated; a dash where it was not measured."""
    return "-" if value is None else f"{value:,.{decimals}f}"


def quantity(value: float) -> str:
    """Return a number in a unit that is not known, such as a label or an error, with three decimals, or where these say nothing of it with four digits."""
    return number(value, 3) if value == 0 or 0.01 <= abs(value) < 1e9 else f"{value:.4g}"


def rounded(value: float) -> str:
    """Return a large count in millions or billions, where all its digits would be too many: 325.7 M."""
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if value >= 10 * size:
            return f"{value / size:,.1f} {unit}"
    return f"{value:,.0f}"


def duration(seconds: float) -> str:
    """Return a time as people say it: 48 s, 7 min 12 s, 3 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def unit(metric: str | None) -> str:
    """Return what follows the value of a metric: per cent for a share, nothing for a correlation."""
    metric = _of_split(metric or "")
    return " %" if metric in _SHARES or "accuracy" in metric or metric.endswith(("_f1", "_exact")) else ""


def _of_split(metric: str) -> str:
    """Return a metric without the split that it is of where that is not dev."""
    return metric.removesuffix("_test").removesuffix("_mismatched")


def scale_of(task: object) -> int:
    """Return by what the metrics of a task are multiplied to be shown: those of SQuAD are per cent already, as its own script has them."""
    return 1 if str(task).startswith("squad") else 100


def measure(name: str, value: float, scale: int = 100) -> str:
    """Return the value of a metric: a share as per cent, a correlation times 100, a loss or bits with three decimals, an error in the unit of labels as :func:`quantity`.

    Args:
        name: of the metric.
        value: as it stands in the files.
        scale: see :func:`scale_of`.
    """
    if _of_split(name) == "mean_absolute_error":
        return quantity(value)
    return share(value, scale, unit(name)) if unit(name) or _of_split(name) in _CORRELATIONS else number(value, 3)


def measures(values: Mapping[str, float], scale: int = 100) -> str:
    """Return metrics in one line: `mlm loss 5.676  mlm accuracy 14.4 %`."""
    return "  ".join(f"{name.replace('_', ' ')} {measure(name, value, scale)}" for name, value in values.items())


def plural(count: int, noun: str, many: str = "") -> str:
    """Return a count with its noun in the right form: 1 tensor, 1,200 tensors.

    Args:
        count: of things.
        noun: of one thing.
        many: of several, where it is not the noun with an s.
    """
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


def visible(text: str) -> str:
    """Return a text of others as a terminal may have it: a replacement character for each that it would obey, or not show.

    Any space is a plain one, and what joins and parts letters, as in Persian and emoji, stays. A soft hyphen, which not all terminals show, is left out.
    """
    return "".join(
        c if c.isprintable() or c in _JOINERS else " " if unicodedata.category(c) == "Zs" else "\ufffd" for c in text.replace("\u00ad", "")
    )


def yaml_text(value: object) -> str:
    """Return a setting as a recipe would have it: true, not True; [a, b]; nothing at all as a dash."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(yaml_text, value))}]"
    return "-" if value in (None, "", {}) else str(value)


def folded(text: str, width: int) -> str:
    """Break the lines that are wider than `width` columns between words, never inside one; what continues is indented further than its line."""
    lines = []
    for line in text.split("\n"):
        indent = " " * (min(len(line) - len(line.lstrip()), width // 2) + 2)
        pieces = textwrap.wrap(
            line, max(width, 20), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, replace_whitespace=False
        )
        lines += pieces if len(line) > width and pieces else [line]
    return "\n".join(lines)


def width_of(stream: TextIO) -> int:
    """Return how wide a table for a stream may be: as its terminal is; for a file or a pipe as it needs."""
    return shutil.get_terminal_size().columns if stream.isatty() else 10_000


def unsteered(text: str, stream: TextIO) -> str:
    """Replace the characters that a terminal obeys by a replacement character where the stream is one; text for a file or a pipe stays as it is."""
    return CONTROL.sub("\ufffd", text) if stream.isatty() else text


def for_stream(text: str, stream: TextIO) -> str:
    """Break lines between words where a terminal would break them anywhere, without what would steer it; text for a file or a pipe stays as it is."""
    return folded(unsteered(text, stream), shutil.get_terminal_size().columns) if stream.isatty() else text


def json_line(value: object, stream: TextIO) -> str:
    """Return a value as a line of JSON for a stream: other characters than ASCII as escapes where its encoding is not UTF-8, the only one of JSON."""
    return json.dumps(value, ensure_ascii=codecs.lookup(stream.encoding or "utf-8").name != "utf-8")
