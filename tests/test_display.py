"""Numbers have one form wherever they are shown, and no other module has a form of its own."""

from __future__ import annotations

import ast
import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight import display
from overnight.display import folded, for_stream, plural, yaml_text
from tests.syntax import nodes
from tests.test_structure import sources


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (display.share(0.1456), "14.6 %"),
        (display.share(0.69, scale=1), "0.7 %"),
        (display.share(None), "-"),
        (display.points(0.0084), "0.8"),
        (display.number(1800, 0), "1,800"),
        (display.rounded(9_999_999), "9,999,999"),
        (display.rounded(325_730_475), "325.7 M"),
        (display.rounded(33e9), "33.0 B"),
        (display.measure("mlm_accuracy", 0.1456), "14.6 %"),
        (display.measure("accuracy of the unit alone", 0.5), "50.0 %"),
        (display.measure("f1", 69.0, display.scale_of("squad")), "69.0 %"),
        (display.measure("spearman", 0.5834), "58.3"),
        (display.measure("bits_per_character", 2.34567), "2.346"),
        (display.measure("mlm_loss", math.nan), "nan"),
        (display.measure("mean_absolute_error", 0.0004), "0.0004"),
        (display.measure("mean_absolute_error_test", 1.25e12), "1.25e+12"),
        (display.measure("mean_absolute_error", 200.0), "200.000"),
        (display.quantity(0.0), "0.000"),
        (display.quantity(-0.00123456), "-0.001235"),
        (display.measures({"mlm_loss": 5.6764, "mlm_accuracy": 0.1439}), "mlm loss 5.676  mlm accuracy 14.4 %"),
        (display.duration(59.4), "59 s"),
        (display.duration(59.6), "1 min 00 s"),
        (display.duration(185), "3 min 05 s"),
        (display.duration(360000), "100 h 00 min"),
        (display.duration(3599.6), "1 h 00 min"),
    ],
)
def test_a_number_has_its_form(shown: str, text: str) -> None:
    assert shown == text


def own_percents(text: str) -> list[int]:
    """Lines in which a module makes a per cent itself: `{...:.1%}`, or a placeholder with decimals and ` %` after it."""
    found = []
    for node in (node for node in nodes(text) if isinstance(node, ast.JoinedStr)):
        for part, after in zip(node.values, [*node.values[1:], None], strict=True):
            form = ast.unparse(part.format_spec) if isinstance(part, ast.FormattedValue) and part.format_spec else ""
            follows = isinstance(after, ast.Constant) and str(after.value).startswith(" %")
            if "%" in form or ("f'" in form and ".1f" in form and follows):
                found.append(node.lineno)
    return found


def test_only_one_module_makes_per_cents() -> None:
    assert own_percents('f"{x:.0%} of {y:.1f} %"') == [1, 1]
    shown = {name for name, text in sources().items() if own_percents(text) and not name.startswith("bench")}
    assert shown <= {"display"}


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


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_only_a_terminal_has_its_lines_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    text = "one line of seven words and more that a pipe gets whole"
    assert for_stream(text, io.StringIO()) == text
    assert for_stream(text, Terminal()) == "one line of seven words and\n  more that a pipe gets whole"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Où\u00a0? «\u202foui\u202f»", "Où ? « oui »"),
        ("東京\u3000大阪", "東京 大阪"),
        ("می\u200cخواهم क्\u200dष 👩\u200d💻", "می\u200cخواهم क्\u200dष 👩\u200d💻"),
        ("Donau\u00addampf", "Donaudampf"),
    ],
)
def test_ordinary_text_of_any_language_is_shown(text: str, shown: str) -> None:
    assert display.visible(text) == shown


@given(st.text(st.sampled_from("\x1b\x07\n\t\x85\u200e\u202e\u2066\u2028\ufeff\ud800\ue000\U000e0001")))
def test_what_steers_a_terminal_or_is_not_shown_is_replaced(text: str) -> None:
    assert display.visible(f"a{text}é") == "a" + "\ufffd" * len(text) + "é"


def test_no_text_of_others_steers_a_terminal() -> None:
    steering = "a\x1b[31m\x07 b\tc\n"
    assert for_stream(steering, Terminal()) == "a\ufffd[31m\ufffd b\tc\n"
    assert for_stream(steering, io.StringIO()) == steering
