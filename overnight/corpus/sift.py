"""Which of the distinct documents stay: those with evaluation text go, then near-duplicates; what goes is counted and sampled."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from overnight.config import Data
from overnight.corpus.decontaminate import find_evaluation_text, write_ngrams
from overnight.corpus.drops import CHARACTERS, SAMPLES, Drops
from overnight.corpus.near_duplicates import find_near_duplicates
from overnight.corpus.shards import read_table


def evaluation_ngrams(data: Data, work: Path, log: Callable[[str], None]) -> None:
    """Read what `data.decontaminate` names, before anything else: a mistake in it is told at once."""
    if data.decontaminate:
        write_ngrams(data.decontaminate, data.decontaminate_words, work / "evaluation.u64", log)


def sift(chunks: list[Path], first: np.ndarray, data: Data, workers: int, log: Callable[[str], None]) -> tuple[np.ndarray, Drops]:
    """Decide which documents stay.

    Args:
        chunks: clean documents, in order.
        first: bool [D], which documents of all chunks are no exact duplicates.
        data: settings.
        workers: processes; nothing depends on it.
        log: called with plain lines.

    Returns:
        stay: bool [D].
        drops: what goes, and what cleaning dropped before.
    """
    tables = [read_table(path) for path in chunks]
    ends = np.cumsum([table.num_rows for table in tables])
    drops = Drops()
    for table in tables:
        drops.count("short", int(table.schema.metadata[b"short"]))
        drops.merge(Drops.from_json(json.loads(table.schema.metadata.get(b"drops", b"{}"))))

    def document(position: int) -> tuple[str, str]:
        number = int(np.searchsorted(ends, position, "right"))
        table = tables[number]
        row = position - int(ends[number]) + table.num_rows
        text = table.column("text")[row].as_py()
        start = text[: 4 * CHARACTERS].decode(errors="ignore") if isinstance(text, bytes) else text
        return table.column("name")[row].as_py(), start.strip()

    def drop(reason: str, positions: np.ndarray, of: Iterable[int] = ()) -> None:
        drops.count(reason, len(positions))
        others = [document(int(position))[0] for position in list(of)[:SAMPLES]]
        for number, position in enumerate(positions[:SAMPLES].tolist()):
            name, text = document(position)
            drops.sample(reason, f"{name} (like {others[number]})" if others else name, text)

    drop("duplicate", np.flatnonzero(~first))
    stay = first
    if data.decontaminate:
        marked = stay & find_evaluation_text(chunks, chunks[0].with_name("evaluation.u64"), data.decontaminate_words, workers)
        drop("evaluation text", np.flatnonzero(marked))
        stay = stay & ~marked
    if data.near_duplicates:
        take = np.split(stay, ends[:-1])
        positions, of = find_near_duplicates(chunks, take, data.near_duplicates, workers, log)
        drop("near-duplicate", positions, of[:SAMPLES])
        stay = stay.copy()
        stay[positions] = False
    return stay, drops
