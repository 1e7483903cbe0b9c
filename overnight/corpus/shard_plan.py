"""Which documents each shard of a split has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from overnight.corpus.shards import checked_chunk, read_table
from overnight.corpus.tasks import ShardTask


def shard_tasks(folder: Path, split: str, source: str, chunks: list[Path], shard_tokens: int) -> Iterator[ShardTask]:
    """Divide the documents of a split, in order, into shards of about equal tokens.

    Args:
        folder: of the prepared data.
        split: of the shards.
        source: name of the source of all these documents, which is part of the names of the shards; empty where none are named.
        chunks: of tokens.
        shard_tokens: tokens of a shard, about.
    """
    ends = [read_table(checked_chunk(path)).column("tokens").offsets.to_numpy()[1:].astype(np.int64) for path in chunks]
    sizes = [int(end[-1]) if len(end) else 0 for end in ends]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    count = max(1, round(int(starts[-1]) / shard_tokens))
    parts: list[list[tuple[Path, int, int]]] = [[] for _ in range(count)]
    for path, start, end in zip(chunks, starts, ends, strict=False):
        if not len(end):
            continue
        # A document goes to the shard in which its last token would lie.
        shard = np.minimum((start + end - 1) * count // int(starts[-1]), count - 1)
        for number in np.unique(shard):
            rows = np.flatnonzero(shard == number)
            parts[number].append((path, int(rows[0]), int(rows[-1]) + 1))
    filled = [part for part in parts if part]  # one document may be longer than a shard
    for number, part in enumerate(filled):
        name = "-".join([split, *filter(None, [source]), f"{number:05d}"])
        yield ShardTask(folder, f"{name}.arrow", split, part, folder / "work" / f"{name}.json", source)
