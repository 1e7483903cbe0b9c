"""The numbers of a prepared folder are those of counting one by one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.corpus import statistics as module
from overnight.corpus.prepared import Prepared
from overnight.corpus.statistics import Lengths, sample_documents, statistics
from tests.corpus.folders import as_of_old, prepared_folder, texts


@given(st.lists(st.integers(1, 3_000_000), min_size=1, max_size=60), st.floats(0.01, 1))
def test_quantiles_are_exact_below_4096_and_to_a_hundredth_above(values: list[int], share: float) -> None:
    lengths = Lengths()
    for value in values:  # however they come
        lengths.add(np.array([value]))
    together = Lengths()
    together.add(np.array(values))
    assert np.array_equal(lengths.counts, together.counts)
    expected = sorted(values)[max(0, int(np.ceil(share * len(values))) - 1)]
    assert lengths.quantile(share) == pytest.approx(expected, rel=0.006 if expected > 4096 else 0)
    assert (lengths.mean(), lengths.longest, lengths.number) == (pytest.approx(np.mean(values)), max(values), len(values))


def test_ranges_of_lengths_add_up() -> None:
    lengths = Lengths()
    lengths.add(np.array([1, 1, 2, 5, 5000, 70_000]))
    assert lengths.within([1, 2, 6, 4000, 6000, 1e9]) == [2, 2, 0, 1, 1]
    assert Lengths().quantile(0.5) == 0 and Lengths().mean() == 0


@pytest.mark.parametrize("old", [False, True])
def test_everything_is_counted(tmp_path: Path, old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", 100)
    rows = {"a.jsonl": texts(20), "b.jsonl": texts(12, seed=1)}
    folder = prepared_folder(tmp_path, rows)
    prepared = Prepared(as_of_old(folder) if old else folder)
    found = statistics(prepared)
    assert list(found.splits) == ["train", "valid"]
    by_source: Counter[tuple[int, str]] = Counter()
    for split, counts in found.splits.items():
        documents = list(prepared.documents(split))
        tokens = np.concatenate([document.tokens for document in documents])
        assert np.array_equal(counts.token_counts, np.bincount(tokens, minlength=300))
        lengths = [len(document.tokens) for document in documents]
        assert (counts.documents.number, counts.documents.sum, counts.documents.longest) == (len(lengths), sum(lengths), max(lengths))
        assert counts.documents.quantile(0.5) == sorted(lengths)[(len(lengths) - 1) // 2]
        assert counts.sentences.number == prepared.manifest.count(split, "sentences")
        given_texts = {f"{tmp_path / name}#{i}": text for name, each in rows.items() for i, text in enumerate(each, 1)}
        decoded = [given_texts[document.name] if not old else prepared.decoder.text(document.tokens) for document in documents]
        assert counts.characters == sum(map(len, decoded)) + old * len(documents)
        by_source.update((int("b.jsonl" in document.source), split) for document in documents)
    assert {key: count.documents for key, count in found.sources.items()} == ({} if old else dict(by_source))
    if not old:
        assert sum(count.tokens for count in found.sources.values()) == sum(each.documents.sum for each in found.splits.values())
        assert all(name for *_, name in found.longest)
    longest = max(len(document.tokens) for split in found.splits for document in prepared.documents(split))
    assert found.longest[0][0] == longest and len(found.longest) == 5


def test_samples_are_drawn_from_the_training_part_by_a_seed(tmp_path: Path) -> None:
    prepared = Prepared(prepared_folder(tmp_path, {"a.jsonl": texts(20)}))
    drawn = sample_documents(prepared, 5, 40)
    assert [document.number for document, _ in drawn] == [document.number for document, _ in sample_documents(prepared, 5, 40)]
    assert len({document.number for document, _ in drawn}) == 5 and all(len(text) == 40 for _, text in drawn)
    assert len(sample_documents(prepared, 1000, 40)) == prepared.manifest.count("train", "documents")
