"""Whether pretraining wins, in words."""

from __future__ import annotations

import re
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.report.verdict import compare, spread
from tests.conftest import ROOT


def line(value: float, **more: object) -> dict[str, object]:
    return {"metric": "accuracy", "value": value, **more}


@pytest.mark.parametrize(
    ("pretrained", "random_init", "wins", "words"),
    [
        ([0.67, 0.66, 0.68], [0.50, 0.49, 0.51], True, "wins by more than the spread"),
        ([0.52, 0.50, 0.54], [0.50, 0.49, 0.51], False, "ahead, but not by more"),
        ([0.52, 0.52, 0.52], [0.50, 0.40, 0.60], False, "ahead, but not by more"),
        ([0.50, 0.49, 0.51], [0.50, 0.49, 0.51], False, "does not win: matched by random init"),
        ([0.40, 0.39, 0.41], [0.50, 0.49, 0.51], False, "does not win"),
        ([0.67], [0.50], None, "ahead of random init, on a single seed"),
        ([0.67, 0.66, 0.68], [0.50], True, "wins by more than the spread"),
        ([0.52, 0.50, 0.54], [0.50], False, "ahead, but not by more"),
        ([0.725, 0.625], [0.575], False, "ahead, but not by more"),
        ([0.65, 0.60], [0.575], False, "ahead, but not by more"),
        ([0.67, 0.66], [], None, "not compared"),
        ([], [0.5], None, "not run yet"),
    ],
)
def test_pretraining_wins_only_by_more_than_the_spread_of_the_seeds(
    pretrained: list[float], random_init: list[float], wins: bool | None, words: str
) -> None:
    sides = [spread({i: line(value) for i, value in enumerate(values)}) for values in (pretrained, random_init)]
    found, text = compare(*sides)
    assert found is wins and words in text


@pytest.mark.parametrize(
    ("pretrained", "random_init", "baselines", "wins", "words"),
    [
        (
            [0.63, 0.62, 0.64],
            [0.5, 0.5, 0.5],
            [0.85],
            False,
            "does not win: beaten by method 0; ahead of random init",
        ),
        ([0.644], [0.867], [0.5, 0.956], False, "does not win: beaten by method 1 and random init; ahead of method 0"),
        (
            [0.5],
            [0.5],
            [0.4, 0.7, 0.45, 0.6],
            False,
            "beaten by method 1 and method 3; matched by random init; ahead of method 2 and method 0",
        ),
        ([0.9], [0.5], [0.4, 0.7], None, "ahead of method 1 and random init and method 0, on a single seed"),
        ([0.63, 0.62, 0.64], [0.5, 0.5, 0.5], [0.1, 0.63], False, "matched by method 1; ahead of random init and method 0"),
        ([0.63, 0.62, 0.64], [0.5, 0.5, 0.5], [0.1, 0.63 - 1e-16], False, "matched by method 1; ahead of random init and"),
        ([0.63, 0.62, 0.64], [0.5, 0.5, 0.5], [0.1, 0.631], False, "beaten by method 1"),
        ([0.63, 0.62, 0.64], [0.5, 0.5, 0.5], [0.55, 0.62], False, "not by more than the spread of the seeds; next is method 1"),
        ([0.63, 0.62, 0.64], [0.5, 0.5, 0.5], [0.55, 0.40], True, "wins by more than the spread; next is method 0"),
        ([0.63, 0.62, 0.64], [0.7, 0.7, 0.7], [0.65, 0.40], False, "beaten by random init and method 0; ahead of method 1"),
        ([0.63], [], [0.85], False, "beaten by method 0"),
        ([0.63], [], [0.55], None, "ahead of method 0, on a single seed: no spread to compare with; not compared with random init"),
        ([0.63, 0.60], [], [0.59], False, "not by more than the spread of the seeds; next is method 0; not compared with random init"),
        ([0.63, 0.60], [], [0.55], None, "ahead of method 0 by more than the spread; not compared with random init"),
        ([0.63], [0.5], [0.55], None, "single seed"),
        ([0.63], [0.5], [float("nan")], None, "single seed"),
        ([float("nan")], [0.5], [0.55], None, "not a number"),
    ],
)
def test_pretraining_wins_only_where_no_baseline_is_better(
    pretrained: list[float], random_init: list[float], baselines: list[float], wins: bool | None, words: str
) -> None:
    sides = [spread({i: line(value) for i, value in enumerate(values)}) for values in (pretrained, random_init)]
    found, text = compare(*sides, [{"method": f"method {i}", "value": value} for i, value in enumerate(baselines)])
    assert found is wins and words in text


@given(st.floats(0, 1), st.floats(0, 1), st.lists(st.floats(0, 1), min_size=1, max_size=3))
def test_no_verdict_is_good_where_anything_else_is_as_good(pretrained: float, random_init: float, baselines: list[float]) -> None:
    sides = [spread({0: line(value), 1: line(value)}) for value in (pretrained, random_init)]
    wins, text = compare(*sides, [{"method": f"method {i}", "value": value} for i, value in enumerate(baselines)])
    assert wins is (pretrained - max(random_init, *baselines) > 1e-9) and (wins or "pretraining wins" not in text)


@given(st.dictionaries(st.integers(0, 9), st.floats(0, 1), min_size=1))
def test_the_spread_holds_every_value_and_the_median(values: dict[int, float]) -> None:
    found = spread({seed: line(value) for seed, value in values.items()})
    assert found is not None
    assert found["values"] == values
    assert found["low"] <= found["median"] <= found["high"]
    assert found["median"] == statistics.median(values.values())
    assert (found["spread"] is None) == (len(values) == 1)


def test_the_verdict_in_the_readme_is_that_of_the_numbers_above_it() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = {
        name: [float(x) / 100 for x in re.findall(r"([\d.]+) %", re.search(rf"^{name} .*", text, re.M)[0])]
        for name in ("pretrained", "random init", "word overlap")
    }
    sides = [spread({i: line(value) for i, value in enumerate(rows[name][:3])}) for name in ("pretrained", "random init")]
    _, verdict = compare(*sides, [{"method": "word overlap", "value": rows["word overlap"][0]}])
    assert f"\n{verdict}\n" in text
