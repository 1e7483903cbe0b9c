"""The examples of docs/use.md run, on a run that is called as there."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from overnight.cli.main import main
from overnight.config import BertRun
from tests.conftest import ROOT
from tests.processes import HANG

PAGE = (ROOT / "docs" / "use.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    """The examples of the page in one language."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_program_of_the_page_runs(trained_run: BertRun, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(trained_run.run_dir)
    (tmp_path / "texts.txt").write_text("one\n\nthree\n")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks("python"))],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shape, pieces, label, *vectors = done.stdout.splitlines()
    assert shape == "(2, 32)" and pieces.count("'token'") == 5 and len(vectors) == 3
    assert label.startswith("('error', 'number', 'text')")


def test_the_commands_of_the_page_run(trained_run: BertRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(trained_run.run_dir)
    (tmp_path / "texts.txt").write_text("one\n\nthree\n")
    monkeypatch.chdir(tmp_path)
    commands = blocks("bash")[0].splitlines()
    assert len(commands) >= 3
    for command in commands:
        piped, _, words = command.rpartition("| ")
        assert piped in ("", "cat texts.txt ")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\n\nthree\n")))
        assert main(shlex.split(words)[1:]) == 0
    assert np.load("vectors.npy").shape == (3, 32)
