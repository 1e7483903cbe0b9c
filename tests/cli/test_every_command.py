"""What commands have in common: what is said when they are interrupted, and that they write nowhere by accident."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml

from overnight.cli import main as command_line
from tests.conftest import ROOT, tiny_tree

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


@pytest.mark.parametrize("argv", [["predict", "mask", "--from", "x"], ["extract-features", "--from", "x", "--to", "y.npy"]])
def test_an_empty_name_of_what_to_read_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main([*argv, "--input="]) == 2
    assert "overnight: --input = '': name what to read" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["predict mask", "embed -", "export --to x", "import --to x", "evaluate"])
@pytest.mark.parametrize("source", ["", "hf:"])
def test_an_empty_name_of_what_to_use_is_refused(command: str, source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main([*command.split(), "--from", source]) == 2
    assert f"overnight: --from = {source!r}: name a run folder, or what else" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["the same name", "a symbolic link", "a hard link"])
@pytest.mark.parametrize(
    "command",
    [
        "predict classes --input texts.jsonl --to other.jsonl",
        "embed more.jsonl texts.jsonl --to other.jsonl",
        "extract-features --input texts.jsonl --to other.jsonl",
        "heatmap --unit 3 --input texts.jsonl --to other.jsonl",
        "evaluate --rows texts.jsonl --to folder --json other.jsonl",
        "evaluate --text more.jsonl texts.jsonl --json other.jsonl",
    ],
)
def test_no_command_writes_over_the_texts_that_it_reads(
    command: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts.jsonl").write_text('{"text": "kept"}\n')
    if kind == "a symbolic link":
        Path("other.jsonl").symlink_to("texts.jsonl")
    elif kind == "a hard link":
        os.link("texts.jsonl", "other.jsonl")
    name = "./texts.jsonl" if kind == "the same name" else "other.jsonl"
    assert command_line.main([*command.replace("other.jsonl", name).split(), "--from", "nothing"]) == 2
    assert f" = {name}: is an input file, which would be overwritten; name another" in capsys.readouterr().err
    assert Path("texts.jsonl").read_text() == '{"text": "kept"}\n'


def test_what_standard_input_is_read_from_is_not_written_over_either(tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("kept\n")
    argv = [sys.executable, "-m", "overnight", "predict", "mask", "--from", "nothing", "--to", str(texts)]
    with texts.open() as stdin:
        done = subprocess.run(argv, stdin=stdin, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2 and f"--to = {texts}: is an input file" in done.stderr


@pytest.mark.parametrize(("command", "key"), [("run", "out"), ("pretrain", "out"), ("prepare", "data.dir")])
def test_a_folder_that_cannot_be_written_is_refused_before_the_work_begins(
    command: str, key: str, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = tiny_tree(tmp_path, tiny_data.parent / "topics.jsonl")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree | {"data": tree["data"] | {"dir": str(tiny_data)}}))
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "x"
    assert command_line.main([command, str(tmp_path / "recipe.yaml"), f"--{key}={folder}"]) == 2
    said = capsys.readouterr()
    assert said.err == f"overnight: {key} = {folder}: cannot be written (Not a directory); name another folder\n" and said.out == ""
