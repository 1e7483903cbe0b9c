"""The study of near-duplicates says how similar the copies are that it plants."""

from __future__ import annotations

import random

import pytest

from benchmarks import near_duplicates


def test_copies_are_as_similar_as_they_are_below_any_threshold_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_duplicates.importlib.util, "find_spec", lambda name: None)  # without the peer
    draw = random.Random(0)
    texts = [" ".join(f"w{draw.randrange(5000)}" for _ in range(200)) for _ in range(24)]
    found = near_duplicates.study("x", *near_duplicates.planted(texts), 0.8)
    # A shingle of 5 words is whole with a probability of 0.8^5 or so, and as many are in both: s / (2 - s).
    similar = {share: found["edits"][share]["mean similarity"] for share in ("1%", "20%")}
    assert 0.85 < similar["1%"] < 0.95 and 0.1 < similar["20%"] < 0.3
