"""How a process that trains with others ends: with its own exit code, whatever torch's threads still hold."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from overnight.distributed import elastic
from overnight.distributed.elastic import Agent, meet
from tests.conftest import ROOT
from tests.processes import Process

# What the interpreter's own end would meet, as gloo's thread does: here an object that aborts when modules are cleared away.
ENDS = """
import atexit, os, sys
from overnight.cli import main as cli
class Late:
    def __del__(self):
        os.abort()
late = Late()
late.itself = late
atexit.register(print, "library written")
def main(words):
    print("printed", end=" ")
    {body}
cli._main = main
cli.command()
"""


def ends(body: str, processes: int = 2) -> tuple[int, str, str]:
    code = ENDS.format(body=body)
    environment = {**os.environ, "WORLD_SIZE": str(processes)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("code", [0, 1, 2, 130, 138, 143])
def test_a_process_among_others_keeps_its_exit_code_and_its_output_whatever_threads_still_hold(code: int) -> None:
    assert ends(f"return {code}") == (code, "printed library written\n", "")


def test_an_error_of_ours_in_one_of_many_processes_shows_its_traceback_and_ends_with_1() -> None:
    code, out, error = ends("assert 1 + 1 == 3, 'a claim'")
    assert (code, out) == (1, "printed library written\n")
    assert error.startswith("Traceback") and error.endswith("AssertionError: a claim\n")


def test_the_plant_would_be_seen() -> None:
    code, _, _ = ends("return 2", processes=1)
    assert code not in (0, 2)


def launched(command: list[str]) -> None:
    Agent(meet("", (1, 1), 0, Path()), command, 2, 10).run()


def test_processes_end_with_the_launch_that_was_killed() -> None:
    body = "import time; print('begun'); time.sleep(60); print('left behind'); return 0"
    with Process(launched, [sys.executable, "-u", "-c", ENDS.format(body=body)]) as process:
        assert "begun" in process.stdout.readline() + process.stdout.readline()
        process.kill()
        rest = process.stdout.read()  # to the end of the last one that writes there
    assert "left behind" not in rest, rest


@pytest.mark.parametrize("given", [None, "INFO"])
def test_torch_does_not_warn_in_every_process_of_a_launch_unless_it_is_asked_to(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []

    class Done:
        returncode = 0

        def __init__(self, command: list[str], env: dict[str, str], **_: object) -> None:
            started.append(env)

        def poll(self) -> int:
            return 0

    monkeypatch.setattr(elastic.subprocess, "Popen", Done)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", given) if given else monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    launched([])
    assert [env["TORCH_CPP_LOG_LEVEL"] for env in started] == [given or "ERROR"] * 2


@pytest.mark.heavy
@pytest.mark.skipif(shutil.which("cc") is None or sys.platform != "linux", reason="needs a C compiler on Linux")
def test_processes_end_as_documented_also_where_gloo_is_late(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.process_ends", "--ends=1", "--late=5000", f"--out={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "result.json").read_text())["exit codes"]
    assert {kind: list(counts["found"]) for kind, counts in found.items()} == {kind: [counts["expected"]] for kind, counts in found.items()}
