"""What differs between two prepared folders is found, and nothing else."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight.config.data import TextSource
from overnight.corpus import compare, external_sort
from overnight.corpus.compare import compare_documents, compare_vocabularies, count_rows, first_difference, setting_rows
from overnight.corpus.prepared import Prepared
from tests.corpus.folders import as_of_old, prepared_folder, texts


@given(a=st.lists(st.integers(0, 12), max_size=30), b=st.lists(st.integers(0, 12), max_size=30), runs=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_equal_keys_are_matched_one_to_one(tmp_path_factory: pytest.TempPathFactory, a: list[int], b: list[int], runs: int) -> None:
    work = tmp_path_factory.mktemp("runs")
    found = []
    for letter, keys in (("a", a), ("b", b)):
        records = np.array([(key << 60, place) for place, key in enumerate(keys)], np.uint64).reshape(-1, 2)
        found.append([work / f"{letter}{i}.run" for i in range(runs)])
        for i, path in enumerate(found[-1]):
            external_sort.write_run(path, records[i::runs])
    pairs = [(int(x), int(y)) for one, two in compare._matches(*found) for x, y in zip(one, two, strict=True)]
    assert all(a[x] == b[y] for x, y in pairs)
    assert len({x for x, _ in pairs}) == len({y for _, y in pairs}) == len(pairs) == (Counter(a) & Counter(b)).total()


@pytest.mark.parametrize("kind", ["named", "old", "old with another vocabulary"])
def test_documents_are_found_again(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_RUN", 7)
    monkeypatch.setattr(compare, "_RANGE", 16)
    rows = texts(60)
    changed = rows[3].replace(rows[3].split()[1], "neither", 1)
    first = prepared_folder(tmp_path / "1", {"a.jsonl": rows})
    given_vocabulary = {} if kind == "old with another vocabulary" else {"vocab_file": str(first / "vocab.txt")}
    # The second has other names for what is new: it is behind the others.
    second_rows = [*rows[:3], changed, *rows[5:], *texts(4, seed=9)]
    second = prepared_folder(
        tmp_path / "2", {"a.jsonl": second_rows}, vocab_size=len((first / "vocab.txt").read_text().split("\n")) - 1, **given_vocabulary
    )
    if kind != "named":
        as_of_old(first), as_of_old(second)
    a, b = Prepared(first), Prepared(second)
    found = compare_documents(a, b, samples=100)
    one, two = Counter(rows), Counter(second_rows)
    assert found.same == (one & two).total() == 58
    assert (found.only_a, found.only_b) == ((one - two).total(), (two - one).total()) == (2, 5)
    assert found.changed == 0 and not found.moved  # the files lie elsewhere, so no name is the same
    for each, places, expected in ((a, found.samples["only_a"], one - two), (b, found.samples["only_b"], two - one)):
        shown = [each.decoder.text(each.document(*place).tokens) for place in places]
        assert sorted("".join(text.split()) for text in shown) == sorted("".join(text.lower().split()) for text in expected)


def test_documents_of_one_name_with_another_text_and_those_in_another_split_are_told(tmp_path: Path) -> None:
    rows = texts(40)
    first = prepared_folder(tmp_path, {"a.jsonl": rows})
    first = first.rename(tmp_path / "first")
    rows[5] = rows[5].replace(rows[5].split()[4], "otherwise", 1)
    second = prepared_folder(tmp_path, {"a.jsonl": rows}, valid_fraction=0.3)
    a, b = Prepared(first), Prepared(second)
    found = compare_documents(a, b, samples=50)
    assert (found.same, found.changed, found.only_a, found.only_b) == (39, 1, 0, 0)
    grown = b.manifest.count("valid", "documents") - a.manifest.count("valid", "documents")
    assert set(found.moved) == {("train", "valid")} and 0 < found.moved["train", "valid"] <= grown + 1
    ((one, two),) = found.samples["changed"]
    assert a.document(*one).name == b.document(*two).name == f"{tmp_path / 'a.jsonl'}#6"
    for one, two in found.samples["moved"]:
        assert (one[0], two[0]) == ("train", "valid") and a.document(*one).name == b.document(*two).name
    texts_ = (
        a.decoder.text(a.document(*found.samples["changed"][0][0]).tokens),
        b.decoder.text(b.document(*found.samples["changed"][0][1]).tokens),
    )
    before, left, right = first_difference(*texts_)
    assert len(before.split()) == 4 and left and "".join(right.split()).startswith("otherwise")
    assert setting_rows(a.manifest, b.manifest) == [("data.valid_fraction", 0.2, 0.3)]
    counts = {name: (x, y) for name, x, y in count_rows(a.manifest, b.manifest)}
    assert counts["valid documents"][1] - counts["valid documents"][0] == grown
    assert "documents read of " + str(tmp_path / "a.jsonl") not in counts


def named(place: Path, file: Path, fields: dict[str, str]) -> Prepared:
    """A folder of named sources that read a file, each by a field of its own."""
    sources = {name: TextSource(paths=[str(file)], field=key) for name, key in fields.items()}
    return Prepared(prepared_folder(place, {}, paths=[], sources=sources))


def test_sources_that_read_one_file_are_told_apart_by_their_names(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text("\n".join(json.dumps({"text": f"{text} one", "more": f"{text} two"}) for text in texts(40)))
    a = named(tmp_path / "1", file, {"titles": "text", "bodies": "more"})
    b = named(tmp_path / "2", file, {"titles": "more", "bodies": "text"})
    found = compare_documents(a, b, samples=3)
    assert found.same == 80 and found.other_source == {("titles", "bodies"): 40, ("bodies", "titles"): 40}
    assert compare_documents(a, a, samples=3).other_source == {}
    file.write_text("\n".join(file.read_text().split("\n")[:30]))
    c = named(tmp_path / "3", file, {"titles": "text", "bodies": "more"})
    counts = {name: (x, y) for name, x, y in count_rows(a.manifest, c.manifest)}
    assert [counts[f"documents read of {name}: {file}"] for name in ("titles", "bodies")] == [(40, 30), (40, 30)]


def test_tokens_that_one_vocabulary_lacks_are_told(tmp_path: Path) -> None:
    a, b = (Prepared(prepared_folder(tmp_path / str(seed), {"a.jsonl": texts(20, seed)}, vocab_size=200 + 50 * seed)) for seed in (0, 1))
    found = compare_vocabularies(a, b)
    one, two = a.decoder.tokens, b.decoder.tokens
    assert set(found.lost) == set(one) - set(two) and set(found.gained) == set(two) - set(one) and found.gained
    assert found.renumbered == sum(one.index(token) != two.index(token) for token in set(one) & set(two))


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        ("a b c d", "a b x d", ("a b", "c", "x")),
        ("a b", "a b c", ("a b", "", "c")),
        ("x a b", "a b", ("", "x", "")),
        ("a b", "a b", ("a b", "", "")),
        ("", "a", ("", "", "a")),
    ],
)
def test_where_two_texts_begin_to_differ(a: str, b: str, found: tuple[str, str, str]) -> None:
    assert first_difference(a, b) == found
