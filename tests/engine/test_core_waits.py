"""Cores that something else uses: seen in what Linux counts, said once, with what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from overnight.engine import core_waits
from overnight.engine.core_waits import CoreWaits

Threads = Callable[[dict[str, float]], None]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(core_waits.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(CoreWaits, "said", False)
    return now


@pytest.fixture
def threads(tmp_path: Path) -> Threads:
    def write(waited: dict[str, float]) -> None:
        for thread, seconds in waited.items():
            (tmp_path / thread).mkdir(exist_ok=True)
            (tmp_path / thread / "schedstat").write_text(f"123456789 {int(seconds * 1e9)} 42\n")

    return write


def test_a_thread_that_waits_for_a_quarter_of_the_time_is_said_once(
    clock: list[float], threads: Threads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    threads({"1": 50.0, "2": 3.0})  # what was before does not count
    waits = CoreWaits(tmp_path)
    clock[0] += 40
    threads({"1": 51.0, "2": 3.0 + 0.24 * 40})
    assert not waits.look()
    clock[0] += 40
    threads({"1": 52.0, "2": 13.0 + 0.6 * 40})
    said = waits.look()
    assert (
        said.startswith("warning: for 61.0 % of the last 40 s other programs kept a thread")
        and "fewer than its 2 threads (compute.threads)" in said
    )
    clock[0] += 40
    threads({"2": 100.0})
    assert not waits.look() and not CoreWaits(tmp_path).look()


def test_steps_that_were_timed_beside_others_are_named_each_time(clock: list[float], threads: Threads, tmp_path: Path) -> None:
    for waited, said in ((1.0, ""), (6.0, "kept a thread from its core for 60.0 % of the time")):
        threads({"1": 50.0, "2": 3.0})
        waits = CoreWaits(tmp_path)
        clock[0] += 10
        threads({"1": 50.0 + waited, "2": 3.0})
        assert said in (found := waits.while_timed()) and bool(found) == bool(said)


def test_one_thread_is_not_told_to_be_fewer_and_threads_that_begin_or_end_are_passed_over(
    clock: list[float], threads: Threads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    threads({"1": 0.0, "2": 7.0})
    waits = CoreWaits(tmp_path)
    (tmp_path / "2" / "schedstat").unlink()
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "schedstat").write_text("")
    threads({"1": 5.0, "4": 9.0})
    clock[0] += 20
    said = waits.look()
    assert said.startswith("warning: for 45.0 % of the last 20 s") and "fewer" not in said


def test_nothing_is_said_within_20_seconds_or_where_the_system_counts_no_waits(
    clock: list[float], threads: Threads, tmp_path: Path
) -> None:
    threads({"1": 0.0})
    waits, unknown = CoreWaits(tmp_path), CoreWaits(tmp_path / "none")
    threads({"1": 19.0})
    clock[0] += 19
    assert not waits.look()
    clock[0] += 1
    assert not unknown.look()
    assert waits.look()


REAL = """
import os, time
from overnight.engine import core_waits
core_waits._EVERY = 0.5
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
waits = core_waits.CoreWaits()
child = os.fork()
end = time.monotonic() + 1
while time.monotonic() < end:
    pass
if child:
    os.wait()
    print(waits.look())
else:
    os._exit(0)
"""


@pytest.mark.heavy  # two seconds of a core; the others of this file read what a system counts
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system counts no waits for cores")
def test_two_processes_on_one_core_are_seen() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    said = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, check=True, env=environment).stdout
    assert "other programs kept a thread of this training from its core" in said
