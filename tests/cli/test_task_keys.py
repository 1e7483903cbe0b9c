"""Fine-tuning from the command line as one meets it first: the help, a table of one's own, this machine's keys, and what comes next."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from safetensors.torch import load_file

from overnight import config
from overnight.cli.task_keys import keys_text, task_overrides
from overnight.config import Run, load
from overnight.config.describe import describe
from overnight.config.schema import Finetune, LinearProbe
from overnight.errors import ConfigError
from tests.cli.test_main import call

Captured = pytest.CaptureFixture[str]
FAST = ["--seq_len=16", "--epochs=0.2", "--global_batch_size=8", "--micro_batch_size=8"]


@pytest.fixture
def copy(pretrained: Run, tmp_path: Path) -> Path:
    """A copy of a run folder whose pretraining is done, at a place with a blank in its name."""
    shutil.copytree(pretrained.run_dir, tmp_path / "my run")
    return tmp_path / "my run"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "mine.csv"
    path.write_text(
        "body,stars\n" + "".join(f"a {w} object {i},{label}\n" for i in range(20) for w, label in (("good", "5"), ("bad", "1")))
    )
    return path


@pytest.mark.parametrize(("command", "kind"), [("finetune", Finetune), ("linear-probe", LinearProbe)])
def test_the_help_lists_every_key_of_a_task_with_its_meaning_and_examples(command: str, kind: Any, capsys: Captured) -> None:
    assert call(command, "--help") == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: overnight {command} TASK --from RUN [--KEY=VALUE ...]")
    flat = " ".join(out.split())
    for key, kind_name, _, text in describe({"": kind}):
        assert text and f" --{key}={kind_name} {' '.join(text.split())}" in flat, key
    assert "--precision=auto|fp32|tf32|bf16" in out and "more:" not in out
    tasks = get_args(get_type_hints(kind)["task"])
    assert set(tasks) <= set(re.findall(r"\w+", out.split("options:")[0]))
    assert out.count(f"\n  overnight {command} ") >= 2


ENCODERS, BYTES = ("finetune", "export"), ("linear-probe", "extract-features", "heatmap", "generate")


@pytest.mark.parametrize("command", [*ENCODERS, *BYTES, "evaluate", "predict"])
def test_the_help_offers_only_sources_that_the_command_takes(command: str, capsys: Captured) -> None:
    assert call(command, "--help") == 0
    text = " ".join(capsys.readouterr().out.split("--from RUN ")[-1].split())
    assert ("Hugging Face folder" in text) is (command not in BYTES)
    assert ("exported byte model" in text) is (command not in ENCODERS)


@pytest.mark.parametrize("kind", [Finetune, LinearProbe])
def test_the_examples_of_the_help_are_recipes(kind: Any) -> None:
    examples = re.findall(r"^  overnight (.*)$", keys_text(kind), re.M)
    for command, name, _, _, *words in map(shlex.split, examples):
        assert command == ("finetune" if kind is Finetune else "linear-probe")
        tree: dict[str, Any] = {"name": "x", "phases": {"a": {"steps": 10, "global_batch_size": 32}}}
        if kind is LinearProbe:
            tree |= {"model": {"kind": "mlstm"}, "data": {"tokenizer": "bytes"}}
        for override in task_overrides(kind, name, [word.removeprefix("--") for word in words], known=False):
            load._override(tree, override)
        assert name in getattr(config.build_run(tree), command.replace("-", "_"))


def test_the_help_of_what_trains_has_no_precision_that_it_refuses(capsys: Captured) -> None:
    assert call("run", "--help") == 0
    said = capsys.readouterr().out
    for text, refused in ((said, "int8"), (keys_text(Finetune), "int8"), (keys_text(LinearProbe), "fp8")):
        assert "--precision=auto|fp32|tf32|bf16|fp16" in text and refused not in text and "automatic loss scale" in " ".join(text.split())


def test_what_is_said_after_fine_tuning_is_of_that_task(copy: Path, table: Path, capsys: Captured) -> None:
    for name in ("first", "second"):
        assert call("finetune", name, "--from", copy, f"--path={table}", "--columns.text=body", "--columns.label=stars", *FAST) == 0
    out = capsys.readouterr().out.rpartition("second: seed 0")[2]
    assert "second, accuracy" in out and "first" not in out and "validation after" not in out


def test_an_own_table_needs_its_path_alone_and_what_comes_next_is_said(
    copy: Path, table: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["--columns.text=body", "--columns.label=stars"]
    assert call("finetune", "opinion", "--from", copy, f"--path={table}", *names, *FAST, "--precision=bf16") == 0
    out = capsys.readouterr().out
    assert json.loads((copy / "tasks.jsonl").read_text().splitlines()[-1])["task"] == "csv"
    assert f"report: {copy / 'report.html'}" in out and "opinion" in (copy / "report.html").read_text()
    ask, export = out.partition("next:\n")[2].splitlines()
    given, _, predict = ask.partition(" | ")
    assert shlex.split(given) == ["echo", "a text"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a text\n")))
    assert call(*shlex.split(predict)[1:], "--precision=bf16") == 0
    assert json.loads(capsys.readouterr().out)["label"] in ("1", "5")
    assert call(*shlex.split(export)[1:], "--compute.threads=1") == 0
    assert "classifier.weight" in load_file(tmp_path / "my run-opinion" / "model.safetensors")
    assert (copy / "run.yaml").read_text().count("bf16") == 0


def test_the_keys_of_this_machine_are_part_of_what_a_result_says_it_was_made_with(copy: Path, table: Path, capsys: Captured) -> None:
    words = ["--from", str(copy), f"--path={table}", "--columns.text=body", "--columns.label=stars", *FAST]
    for precision in ("fp32", "bf16", "fp32"):
        assert call("finetune", "opinion", *words, f"--precision={precision}") == 0
    entries = [json.loads(line) for line in (copy / "tasks.jsonl").read_text().splitlines()]
    tags = [entry["config_hash"] for entry in entries if entry["kind"] == "finetune"]
    assert tags[0] == tags[2] != tags[1]


def test_questions_of_ones_own_are_tuned_and_answered_from_files_of_their_format(copy: Path, tmp_path: Path, capsys: Captured) -> None:
    for name in ("train", "dev"):
        qas = [{"id": i, "question": "what?", "answers": [{"text": f"number {i}", "answer_start": 4 + (i == 0)}]} for i in range(2)]
        paragraphs = [{"context": f"The number {i}.", "qas": [qas[i]]} for i in range(2)]
        (tmp_path / f"{name}.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    words = ["faq", "--from", copy, f"--path={tmp_path / 'train.json'}", f"--dev={tmp_path / 'dev.json'}", *FAST, "--seq_len=24"]
    assert call("finetune", *words) == 1
    assert "1 of 2 answers do not stand at their answer_start" in capsys.readouterr().err
    assert call("finetune", *words, "--max_misplaced_answers=0.5") == 0
    out = capsys.readouterr().out
    assert "faq: trained on train.json, scored on dev.json" in out and "SQuAD" not in out and " exact match " in out and " %" in out
    assert "overnight predict faq --from" in out and "--input QUESTIONS.json" in out
    answers = tmp_path / "predictions.json"
    assert call("predict", "faq", "--from", copy, "--input", tmp_path / "dev.json", "--to", answers) == 0
    assert set(json.loads(answers.read_text())) == {"0", "1"}


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ["finetune", "mine", "--path=FOLDER"],
            "--task=csv for a table of your own (.csv, .tsv, .jsonl, .parquet), --task=squad for questions",
        ),
        (["finetune", "mine", "--path=$OVERNIGHT_GONE/x"], "finetune.mine.path = '$OVERNIGHT_GONE/x': the environment variable"),
        (["finetune", "reviews.v2", "--path=x.csv"], "finetune.reviews.v2: a name must be of letters, digits, '_' and '-'"),
        (["finetune", "mask", "--path=x.csv"], "finetune.mask: is a reserved name: `mask` fills in [MASK]"),
        (["finetune", "mnly"], "did you mean 'mnli'?"),
        (["finetune", "csv", "--path=x.csv", "--precision=fp4"], "precision = 'fp4'"),
        (["finetune", "sst2", "--path=x", "--columns.text=a"], "finetune.sst2.columns: only a table of your own (csv)"),
        (["finetune", "sst2", "--path=x", "--dev=a"], "finetune.sst2.dev = 'a': only csv, squad and tokens"),
        (["finetune", "csv", "--path=x", "--columns.label=a", "--columns.score=b"], "give one of columns.label (a class), columns.labels"),
        (["finetune", "csv", "--path=x", "--columns.txt=a"], "finetune.csv.columns.txt = 'a': unknown key, did you mean 'text'?"),
        (
            ["predict", "mask", "--seed=1"],
            "--seed: `overnight predict` takes only run-level keys, such as --precision=bf16",
        ),
        (["export", "--to", "x", "--phases.a.steps=1"], "--phases.a.steps: `overnight export` takes only run-level keys"),
    ],
)
def test_a_request_that_cannot_be_understood_says_what_to_write(argv: list[str], says: str, copy: Path, capsys: Captured) -> None:
    assert call(*argv, "--from", copy) == 2
    assert says in capsys.readouterr().err


def test_a_task_is_found_by_its_name_or_by_what_its_path_names(tmp_path: Path) -> None:
    inside = {
        "table": ("train.jsonl", "csv"),
        "capitals": ("TRAIN.CSV", "csv"),
        "words": ("train.CoNLL", "tokens"),
        "conll2003": ("eng.train", "tokens"),
        "questions": ("train-v1.1.json", "squad"),
    }
    for folder, (name, _) in inside.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).touch()
    folders = ((str(tmp_path / folder), task) for folder, (_, task) in inside.items())
    for path, task in (("x.csv", "csv"), ("a/b.tsv", "csv"), *folders, ("q.json", "squad")):
        assert task_overrides(Finetune, "mine", [f"path={path}"], False) == [f"finetune.mine.task={task}", f"finetune.mine.path={path}"]
    assert task_overrides(Finetune, "sst2", ["path=x.csv"], False)[0] == "finetune.sst2.task=sst2"
    assert task_overrides(Finetune, "mine", ["path=x.csv", "task=sst"], False) == ["finetune.mine.path=x.csv", "finetune.mine.task=sst"]
    assert task_overrides(Finetune, "mine", ["lr=1", "compute.threads=1"], True) == ["finetune.mine.lr=1", "compute.threads=1"]
    with pytest.raises(ConfigError, match="neither a task"):
        task_overrides(LinearProbe, "mine", ["path=q.json"], False)


def test_a_folder_without_a_model_is_said_to_be_one(tmp_path: Path, capsys: Captured) -> None:
    assert call("finetune", "csv", "--from", tmp_path, "--path=x.csv") == 2
    assert f"{tmp_path}: holds no model; name a run folder, or a checkpoint of others" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["finetune csv --path=x.csv", "predict mask", "embed -", "generate", "report"])
def test_the_name_of_a_run_alone_is_told_its_folder(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "run.yaml").touch()
    assert call(*command.split(), *["--from"] * (command != "report"), "mine") != 0
    assert "did you mean runs/mine?" in capsys.readouterr().err


@pytest.mark.parametrize("record", ["budget.json", "size.json"])
@pytest.mark.parametrize("command", ["finetune csv --path=x.csv", "export --to x", "predict mask", "embed -", "generate", "report"])
def test_a_run_that_stopped_before_its_training_is_said_to_have_no_checkpoint_yet(
    command: str, record: str, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / record).write_text("{}")
    assert call(*command.split(), *["--from"] * (command != "report"), tmp_path) == 2
    assert capsys.readouterr().err == f"overnight: {tmp_path} has no checkpoint yet; run its command again to train it\n"
