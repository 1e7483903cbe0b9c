"""What is not finite damages nothing, and a run folder has one writer."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from overnight import config
from overnight.checkpoint import reader
from overnight.checkpoint.run_identity import claim_folder
from overnight.config import Run
from overnight.console import Line
from overnight.engine import loop, pretrain
from overnight.engine.finite import NonFiniteError
from overnight.errors import UserError
from overnight.finetune.finetune import finetune
from overnight.report.summary import summary_text
from overnight.run_dir import lock
from overnight.run_dir.lock import Heartbeat, run_lock
from overnight.signals import catch_signals
from tests.engine.test_pretrain import assert_same_run, finish, spawn
from tests.processes import wait_until

Make = Callable[..., Run]


@pytest.fixture
def undisturbed(tiny: Make, tmp_path: Path) -> Run:
    run = tiny(out=str(tmp_path / "undisturbed"))
    finish(run)
    return run


def poisoned(at: int, check: bool = True) -> Callable[..., Tensor]:
    """The step of the optimizer, with a NaN in one gradient of step `at` of the run; without `check` as a GPU does it."""
    real, count = loop.clip_and_step, 0

    def step(optimizer: torch.optim.Optimizer, max_norm: float, asked: bool) -> Tensor:
        nonlocal count
        count += 1
        if count == at:
            group = optimizer.param_groups[0]
            group["params"][group["param_names"].index("pooler.weight")].grad[0, 0] = math.nan
        return real(optimizer, max_norm, asked and check)

    return step


def weights_are_finite(run: Run) -> bool:
    places = list((run.run_dir / "checkpoints").glob("step-*"))
    return all(tensor.isfinite().all() for place in places for tensor in reader.read_checkpoint(place)[1].values())


def lines(run: Run, kind: str) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    found = [json.loads(text, parse_constant=refuse) for text in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


def test_a_nan_stops_before_the_step_and_the_same_command_continues(tiny: Make, undisturbed: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny()
    with monkeypatch.context() as patch:
        patch.setattr(loop, "clip_and_step", poisoned(at=9))
        with pytest.raises(NonFiniteError) as caught:
            finish(run)
    told = str(caught.value)
    assert caught.value.exit_code == 1
    assert told.startswith("phase long, step 3: the losses are finite (mlm ") and "the gradient of pooler.weight is not finite" in told
    assert f"The last good checkpoint is {run.run_dir}/checkpoints/step-0000008, and the same command resumes" in told
    assert lines(run, "event")[-1]["event"] == "not_finite" and "pooler.weight" in lines(run, "event")[-1]["message"]
    assert weights_are_finite(run)
    finish(run)
    assert_same_run(run, undisturbed)


def test_a_nan_before_the_first_checkpoint_does_not_say_that_the_run_resumes(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "clip_and_step", poisoned(at=1))
    with pytest.raises(NonFiniteError, match=r"There is no checkpoint yet: the same command begins anew; with other settings.*--out"):
        finish(tiny(**{"checkpoint.save_every": 100}))


@pytest.mark.parametrize("log_every", [1, 100])
def test_where_the_loop_does_not_look_nothing_that_is_not_finite_is_saved(
    log_every: int, tiny: Make, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny(**{"logging.log_every": log_every, "checkpoint.save_every": 4, "logging.eval_every": 0})
    with monkeypatch.context() as patch:
        patch.setattr(loop, "clip_and_step", poisoned(at=9, check=False))
        with pytest.raises(NonFiniteError) as caught:
            finish(run)
    seen = 3 if log_every == 1 else 4  # of phase long: at the next line, or before the next checkpoint
    assert f"phase long, step {seen}, or one since the last line of metrics" in str(caught.value)
    assert "; the weights of encoder.word.weight, " in str(caught.value)
    assert sorted(p.name for p in (run.run_dir / "checkpoints").glob("step-*")) == ["step-0000004", "step-0000006"]
    assert weights_are_finite(run)
    finish(run)
    theirs, mine = (reader.read_checkpoint(r.run_dir / "checkpoints" / "step-0000010")[1] for r in (undisturbed, run))
    assert all(torch.equal(theirs[name], mine[name]) for name in theirs)


def test_weights_that_a_step_itself_made_infinite_are_not_saved(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run, real, count = tiny(), loop.clip_and_step, 0

    def overflow(optimizer: torch.optim.Optimizer, *args: Any) -> Tensor:
        nonlocal count
        norm, count = real(optimizer, *args), count + 1
        if count == 4:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0][0, 0] = math.inf
        return norm

    monkeypatch.setattr(loop, "clip_and_step", overflow)
    with pytest.raises(NonFiniteError, match=r"step 4, .*the weights of encoder\.layers\.0\.qkv\.weight are not finite"):
        finish(run)
    assert [p.name for p in (run.run_dir / "checkpoints").glob("step-*")] == ["step-0000002"]


def test_a_skipped_step_is_told_and_counted_and_the_metrics_stay_json(tiny: Make) -> None:
    run, told = tiny(**{"stability.on_nonfinite": "skip"}), io.StringIO()
    work = pretrain.TrainingRun(run, Line(told))
    claim_folder(run)
    calls = 0

    def losses(batch: Any, dtype: torch.dtype) -> Any:
        nonlocal calls
        calls += 1
        found, hits = work.model.losses(batch, dtype)
        return {name: loss * (math.nan if calls in (5, 6) else 1) for name, loss in found.items()}, hits  # both micro-batches of step 3

    work.objective = losses
    work.go()
    assert "step 3 skipped: the mlm loss is nan and the nsp loss is nan; the gradient of" in told.getvalue()
    (event,) = (line for line in lines(run, "event") if line["event"] == "skipped")
    assert event["global_step"] == 3 and event["message"].startswith("step 3 skipped")
    train = lines(run, "train")
    assert [line["global_step"] for line in train] == [1, 2, 4, 5, 6, 7, 8, 9, 10]
    assert [line.get("skipped") for line in train] == [None, None, 1, 1, 1, 1, 1, 1, 1]
    progress, _, optimizer = reader.read_checkpoint(run.run_dir / "checkpoints" / "step-0000010")
    assert progress.skipped == 1
    assert {float(value) for key, value in optimizer.items() if key.endswith("/step")} == {9 - 5.0}  # NVLAMB counts each phase anew


def command(run: Run) -> tuple[int, str]:
    with spawn(run) as process:
        return process.end()


def test_a_second_process_is_refused_with_the_first_ones_number(tiny: Make, tmp_path: Path) -> None:
    run = tiny()
    with run_lock(run.run_dir):
        code, output = command(run)
        assert code == 1 and f"by another job, process {os.getpid()} on {socket.gethostname()};" in output and "Traceback" not in output
        assert sorted(p.name for p in run.run_dir.iterdir()) == ["lock"]
        with pytest.raises(UserError, match="is being written by another job"):
            finish(run)
    finish(run)
    with run_lock(run.run_dir):
        assert "tiny" in summary_text(run.run_dir)  # reading is free
        (tmp_path / "rows.csv").write_text("a,1\n")
        with pytest.raises(UserError, match="is being written by another job"):
            finetune(dataclasses.replace(run, finetune={"x": config.Finetune(task="csv", path=str(tmp_path))}), "x")


def test_the_lock_is_free_after_kill_9(tiny: Make) -> None:
    run = tiny(**{"phases.short.steps": 100_000})
    with spawn(run) as process:
        wait_until((run.run_dir / "heartbeat.json").exists, process)
        with pytest.raises(UserError, match=f"process {process.pid} on "), run_lock(run.run_dir):
            pass
        pulse = json.loads((run.run_dir / "heartbeat.json").read_text())
        assert (pulse["pid"], pulse["phase"]) == (process.pid, "short") and pulse["step"] >= 1
    with run_lock(run.run_dir):
        assert json.loads((run.run_dir / "lock").read_text())["pid"] == os.getpid()


def test_a_holder_that_has_not_yet_written_its_number_is_refused_without_it(tmp_path: Path) -> None:
    with run_lock(tmp_path):
        (tmp_path / "lock").write_text("")
        with pytest.raises(UserError, match="another job, which has just begun"), run_lock(tmp_path):
            pass


def test_the_heart_beats_every_ten_seconds_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, seen = 0.0, []
    monkeypatch.setattr(lock.time, "monotonic", lambda: now)
    heartbeat = Heartbeat(tmp_path)
    for step in range(1, 30):
        heartbeat.beat("short", step)
        pulse = json.loads((tmp_path / "heartbeat.json").read_text())
        assert pulse.keys() == {"time", "phase", "step", "pid", "host"}
        seen.append(pulse["step"])
        now += 1
    assert sorted(set(seen)) == [1, 11, 21]


def test_only_ctrl_c_stops_at_once_after_a_first_signal() -> None:
    with catch_signals() as signals:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        assert signals.received == signal.SIGUSR1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_sigusr1_ends_a_job_with_a_checkpoint_and_138(tiny: Make, undisturbed: Run) -> None:
    run = tiny(**{"phases.short.steps": 100_000})
    with spawn(run) as process:
        wait_until((run.run_dir / "heartbeat.json").exists, process)
        process.send_signal(signal.SIGUSR1)
        code, output = process.end()
    assert code == 138, output
    assert "overnight: stopped by SIGUSR1 at step" in output and "a checkpoint is written" in output
    newest = reader.newest_checkpoint(run.run_dir / "checkpoints")
    assert newest is not None and f"step {int(newest.name[5:])} of phase short" in output
