"""A search tries what it says, resumes, is lost by what diverges, keeps to its budget, and never chooses by the reported rows unasked."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.cli.main import main
from overnight.config import Search
from overnight.engine import loop
from overnight.errors import ConfigError, TrainingError
from overnight.finetune import search as module
from overnight.finetune.finetune import finetune
from overnight.finetune.rehearsal import Rehearsal, combinations
from overnight.finetune.seed import train_seed
from tests.finetune.conftest import SPEC, Task
from tests.finetune.test_finetune import Stop, kept, lines, tune

GRID = {"lr": [1e-3, 3e-3], "epochs": [0.2, 0.4]}
# What each of the four takes as a rehearsal has it (s).
COSTS = {0.2: 10.0, 0.4: 20.0}


@pytest.fixture(autouse=True)
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test knows what a trial costs, whatever the machine."""
    monkeypatch.setattr(Rehearsal, "seed_seconds", lambda self, spec: COSTS[spec.epochs])


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What every trained seed was called with; the trial with a rate of 3e-3 and 0.2 epochs is the best."""
    calls: list[dict[str, Any]] = []

    def train(run: Any, spec: Any, task: Any, *rest: Any) -> Any:
        found = train_seed(run, spec, task, *rest)
        calls.append({"lr": spec.lr, "epochs": spec.epochs, "rows": len(task.train)})
        if found.value is None:
            return found
        return dataclasses.replace(found, value=0.9 if (spec.lr, spec.epochs) == (3e-3, 0.2) else 0.5)

    monkeypatch.setattr("overnight.finetune.beginning.train_seed", train)
    return calls


def trials(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in entries if entry["kind"] == "trial"]


def test_every_combination_is_tried_on_fewer_rows_and_the_best_is_trained_on_all_with_all_seeds(
    with_task: Task, classes: Path, scored: list[dict[str, Any]]
) -> None:
    run = with_task("csv", classes, search=GRID, seeds=[3, 4])
    said = tune(run)
    found = lines(run)
    assert [e["settings"] for e in trials(found)] == [{"lr": lr, "epochs": e} for lr in GRID["lr"] for e in GRID["epochs"]]
    assert {entry["seed"] for entry in trials(found)} == {3}
    seeds = [entry for entry in found if entry["kind"] == "finetune"]
    assert [entry["seed"] for entry in seeds] == [3, 4] and {entry["rows"] for entry in seeds} == {40}
    assert {call["rows"] for call in scored[:4]} == {36} and [call["rows"] for call in scored[4:]] == [40, 40]
    assert [(call["lr"], call["epochs"]) for call in scored[4:]] == [(3e-3, 0.2)] * 2
    facts = json.loads((kept(run) / "task.json").read_text())
    assert (facts["spec"]["lr"], facts["spec"]["epochs"]) == (3e-3, 0.2)
    # It is said before anything is trained what it will cost.
    assert said.index("search of 4 trials, about 1 min 00 s; chosen by accuracy on 4 training sequences set aside") < said.index("trial 1")
    assert "then 2 seeds with the best, about 20 s to 40 s" in said and "best lr=0.003 epochs=0.2" in said
    (table,) = re.findall(r"^trial .*\n(?:\d .*\n)+", said, re.MULTILINE)
    assert len(table.splitlines()) == 5 and re.search(r"^3 +0.003 +0.2 +0.22 +90.0 %", table, re.MULTILINE)
    assert not list((run.run_dir / "finetune").glob("mine.search/*/checkpoints"))
    # Again nothing is done.
    before = len(scored)
    assert "searched already; best lr=0.003 epochs=0.2" in tune(run) and len(scored) == before and lines(run) == found


def test_the_reported_rows_choose_only_where_that_is_asked_for(with_task: Task, classes: Path, scored: list[dict[str, Any]]) -> None:
    run = with_task("csv", classes, search=GRID, select_on="dev")
    assert "chosen by accuracy on dev rows, whose score is also reported" in tune(run)
    assert {call["rows"] for call in scored} == {40}
    assert lines(run)[-1]["kind"] == "finetune" and lines(run)[-1]["selected_on"] == "dev"


def test_a_search_that_is_cut_off_anywhere_continues(
    with_task: Task, classes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = with_task("csv", classes, search={"lr": [1e-3, 3e-3], "epochs": [0.4]}, **{"checkpoint.save_every": 1})
    whole = dataclasses.replace(run, out=str(tmp_path / "whole"))
    shutil.copytree(run.run_dir, whole.run_dir)
    tune(whole)
    real = loop.clip_and_step
    # Two steps a trial: inside the first, inside the second, and inside the seed.
    for steps in (2, 3, 2):
        calls = 0

        def cut(*args: Any, steps: int = steps) -> Any:
            nonlocal calls
            calls += 1
            if calls == steps:
                raise Stop
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(loop, "clip_and_step", cut)
            with pytest.raises(Stop):
                tune(run)
    tune(run)
    assert (kept(run) / "model.safetensors").read_bytes() == (kept(whole) / "model.safetensors").read_bytes()
    values = [[(entry["kind"], entry["value"], entry.get("settings")) for entry in lines(one)] for one in (run, whole)]
    assert values[0] == values[1] and [kind for kind, *_ in values[0]] == ["trial", "trial", "search", "finetune"]


def test_more_to_try_keeps_what_was_tried(with_task: Task, classes: Path, scored: list[dict[str, Any]]) -> None:
    tune(with_task("csv", classes, search={"lr": [1e-3], "epochs": [0.2]}))
    run = with_task("csv", classes, search=GRID)
    said = tune(run)
    assert "4 trials, 1 of them done, about 50 s" in said
    assert [e["settings"]["lr"] for e in trials(lines(run))] == [1e-3, 1e-3, 3e-3, 3e-3]


def test_a_trial_that_diverges_has_lost(with_task: Task, classes: Path) -> None:
    run = with_task("csv", classes, search={"lr": [1e30, 1e-3]})
    COSTS[2] = 1.0
    said = tune(run)
    first, second = trials(lines(run))
    assert "not finite" in first["diverged"] and "diverged" not in second
    assert re.search(r"^1 +1e\+30 +- +diverged", said, re.MULTILINE) and "best lr=0.001" in said
    with pytest.raises(TrainingError, match="every trial diverged; try lower rates"):
        tune(with_task("csv", classes, search={"lr": [1e30]}))


def test_the_budget_leaves_out_what_does_not_fit(
    with_task: Task, classes: Path, scored: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])

    def takes(*args: Any) -> Any:
        clock[0] += COSTS[args[1].epochs]
        return train_seed(*args)

    monkeypatch.setattr("overnight.finetune.beginning.train_seed", takes)
    run = with_task("csv", classes, search={**GRID, "budget": "45s"})
    said = tune(run)
    # 10 and 20 s are spent, 10 more fit, 20 do not.
    assert [e["settings"]["epochs"] for e in trials(lines(run))] == [0.2, 0.4, 0.2]
    assert "about 45 s" in said and "trial 4 left out, it does not fit into 45s" in said and re.search(r"^4 .*left out", said, re.MULTILINE)
    assert "searched already" in tune(run)


def test_the_time_before_a_kill_counts(with_task: Task, classes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = with_task("csv", classes, search={"lr": [1e-3], "epochs": [0.4]}, **{"checkpoint.save_every": 1, "logging.log_every": 1})
    real = loop.clip_and_step

    def stop(*args: Any) -> Any:
        # As the kill of a training would that has gone on for a thousand seconds.
        (metrics,) = (run.run_dir / "finetune").rglob("metrics.jsonl")
        with metrics.open("a") as file:
            file.write('{"kind": "train", "phase": "finetune", "step": 1, "seconds": 1000.0}\n')
        raise Stop

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(loop, "clip_and_step", stop)
        tune(run)
    monkeypatch.setattr(loop, "clip_and_step", real)
    tune(run)
    (trial,) = trials(lines(run))
    assert 1000 < trial["seconds"] < 2000 and lines(run)[-1]["seconds"] < 1000


def test_a_budget_too_short_for_one_trial_is_refused_with_the_least_that_is_needed(with_task: Task, classes: Path) -> None:
    run = with_task("csv", classes, search={**GRID, "budget": "9s"})
    said = r"budget = 9s: is too short for one trial; the shortest, lr=0.001 epochs=0.2, takes about 10 s: give at least 11s"
    with pytest.raises(ConfigError, match=said):
        finetune(run, "mine")  # type: ignore[arg-type]
    assert lines(run) == []


def test_the_command_line_takes_a_search_as_one_mapping_or_key_by_key(
    with_task: Task, classes: Path, scored: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    run = with_task("csv", classes)
    words = ["finetune", "own", "--from", str(run.run_dir), "--task=csv", f"--path={classes}", *(f"--{k}={v}" for k, v in SPEC.items())]
    assert main([*words, "--search", "{lr: [1e-3, 3e-3], epochs: [0.2]}"]) == 0
    assert "own: best lr=0.003 epochs=0.2" in capsys.readouterr().out
    assert main([*words, "--search.lr=[1e-3,3e-3]", "--search.epochs=0.2"]) == 0
    assert "own: searched already; best lr=0.003 epochs=0.2" in capsys.readouterr().out
    assert main([*words, "--search.lr=[1e-3,2e-3]", "--search.epochs=0.4", "--search.budget=1s"]) == 2
    assert "is too short for one trial" in capsys.readouterr().err


@given(st.integers(0, 20), st.integers(0, 5))
def test_a_draw_is_some_of_the_combinations_once_each_and_always_the_same(draw: int, seed: int) -> None:
    search = Search(lr=[1e-4, 2e-4, 3e-4], epochs=[1, 2], layer_lr_decay=[0.8, 1.0], draw=draw, seed=seed)
    found = combinations(search)
    assert found == combinations(search) and len(found) == (min(draw, 12) or 12)
    assert len({tuple(one.items()) for one in found}) == len(found) and all(one in search.combinations for one in found)
    if draw:
        assert combinations(dataclasses.replace(search, draw=min(12, draw + 1)))[: len(found)] == found


@pytest.mark.parametrize(
    ("search", "said"),
    [
        ({"lr": [-1.0]}, r"search.lr = \[-1.0\]: each must be above 0"),
        ({"layer_lr_decay": [0.9, 1.5]}, r"search.layer_lr_decay = \[0.9, 1.5\]: each must be"),
        ({"epochs": ["many"]}, r"search.epochs.0 = 'many'"),
        ({"global_batch_size": [8, 12]}, r"search.global_batch_size = 12: cannot be split"),
        ({"lr": [1e-3], "budget": "soon"}, r"search.budget = 'soon': must be a time such as 30m"),
        ({"budget": "30m"}, r"search: has nothing to try"),
        ({"rate": [1e-3]}, r"search.rate"),
    ],
)
def test_what_cannot_be_searched_is_refused(with_task: Task, classes: Path, search: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        with_task("csv", classes, search=search)
