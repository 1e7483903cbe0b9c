"""Duplicates and the validation part."""

from __future__ import annotations

import numpy as np

from overnight.corpus import dedup


def test_equality_is_blind_to_paragraphs_but_not_to_words() -> None:
    assert dedup.document_hash(["a b.", "c d."]) == dedup.document_hash(["a b. c d."])
    assert dedup.document_hash(["a b."]) != dedup.document_hash(["a B."])


def test_the_validation_share_is_as_asked_and_nested() -> None:
    hashes = np.frombuffer(b"".join(dedup.document_hash([str(i)]) for i in range(20_000)), np.uint8).reshape(-1, 16)
    small, large = dedup.valid_mask(hashes, 0.02), dedup.valid_mask(hashes, 0.05)
    assert 0.016 < small.mean() < 0.024 and not (small & ~large).any()
    assert not dedup.valid_mask(hashes, 0.0).any()


def test_the_test_share_is_nested_and_apart_from_what_is_validation() -> None:
    hashes = np.frombuffer(b"".join(dedup.document_hash([str(i)]) for i in range(20_000)), np.uint8).reshape(-1, 16)
    small, large = dedup.test_mask(hashes, 0.02), dedup.test_mask(hashes, 0.3)
    assert 0.016 < small.mean() < 0.024 and not (small & ~large).any()
    assert not (dedup.test_mask(hashes, 0.5) & dedup.valid_mask(hashes, 0.5)).any()
    assert not dedup.test_mask(hashes, 0.0).any()
