"""The shell's completion knows commands, options, recipes, and the keys of recipes, tasks and runs."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from overnight import config
from overnight.cli.completion import first_sentence
from overnight.cli.main import main
from tests.conftest import ROOT
from tests.processes import overnight


def completions(line: str, folder: Path) -> list[str]:
    """What is offered at the end of a line that begins with `overnight `."""
    asks = {"_ARGCOMPLETE": 1, "COMP_LINE": line, "COMP_POINT": len(line), "_ARGCOMPLETE_STDOUT_FILENAME": folder / "out"}
    with contextlib.chdir(folder), overnight(**asks) as process:
        code, output = process.end()
    assert code == 0, output
    return [word.strip() for word in (folder / "out").read_text().split("\013")]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("lin", ["linear-probe"]),
        ("run de", ["demo"]),
        ("run demo --phases.short.optim.lr", ["--phases.short.optim.lr", "--phases.short.optim.lr_in_momentum"]),
        ("launch demo --sig", ["--signal-before"]),
        ("plan demo --print", ["--print-config"]),
        ("pretrain demo --finetune", []),
        ("run mlstm-small --model.num_h", []),
        ("run demo --precision=b", ["--precision=bf16"]),
        ("run demo --precision b", ["bf16"]),
        ("run demo --phases.short.optim.name la", ["lamb", "lans", "lars"]),
        ("run absent.yaml --compute.th", ["--compute.threads"]),
        ("finetune mn", ["mnli"]),
        ("finetune csv --columns.te", ["--columns.text", "--columns.text_b"]),
        ("linear-probe csv --from x --feat", ["--features"]),
        ("generate --compute.d", ["--compute.deterministic", "--compute.device"]),
        ("evaluate --from x --data.d", ["--data.dir", "--data.documents"]),
        ("evaluate --split v", ["valid"]),
        ("download sq", ["squad"]),
        ("download glue --task mr", ["mrpc"]),
        ("download amazon --category Digital", ["Digital_Music"]),
        ("recipes --", ["--help"]),
        ("data l", ["look"]),
        ("data look --sp", ["--split"]),
        ("data look x --split v", ["valid"]),
    ],
)
def test_what_is_offered(line: str, offered: list[str], tmp_path: Path) -> None:
    assert sorted(completions(f"overnight {line}", tmp_path)) == (offered or [""])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Rate of the head (Clark et al. 2020). 1: all\n    equal.", "Rate of the head (Clark et al. 2020)"),
        ("The settings of Liu et al. 2019 for this\n    task. Others take precedence.", "The settings of Liu et al. 2019 for this task"),
        ("One in all. Another.", "One in all"),
        ("Only one.", "Only one."),
    ],
)
def test_a_help_text_is_cut_after_its_first_sentence_and_not_at_a_citation(text: str, sentence: str) -> None:
    assert first_sentence(text) == sentence


def test_recipes_files_and_run_folders_are_offered_and_a_run_folder_gives_its_keys(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.yaml").write_text(config.run_yaml(config.load_run("demo")))
    (tmp_path / "mine.yaml").write_text("name: [")
    assert set(completions("overnight pretrain ", tmp_path)) == {*config.recipes(), "mine.yaml", "run/"}
    assert completions("overnight pretrain run/ --phases.short.ste", tmp_path) == ["--phases.short.steps"]
    assert completions("overnight pretrain mine.yaml --phases.short.ste", tmp_path) == [""]
    assert completions("overnight predict mask --from ", tmp_path) == ["run/"]


def test_bash_completes_by_the_script_that_is_printed(tmp_path: Path) -> None:
    program = tmp_path / "overnight"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m overnight "$@"\n')
    program.chmod(0o755)
    line = "overnight run mlstm-s"
    script = f"""eval "$(overnight completion bash)"
        complete -p overnight
        COMP_WORDS=({line}) COMP_CWORD=2 COMP_LINE="{line}" COMP_POINT={len(line)} COMP_TYPE=9
        _python_argcomplete overnight mlstm-s run; echo "offered: ${{COMPREPLY[*]}}" """
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "-F _python_argcomplete overnight" in done.stdout and "offered: mlstm-small" in done.stdout


@pytest.mark.parametrize(("shell", "holds"), [("zsh", "#compdef overnight"), ("fish", "complete --command overnight")])
def test_the_other_shells_have_a_script(shell: str, holds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert holds in capsys.readouterr().out
