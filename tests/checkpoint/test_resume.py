"""Checkpoints of whole runs: killed while one is written, on a full disk, and continued with another recipe."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overnight.checkpoint import reader, writer
from overnight.checkpoint.writer import CheckpointWriter
from overnight.config import Run
from overnight.errors import ConfigError, DataError
from tests.engine.test_pretrain import assert_same_run, finish
from tests.processes import Process

Make = Callable[..., Run]

DISK = """
import shutil, subprocess, sys
from pathlib import Path
from tests.checkpoint.test_reader import network, saved
from overnight.errors import DataError
from overnight.checkpoint import reader

disk, real = Path(sys.argv[1]), shutil.disk_usage
def refused(*steps):
    try:
        saved(disk / "run", *steps)
    except DataError as error:
        print(error)
    assert reader.load_checkpoint(disk / "run", network())[0].global_step == 1
    assert not list((disk / "run").glob(".*"))
saved(disk / "run", 1)
(disk / "other").write_bytes(bytes(real(disk).free - 8192))
refused(2)
shutil.disk_usage = lambda path: real(path)._replace(total=0)  # a disk that does not know what is free on it
refused(2)
(disk / "other").unlink()
subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
shutil.disk_usage = real
refused(2)
"""


def test_a_disk_that_fills_up_and_one_that_cannot_be_written(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f'mount -t tmpfs -o size=600k tmpfs "{disk}" && exec "{sys.executable}" -c "$1" "{disk}"'
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("a user may not mount here")
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script, "sh", DISK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, during, locked = done.stdout.splitlines()
    for told in (before, during, locked):
        assert told.startswith(f"checkpoint {disk}/run/step-0000002 could not be written: ") and told.endswith(" and run again")
        assert "; step-0000001 before it is untouched. " in told
    assert "No space left on device" in before and before.endswith("It takes 0.3 MB, and 0.0 MB are free there: make room and run again")
    assert "No space left on device" in during and during.endswith(before.rpartition(".")[2])
    assert "Read-only file system" in locked and locked.endswith("Correct that and run again")


def saves(run: Run) -> list[dict[str, Any]]:
    lines = [json.loads(text) for text in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("event") == "checkpoint_saved"]


def _killed_in_step_5(run: Run) -> None:
    """Half of the moments of step 4 are on the disk, and step 5 is done, when the process kills itself."""
    real = writer.save_file

    def save_file(named: Any, path: Path) -> None:
        real(named, path)
        if path.parent.name == ".step-0000004.tmp" and path.name == "optimizer.safetensors":
            os.truncate(path, path.stat().st_size // 2)
            while '"global_step": 5' not in (run.run_dir / "metrics.jsonl").read_text():
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)

    writer.save_file = save_file
    finish(run)


def test_kill_9_while_a_checkpoint_is_written_and_the_training_goes_on(tiny: Make, tmp_path: Path) -> None:
    run, undisturbed = tiny(), tiny(out=str(tmp_path / "undisturbed"))
    finish(undisturbed)
    with Process(_killed_in_step_5, run) as process:
        code, output = process.end()
    assert code == -signal.SIGKILL, output
    assert '"global_step": 5' in (run.run_dir / "metrics.jsonl").read_text()
    assert sorted(p.name for p in (run.run_dir / "checkpoints").iterdir()) == [".step-0000004.tmp", "latest", "step-0000002"]
    finish(run)
    assert_same_run(run, undisturbed)
    assert [line["global_step"] for line in saves(run)] == [2, 4, 6, 8, 10]
    assert not list((run.run_dir / "checkpoints").glob(".*"))


def test_a_failed_write_stops_the_training_at_the_next_step(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run, real = tiny(), CheckpointWriter.save

    def save(saver: CheckpointWriter, *args: Any) -> float:
        seconds = real(saver, *args)
        saver.settle()
        return seconds

    def write(folder: Path, parts: Any, progress: dict[str, Any]) -> None:
        raise DataError("checkpoint x could not be written")

    monkeypatch.setattr(CheckpointWriter, "save", save)
    monkeypatch.setattr(writer, "write_checkpoint", write)
    with pytest.raises(DataError, match="checkpoint x could not be written"):
        finish(run)
    lines = [json.loads(text) for text in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["global_step"] for line in lines if line["kind"] == "train"] == [1, 2]


def test_each_checkpoint_says_how_long_the_training_stood_still(tiny: Make) -> None:
    run = tiny(**{"checkpoint.keep_latest_k": 1, "checkpoint.keep_every_n_steps": 5})
    finish(run)
    events = saves(run)
    assert [(line["phase"], line["step"], line["global_step"]) for line in events] == [
        ("short", 2, 2),
        ("short", 4, 4),
        ("short", 6, 6),
        ("long", 2, 8),
        ("long", 4, 10),
    ]
    assert all(line["save_seconds"] >= 0 for line in events)
    finish(run)
    assert saves(run) == events
    assert [place.name for place in reader.list_checkpoints(run.run_dir / "checkpoints")] == ["step-0000010", "step-0000006"]


def test_another_precision_and_another_optimizer_are_refused(tiny: Make) -> None:
    run = tiny()
    finish(run)
    with pytest.raises(ConfigError, match=r"\n  precision: fp32 there, bf16 here"):
        finish(tiny(**{"precision": "bf16"}))
    lans = {f"phases.{name}.optim": {"name": "lans", "lr": 0.01} for name in ("short", "long")}
    with pytest.raises(ConfigError, match=r"phases.short.optim.name: lamb there, lans here"):
        finish(tiny(**lans))
    (run.run_dir / "run.yaml").unlink()
    with pytest.raises(
        DataError, match=r"are of lamb, and phase long trains with lans, which cannot continue with its moments; give this run"
    ):
        finish(tiny(**lans))
