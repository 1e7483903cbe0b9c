"""Documents of a prepared folder by number, at random, by their source, or by what they say; one is in memory at a time."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc

from overnight.corpus.document import printable
from overnight.corpus.document_table import DocumentTable
from overnight.corpus.prepared import Prepared, PreparedDocument
from overnight.errors import ConfigError, DataError

# What WordPiece takes for one word, or for one mark.
_PART = re.compile(r"[^\W_]+|[^\s]")


@dataclass(frozen=True)
class Selection:
    """Which documents of a split to take; without numbers and a sample all of them."""

    split: str
    numbers: Sequence[int] = ()
    """From 1."""
    sample: int = 0
    """So many at random."""
    seed: int = 0
    source: str = ""
    """Only those in whose name, in whose entry of `data.paths`, or in the name of whose source this stands."""


def selected_documents(prepared: Prepared, selection: Selection) -> Iterator[PreparedDocument]:
    """Yield documents, in order; those of numbers in the order of these.

    Raises:
        DataError: when a number is none of the split, the split is empty, or the folder does not know the sources of its documents.
    """
    if not prepared.manifest.count(selection.split, "documents"):
        others = ", ".join(prepared.splits()) or "nothing"
        raise DataError(f"{prepared.folder}: {selection.split} holds no document; there is {others}")
    if selection.numbers:
        yield from (prepared.document(selection.split, number) for number in selection.numbers)
    elif selection.sample:
        yield from _sample(prepared, selection)
    else:
        for first, rows in _candidates(prepared, selection):
            yield from (prepared.document(selection.split, first + row) for row in rows.tolist())


def count_of_source(prepared: Prepared, split: str, source: str) -> int:
    """Return how many documents of a split :func:`selected_documents` takes for those of a source."""
    return sum(len(rows) for _, rows in _candidates(prepared, Selection(split, source=source)))


def _table(prepared: Prepared) -> DocumentTable:
    if prepared.table is None:
        raise DataError(
            f"{prepared.folder}: was prepared before names and sources of documents were kept, so documents cannot be chosen by them; prepare again into another folder"
        )
    return prepared.table


def _candidates(prepared: Prepared, selection: Selection) -> Iterator[tuple[int, np.ndarray]]:
    """Yield for each shard the number of its first document, and the rows of those of the source that is asked for."""
    first = 1
    for entry in prepared.entries(selection.split):
        rows = np.arange(entry.documents)
        if selection.source:
            known, part = _table(prepared).rows(entry), printable(selection.source)
            of_source = [number for number, source in enumerate(prepared.manifest.sources) if part in source.path or part in source.name]
            named = pc.match_substring(known.names, part).to_numpy(zero_copy_only=False)
            rows = np.flatnonzero(named | np.isin(known.sources, of_source))
        yield first, rows
        first += entry.documents


def _sample(prepared: Prepared, selection: Selection) -> Iterator[PreparedDocument]:
    """Yield distinct documents at random: counted in a first pass, read in a second."""
    counts = np.array([len(rows) for _, rows in _candidates(prepared, selection)])
    drawn = np.random.default_rng(selection.seed).choice(counts.sum(), min(selection.sample, int(counts.sum())), replace=False)
    ends = np.cumsum(counts)
    for (first, rows), end in zip(_candidates(prepared, selection), ends.tolist(), strict=True):
        inside = np.sort(drawn[(drawn >= end - len(rows)) & (drawn < end)]) - (end - len(rows))
        yield from (prepared.document(selection.split, first + int(row)) for row in rows[inside])


def search_pattern(prepared: Prepared, text: str, regex: str, ignore_case: bool) -> re.Pattern[str] | None:
    """Return what a search looks for in decoded text; None for no search.

    Text is found however its white space is, as WordPiece forgets that around punctuation; and in any case where the vocabulary is of lower case.

    Args:
        text: as it stands in the source.
        regex: a regular expression instead, of the text as it is shown.

    Raises:
        ConfigError: when that is none.
    """
    lowercase = bool(prepared.manifest.settings.get("lowercase", False)) and not prepared.decoder.is_bytes
    flags = re.IGNORECASE if ignore_case or lowercase else re.NOFLAG
    if regex:
        try:
            return re.compile(regex, flags)
        except re.error as error:
            raise ConfigError(f"--regex {regex!r}: is not a regular expression ({error}); --search takes text as it is") from None
    if prepared.decoder.is_bytes:
        return re.compile(r"\s+".join(map(re.escape, text.split())), flags) if text.strip() else None
    text = prepared.decoder.normalized(text)
    parts, between = list(_PART.finditer(text)), ""
    for before, after in itertools.pairwise(parts):
        words = before[0].isalnum() and after[0].isalnum()
        between += re.escape(before[0]) + (r"\s+" if words and before.end() < after.start() else r"\s*")
    return re.compile(between + re.escape(parts[-1][0]), flags) if parts else None


def passages(text: str, pattern: re.Pattern[str], around: int, most: int) -> list[tuple[str, str, str]]:
    """Return where a pattern is found: what stands before it, what was found, and what follows, `around` characters on each side.

    Args:
        most: passages.
    """
    found = []
    for match in pattern.finditer(text):
        start, end = match.span()
        found.append((text[max(0, start - around) : start], match[0], text[end : end + around]))
        if len(found) == most:
            break
    return found
