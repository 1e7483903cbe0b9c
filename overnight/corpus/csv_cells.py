"""Rows of comma-separated values with cells longer than the standard library allows."""

from __future__ import annotations

import csv
from typing import Any

SEPARATOR_ROW = ["sep=", ""]
"""The first row of a table that is written for Excel: `sep=,`."""


def next_cells(reader: Any, longest: int) -> list[str] | None:
    """Return the next row of a `csv.reader`; None at the end.

    The module's own limit on a cell is 128 KiB, and one for the whole process: it is another one only while the row is read.

    Args:
        reader: a `csv.reader`.
        longest: characters of a cell at most, so that a quotation mark that is never closed does not fill the memory.

    Raises:
        csv.Error: when the row is none, or a cell is longer.
    """
    before = csv.field_size_limit(longest)
    try:
        return next(reader, None)
    finally:
        csv.field_size_limit(before)
