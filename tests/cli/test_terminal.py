"""What is printed fits the terminal, its encoding and its width; and a terminal may close."""

from __future__ import annotations

import io
import os
import pty
import signal
import sys
from pathlib import Path

import pytest

from overnight.cli import machine_commands, recipe_commands
from tests.cli.test_main import Captured, call, recipe

__all__ = ["recipe"]


@pytest.mark.parametrize(("encoding", "errors"), [("ascii", "strict"), ("ascii", "surrogateescape"), ("latin-1", "strict")])
def test_a_terminal_that_is_not_utf_8_shows_what_it_cannot_as_escapes(
    encoding: str, errors: str, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=errors) for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    assert call("plan", recipe, "--name=Müller ▁ 中") == 0
    assert call("plan", "中.yaml") == 2
    out.flush()
    err.flush()
    assert "\\u2581 \\u4e2d: BERT" in out.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    assert "no recipe '\\u4e2d.yaml'" in err.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]


@pytest.mark.parametrize("columns", [60, 80, 110])
def test_the_examples_of_a_help_stand_in_columns_or_on_lines_of_their_own(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert call("run", "--help") == 0
    lines = capsys.readouterr().out.splitlines()
    (at,) = (i for i, line in enumerate(lines) if line.startswith("  overnight run demo") and "--phases" not in line)
    beside, own = lines[at].endswith("minutes, no data needed"), lines[at + 1] == "      minutes, no data needed"
    assert beside is (columns == 110) and own is (columns < 110)
    assert all(len(line) <= max(columns, 76) for line in lines[: at + 12])


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_command_whose_output_is_closed_does_its_work(name: str, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, name, None)
    assert call("plan", recipe) == 0
    assert call("plan", "none.yaml") == 2
    getattr(sys, name).close()


@pytest.mark.parametrize("ignored", [False, True])
def test_a_terminal_that_closes_terminates_a_command_unless_it_is_nohups(
    ignored: bool, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    monkeypatch.setattr(machine_commands, "_doctor", lambda *_: os.kill(os.getpid(), signal.SIGHUP))
    try:
        assert call("doctor") == (0 if ignored else 143)
        assert signal.getsignal(signal.SIGHUP) == (signal.SIG_IGN if ignored else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ("terminated" in capsys.readouterr().err) is not ignored


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_of_many_processes_that_are_stopped_at_their_start_the_first_says_it(
    number: signal.Signals, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe_commands, "_pretrain", lambda *_: os.kill(os.getpid(), number))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        assert call("pretrain", "demo") == 128 + number
        assert capsys.readouterr().err.count("the same command") == (rank == 0)


def test_what_is_printed_to_a_terminal_that_has_closed_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()

    def close(*_: object) -> None:
        os.close(ours)
        for _ in range(3):
            print("lost", flush=True)

    monkeypatch.setattr(machine_commands, "_doctor", close)
    with os.fdopen(theirs, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert call("doctor") == 0
