"""Shingles and sketches: C and numpy alike, and both as defined."""

from __future__ import annotations

import random
import re
import unicodedata
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.corpus import shingles

DOCUMENT = st.text(st.sampled_from("abcD9  .,'’—«é中文、ñßжЖς\u03a3،।，€😀𠀋\n\u00a0"), max_size=60)


def flat(documents: list[str]) -> tuple[np.ndarray, np.ndarray]:
    encoded = [document.encode() for document in documents]
    return np.frombuffer(b"".join(encoded), np.uint8), np.cumsum([0, *map(len, encoded)])


def words(text: str) -> list[str]:
    """Return the words of a text, by a pattern: the definition."""
    text = "".join(" " if unicodedata.category(character)[0] in "PSZC" else character.casefold() for character in text)
    return re.findall(r"[\u3000-\u9fff\U00020000-\U0003ffff]|[^\s\u3000-\u9fff\U00020000-\U0003ffff]+", text)


@pytest.fixture(params=["C", "numpy"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "numpy":
        monkeypatch.setattr(shingles, "_library", lambda: None)
    elif shingles._library() is None:
        pytest.skip("no C compiler")
    yield request.param


@given(st.lists(DOCUMENT, min_size=1, max_size=6), st.integers(1, 6), st.booleans())
def test_c_and_numpy_give_the_same(documents: list[str], n: int, whole_short: bool) -> None:
    if shingles._library() is None:
        pytest.skip("no C compiler")
    text, offsets = flat(documents)
    hashes, ends = shingles.ngram_hashes(text, offsets, n, whole_short)
    plain, plain_ends = shingles._plain_ngrams(text, offsets, n, whole_short)
    assert hashes.tolist() == plain.tolist() and ends.tolist() == plain_ends.tolist()
    sketch, keys = shingles.sketches(hashes, ends, 26, 8)
    plain_sketch, plain_keys = shingles._plain_sketches(hashes, ends, 26, 8)
    filled = np.diff(ends, prepend=0) > 0
    assert (sketch == plain_sketch).all() and (keys[filled] == plain_keys[filled]).all()


@given(st.lists(DOCUMENT, min_size=2, max_size=4), st.integers(1, 4))
def test_hashes_are_equal_where_the_words_are(documents: list[str], n: int) -> None:
    found: dict[tuple[str, ...], int] = {}
    hashes, ends = shingles.ngram_hashes(*flat(documents), n)
    start = 0
    for document, end in zip(documents, ends.tolist(), strict=True):
        each = words(document)
        grams = [tuple(each[i : i + n]) for i in range(len(each) - n + 1)]
        assert len(grams) == end - start
        for gram, value in zip(grams, hashes[start:end].tolist(), strict=True):
            assert found.setdefault(gram, value) == value
        start = end
    assert len(set(found.values())) == len(found)


def test_case_punctuation_and_white_space_do_not_count(kind: str) -> None:
    a, b, c = (
        shingles.ngram_hashes(*flat([text]), 3, True)[0].tolist()
        for text in ("Don’t stop — “he said”, 3 times…", "don't\nSTOP he (said) 3 times", "don't stop she said 3 times")
    )
    assert a == b != c


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Заяц долго спал у дороги", "ЗАЯЦ — ДОЛГО СПАЛ, У ДОРОГИ!"),
        ("Ο λαγός κοιμήθηκε πολύ", "Ο ΛΑΓΌΣ· ΚΟΙΜΉΘΗΚΕ ΠΟΛΎ"),
        ("兔子睡着了，乌龟赢了。", "兔子睡着了,乌龟赢了!"),
        ("نام الأرنب، ففازت السلحفاة؟", "نام الأرنب ففازت السلحفاة"),
        ("खरगोश सो गया। कछुआ जीत गया।", "खरगोश सो गया, कछुआ जीत गया"),
        ("the hare slept 😀 and lost 5€", "The hare slept; and lost 5 €."),
        ("𞤀𞤣𞤤𞤢𞤥 𠀋𠀌", "𞤢𞤣𞤤𞤢𞤥、𠀋 𠀌"),
    ],
)
def test_case_and_punctuation_of_no_alphabet_count(kind: str, one: str, other: str) -> None:
    hashes, ends = shingles.ngram_hashes(*flat([one, other]), 2)
    assert hashes[: ends[0]].tolist() == hashes[ends[0] :].tolist() != []


def test_a_document_of_few_words_has_one_hash_only_where_that_is_asked_for(kind: str) -> None:
    text, offsets = flat(["one two", "", "one two three four", "…"])
    assert shingles.ngram_hashes(text, offsets, 3)[1].tolist() == [0, 0, 2, 2]
    hashes, ends = shingles.ngram_hashes(text, offsets, 3, True)
    assert ends.tolist() == [1, 1, 3, 3] and len(set(hashes.tolist())) == 3


def pair_of(rng: random.Random, size: int, similarity: float) -> tuple[list[int], list[int], float]:
    """Return two sets of hashes of which one is about as large, and their Jaccard similarity."""
    shared = round(size * similarity)
    values = [rng.getrandbits(64) for _ in range(2 * size - shared)]
    return values[:size], values[size - shared :], shared / len(values)


@pytest.mark.parametrize("size", [20, 120, 2000])
@pytest.mark.parametrize("similarity", [0.3, 0.9])
def test_the_estimate_is_without_bias_and_as_exact_as_its_formula(size: int, similarity: float) -> None:
    rng = random.Random(size)
    pairs = [pair_of(rng, size, similarity) for _ in range(400)]
    hashes = np.array([value for a, b, _ in pairs for value in a + b], np.uint64)
    sketch, _ = shingles.sketches(hashes, np.arange(1, 801) * size, 1, 1)
    errors = shingles.similarity(sketch[::2], sketch[1::2]) - pairs[0][2]
    deviation = (pairs[0][2] * (1 - pairs[0][2]) / shingles.BINS) ** 0.5
    assert errors.std() < 1.15 * deviation
    assert abs(errors.mean()) < 4 * deviation / len(pairs) ** 0.5


@pytest.mark.parametrize("size", [5, 20, 120, 2000])
def test_filled_bins_agree_with_the_probability_of_the_similarity(size: int, kind: str) -> None:
    """Documents with fewer n-grams than bins too: bands of one row are the bins themselves, after densification."""
    rng = random.Random(size)
    pairs = [pair_of(rng, size, 0.8) for _ in range(300)]
    hashes = np.array([value for a, b, _ in pairs for value in a + b], np.uint64)
    _, keys = shingles.sketches(hashes, np.arange(1, 601) * size, shingles.BINS, 1)
    agree = (keys[::2] == keys[1::2]).mean(axis=1)
    truth = pairs[0][2]
    # The bins of a document depend on each other; of different pairs they do not.
    assert abs(agree.mean() - truth) < 4 * agree.std() / len(pairs) ** 0.5
    assert agree.std() < 3 * (truth * (1 - truth) / min(size, shingles.BINS)) ** 0.5
