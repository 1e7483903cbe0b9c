"""A job that was started again waits for its lock; clocks that jump break neither lock, heartbeat nor progress, and change no number."""

from __future__ import annotations

import io
import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from overnight.config import Run
from overnight.console import Line
from overnight.engine.pretrain import pretrain
from overnight.errors import UserError
from overnight.run_dir import lock
from overnight.run_dir.lock import Heartbeat, run_lock
from tests.engine.test_pretrain import parameters

DAY = 86_400.0
COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that were slept, on a clock that moves by nothing else."""
    found: list[float] = []
    monkeypatch.setattr(lock.time, "monotonic", lambda: sum(found))
    monkeypatch.setattr(lock.time, "sleep", found.append)
    return found


@pytest.mark.parametrize("name", COUNTS)
def test_a_job_that_was_started_again_waits_a_minute_for_the_lock(
    name: str, slept: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    with run_lock(tmp_path), pytest.raises(UserError, match="is being written by another job"), run_lock(tmp_path):
        pass
    assert sum(slept) == pytest.approx(60, abs=0.2)


@pytest.mark.parametrize("name", COUNTS)
def test_a_job_that_was_started_again_gets_the_lock_once_it_is_free(
    name: str, slept: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "3")
    before = run_lock(tmp_path)
    before.__enter__()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 20:
            before.__exit__(None, None, None)

    monkeypatch.setattr(lock.time, "sleep", sleep)
    with run_lock(tmp_path):
        assert len(slept) == 20
        assert json.loads((tmp_path / "lock").read_text())["pid"]


@pytest.mark.parametrize("movable", [True, False])
def test_another_folder_is_a_remedy_only_where_one_can_be_given(movable: bool, tmp_path: Path) -> None:
    remedy = (
        r"wait until it ends, stop it, or give this run its own folder \(--out=\.\.\.\)$" if movable else "wait until it ends, or stop it$"
    )
    with run_lock(tmp_path), pytest.raises(UserError, match=remedy), run_lock(tmp_path, movable):
        pass
    (tmp_path / "taken").touch()
    other = "give this run another folder" if movable else "name a copy of it that you may write$"
    with pytest.raises(UserError, match=rf"taken: cannot be written \(.+\); let yourself write into it, or {other}"):
        run_lock(tmp_path / "taken", movable).__enter__()


@pytest.mark.parametrize("count", ["", "0", None])
def test_a_first_start_does_not_wait(count: str | None, slept: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in COUNTS:
        if count is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, count)
    with (
        run_lock(tmp_path),
        pytest.raises(UserError, match=f"is being written by another job, process {os.getpid()} on {socket.gethostname()};"),
        run_lock(tmp_path),
    ):
        pass
    assert slept == []


@pytest.mark.parametrize("jump", [-DAY, DAY])
def test_the_heart_beats_on_when_the_wall_clock_jumps(jump: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steady, wall, seen = 0.0, 1e9, []
    monkeypatch.setattr(lock.time, "monotonic", lambda: steady)
    monkeypatch.setattr(lock.time, "time", lambda: wall)
    heartbeat = Heartbeat(tmp_path)
    for step in range(1, 42):
        heartbeat.beat("short", step)
        seen.append(json.loads((tmp_path / "heartbeat.json").read_text()))
        steady += 1
        wall += jump if step == 15 else 1
    assert sorted({pulse["step"] for pulse in seen}) == [1, 11, 21, 31, 41]
    assert seen[20]["time"] == pytest.approx(1e9 + jump, abs=30)


def jumping(steps: Iterator[float]) -> Callable[[], float]:
    now = 1e6

    def clock() -> float:
        nonlocal now
        now += next(steps)
        return now

    return clock


@pytest.mark.parametrize("steps", [(0.1, DAY, 0.1), (0.1, -DAY, 0.1)], ids=["forward", "backward"])
def test_no_clock_breaks_a_run_or_changes_a_number(
    steps: tuple[float, ...], tiny: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steady = tiny(out=str(tmp_path / "steady"))
    pretrain(steady, Line(io.StringIO()))
    run = tiny(out=str(tmp_path / "jumping"))
    with monkeypatch.context() as patch:
        for name in ("time", "monotonic", "perf_counter"):
            patch.setattr(time, name, jumping(itertools.cycle(steps)))
        pretrain(run, Line(io.StringIO()))
    ours, theirs = parameters(run), parameters(steady)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert losses(run) == losses(steady)


def losses(run: Run) -> list[Any]:
    found = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        (line["kind"], line.get("global_step"), line.get("loss"), line.get("mlm_loss")) for line in found if line.get("event") != "peak"
    ]  # no share of the peak where the clock was wrong
