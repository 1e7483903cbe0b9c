"""A run that is stopped anywhere, by anything, ends as the undisturbed one does, bit by bit."""

from __future__ import annotations

import io
import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.exc import InductorError

from overnight import config
from overnight.checkpoint import reader, writer
from overnight.cli.main import main
from overnight.config import Run
from overnight.console import Line
from overnight.engine import loop, pretrain
from overnight.errors import ConfigError, DataError
from overnight.signals import Interrupted
from tests.conftest import CLOCK
from tests.processes import Process, overnight

Make = Callable[..., Run]


def finish(run: Run) -> str:
    """Pretrain; returns what was printed."""
    out = io.StringIO()
    pretrain.pretrain(run, Line(out))
    return out.getvalue()


def parameters(run: Run) -> dict[str, torch.Tensor]:
    newest = reader.newest_checkpoint(run.run_dir / "checkpoints")
    assert newest is not None
    _, model, optimizer = reader.read_checkpoint(newest)
    return {**model, **{f"optimizer {k}": v for k, v in optimizer.items()}}


def metrics(run: Run) -> list[dict[str, Any]]:
    """The lines without events and without what the clock decides."""
    lines = [json.loads(text) for text in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in CLOCK} for line in lines if line["kind"] != "event"]


def assert_same_run(a: Run, b: Run) -> None:
    mine, theirs = parameters(a), parameters(b)
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name
    assert metrics(a) == metrics(b)


@pytest.fixture(scope="module")
def undisturbed(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    from tests.conftest import tiny_tree

    tree = tiny_tree(tmp_path_factory.mktemp("undisturbed"), tiny_data.parent / "topics.jsonl")
    tree["data"]["dir"] = str(tiny_data)
    run = config.build_run(tree)
    finish(run)
    return run


class Stop(Exception):
    """What stands for a crash inside one process."""


def stop_after(steps: int, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = loop.clip_and_step, 0

    def crash(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        if count == steps + 1:
            raise Stop
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "clip_and_step", crash)
        with pytest.raises(Stop):
            finish(run)


@pytest.mark.parametrize("at", [1, 3, 5, 6, 7, 9])
def test_a_crash_in_any_phase_does_not_change_the_result(at: int, tiny: Make, undisturbed: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny()
    stop_after(at, run, monkeypatch)
    finish(run)
    assert_same_run(run, undisturbed)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_writes_a_checkpoint_and_exits_with_its_code(number: signal.Signals, tiny: Make, undisturbed: Run) -> None:
    run = tiny(**{"checkpoint.save_every": 1000})
    work = pretrain.TrainingRun(run, Line(io.StringIO()))
    pretrain.claim_folder(run)
    calls = 0

    def losses(batch: Any, dtype: torch.dtype) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            os.kill(os.getpid(), number)
        return work.model.losses(batch, dtype)

    work.objective = losses
    with pytest.raises(Interrupted) as caught:
        work.go()
    assert caught.value.exit_code == 128 + (signal.SIGTERM if number == signal.SIGHUP else number)
    newest = reader.newest_checkpoint(run.run_dir / "checkpoints")
    assert newest is not None and newest.name == "step-0000001"
    finish(run)
    assert_same_run(run, undisturbed)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, None])
def test_a_signal_that_ended_the_compiler_too_is_the_cause_and_not_the_compiler(number: signal.Signals | None, tiny: Make) -> None:
    run = tiny()
    work = pretrain.TrainingRun(run, Line(io.StringIO()))
    pretrain.claim_folder(run)

    def losses(batch: Any, dtype: torch.dtype) -> Any:
        if number:
            os.kill(os.getpid(), number)
        raise InductorError(RuntimeError("C++ compile error"), None)

    work.objective = losses
    with pytest.raises(Interrupted if number else InductorError) as caught:
        work.go()
    if number:
        assert caught.value.exit_code == 128 + (signal.SIGTERM if number == signal.SIGHUP else number)
        assert "ed at step 1 of phase short, whose layers were being compiled; the same command continues" in str(caught.value)
    finish(run)


def recipe_of(run: Run) -> Path:
    path = run.run_dir.parent / "recipe.yaml"
    path.write_text(config.run_yaml(run))
    return path


def spawn(run: Run) -> Process:
    return overnight("pretrain", recipe_of(run))


@pytest.mark.slow
def test_kills_at_random_moments_do_not_change_the_result(tiny: Make, undisturbed: Run) -> None:
    run, moment = tiny(), random.Random(0)
    checkpoints = run.run_dir / "checkpoints"
    for _ in range(4):
        before = {p.name for p in checkpoints.glob("*step-*")}
        with spawn(run) as process:
            # Wait until this process writes a checkpoint (it may be in the middle of one), and a little more.
            while process.returncode is None and not {p.name for p in checkpoints.glob("*step-*")} - before:
                time.sleep(0.0005)
            time.sleep(moment.uniform(0, 0.01))
    with spawn(run) as process:
        code, output = process.end()
    assert code == 0, output
    assert_same_run(run, undisturbed)


def test_a_finished_run_is_left_alone(tiny: Make) -> None:
    run = tiny()
    finish(run)
    before = {p: p.stat().st_mtime_ns for p in (run.run_dir / "checkpoints").rglob("*")} | {"metrics": metrics(run)}
    finish(run)
    assert before == {p: p.stat().st_mtime_ns for p in (run.run_dir / "checkpoints").rglob("*")} | {"metrics": metrics(run)}


@pytest.mark.parametrize("part", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "missing", "flipped"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before_and_says_so(part: str, damage: str, tiny: Make, undisturbed: Run) -> None:
    run = tiny()
    finish(run)
    newest = reader.newest_checkpoint(run.run_dir / "checkpoints")
    assert newest is not None
    path = newest / part
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 3] ^= 0x40
        path.write_bytes(content)
    finish(run)
    events = [json.loads(t) for t in (run.run_dir / "metrics.jsonl").read_text().splitlines() if '"event"' in t]
    assert any(newest.name in e.get("message", "") for e in events)
    assert_same_run(run, undisturbed)


def test_without_any_whole_checkpoint_nothing_is_overwritten(tiny: Make) -> None:
    run = tiny()
    finish(run)
    for path in (run.run_dir / "checkpoints").glob("step-*/model.safetensors"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="no checkpoint is whole"):
        finish(run)


def _fill_the_disk(recipe: Path) -> None:
    """A limit on the size of files (the weights are larger, the plans are not) makes the write itself fail, as a full disk does,
    once the first checkpoint exists."""
    real = writer.write_checkpoint

    def write(folder: Path, *args: Any) -> Any:
        if reader.newest_checkpoint(folder):
            resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))
        return real(folder, *args)

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    writer.write_checkpoint = write
    sys.exit(main(["pretrain", str(recipe)]))


@pytest.mark.parametrize("async_save", [True, False])
def test_a_full_disk_during_a_checkpoint_keeps_the_one_before(async_save: bool, tiny: Make) -> None:
    run = tiny(**{"checkpoint.save_every": 4, "checkpoint.async_save": async_save})
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    with Process(_fill_the_disk, recipe_of(run)) as process:
        code, output = process.end()
    assert code == 1, output
    assert "step-0000006 could not be written" in output and "Traceback" not in output
    assert sorted(p.name for p in (run.run_dir / "checkpoints").iterdir()) == ["latest", "step-0000004"]


def test_a_folder_of_another_recipe_is_refused_with_the_fields_that_differ(tiny: Make) -> None:
    run = tiny()
    finish(run)
    with pytest.raises(ConfigError, match=r"seed: 0 there, 7 here"):
        finish(tiny(seed=7))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("data.vocab_size", 700, "data.vocab_size: prepared with 600, now asked for 700"),
        ("data.lowercase", False, "data.lowercase: prepared with True, now asked for False"),
        ("data.paths", ["elsewhere.txt"], r"data.paths: prepared with \[.*topics.jsonl'\], now asked for \['elsewhere.txt'\]"),
    ],
)
def test_data_prepared_with_other_settings_than_the_recipe_says_is_refused_and_nothing_written(
    key: str, value: Any, expected: str, tiny: Make
) -> None:
    run = tiny(**{key: value})
    with pytest.raises(ConfigError, match=expected):
        finish(run)
    assert not run.run_dir.exists()


def test_hardware_settings_may_change_between_resumes(tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = {"model.dropout": 0.0, "model.attention_dropout": 0.0}
    whole, run = (tiny(**quiet, out=str(tmp_path / name)) for name in ("whole", "resumed"))
    finish(whole)
    stop_after(4, run, monkeypatch)
    other = {
        "phases.short.micro_batch_size": 2,
        "phases.long.micro_batch_size": 4,
        "checkpoint.keep_latest_k": 5,
        "checkpoint.save_every": 1,
    }
    finish(tiny(**quiet, **other, out=str(tmp_path / "resumed")))
    assert len(reader.list_checkpoints(run.run_dir / "checkpoints")) == 5
    a, b = parameters(whole), parameters(run)
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 8])
def test_accumulation_does_not_change_the_training(micro_batch_size: int, tiny: Make, tmp_path: Path) -> None:
    quiet = {"model.dropout": 0.0, "model.attention_dropout": 0.0}
    whole = tiny(**quiet, out=str(tmp_path / "whole"))
    sizes = {f"phases.{phase}.micro_batch_size": micro_batch_size for phase in ("short", "long")}
    cut = tiny(**quiet, out=str(tmp_path / "cut"), **sizes)
    finish(whole)
    finish(cut)
    a, b = parameters(whole), parameters(cut)
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=2e-6, msg=name)


def test_only_the_last_checkpoints_are_kept(undisturbed: Run) -> None:
    kept = sorted(p.name for p in (undisturbed.run_dir / "checkpoints").glob("step-*"))
    assert kept == ["step-0000008", "step-0000010"]
    assert (undisturbed.run_dir / "checkpoints" / "latest").read_text() == "step-0000010"


def test_the_loss_falls(tiny: Make) -> None:
    run = tiny(
        **{"phases.short.steps": 60, "phases.short.global_batch_size": 32, "phases.short.micro_batch_size": 32, "logging.eval_every": 0}
    )
    finish(run)
    losses = [line["mlm_loss"] for line in metrics(run) if line["kind"] == "train" and line["phase"] == "short"]
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.3


def test_bf16_follows_fp32(tiny: Make, tmp_path: Path) -> None:
    runs = [tiny(**{"precision": kind}, out=str(tmp_path / kind)) for kind in ("fp32", "bf16")]
    for run in runs:
        finish(run)
    fp32, bf16 = ([line["mlm_loss"] for line in metrics(run) if line["kind"] == "eval"] for run in runs)
    assert fp32 == pytest.approx(bf16, rel=0.01)
    assert fp32 != bf16


def test_several_processes_that_do_not_know_each_other_are_refused(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        ConfigError, match="WORLD_SIZE = 2: without RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT; start the processes with torchrun"
    ):
        finish(tiny())
