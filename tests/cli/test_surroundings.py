"""What is wrong around a command is said in a line, not in a traceback: no memory is left, or the working directory is gone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from overnight.cli import machine_commands
from overnight.cli.main import main


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore"), "CUDA out of memory. Tried to allocate 2 GiB.;"),
        (RuntimeError("CUDA error: out of memory"), "CUDA error: out of memory;"),
        (MemoryError(), "MemoryError;"),
    ],
)
def test_memory_that_is_missing_is_no_traceback(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(options: object, overrides: object) -> None:
        raise error

    monkeypatch.setattr(machine_commands, "_doctor", fails)
    assert main(["doctor"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"overnight: there is too little memory: {said} another program may use it") and err.count("\n") == 1


def test_another_error_is_one_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(options: object, overrides: object) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(machine_commands, "_doctor", fails)
    with pytest.raises(RuntimeError, match="shapes"):
        main(["doctor"])


def test_a_working_directory_that_was_deleted_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    code = main(["recipes"])
    os.chdir(tmp_path)
    assert code == 2 and "the working directory was deleted; change to one that is there (cd)" in capsys.readouterr().err
