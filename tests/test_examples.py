"""The examples run, and say what the package does today."""

from __future__ import annotations

import re
import runpy
import shlex
import sys

import pytest

from overnight.cli.main import main
from tests.conftest import ROOT

EXAMPLES = ROOT / "examples"


def test_lamb_in_a_plain_loop_learns_the_spirals(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "lamb_in_a_plain_loop.py"), run_name="__main__")
    last = capsys.readouterr().out.splitlines()[-1]
    found = re.fullmatch(r"accuracy ([\d.]+) %", last)
    assert found and float(found[1]) > 95, last


def test_the_job_of_slurm_is_what_its_command_prints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = re.search(r"`overnight (launch [^`]*)`", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert found
    monkeypatch.setattr(sys, "executable", "python")
    assert main(shlex.split(found[1])) == 0
    assert capsys.readouterr().out == (EXAMPLES / "slurm_job.sh").read_text(encoding="utf-8")


def test_every_example_is_in_the_list() -> None:
    listed = set(re.findall(r"^\| `([^`]+)`", (EXAMPLES / "README.md").read_text(encoding="utf-8"), re.M))
    assert listed == {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")}
