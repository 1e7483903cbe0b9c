"""Near-duplicates: against exact similarity, in few and many merges, interrupted."""

from __future__ import annotations

import dataclasses
import json
import random
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight.config import Data
from overnight.corpus import external_sort, near_duplicates, pipeline
from overnight.corpus.drops import SAMPLES, Drops
from overnight.corpus.near_duplicates import WORDS, bands_for, clusters, find_near_duplicates
from overnight.corpus.pipeline import prepare
from overnight.corpus.shards import seal_chunk, write_table
from overnight.errors import ConfigError
from tests.corpus.folders import contents

VOCABULARY = [f"w{number}" for number in range(5000)]


def silent(line: str) -> None:
    pass


def edited(rng: random.Random, words: list[str], edits: int) -> list[str]:
    words = list(words)
    for _ in range(edits):
        words[rng.randrange(len(words))] = rng.choice(VOCABULARY)
    return words


def exact(a: list[str], b: list[str]) -> float:
    """Return Jaccard's similarity of the shingles of two documents."""
    left, right = ({tuple(words[i : i + WORDS]) for i in range(max(len(words) - WORDS + 1, 1))} for words in (a, b))
    return len(left & right) / len(left | right)


def families(seed: int, count: int, size: int, edits: int) -> list[list[str]]:
    """Return documents of which many are edited copies of others, shuffled."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        first = rng.choices(VOCABULARY, k=size)
        found += [first, *(edited(rng, first, rng.randint(1, edits)) for _ in range(rng.randint(0, 3)))]
    rng.shuffle(found)
    return found


def chunks_of(folder: Path, documents: list[list[str]], size: int) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for first in range(0, len(documents), size):
        paths.append(folder / f"clean-{first // size:05d}.arrow")
        write_table(paths[-1], {"text": pa.array([" ".join(words) for words in documents[first : first + size]], pa.large_string())})
        seal_chunk(paths[-1])
    return paths


def found_in(folder: Path, documents: list[list[str]], threshold: float, size: int = 7, workers: int = 1) -> dict[int, int]:
    paths = chunks_of(folder, documents, size)
    take = [np.ones(len(documents[first : first + size]), bool) for first in range(0, len(documents), size)]
    positions, of = find_near_duplicates(paths, take, threshold, workers, silent)
    return dict(zip(positions.tolist(), of.tolist(), strict=True))


@settings(max_examples=12)
@given(seed=st.integers(0, 1 << 30), threshold=st.sampled_from([0.4, 0.6, 0.8, 0.95]), size=st.sampled_from([20, 80, 400]))
def test_what_goes_is_what_exact_similarity_says_but_near_the_threshold(
    tmp_path_factory: pytest.TempPathFactory, seed: int, threshold: float, size: int
) -> None:
    documents = families(seed, 12, size, max(1, size // 25))
    found = found_in(tmp_path_factory.mktemp("near"), documents, threshold)
    similar = {(i, j): exact(documents[i], documents[j]) for i, j in combinations(range(len(documents)), 2)}
    slack = 0.13  # over four standard deviations of the estimate
    surely = clusters(np.array([pair for pair, value in similar.items() if value > threshold + slack], np.uint64).reshape(-1, 2))[0]
    perhaps = clusters(np.array([pair for pair, value in similar.items() if value > threshold - slack], np.uint64).reshape(-1, 2))
    assert set(surely.tolist()) <= set(found)
    assert set(found) <= set(perhaps[0].tolist())
    assert all(of < document for document, of in found.items())


def test_copies_in_capitals_or_with_other_marks_are_found_in_any_alphabet(tmp_path: Path) -> None:
    rng = random.Random(3)
    words = [["".join(rng.choices("абвгдежзиклмнопрстуф", k=6)) for _ in range(60)] for _ in range(3)]
    clauses = [["".join(map(chr, rng.choices(range(0x4E00, 0x5A00), k=9))) for _ in range(20)] for _ in range(3)]
    documents = words + [[word.upper() for word in each] for each in words]
    documents += [["，".join(each)] for each in clauses] + [[",".join(each)] for each in clauses]
    assert found_in(tmp_path, documents, 0.8) == {3: 0, 4: 1, 5: 2, 9: 6, 10: 7, 11: 8}


def test_equal_words_are_found_at_any_length_and_different_ones_not(tmp_path: Path) -> None:
    rng = random.Random(0)
    originals = [rng.choices(VOCABULARY, k=size) for size in (1, 2, 5, 30, 3000)]
    unlike = [rng.choices(VOCABULARY, k=size) for size in (1, 2, 5, 30, 3000)]
    assert found_in(tmp_path, [*originals, *unlike, *originals], 1.0) == {10 + i: i for i in range(5)}


@pytest.mark.parametrize("threshold", [0.05, 0.3, 0.5, 0.8, 0.9, 1.0])
def test_bands_find_a_pair_at_the_threshold_with_99_in_100(threshold: float) -> None:
    bands, rows = bands_for(threshold)
    assert 1 - (1 - threshold**rows) ** bands >= 0.99
    assert bands * rows <= 256
    assert rows == 1 or bands == 1 or 1 - (1 - threshold**rows) ** (bands - 1) < 0.99


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=40))
def test_clusters_are_the_connected_documents_under_their_first(pairs: list[tuple[int, int]]) -> None:
    root = {number: number for pair in pairs for number in pair}
    for _ in pairs:
        for a, b in pairs:
            root[a] = root[b] = min(root[a], root[b])
    later, first = clusters(np.array(pairs, np.uint64).reshape(-1, 2))
    assert dict(zip(later.tolist(), first.tolist(), strict=True)) == {n: r for n, r in sorted(root.items()) if n != r}
    assert later.tolist() == sorted(later.tolist())


def test_many_small_merges_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = families(1, 60, 60, 3)
    whole = found_in(tmp_path / "one", documents, 0.6, size=1000)
    assert len(whole) > 30
    monkeypatch.setattr(external_sort, "FAN_IN", 3)
    monkeypatch.setattr(external_sort, "BLOCK", 10)
    monkeypatch.setattr(external_sort, "RANGE", 1000)
    monkeypatch.setattr(near_duplicates, "_PAIRS", 5)
    assert found_in(tmp_path / "many", documents, 0.6, size=4) == whole
    assert len(list((tmp_path / "many").glob("pairs-*.u64"))) > 3


def test_documents_that_are_not_taken_are_as_if_they_were_not_there(tmp_path: Path) -> None:
    documents = families(2, 20, 60, 2)
    take = np.arange(len(documents)) % 3 > 0
    take[7:14] = False  # a whole chunk
    rest = [words for words, taken in zip(documents, take, strict=True) if taken]
    expected = found_in(tmp_path / "rest", rest, 0.6)
    paths = chunks_of(tmp_path / "all", documents, 7)
    positions, of = find_near_duplicates(paths, np.split(take, range(7, len(take), 7)), 0.6, 1, silent)
    numbers = np.flatnonzero(take)
    assert dict(zip(positions.tolist(), of.tolist(), strict=True)) == {numbers[a]: numbers[b] for a, b in expected.items()} != {}


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pipeline, "CHUNK_BYTES", 10_000)
    (tmp_path / "text").mkdir()
    for number, words in enumerate(families(3, 30, 120, 2)):
        (tmp_path / "text" / f"{number:03d}.txt").write_text(" ".join(words) + ".")
    return tmp_path / "text"


def data(corpus: Path, **changes: Any) -> Data:
    return dataclasses.replace(
        Data(paths=[str(corpus)], tokenizer="bytes", valid_fraction=0.2, workers=1, near_duplicates=0.8),
        **changes,
    )


def test_prepare_drops_counts_and_samples_them_with_any_number_of_workers(corpus: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    manifest = prepare(data(corpus), tmp_path / "1", lines.append)
    prepare(data(corpus, workers=2), tmp_path / "2", silent)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    drops = json.loads((tmp_path / "1/drops.json").read_text())
    count = drops["near_duplicates"]["count"]
    documents = len(list(corpus.iterdir()))
    assert 20 < count == documents - manifest.count("train", "documents") - manifest.count("valid", "documents")
    assert any(f"{count} by data.near_duplicates" in line for line in lines)
    samples = drops["near_duplicates"]["samples"]
    assert len(samples) == SAMPLES
    for sample in samples:
        name, of = sample["document"].removesuffix(")").split(" (like ")
        assert of < name and exact(Path(name).read_text().split(), Path(of).read_text().split()) > 0.7
        assert sample["text"] == Path(name).read_text()[:200]


def test_another_threshold_is_another_corpus(corpus: Path, tmp_path: Path) -> None:
    prepare(data(corpus), tmp_path / "out", silent)
    with pytest.raises(ConfigError, match=r"data\.near_duplicates: prepared with 0\.8, now asked for 0\.5"):
        prepare(data(corpus, near_duplicates=0.5), tmp_path / "out", silent)


class _StopError(Exception):
    pass


@pytest.mark.parametrize("stage", ["sign_chunk", "find_pairs", "clusters", "merged"])
def test_it_continues_where_it_stopped_and_gives_the_same_bytes(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    monkeypatch.setattr(external_sort, "FAN_IN", 2)
    monkeypatch.setattr(external_sort, "RANGE", 200)
    prepare(data(corpus), tmp_path / "whole", silent)
    module: Any = external_sort if stage == "merged" else near_duplicates
    original, calls = getattr(module, stage), []

    def stopping(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) > (0 if stage == "clusters" else 2):
            raise _StopError
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, stage, stopping)
        with pytest.raises(_StopError):
            prepare(data(corpus), tmp_path / "out", silent)
    done = {path: path.stat().st_mtime_ns for path in (tmp_path / "out/work").glob("*.*") if path.suffix in (".u16", ".run", ".u64")}
    again = clusters

    def looking(pairs: np.ndarray) -> Any:
        assert all(path.stat().st_mtime_ns == when for path, when in done.items() if path.exists())
        return again(pairs)

    assert done
    monkeypatch.setattr(near_duplicates, "clusters", looking)
    prepare(data(corpus), tmp_path / "out", silent)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@given(st.lists(st.tuples(st.sampled_from("ab"), st.text(max_size=5)), max_size=60), st.integers(0, 60))
def test_drops_of_parts_merge_to_those_of_the_whole(added: list[tuple[str, str]], cut: int) -> None:
    whole, left, right = Drops(), Drops(), Drops()
    for number, (reason, text) in enumerate(added):
        whole.add(reason, str(number), text * 100)
        (left if number < cut else right).add(reason, str(number), text * 100)
    left.merge(Drops.from_json(json.loads(json.dumps(right.as_json()))))
    assert left == whole
    assert all(len(kept) == min(whole.counts[reason], SAMPLES) for reason, kept in whole.samples.items())
    assert all(len(text) <= 200 for kept in whole.samples.values() for _, text in kept)


@given(take=st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=5), data=st.data())
def test_documents_are_found_again_among_all(take: list[list[bool]], data: st.DataObject) -> None:
    masks = [np.array(each, bool) for each in take]
    firsts = np.cumsum([0, *(int(mask.sum()) for mask in masks)])
    numbers = np.array(data.draw(st.lists(st.integers(0, int(firsts[-1]) - 1))) if firsts[-1] else [], np.int64)
    expected = np.flatnonzero(np.concatenate(masks))[numbers]
    assert near_duplicates._positions(masks, firsts, numbers).tolist() == expected.tolist()
