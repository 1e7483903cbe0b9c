"""Numbers in words, and lines that fit."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.wording import folded, for_stream, plural, yaml_text


@pytest.mark.parametrize(
    ("count", "noun", "many", "words"),
    [
        (1, "tensor", "", "1 tensor"),
        (0, "tensor", "", "0 tensors"),
        (1200, "piece", "", "1,200 pieces"),
        (2, "epoch of", "epochs of", "2 epochs of"),
    ],
)
def test_one_thing_is_not_said_in_the_plural(count: int, noun: str, many: str, words: str) -> None:
    assert plural(count, noun, many) == words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (False, "false"),
        (0, "0"),
        (1e-6, "1e-06"),
        ("", "-"),
        (None, "-"),
        ({}, "-"),
        ([0.9, True], "[0.9, true]"),
        ("a", "a"),
    ],
)
def test_a_setting_is_shown_as_a_recipe_would_have_it(value: object, text: str) -> None:
    assert yaml_text(value) == text


@given(st.text("abc  -/\n", max_size=300), st.integers(20, 60))
def test_folding_keeps_every_word_whole_and_every_line_within_the_width(text: str, width: int) -> None:
    found = folded(text, width)
    assert found.split() == text.split()
    assert all(len(line) <= width or len(line.split()) <= 1 for line in found.split("\n"))
    assert folded(text, 10_000) == text


def test_a_table_that_fits_keeps_its_columns() -> None:
    table = "name   value\nloss   5.676"
    assert folded(table, 40) == table


def test_only_a_terminal_has_its_lines_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "30")
    text = "one line of seven words and more that a pipe gets whole"
    assert for_stream(text, io.StringIO()) == text
    assert for_stream(text, Terminal()) == "one line of seven words and\n  more that a pipe gets whole"
