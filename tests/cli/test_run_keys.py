"""Every command that takes a run takes the same run-level keys, and no others."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from overnight import config
from overnight.cli import main as cli
from overnight.cli import task_keys
from overnight.cli.main import main
from overnight.config import Run

BYTES = ("linear-probe", "extract-features", "heatmap", "generate")
EITHER = ("predict", "export", "evaluate")
USES = ("embed", "serve")
"""Their tests are in tests/inference: they open more than runs."""
KEYS = ["--precision=bf16", "--compute.device", "cpu", "--compute.threads=1", "--memory.activation_checkpointing=full"]
Captured = pytest.CaptureFixture[str]


def commands() -> dict[str, argparse.ArgumentParser]:
    """The commands that compute something with a run, which is given by --from, with their parsers."""
    others = ("import", "submission")
    return {name: parser for name, parser in cli._parser()[1].items() if name not in others and "--from" in parser._option_string_actions}


def request(command: str, folder: Path) -> list[str]:
    """A command line with all that the command requires."""
    words = [command, *(["csv", "--path=x.csv"] if command in ("finetune", "linear-probe") else [])]
    for action in commands()[command]._actions:
        if action.required and action.dest not in ("source", "help") and not (action.dest == "task" and len(words) > 1):
            words += [*action.option_strings[:1], "1"]
    return [*words, "--from", str(folder)]


def folder(place: Path, kind: str) -> Path:
    """A run folder with its settings alone."""
    data = {} if kind == "bert" else {"data": {"tokenizer": "bytes"}}
    tree: dict[str, Any] = {"name": "x", "model": {"kind": kind}, "phases": {"a": {"steps": 10, "global_batch_size": 32}}, **data}
    (place / "run.yaml").write_text(config.run_yaml(config.build_run(tree)))
    return place


def test_no_command_is_forgotten() -> None:
    assert set(commands()) == {"finetune", *USES, *BYTES, *EITHER}


@pytest.mark.parametrize(
    ("command", "kind"), [("finetune", "bert"), *((name, "mlstm") for name in (*BYTES, *EITHER)), *((name, "bert") for name in EITHER)]
)
def test_a_command_opens_its_run_with_the_keys(
    command: str, kind: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Run] = []

    def stop(path: Path, overrides: Sequence[str] = ()) -> Run:
        opened.append(config.stored_run(path, overrides))
        if overrides:
            raise KeyboardInterrupt
        return opened[-1]

    monkeypatch.setattr(task_keys, "stored_run", stop)
    words = request(command, folder(tmp_path, kind))
    assert main([*words, *KEYS]) == 130, capsys.readouterr().err
    run = opened[-1]
    assert (run.precision, run.compute.device, run.compute.threads) == ("bf16", "cpu", 1)
    assert run.memory.activation_checkpointing == "full" and run.run_dir == tmp_path
    assert main([*words, "--precision=fp4"]) == 2
    assert "precision = 'fp4'" in capsys.readouterr().err
    assert main([*words, "--model.hidden_size=8"]) == 2
    refused = (
        f"{command.replace('-', '_')}.csv.model" if "csv" in words else f"--model.hidden_size: `overnight {command}` takes only run-level"
    )
    assert refused in capsys.readouterr().err


@pytest.mark.parametrize(("command", "kind"), [("finetune", "mlstm"), *((name, "bert") for name in BYTES)])
def test_a_command_of_the_other_kind_of_model_says_so(command: str, kind: str, tmp_path: Path, capsys: Captured) -> None:
    assert main(request(command, folder(tmp_path, kind))) == 2
    assert f"model.kind = {kind!r}: `overnight {command}` is for " in capsys.readouterr().err


def test_an_override_with_spaces_may_stand_anywhere(capsys: Captured) -> None:
    spaced = "--data.paths=[one folder, another]"
    for words in ([spaced, "demo"], ["demo", spaced]):
        assert main(["plan", *words, "--print-config"]) == 0
        assert yaml.safe_load(capsys.readouterr().out)["data"]["paths"] == ["one folder", "another"]
    assert main(["evaluate", "--from", "nowhere", "--text", "some.txt", "--compute={threads: 1}"]) == 2
    assert "nowhere: does not exist" in capsys.readouterr().err, "the override is no file"
