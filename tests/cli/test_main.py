"""Every command answers, ends with the promised exit code, and tells a user's mistake without a traceback."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from overnight import config
from overnight.cli import machine_commands, run_commands
from overnight.cli.main import main
from overnight.config import Run
from tests.conftest import ROOT, tiny_tree
from tests.processes import overnight

COMMANDS = (
    "run",
    "prepare",
    "pretrain",
    "launch",
    "finetune",
    "predict",
    "submission",
    "export",
    "report",
    "plan",
    "bench",
    "doctor",
    "recipes",
    "completion",
)
COMMANDS += ("data",)  # tests/cli/test_data_commands.py
COMMANDS += ("evaluate", "linear-probe", "extract-features", "heatmap", "generate", "import")  # tests/test_byte_commands.py
RECIPE_COMMANDS = ("run", "prepare", "pretrain", "plan")
Captured = pytest.CaptureFixture[str]


def call(*argv: str | Path | int) -> int:
    return main([str(word) for word in argv])


@pytest.fixture
def recipe(tmp_path: Path, tiny_data: Path) -> Path:
    """A tiny recipe on the prepared corpus."""
    tree = tiny_tree(tmp_path, tiny_data.parent / "topics.jsonl")
    tree["data"]["dir"] = str(tiny_data)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


@pytest.fixture
def copy(pretrained: Run, tmp_path: Path) -> Path:
    """A copy of a run folder whose pretraining is done."""
    shutil.copytree(pretrained.run_dir, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "mine.csv"
    path.write_text(
        "text,label\n" + "".join(f"a {w} object {i},{label}\n" for i in range(20) for w, label in (("good", "yes"), ("bad", "no")))
    )
    return path


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    script = """
import sys
from overnight.cli.main import main
code = main(["--help"])
heavy = {"torch", "numpy", "pydantic", "yaml", "pyarrow", "tokenizers", "transformers", "rich", "argcomplete"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else code)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    for command in COMMANDS:
        assert f"\n    {command} " in result.stdout or f"\n    {command}\n" in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: Captured) -> None:
    assert call(command, "--help") == 0
    assert capsys.readouterr().out.startswith(f"usage: overnight {command} ")


def test_the_version_is_told(capsys: Captured) -> None:
    import overnight

    assert call("--version") == 0
    assert capsys.readouterr().out == f"overnight {overnight.__version__}\n"


def test_recipes_are_listed_with_what_they_are(capsys: Captured) -> None:
    assert call("recipes") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(config.recipes())
    for line in lines:
        # One whole sentence; "et al. 2018" and "docs/size.md" end none.
        assert len(line.split()) > 5 and line.endswith(".") and not re.search(r"\.\s+[A-Z`]", line), line
        assert line.count("(") == line.count(")"), line


def test_the_help_of_bench_and_the_readme_name_every_benchmark(capsys: Captured) -> None:
    assert call("bench", "--help") == 0
    listed = re.findall(r"^  (\w+) +\w.{10,}$", capsys.readouterr().out.split("\nbenchmarks:\n")[1], re.M)
    row = next(line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("| `overnight bench` |"))
    assert len(listed) == 10 and set(re.findall(r"`(\w+)`", row)) == set(listed)
    assert all((ROOT / "overnight/bench" / f"{name}.py").is_file() for name in listed)


def test_doctor_tells_of_torch(capsys: Captured) -> None:
    assert call("doctor") == 0
    assert "torch" in capsys.readouterr().out


@pytest.mark.parametrize("command", RECIPE_COMMANDS)
def test_print_config_gives_a_recipe_that_gives_itself(command: str, recipe: Path, tmp_path: Path, capsys: Captured) -> None:
    before = files(tmp_path)
    assert call(command, recipe, "--print-config", "--phases.long.optim.lr=4e-3", "--data.paths", "one/folder") == 0
    first = capsys.readouterr().out
    assert yaml.safe_load(first)["phases"]["long"]["optim"]["lr"] == 0.004
    assert yaml.safe_load(first)["data"]["paths"] == ["one/folder"]
    assert files(tmp_path) == before
    again = tmp_path / "again.yaml"
    again.write_text(first)
    assert call(command, again, "--print-config") == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (["--phases.long.optim.rl=1"], ["phases.long.optim.rl = 1", "unknown key", "Allowed:", "betas"]),
        (["--phases.long.steps=many"], ["phases.long.steps = 'many'", "integer"]),
        (["--phases.long.steps", "0"], ["phases.long.steps = 0", "above 0"]),
        (["--seed", "-1"], ["seed = -1", "0 to 4294967295"]),
        (["--precision=fp4"], ["precision = 'fp4'", "'fp32', 'tf32', 'bf16', 'fp16', 'fp8' or 'int8'"]),
        (["--phases.short.global_batch_size=7"], ["phases.short.global_batch_size = 7", "cannot be split"]),
        (["--phases.short.optim.schedule.warmup_ratio=2"], ["warmup_ratio = 2", "longer than the phase"]),
        (["--model.num_heads=5"], ["model.num_heads = 5", "must divide model.hidden_size = 32"]),
        (["--data.vocab_file=/nowhere/vocab.txt"], ["data.vocab_file = '/nowhere/vocab.txt'"]),
        (["--na=x"], ["na = 'x'", "unknown key"]),
        (["--name"], ["--name", "has no value"]),
        (["name=x"], ["'name=x'", "--key=value"]),
        (["--seed=[a"], ["seed = '[a'", "not a YAML value"]),
    ],
)
def test_a_wrong_override_names_key_value_and_what_is_allowed_before_any_work(
    override: list[str], says: list[str], recipe: Path, tmp_path: Path, capsys: Captured
) -> None:
    before = files(tmp_path)
    for command in RECIPE_COMMANDS:
        assert call(command, recipe, *override) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("overnight: ") and captured.out == ""
        for text in says:
            assert text in captured.err
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "\n    run "),
        (["train"], "no command 'train': did you mean 'pretrain'?"),
        (["x"], "no command 'x': there are run, prepare, "),
        (["plan", "demo", "--precision=fp4"], "'fp8' or 'int8'; int8 works only for predict, embed and serve"),
        (["run"], "name a recipe"),
        (["run", "dmeo"], "did you mean 'demo'?"),
        (["predict", "mask"], "--from"),
        (
            ["predict", "mask", "--from", "nowhere"],
            "nowhere: does not exist; name a run folder, a checkpoint of others, such as a Hugging Face folder",
        ),
        (["finetune", "sst2", "--from", "nowhere"], "nowhere: does not exist; name a run folder, "),
        (["export", "--from", "nowhere", "--to", "x"], "nowhere: does not exist; name a run folder, "),
        (["recipes", "--seed=1"], "unrecognized arguments: --seed=1"),
        (["bench", "speed"], "invalid choice: 'speed'"),
        (["run", "demo", "--print_config"], "--print_config: is written --print-config"),
        (["launch", "demo", "--signal_before=3"], "--signal_before: is written --signal-before"),
    ],
)
def test_a_usage_error_ends_with_2_and_says_what_is_wrong(argv: list[str], says: str, capsys: Captured) -> None:
    assert call(*argv) == 2
    assert says in capsys.readouterr().err


def test_a_run_file_that_is_not_one_is_named(tmp_path: Path, capsys: Captured) -> None:
    for content in ("- a list", "name: [", "name: x\n", "\xff"):
        (tmp_path / "run.yaml").write_bytes(content.encode("latin-1"))
        assert call("predict", "mask", "--from", tmp_path) == 2
        assert "overnight: " in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_refused(recipe: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert call("pretrain", recipe, "--compute.device=cuda") == 2
    assert "compute.device = 'cuda': no GPU" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_pretraining_without_preparing_says_so_and_claims_no_folder(recipe: Path, tmp_path: Path, capsys: Captured) -> None:
    assert call("pretrain", recipe, f"--data.dir={tmp_path / 'none'}") == 1
    assert "run `overnight prepare` first" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_what_the_system_refuses_is_told_without_a_traceback(
    copy: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: object) -> None:
        raise OSError(5, "Input/output error", str(copy))

    monkeypatch.setattr("overnight.report.page.write_report", refused)
    assert call("report", copy) == 1
    assert capsys.readouterr().err == f"overnight: [Errno 5] Input/output error: '{copy}'\n"


def test_prepare_and_pretrain_do_their_part_and_again_nothing(recipe: Path, tmp_path: Path, capsys: Captured) -> None:
    data = [f"--data.dir={tmp_path / 'data'}", "--data.vocab_size=400"]
    assert call("prepare", recipe, *data) == 0
    assert "shards" in capsys.readouterr().out
    assert call("pretrain", recipe, *data) == 0
    assert "long 4/4  validation: mlm loss" in capsys.readouterr().out
    checkpoints = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert call("prepare", recipe, *data) == 0
    assert re.search(r"^prepare: .+ is ready: [\d,]+ documents and [\d,]+ tokens to train on$", capsys.readouterr().out, re.M)
    assert call("pretrain", recipe, *data) == 0
    assert checkpoints == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}


def test_an_own_table_is_tuned_asked_exported_and_reported(
    copy: Path, table: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["--seq_len=16", "--epochs", "1", "--global_batch_size=8", "--micro_batch_size=8"]
    assert call("finetune", "opinion", "--from", copy, "--task=csv", f"--path={table}", *settings) == 0
    out = capsys.readouterr().out
    assert "opinion: seed 0 pretrained  accuracy" in out and "opinion, accuracy  seed 0" in out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a good object\na bad object\n")))
    assert call("predict", "opinion", "--from", copy) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [a["id"] for a in answers] == ["1", "2"] and {a["label"] for a in answers} <= {"yes", "no"}
    assert call("export", "--from", copy, "--to", tmp_path / "hf", "--task", "opinion") == 0
    exported = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert exported["architectures"] == ["BertForSequenceClassification"] and exported["id2label"] == {"0": "no", "1": "yes"}
    assert call("report", copy, "--to", tmp_path / "page.html") == 0
    assert "opinion" in (tmp_path / "page.html").read_text()


def test_a_file_of_lines_is_answered(copy: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "lines").write_text("The [MASK].\n")
    assert call("predict", "mask", "--from", copy, "--input", tmp_path / "lines") == 0
    assert len(json.loads(capsys.readouterr().out)["masks"]) == 1


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["finetune", "sts"], 2, "(did you mean 'stsb'?); say what it is: --task=csv"),
        (["finetune", "csv", "--seq_len=16"], 2, "finetune.csv.path = ''"),
        (["finetune", "csv", "--path=/nowhere.csv", "--seq_len=16"], 1, "/nowhere.csv: does not exist"),
        (["finetune", "csv", "--path=x", "--seq_len=16", "--lr=[x"], 2, "finetune.csv.lr = '[x' is not a YAML value"),
        (["finetune", "csv", "--path=x", "--size=16"], 2, "finetune.csv.size = 16: unknown key"),
        (["finetune", "csv", "--path=x"], 2, "finetune.csv.seq_len = 128: must be 8 to model.max_position_embeddings = 48"),
        (["predict", "sst2"], 1, "it has: none"),
        (["export", "--to", "x", "--task", "sst2"], 1, "no fine-tuned task 'sst2'"),
    ],
)
def test_a_wrong_request_of_a_run_is_explained(argv: list[str], code: int, says: str, copy: Path, capsys: Captured) -> None:
    before = files(copy)
    assert call(*argv, "--from", copy) == code
    assert says in capsys.readouterr().err
    assert files(copy) == before


def test_export_refuses_a_folder_that_holds_something_else(copy: Path, tmp_path: Path, capsys: Captured) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter.tex").write_text("years of work")
    assert call("export", "--from", copy, "--to", folder) == 1
    assert "holds 'chapter.tex', which no export wrote" in capsys.readouterr().err
    assert files(folder) == {"chapter.tex"}


def test_a_run_moved_away_from_its_vocabulary_can_still_be_used(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = copy / "run.yaml"
    tree = yaml.safe_load(path.read_text())
    tree["data"]["vocab_file"] = "$OVERNIGHT_GONE/vocab.txt"
    path.write_text(yaml.safe_dump(tree))
    assert call("export", "--from", copy, "--to", tmp_path / "out") == 0


def test_an_own_bug_is_not_hidden(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*args: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(run_commands, "_export", bug)
    with pytest.raises(ZeroDivisionError):
        call("export", "--from", copy, "--to", "x")


def test_a_signal_that_a_library_swallows_and_breaks_at_is_still_a_signal(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
        raise RecursionError("a module that was imported by half")

    monkeypatch.setattr(machine_commands, "_doctor", broken)
    assert main(["doctor"]) == 143
    assert "terminated" in capsys.readouterr().err


def test_the_handler_of_sigterm_is_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert call("recipes") == 0
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_reader_that_goes_away_is_no_error(recipe: Path) -> None:
    command = f'{sys.executable} -c \'from overnight.cli.main import main; import sys; sys.exit(main(["run", "-h"]))\''
    script = f"{command} | true; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stderr) == (0, "")


def stop_at(argv: list[str], sign: str, number: signal.Signals) -> tuple[int, str]:
    """Run a command, which gets a signal once it has printed a text; its exit code and all output."""
    with overnight(*argv, signal_at=(sign, number)) as process:
        return process.end()


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated"), (signal.SIGUSR1, 138, "terminated")],
)
def test_prepare_can_be_stopped_and_the_same_command_continues(
    number: signal.Signals, code: int, word: str, recipe: Path, tmp_path: Path, tiny_data: Path
) -> None:
    argv = ["prepare", str(recipe), f"--data.dir={tmp_path / 'data'}"]
    found, output = stop_at(argv, "read and clean", number)
    assert found == code, output
    assert f"overnight: {word}; the same command continues" in output and "Traceback" not in output
    assert not (tmp_path / "data" / "manifest.json").exists()
    assert main(argv) == 0
    for file in ("manifest.json", "vocab.txt", "train-00000.arrow"):
        assert (tmp_path / "data" / file).read_bytes() == (tiny_data / file).read_bytes()


@pytest.mark.parametrize(("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")])
def test_finetuning_can_be_stopped_and_the_same_command_continues(
    number: signal.Signals, code: int, word: str, copy: Path, table: Path, tmp_path: Path, capsys: Captured
) -> None:
    argv = [
        "finetune",
        "csv",
        "--from",
        str(copy),
        f"--path={table}",
        "--seq_len=16",
        "--epochs=12",
        "--global_batch_size=8",
        "--micro_batch_size=8",
    ]
    found, output = stop_at([*argv, "--seeds=[0,1,2,3,4,5]"], "csv: seed 0 pretrained  accuracy", number)
    assert found == code, output
    assert f"overnight: {word}; the same command continues" in output and "Traceback" not in output
    before = [json.loads(line).get("seed") for line in (copy / "tasks.jsonl").read_text().splitlines()]
    assert 0 in before and 5 not in before
    assert main([*argv, "--seeds=[0,5]"]) == 0
    after = [json.loads(line).get("seed") for line in (copy / "tasks.jsonl").read_text().splitlines()]
    assert after == [*before, 5]
