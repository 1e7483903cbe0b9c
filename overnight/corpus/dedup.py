"""The hash of a document, by which equal ones are found (:mod:`exact_duplicates`), and the validation part is drawn."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import xxhash


def document_hash(sentences: list[str]) -> bytes:
    """Return XXH3-128 (16 bytes) of a cleaned document, blind to where its lines and paragraphs break."""
    return xxhash.xxh3_128_digest(" ".join(sentences).encode())


def hash_column(column: pa.Array) -> np.ndarray:
    """Return a column of hashes as uint8 [D, 16], without a copy."""
    flat = np.frombuffer(column.buffers()[1] or b"", np.uint8)
    return flat[16 * column.offset : 16 * (column.offset + len(column))].reshape(-1, 16)


def valid_mask(hashes: np.ndarray, fraction: float) -> np.ndarray:
    """Return which documents are set aside for validation: the hash decides alone, so one stays on its side when others are added: uint8 [D, 16] -> bool [D]."""
    return hash_position(hashes) < fraction


def test_mask(hashes: np.ndarray, fraction: float) -> np.ndarray:
    """Return which documents are kept apart for the test: at the other end, so that no other fraction moves one: uint8 [D, 16] -> bool [D]."""
    return hash_position(hashes) >= 1 - fraction


def hash_position(hashes: np.ndarray) -> np.ndarray:
    """Return where in 0..1 each hash lies, from its first 53 bits (exact in a double): uint8 [D, 16] -> float64 [D]."""
    first = np.ascontiguousarray(hashes[:, :8]).view(">u8")[:, 0]
    return (first >> np.uint64(11)).astype(np.float64) / 2.0**53
