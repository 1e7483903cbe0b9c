"""The heat maps and the noise curve hold what was measured, thinned where it is too much to see."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from overnight.report.run_reader import read_folder
from overnight.report.tensors import COLUMNS, heat_maps, noise_curves
from tests.report.sample import measured, metrics, write_run

TENSORS = [line for line in measured() if line["kind"] == "tensor_norms"]
NOISE = [line for line in measured() if line["kind"] == "noise"]


def test_a_map_has_a_row_for_every_tensor_and_a_column_for_every_measured_step() -> None:
    maps = heat_maps(TENSORS)
    assert maps is not None
    assert maps["step"] == [line["global_step"] for line in TENSORS] and maps["seconds"] == [line["seconds"] for line in TENSORS]
    assert maps["change"]["names"] == ["encoder.word.weight", "encoder.layers.0.up.weight", "encoder.layers.0.up.bias"]
    assert maps["change"]["values"][0][:2] == [0.00511, 0.00522]
    assert maps["ratio"]["values"][1][:2] == [0.0247, 0.0494], "three digits"


def test_a_tensor_without_a_trust_ratio_has_no_row_and_one_that_was_0_a_gap() -> None:
    maps = heat_maps(TENSORS)
    assert maps is not None
    assert maps["ratio"]["names"] == ["encoder.word.weight", "encoder.layers.0.up.weight"]
    assert maps["change"]["values"][2] == [None, *[0.04] * 19]


def test_an_optimizer_without_trust_ratios_has_an_empty_map_of_them() -> None:
    maps = heat_maps([{**line, "tensor_norms": {"a": [1.0, 1.0, 0.1, None]}} for line in TENSORS])
    assert maps is not None and maps["ratio"] == {"names": [], "values": []}


def test_a_tensor_that_one_phase_does_not_have_leaves_a_gap_there() -> None:
    maps = heat_maps([{**line, "tensor_norms": {"ab"[i % 2]: [1.0, 1.0, 0.5, 2.0]}} for i, line in enumerate(TENSORS[:3])])
    assert maps is not None and maps["ratio"] == {"names": ["a", "b"], "values": [[2.0, None, 2.0], [None, 2.0, None]]}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_a_gap(bad: float) -> None:
    maps = heat_maps([{**TENSORS[0], "tensor_norms": {"a": [1.0, bad, bad, bad], "b": [bad, 1.0, 1.0, 1.0]}}])
    assert maps is not None and maps["ratio"]["names"] == ["b"] and maps["change"]["names"] == []
    curves = noise_curves([{**NOISE[0], "groups": {"run": bad}}], 10)
    assert curves is not None and curves["groups"] == {"run": [None]}
    assert json.dumps([maps, curves], allow_nan=False)


def test_a_long_run_is_thinned_to_what_can_be_seen() -> None:
    maps = heat_maps([line for line in measured(4000, 2) if line["kind"] == "tensor_norms"])
    assert maps is not None and COLUMNS / 2 < len(maps["step"]) <= COLUMNS
    curves = noise_curves([line for line in measured(4000, 2) if line["kind"] == "noise"], 300)
    assert curves is not None and 150 < len(curves["step"]) <= 300


def test_the_noise_curve_has_a_gap_where_the_scale_is_unknown_and_says_what_the_last_known_one_means() -> None:
    curves = noise_curves([*NOISE, {**NOISE[-1], "global_step": 999, "groups": {"run": None}}], 100)
    assert curves is not None
    assert curves["groups"]["run"] == [None, *[10.0 * step for step in range(4, 41, 2)], None]
    assert curves["groups"]["vectors"] == [None] * 21
    assert curves["says"] == "at step 40: 400; with 64 sequences a batch, 7.2 times the fewest steps and 1.2 times the fewest examples"
    unknown = noise_curves(NOISE[:1], 100)
    assert unknown is not None and "never known" in unknown["says"]


def test_a_run_that_measured_nothing_has_neither(tmp_path: Path) -> None:
    records = read_folder(write_run(tmp_path / "run", metrics())).records
    assert heat_maps(records["tensor_norms"]) is None and noise_curves(records["noise"], 10) is None


def test_of_a_step_that_was_measured_twice_the_newer_line_counts(tmp_path: Path) -> None:
    again = {**NOISE[3], "groups": {"run": 7.0}}
    records = read_folder(write_run(tmp_path / "run", [*measured(), again])).records["noise"]
    assert len(records) == len(NOISE) and records[3]["groups"] == {"run": 7.0}
