"""The validation and test documents of a corpus: how much it is, of which documents, and whether a score on it says something."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from overnight.corpus import dedup
from overnight.corpus.shards import SPLITS, Manifest, read_table
from overnight.display import plural
from overnight.errors import DataError

NAMES = 100
"""Documents of a part that the manifest names at most."""
# A loss on fewer is that of these documents, not of the corpus: one unusual document is a tenth of it.
LEAST_DOCUMENTS, LEAST_TOKENS = 10, 10_000
LARGEST_SHARE = 0.5
"""The most that `data.valid_fraction` and `data.test_fraction` may be."""


def side_hashes(tables: Sequence[pa.RecordBatch]) -> np.ndarray:
    """Return the hashes that decide on which side documents are: of its group where a document has one, else its own: uint8 [D, 16].

    Args:
        tables: clean chunks.
    """
    found: list[bytes] = []
    for table in tables:
        own = table.column("hash").to_pylist()
        groups = table.column("group").to_pylist() if "group" in table.schema.names else [""] * len(own)
        found += [xxhash.xxh3_128_digest(group.encode()) if group else each for each, group in zip(own, groups, strict=True)]
    return np.frombuffer(b"".join(found), np.uint8).reshape(-1, 16)


def sides(
    chunks: Sequence[Path], stay: np.ndarray, valid_fraction: float, test_fraction: float
) -> tuple[list[np.ndarray], tuple[float, float]]:
    """Return on which side documents are, chunk by chunk.

    Args:
        chunks: clean documents, one at least.
        stay: bool [D], which documents of all chunks are kept.
        valid_fraction, test_fraction: shares for validation and test.

    Returns:
        splits: uint8 of each document of each chunk: 0 dropped, 1 train, 2 valid, 3 test.
        places: the least and the greatest place of a hash between 0 and 1, of the documents that are kept.
    """
    splits, places, start = [], [], 0
    for path in chunks:
        hashes = side_hashes([read_table(path)])
        here = stay[start : start + len(hashes)]
        start += len(hashes)
        split = here.astype(np.uint8)
        split[here & dedup.valid_mask(hashes, valid_fraction)] = 2
        split[here & dedup.test_mask(hashes, test_fraction)] = 3
        splits.append(split)
        positions = dedup.hash_position(hashes[here])
        places += [float(positions.min()), float(positions.max())] if len(positions) else []
    return splits, (min(places, default=1.0), max(places, default=0.0))


def whole_files(chunks: Sequence[Path]) -> bool:
    """Return whether any document is a whole file, of which `data.documents` can make several; of rows, pages, paragraphs and lines it cannot.

    Args:
        chunks: clean documents.
    """
    # What is a part of a file is called file#number or file#title; a page of WARC by its address.
    return any("#" not in name and not name.startswith("http") for path in chunks for name in read_table(path).column("name").to_pylist())


def check_share(key: str, fraction: float, num_validation: int, trained: int, nearest: float, files: Callable[[], bool]) -> None:
    """Check that a share of the documents takes some, and leaves some to train on.

    Args:
        key: of the share.
        num_validation: documents that it takes.
        trained: documents that are left.
        nearest: share that would take the first.
        files: as :func:`whole_files`.

    Raises:
        DataError: saying which share would do.
    """
    if trained and (num_validation or not fraction):
        return
    part = "validation" if "valid" in key else "the test"
    documents = plural(trained + num_validation, "document")
    # Many a paragraph, such as one of a dialogue, has fewer characters than `data.min_chars` asks of a document.
    more = "make more documents with --data.documents=paragraph --data.min_chars=1" if files() else "add documents"
    if not trained:
        raise DataError(f"{key} = {fraction} leaves none of {documents} to train on; lower it (0 turns {part} off), or {more}")
    enough = _above(nearest)
    remedy = (
        f"use at least {enough:g} (0 turns {part} off)" if enough <= LARGEST_SHARE and trained > 1 else f"set it to 0 to turn {part} off"
    )
    raise DataError(f"{key} = {fraction} selects none of {documents} for {part}; {remedy}, or {more}")


def _above(share: float) -> float:
    """Return the next number above a share (0 to 1) that has two digits."""
    share = max(share, 1e-6)
    unit = 10.0 ** (math.floor(math.log10(share)) - 1)
    first = math.floor(share / unit)  # 0.29 / 0.01 is 28.999...
    return next(above for steps in (1, 2) if (above := float(f"{(first + steps) * unit:.2g}")) > share)


def names_by_split(chunks: Sequence[Path], splits: Sequence[np.ndarray]) -> dict[str, list[str]]:
    """Return where the first documents of the validation and the test part are from, by part.

    Args:
        chunks: clean documents.
        splits: part of each document of each chunk: 0 dropped, else its place in SPLITS, from 1.
    """
    found: dict[str, list[str]] = {split: [] for split in SPLITS[1:]}
    for path, split in zip(chunks, splits, strict=True):
        for kind, (_, names) in enumerate(found.items(), 2):
            if (wanted := NAMES - len(names)) > 0 and (split == kind).any():
                names += read_table(path).column("name").filter(pa.array(split == kind)).to_pylist()[:wanted]
    return {split: names for split, names in found.items() if names}


def share_for(chunks: Sequence[Path], splits: Sequence[np.ndarray], documents: int) -> float | None:
    """Return the least `valid_fraction` of two digits that would take so many documents; None where none may, or would leave one to train on."""
    kept = (read_table(path).filter(pa.array(split > 0)) for path, split in zip(chunks, splits, strict=True))
    # Of each chunk the first, and the last.
    found = (np.sort(dedup.hash_position(side_hashes([table]))) for table in kept)
    positions = np.sort(np.concatenate([each if len(each) <= documents else np.append(each[:documents], each[-1]) for each in found]))
    if len(positions) <= documents:
        return None
    share = _above(float(positions[documents - 1]))
    return share if share <= LARGEST_SHARE and share < positions[-1] else None


def without_validation(manifest: Manifest) -> dict[str, int]:
    """Return the named sources that have documents to train on and none for validation, and how many they have."""
    found = {split: Counter[str]() for split in SPLITS}
    for entry in manifest.shards:
        found[entry.split][entry.source] += entry.documents
    return {name: count for name, count in found["train"].items() if not found["valid"][name]}


def validation_lines(manifest: Manifest, share: Callable[[int], float | None], files: Callable[[], bool]) -> Iterator[str]:
    """Yield what `prepare` says of the validation part: how much it is, of which documents, and a warning where it is too little.

    Args:
        share: gives the `valid_fraction` that would take so many documents, as :func:`share_for`.
        files: as :func:`whole_files`.
    """
    documents, tokens = (manifest.count("valid", what) for what in ("documents", "tokens"))
    fraction = manifest.settings["valid_fraction"]
    if not documents:
        wanted = share(LEAST_DOCUMENTS) or share(1)
        remedy = f"with --data.valid_fraction={wanted:g}" if wanted else "with more documents"
        gone = "; those that it selected were dropped because of their tokens (see drops.json)" if fraction else ""
        yield (
            f"warning: no document is in the validation split (data.valid_fraction = {fraction:g}{gone}), and pretraining needs some to measure on: "
            f"prepare into another folder {remedy}"
        )
        return
    for name, count in without_validation(manifest).items():
        more = f"make more documents of it (data.sources.{name}.documents = paragraph or line)" if files() else "add documents to it"
        yield (
            f"warning: none of the {plural(count, 'document')} of source {name} is in the validation split, so no loss shows how well it is learned: "
            + (f"raise data.valid_fraction = {fraction:g}, or " if fraction < LARGEST_SHARE else "")
            + more
        )
    names = manifest.first_documents.get("valid", [])
    more = ", ..." if documents > 3 else ""
    yield f"validation: {plural(documents, 'document')}, {tokens:,} tokens: {', '.join(names[:3])}{more} (manifest.json names {len(names)})"
    if documents < LEAST_DOCUMENTS or tokens < LEAST_TOKENS:
        hints = ["add text"]
        if documents < LEAST_DOCUMENTS:
            if wanted := share(LEAST_DOCUMENTS):
                hints.insert(0, f"--data.valid_fraction={wanted:g} would take about {LEAST_DOCUMENTS} documents")
        elif fraction < LARGEST_SHARE:
            hints.insert(0, f"raise data.valid_fraction above {fraction:g}")
        if files():
            hints.append("make more documents of it (data.documents = paragraph or line)")
        yield (
            f"warning: scores on {plural(documents, 'validation document')} of {tokens:,} tokens say little about other documents (at least {LEAST_DOCUMENTS} documents and "
            f"{LEAST_TOKENS:,} tokens would be better): {'; or '.join(hints)}"
        )
