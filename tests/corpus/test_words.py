"""Distinct words, in C and with pyarrow, compared with what Python says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overnight.corpus import words
from overnight.corpus.words import WORD_OR_MARK, distinct_words, ragged

TEXT = st.lists(st.sampled_from([*"ab \n.,'`~", "the", "é", "中", "\u00a0", "\x01", "𝒳", "  "])).map("".join)


@pytest.fixture(params=["C", "pyarrow"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "pyarrow":
        monkeypatch.setattr(words, "_library", lambda: None)
    elif words._library() is None:
        pytest.skip("there is no C compiler")


@pytest.mark.usefixtures("library")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXT)
def test_words_are_those_between_spaces_or_marks_in_the_order_in_which_they_first_occur(text: str) -> None:
    expected = [part for line in text.split("\n") for word in line.split(" ") for part in WORD_OR_MARK.findall(word)]
    found, places = distinct_words(text.encode())
    assert found == list(dict.fromkeys(expected))
    assert [found[place] for place in places] == expected


@pytest.mark.usefixtures("library")
def test_more_different_words_than_were_expected_are_found() -> None:
    expected = [np.base_repr(number, 36) for number in range(20_000)]
    found, places = distinct_words(" ".join(expected * 2).encode())
    assert found == expected and places.tolist() == [*range(20_000)] * 2


@given(values=st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=6), data=st.data())
def test_ragged_gives_the_values_of_each_place_on_end(values: list[list[int]], data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, len(values) - 1)))
    flat, offsets = np.array([each for part in values for each in part], np.int64), np.cumsum([0, *map(len, values)])
    assert ragged(flat, offsets, np.array(places, np.int32)).tolist() == [each for place in places for each in values[place]]
