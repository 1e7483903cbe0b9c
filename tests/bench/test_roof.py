"""`overnight bench roof` measures rates and components, and `overnight plan --roof` reads them."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from overnight.bench import roof as bench_roof
from overnight.bench.measure import Row
from overnight.bench.roof import Case
from overnight.cli.main import main
from overnight.cli.plan import make_plan
from overnight.cli.roof_plan import Roof, read_roof, step_times
from overnight.config import run_yaml
from overnight.errors import ConfigError, DataError
from overnight.models import layers
from overnight.models.roofline import Rates
from tests.bench.test_benchmarks import assert_result
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def roof(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of a measurement."""
    path, before = tmp_path_factory.mktemp("roof") / "roof.json", torch.get_num_threads()
    torch.set_num_threads(1)
    assert main(["bench", "roof", "--tiny", f"--json={path}"]) == 0
    torch.set_num_threads(before)
    return path


def test_it_measures_rates_and_every_component_beside_its_floor(roof: Path) -> None:
    rows = {row["name"]: row for row in assert_result(roof.read_text(encoding="utf-8").replace("\n", " "), "roof")}
    components = [
        "attention",
        "products of the layers",
        "norms, GELU, dropout",
        "vocabulary head and loss",
        "embeddings",
        "micro-batch",
        "optimizer",
    ]
    # What is left of a layer without its products and attention may be less than the noise of a busy machine.
    given = [name for name in components if name in rows or "norms" not in name]
    assert [name for name, row in rows.items() if row.get("peer") == "floor"] == given
    # The sum of the products is timed as a product itself: their floor is what they took.
    assert rows["products of the layers"]["value"] == pytest.approx(rows["products of the layers"]["peer_value"], rel=1e-3)
    share = rows["micro-batch, share of the floor"]["value"]
    assert share == pytest.approx(100 * rows["micro-batch"]["peer_value"] / rows["micro-batch"]["value"], rel=1e-3)
    memory = "copy" if torch.cuda.is_available() else "memory"
    assert rows[memory]["unit"] == "GB/s" and rows[f"products {read_roof(roof).precision}"]["unit"] == "TFLOP/s"


def test_a_plan_says_the_least_and_the_expected_time(roof: Path, tiny: Any) -> None:
    run = tiny()
    whole = step_times(run, 500, Roof("fp32", Rates(1e9, 1e9), 0.5, 0.25))
    assert [time.phase for time in whole] == list(run.phases)
    for time in whole:
        step = time.components["optimizer"] + time.components["weights cast, gradients added"]
        assert time.least == pytest.approx(sum(time.components.values())) and min(time.components.values()) >= 0
        assert time.expected == pytest.approx((time.least - step) / 0.5 + step / 0.25)
    faster = step_times(run, 500, Roof("fp32", Rates(2e9, 2e9), 0.5, 0.25))
    assert faster[0].least == pytest.approx(whole[0].least / 2)
    assert read_roof(roof).rates.copy > 0


def test_the_command_prints_it_and_refuses_other_files_and_other_networks(
    roof: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = f"--precision={read_roof(roof).precision}"
    assert main(["plan", "bert-base", f"--roof={roof}", "--json", measured]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [time["phase"] for time in plan["roof"]] == [phase["name"] for phase in plan["phases"]]
    assert main(["plan", "bert-base", f"--roof={roof}", measured]) == 0
    assert "roof of phase" in capsys.readouterr().out
    for path in (roof, tmp_path / "none.json"):  # the file, if there is one, is not what is wrong
        assert main(["plan", "mlstm-small", f"--roof={path}"]) == ConfigError.exit_code
        assert "--roof: works only for model.kind=bert" in capsys.readouterr().err
    other = tmp_path / "other.json"
    other.write_text('{"what": "gpu", "rows": []}', encoding="utf-8")
    unknown = tmp_path / "unknown.json"
    name = "micro-batch, share of the floor"
    found = json.loads(roof.read_text(encoding="utf-8"))
    rows = [row | {"value": math.nan} if row["name"] == name else row for row in found["rows"]]
    unknown.write_text(json.dumps(found | {"rows": rows}), encoding="utf-8")
    not_a_result = "is not the result of `overnight bench roof`"
    for path, problem in ((other, not_a_result), (unknown, not_a_result), (tmp_path / "none.json", "is missing")):
        with pytest.raises(DataError, match=problem):
            read_roof(path)


def test_a_roof_of_another_precision_is_refused_with_how_to_measure_it(roof: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = read_roof(roof).precision
    other = "fp16" if measured == "bf16" else "bf16"
    assert main(["plan", "bert-base", f"--roof={roof}", f"--precision={other}"]) == ConfigError.exit_code
    said = capsys.readouterr().err
    assert f"was measured in {measured}, and precision is {other}; measure that with `overnight bench roof --precision={other} " in said
    assert said.endswith(f"`, or plan for that machine with --precision={measured}\n")


def test_the_roof_of_a_gpu_from_before_its_precision_was_written_is_that_of_bf16() -> None:
    found = read_roof(ROOT / "benchmarks" / "results" / "2026-11-26-h100" / "roof.json")
    assert found.precision == "bf16" and found.rates.products > 5e14


def test_the_other_precision_is_measured_where_it_is_asked_for(tmp_path: Path) -> None:
    assert main(["bench", "roof", "--tiny", "--precision=bf16", f"--json={tmp_path / 'roof.json'}"]) == 0
    assert read_roof(tmp_path / "roof.json").precision == "bf16"


def test_the_time_of_a_budget_is_told_of_the_steps_that_it_has(
    roof: Path, tiny: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny(precision=read_roof(roof).precision)
    planned = make_plan(run)
    short = dataclasses.replace(planned, phases=[dataclasses.replace(phase, steps=7) for phase in planned.phases])
    monkeypatch.setattr("overnight.cli.plan.make_plan", lambda run: short)
    path = roof.with_name("run.yaml")
    path.write_text(run_yaml(run), encoding="utf-8")
    assert main(["plan", str(path), f"--roof={roof}", "--json"]) == 0
    assert [time["steps"] for time in json.loads(capsys.readouterr().out)["roof"]] == [7] * len(run.phases)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a GPU the products are torch's own")
def test_the_products_of_a_cpu_are_those_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.Size] = []
    real = layers._product
    monkeypatch.setattr(layers, "_product", lambda x, w, bias=None: (asked.append(x.shape), real(x, w, bias))[1])
    bench_roof.product(4, 8, 16, torch.device("cpu"), torch.float32)()
    assert asked[:2] == [(4, 8), (4, 16)]  # forward, and the gradient of the input


def test_the_table_of_gpus_needs_no_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "roof", "--table"]) == 0
    assert capsys.readouterr().out.startswith("| ms | base, H100 |")


def a_row(case: Case, device: torch.device, precision: str) -> list[Row]:
    """Stands for a measurement that has memory for two sequences."""
    if case.sequences > 2:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5.40 GiB.\nMore")
    return [Row(f"{case.sequences} sequences", 1.0, "ms")]


def test_where_memory_runs_out_fewer_sequences_are_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_roof, "measured", a_row)
    bench_roof.run(tiny=True)
    text = capsys.readouterr().out
    assert "left out, for memory: 4 sequences (CUDA out of memory. Tried to allocate 5.40 GiB.)" in text
    assert [row["name"] for row in assert_result(text, "roof")] == ["2 sequences"]


def test_what_cannot_be_written_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_roof, "measured", lambda case, device, precision: [Row("a", 1.0, "ms")])
    (tmp_path / "file").touch()
    assert main(["bench", "roof", f"--json={tmp_path / 'file' / 'roof.json'}"]) == 1
    said = capsys.readouterr()
    assert [row["name"] for row in assert_result(said.out, "roof")] == ["a"] and str(tmp_path / "file") in said.err


def test_it_has_the_memory_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for name in ("use_large_pages", "keep_freed_memory"):
        monkeypatch.setattr(bench_roof, name, lambda name=name: done.append(name))
    monkeypatch.setattr(bench_roof, "measured", lambda case, device, precision: (done.append("measured"), [Row("a", 1.0, "ms")])[1])
    bench_roof.run(tiny=True)
    assert done == ["use_large_pages", "keep_freed_memory", "measured"]


def test_the_table_is_no_measurement_to_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "roof", "--table", f"--json={tmp_path / 'roof.json'}"]) == ConfigError.exit_code
    assert "--json: has no measurement to write with --table" in capsys.readouterr().err
    assert main(["bench", "roof", "--table", "--precision=fp32"]) == ConfigError.exit_code
    assert "--precision: the table is that of bf16" in capsys.readouterr().err
