"""Work is not lost with the reader of what a command prints, and what only prints ends with it."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from overnight.checkpoint.reader import newest_checkpoint
from overnight.cli import machine_commands
from tests.cli.test_main import Captured, call, recipe

__all__ = ["recipe"]


@contextmanager
def unread(kind: str, *names: str) -> Iterator[None]:
    """Within it, standard streams lead to a pipe or a terminal that nobody reads."""
    reader, writer = os.pipe() if kind == "pipe" else os.openpty()
    os.close(reader)
    with pytest.MonkeyPatch.context() as patch, open(writer, "w", encoding="utf-8") as stream:
        for name in names:
            patch.setattr(sys, name, stream)
        yield


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_a_training_whose_reader_has_gone_trains_to_its_end_and_says_so_once(
    kind: str, recipe: Path, tmp_path: Path, capsys: Captured
) -> None:
    with unread(kind, "stdout"):
        assert call("pretrain", recipe) == 0
    said = capsys.readouterr().err
    assert said == "overnight: the reader of standard output has gone; the command continues and prints nothing more there\n"
    assert newest_checkpoint(tmp_path / "run" / "checkpoints")
    assert call("pretrain", recipe) == 0
    assert "all phases are done" in capsys.readouterr().out


def test_a_training_whose_both_outputs_have_no_reader_trains_to_its_end(recipe: Path, tmp_path: Path, capsys: Captured) -> None:
    with unread("pipe", "stdout", "stderr"):
        assert call("pretrain", recipe) == 0
    assert call("pretrain", recipe) == 0
    assert "all phases are done" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv", ["recipes", "run RECIPE --print-config", "run RECIPE --help", "download --list", "plan RECIPE", "--version"]
)
def test_what_only_prints_ends_quietly_with_its_reader(argv: str, recipe: Path, capsys: Captured) -> None:
    with unread("pipe", "stdout"):
        assert call(*argv.replace("RECIPE", str(recipe)).split()) == 0
    assert capsys.readouterr().err == ""


def test_a_pipe_of_its_own_that_breaks_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def broken(*args: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(machine_commands, "_doctor", broken)
    assert call("doctor") == 1
    assert capsys.readouterr().err == "overnight: [Errno 32] Broken pipe\n"


@pytest.mark.parametrize("argv", ["recipes", "plan RECIPE", "pretrain RECIPE"])
def test_a_full_disk_behind_standard_output_is_named(argv: str, recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    full = Path("/dev/full")
    if not full.is_char_device():
        pytest.skip("there is no /dev/full")
    with full.open("w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert call(*argv.replace("RECIPE", str(recipe)).split()) == 1
    assert capsys.readouterr().err.startswith("overnight: [Errno 28] No space left on device: 'standard output'; make room, ")
