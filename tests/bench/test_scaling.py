"""The sweep makes runs of every length from one trunk and continues after a kill; the fit finds the law that made the points."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks import scaling_fit, scaling_sweep
from benchmarks.scaling_fit import errors, fit, left_out, mean_error, usable
from benchmarks.scaling_sweep import Chain, Sweep, go, listed, work_of
from overnight import config
from overnight.config import BertRun, Run
from overnight.engine.scaling_law import LAW as LAW_OF_THE_PACKAGE
from overnight.engine.scaling_law import LAW_FROM, Law
from tests.conftest import ROOT, modern_settings, tiny_tree
from tests.recipe import change

LAW = Law(floor=0.4, a_scale=40.0, a=0.3, b_scale=70.0, b=0.25)


def planted(noise: float = 0.0) -> list[dict[str, float]]:
    """Runs that follow a law, each off by a random share."""
    generator = np.random.default_rng(0)
    return [
        {
            "parameters": n,
            "tokens": d / 4,
            "characters": d,
            "bits_per_character": LAW.loss(n, d) * float(np.exp(noise * generator.standard_normal())),
        }
        for n, d in itertools.product((4e5, 1.3e6, 4.7e6, 1.4e7, 3.7e7), (1e7, 2e7, 4e7, 8e7, 1.6e8))
    ]


def test_the_fit_finds_the_planted_coefficients() -> None:
    found = fit(planted()).law
    for name in ("floor", "a_scale", "a", "b_scale", "b"):
        assert getattr(found, name) == pytest.approx(getattr(LAW, name), rel=0.02), name


def test_runs_that_were_scored_on_another_text_do_not_move_the_law() -> None:
    points: list[dict[str, Any]] = [{**point, "text": "sweep" if number % 3 else "books"} for number, point in enumerate(planted())]
    for point in points:
        point["bits_per_character"] *= 0.97 if point["text"] == "sweep" else 1.0
    found = fit(points)
    assert dataclasses.astuple(found.law) == pytest.approx(dataclasses.astuple(LAW), rel=0.02)
    assert found.factors == {"sweep": pytest.approx(0.97, rel=1e-3)} and max(map(abs, errors(found, points))) < 1e-3


def test_one_run_that_went_wrong_does_not_move_the_fit() -> None:
    points = planted(noise=1e-4)
    points[7]["bits_per_character"] *= 1.3
    away = {"parameters": 8.5e7, "tokens": 0.0, "characters": 1e9, "bits_per_character": LAW.loss(8.5e7, 1e9)}
    assert abs(errors(fit(points), [away])[0]) < 0.02


def test_with_a_given_shape_only_the_floor_and_the_scale_are_fitted() -> None:
    points = planted()[::6]
    shape = Law(floor=9.0, a_scale=4.0, a=0.3, b_scale=7.0, b=0.25)
    found = fit(points[:3], shape).law
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(LAW), rel=0.01)
    with pytest.raises(SystemExit, match="4 runs, and 5 coefficients to fit"):
        fit(points[:4])
    with pytest.raises(SystemExit, match="0 runs, and 5 coefficients to fit"):
        fit([])


def test_the_error_is_of_runs_that_were_not_fitted() -> None:
    points = planted()
    away = left_out(points)
    assert {p["parameters"] for p in away if p["tokens"] < 4e7} == {3.7e7} and len(away) == 9
    rest = [p for p in points if p not in away]
    assert mean_error(errors(fit(rest), away)) < 1e-3


def test_runs_on_the_plateau_and_other_chains_are_not_fitted() -> None:
    rows: list[dict[str, Any]] = [
        {"name": name, "masked_accuracy": accuracy} for name, accuracy in (("size-a", 0.3), ("size-a", 0.1), ("rate-a", 0.4))
    ]
    assert usable(rows, 0.15) == rows[:1]


@pytest.mark.heavy
def test_the_fit_is_written_beside_the_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = [{**point, "name": "size-x", "masked_accuracy": 0.4} for point in planted()]
    (tmp_path / "results.json").write_text(json.dumps({"points": points}))
    scaling_fit.main(["--test", str(tmp_path), str(tmp_path), "--out", str(tmp_path / "fit")])
    report = json.loads((tmp_path / "fit" / "fit.json").read_text())
    assert (report["runs"], len(report["tests"]), report["left_out"]) == (25, 25, 9) and report["error_left_out"] < 1e-3
    assert "fitted to 25 runs" in capsys.readouterr().out
    assert "37.0 M parameters" in (tmp_path / "fit" / "law.svg").read_text()


@pytest.fixture
def sweep(tiny: Callable[..., Run], tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """A sweep of one network of two lengths, of seconds."""
    tree = change(tiny_tree(tmp_path, tiny_data.parent / "topics.jsonl"), modern_settings())
    optim = {"name": "muon", "lr": 4e-3, "schedule": {"name": "wsd", "warmup_ratio": 0.1, "stable_ratio": 0.5}}
    tree["phases"] = {"short": {**tree["phases"]["short"], "mlm_probability": 0.3, "max_predictions_per_seq": 0, "optim": optim}}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    monkeypatch.setattr(scaling_sweep, "SIZES", ((1, 64),))
    lengths = tuple(steps * 4 * 128 for steps in (5, 10))
    return Sweep(tmp_path / "out", tmp_path / "work", str(path), (), lengths, 4, {600: tiny_data}, 2000, 1)


def chain_of(sweep: Sweep) -> Chain:
    return next(sweep.chains())


def test_the_branch_of_a_length_begins_where_the_rate_is_to_fall(sweep: Sweep) -> None:
    chain = chain_of(sweep)
    assert [chain.steps(tokens) for tokens in chain.tokens] == [(3, 2), (6, 4)]
    run = sweep.run(chain, sweep.work, *chain.steps(chain.tokens[1]))
    trunk, decay = run.phases.values()
    assert isinstance(run, BertRun) and (trunk.optim.schedule.name, decay.optim.schedule.name) == ("constant", "wsd")
    assert trunk.optim.schedule.warmup_ratio * trunk.optim.schedule.total_steps == 20 and not decay.optim.reset_moments
    # The trunk warms up alike however long it becomes, so that it may be extended.
    short = sweep.run(chain, sweep.work, 3)
    different = list(config.differences(config.identity(short)["phases"]["trunk"], config.identity(run)["phases"]["trunk"]))
    assert [line.split(":")[0] for line in different] == ["steps"]


def test_a_trunk_is_trained_once_for_all_lengths() -> None:
    chain = Chain("size-x", 1, 64, 600, 4, 1e-3, 0, (100, 200, 400))
    assert work_of(chain) == pytest.approx(0.6 * 400 + 0.4 * 700)
    assert work_of(chain, [100]) == pytest.approx(0.6 * 300 + 0.4 * 600) and work_of(chain, chain.tokens) == 0


@pytest.mark.heavy
def test_a_sweep_that_was_killed_continues_and_does_nothing_twice(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = scaling_sweep.masked_score, []

    def killed(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(scaling_sweep, "masked_score", killed)
    chains = [chain_of(sweep)]
    with pytest.raises(KeyboardInterrupt):
        go(sweep, chains, 60)
    assert [point["steps"] for point in sweep.points()] == [5]
    assert "1 of 2 lengths done" in next(listed(sweep, chains))
    go(sweep, chains, 60)
    points = sweep.points()
    assert [point["steps"] for point in points] == [5, 10] and len(calls) == 3
    assert all(0 < point["bits_per_character"] < 9 and point["parameters"] == 4 * 64**2 + 3 * 64 * 160 for point in points)
    go(sweep, chains, 60)
    assert len(calls) == 3, "all is done"


def test_no_run_is_begun_when_the_time_is_over(sweep: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    go(sweep, [chain_of(sweep)], -1)
    assert not sweep.points() and "time is over" in capsys.readouterr().out


def test_the_law_of_the_package_is_the_fit_of_the_stored_runs() -> None:
    report = json.loads((ROOT / "benchmarks/results/2026-11-26-law/fit.json").read_text())
    assert dataclasses.astuple(LAW_OF_THE_PACKAGE) == pytest.approx(tuple(report["law"].values()), rel=2e-3)
    assert LAW_FROM.startswith(f"{report['runs']} runs")
