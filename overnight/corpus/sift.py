"""Which of the distinct documents stay: those with evaluation text go, then near-duplicates; what goes is counted and sampled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from overnight.config import Data
from overnight.corpus import data_paths
from overnight.corpus.clean import clean
from overnight.corpus.decontaminate import find_evaluation_text, write_ngrams
from overnight.corpus.drops import SAMPLE_CHARS, SAMPLES, Drops
from overnight.corpus.near_duplicates import find_near_duplicates
from overnight.corpus.shards import read_table
from overnight.corpus.text import clean_text
from overnight.corpus.workers import Workers
from overnight.display import plural

# Documents that are looked at together.
_BLOCK = 1 << 20


def evaluation_ngrams(data: Data, work: Path, log: Callable[[str], None]) -> None:
    """Read what `data.decontaminate` names, before anything else: a mistake in it is told at once."""
    if data.decontaminate:
        # As it is, as it would be trained on, and normalized: text for a byte model is not.
        forms = (str, partial(clean_text, data=data), clean)
        write_ngrams(data.decontaminate, data.decontaminate_words, work / "evaluation.u64", log, forms)


def evaluation_files(data: Data) -> list[Any]:
    """Return what is to be compared to see whether a file of `data.decontaminate` has changed."""
    files = [file for path in data.decontaminate for file in data_paths.expand(path, "data.decontaminate")]
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def sift(chunks: list[Path], first: np.ndarray, data: Data, workers: Workers, log: Callable[[str], None]) -> tuple[np.ndarray, Drops]:
    """Decide which documents stay.

    Args:
        chunks: clean documents, in order.
        first: bool [D], which documents of all chunks are no exact duplicates.
        data: settings.
        workers: processes; nothing depends on it.
        log: called with plain lines.

    Returns:
        stay: bool [D].
        drops: what goes, by the setting that did it; `duplicates` are exact ones.
    """
    ends = np.cumsum([read_table(path).num_rows for path in chunks])
    drops = Drops()

    def document(position: int) -> tuple[str, str]:
        number = int(np.searchsorted(ends, position, "right"))
        table = read_table(chunks[number])
        row = position - int(ends[number]) + table.num_rows
        text = table.column("text")[row].as_py()
        start = text[: 4 * SAMPLE_CHARS].decode(errors="ignore") if isinstance(text, bytes) else text
        return table.column("name")[row].as_py(), start.strip()

    def drop(reason: str, positions: np.ndarray, count: int, like: np.ndarray | None = None) -> None:
        for number, position in enumerate(positions[:SAMPLES].tolist()):
            name, text = document(position)
            drops.add(reason, name if like is None else f"{name} (like {document(int(like[number]))[0]})", text)
        if count > SAMPLES:
            drops.counts[reason] += count - SAMPLES

    drop("duplicates", _some(~first), len(first) - int(first.sum()))
    stay = first
    if data.decontaminate:
        marked = stay & find_evaluation_text(chunks, chunks[0].with_name("evaluation.u64"), data.decontaminate_words, workers)
        drop("decontaminate", _some(marked), found := int(marked.sum()))
        log(f"decontaminate: {plural(found, 'document')} with text of evaluations left out")
        stay = stay & ~marked
    if data.near_duplicates:
        positions, like = find_near_duplicates(chunks, np.split(stay, ends[:-1]), data.near_duplicates, workers, log)
        drop("near_duplicates", positions, len(positions), like)
        stay = stay.copy()
        stay[positions] = False
    return stay, drops


def _some(marked: np.ndarray) -> np.ndarray:
    """Return where the first documents that are marked are, as many as are samples at most: there may be millions."""
    found = np.zeros(0, np.int64)
    for start in range(0, len(marked), _BLOCK):
        if len(found) >= SAMPLES:
            break
        found = np.append(found, start + np.flatnonzero(marked[start : start + _BLOCK]))
    return found[:SAMPLES]
