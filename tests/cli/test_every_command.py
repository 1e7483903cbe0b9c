"""What commands have in common: what is said when they are interrupted, and that they write nowhere by accident."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from overnight.cli import main as command_line

_KEEP = {"run", "prepare", "pretrain", "launch", "finetune", "linear-probe", "evaluate", "download"}


def test_only_a_command_that_keeps_what_it_has_done_is_said_to_continue(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(options: Namespace, overrides: list[str]) -> None:
        raise KeyboardInterrupt

    def parsed(words: list[str]) -> tuple[Any, list[str]]:
        return Namespace(command=words[0], function=interrupted), []

    _, commands = command_line._parser()
    monkeypatch.setattr(command_line, "_parse", parsed)
    assert commands.keys() >= _KEEP
    for command in commands:
        assert command_line.main([command]) == 130
        then = "continues" if command in _KEEP else "begins anew"
        assert capsys.readouterr().err == f"\novernight: interrupted; the same command {then}\n"


@pytest.mark.parametrize("argv", [["download", "blimp"], ["report", "x"], ["predict", "mask", "--from", "x"]])
def test_an_empty_name_of_what_to_write_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main([*argv, "--to="]) == 2
    assert "overnight: --to = '': name what to write" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["predict mask", "embed -", "export --to x", "import --to x", "evaluate"])
@pytest.mark.parametrize("source", ["", "hf:"])
def test_an_empty_name_of_what_to_use_is_refused(command: str, source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main([*command.split(), "--from", source]) == 2
    assert f"overnight: --from = {source!r}: name a run folder, or what else" in capsys.readouterr().err
