"""`overnight evaluate --task --rows` scores rows as fine-tuning scores its dev rows, and names what is wrong with a file."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from overnight import config
from overnight.cli.main import main
from overnight.config import Run
from overnight.console import Line
from overnight.finetune.finetune import finetune
from overnight.run_dir.task_results import append_result, read_results
from tests.finetune.conftest import SPEC, Task

Captured = pytest.CaptureFixture[str]


def _squad(path: Path, name: str) -> None:
    context = f"The {name} value is number seven."
    asked = [{"id": f"{name}{i}", "question": "What is it?", "answers": [{"text": "seven", "answer_start": 22}]} for i in range(3)]
    asked = [{**qa, "answers": [{"text": "seven", "answer_start": context.index("seven")}]} for qa in asked]
    none: Any = [{"id": f"{name}none{i}", "question": "What is a class?", "answers": [], "is_impossible": True} for i in range(3)]
    path.write_text(json.dumps({"data": [{"title": name, "paragraphs": [{"context": context, "qas": asked + none}]}]}))


def test_rows_that_the_task_was_trained_on_are_said(with_task: Task, tmp_path: Path, capsys: Captured) -> None:
    rows = [f"{word} {number},{label}\n" for number in range(20) for label, word in (("yes", "integer"), ("no", "string"))]
    (tmp_path / "mine.csv").write_text("text,label\n" + "".join(rows))
    (tmp_path / "new.csv").write_text("text,label\nobject 3,yes\n" + rows[4])
    run = with_task("csv", tmp_path / "mine.csv")
    finetune(run, "mine")
    for name, said in (("mine", "36 of 40 rows are of those that the task trains on"), ("new", "1 of 2 rows is of those")):
        capsys.readouterr()
        assert main(["evaluate", "--from", str(run.run_dir), "--task=mine", f"--rows={tmp_path / name}.csv"]) == 0
        assert said in capsys.readouterr().out
    (tmp_path / "mine.csv").unlink()
    capsys.readouterr()
    assert main(["evaluate", "--from", str(run.run_dir), "--task=mine", f"--rows={tmp_path / 'new.csv'}"]) == 0
    assert "trains on" not in capsys.readouterr().out


def _notes(run: Run, rows: Path, capsys: Captured) -> list[str]:
    """Return what is said of the rows of a file that a task has seen."""
    capsys.readouterr()
    assert main(["evaluate", "--from", str(run.run_dir), "--task=mine", f"--rows={rows}"]) == 0
    return [line.removeprefix(f"{rows}: ") for line in capsys.readouterr().out.splitlines() if "of those that" in line]


def test_sentences_and_questions_that_the_task_was_trained_on_are_said(with_task: Task, tmp_path: Path, capsys: Captured) -> None:
    train = tmp_path / "train.conll"
    train.write_text("class O\ninteger B-NUM\n\nstring B-TXT\n\n")
    (tmp_path / "dev.conll").write_text("string B-TXT\nobject O\n\n")
    run = with_task("tokens", train, dev=str(tmp_path / "dev.conll"))
    finetune(run, "mine")
    said = "are of those that the task trains on: a score there says little about other rows"
    assert _notes(run, train, capsys) == [f"2 of 2 sentences {said}"] and _notes(run, tmp_path / "dev.conll", capsys) == []
    for name in ("train", "dev"):
        _squad(tmp_path / f"{name}-v2.0.json", name)
    run = with_task("squad", tmp_path, seq_len=48)
    finetune(run, "mine")
    assert _notes(run, tmp_path / "train-v2.0.json", capsys) == [f"6 of 6 questions {said}"]
    # Its threshold is.
    (chosen,) = _notes(run, tmp_path / "dev-v2.0.json", capsys)
    assert (
        chosen
        == "6 of 6 questions are of those that the model, its epoch or its threshold was chosen by: a score there is a little too good"
    )


@pytest.mark.parametrize(
    ("settings", "seen"),
    [
        ({}, ["36 of 40 rows are of those that the task trains on"]),
        ({"max_train_examples": 10}, ["10 of 40 rows are of those that the task trains on"]),
        (
            {"keep_best": True},
            [
                "32 of 40 rows are of those that the task trains on",
                "4 of 40 rows are of those that the model, its epoch or its threshold was",
            ],
        ),
        (
            {"keep_best": True, "select_on": "dev", "max_train_examples": 10},
            [
                "10 of 40 rows are of those that the task trains on",
                "4 of 40 rows are of those that the model, its epoch or its threshold was",
            ],
        ),
        (
            {"seeds": [0, 1]},
            [
                "36 of 40 rows are of those that the task trains on",
                "4 of 40 rows are of those that the model, its epoch or its threshold was",
            ],
        ),
    ],
)
def test_rows_are_said_to_be_trained_on_or_chosen_by_as_they_were(
    settings: dict[str, Any], seen: list[str], with_task: Task, tmp_path: Path, capsys: Captured
) -> None:
    rows = [f"{word} {number},{label}\n" for number in range(20) for label, word in (("yes", "integer"), ("no", "string"))]
    (tmp_path / "mine.csv").write_text("text,label\n" + "".join(rows))
    run = with_task("csv", tmp_path / "mine.csv", **settings)
    finetune(run, "mine")
    notes = _notes(run, tmp_path / "mine.csv", capsys)
    assert len(notes) == len(seen) and all(note.startswith(start) for note, start in zip(notes, seen, strict=True))


def test_rows_that_the_seeds_of_a_later_command_were_compared_by_are_said_to_have_chosen_the_model(
    with_task: Task, classes: Path, capsys: Captured
) -> None:
    run = with_task("csv", classes)
    finetune(run, "mine")
    chosen = "2 of 20 rows are of those that the model, its epoch or its threshold was chosen by: a score there is a little too good"
    assert chosen not in _notes(run, classes / "dev.csv", capsys)
    log = run.run_dir / "tasks.jsonl"
    (entry,) = [entry for entry in read_results(log) if entry["kind"] == "finetune"]
    append_result(log, {**entry, "seed": 1, "value": -1.0})
    assert chosen in _notes(run, classes / "dev.csv", capsys)


@pytest.fixture(params=["classes", "pairs", "topics", "tags", "questions"])
def task_files(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, dict[str, Any], Path]:
    """The task, its folder, its further settings, and the file of its dev rows."""
    folder = tmp_path / "data"
    folder.mkdir()
    words = {"number": "integer division", "text": "string literal", "error": "raised exception"}
    named, labels = list(words.items()), list(words)
    for name, count in (("train", 24), ("dev", 10)):
        if request.param == "classes":
            rows = [f"{w} {i},{label}\n" for i, (label, w) in zip(range(count), named * count, strict=False)]
            (folder / f"{name}.csv").write_text("body,stars\n" + "".join(rows))
        elif request.param == "pairs":
            (folder / f"{name}.tsv").write_text("text\tother\tscore\n" + "".join(f"class {i}\tobject {i}\t{i / 7}\n" for i in range(count)))
        elif request.param == "topics":
            sets = [labels[: i % 3] for i in range(count)]
            lines = [json.dumps({"id": i, "text": f"{' '.join(words[w] for w in s)} object {i}", "labels": s}) for i, s in enumerate(sets)]
            (folder / f"{name}.jsonl").write_text("\n".join([*lines, ""]))
        elif request.param == "tags":
            (folder / f"{name}.conll").write_text("class O\ninteger B-NUM\ndivision I-NUM\n\nstring B-TXT\n\n" * (count // 4))
        else:
            _squad(folder / f"{name}-v2.0.json", name)
    dev = next(folder.glob("dev*"))
    columns = {"columns": {"text": "body", "label": "stars"}} if request.param == "classes" else {}
    columns = {"columns": {"text_b": "other"}} if request.param == "pairs" else columns
    kind = {"tags": "tokens", "questions": "squad"}.get(request.param, "csv")
    return kind, folder, {**columns, **({"seq_len": 48} if kind == "squad" else {})}, dev


def test_rows_are_scored_as_fine_tuning_scores_its_dev_rows(
    task_files: tuple[str, Path, dict[str, Any], Path], with_task: Task, tmp_path: Path, capsys: Captured
) -> None:
    kind, folder, settings, dev = task_files
    run = with_task(kind, folder, **settings)
    finetune(run, "mine")
    assert main(["export", "--from", str(run.run_dir), "--task=mine", f"--to={tmp_path / 'exported'}"]) == 0
    (entry,) = [entry for entry in read_results(run.run_dir / "tasks.jsonl") if entry["kind"] == "finetune"]
    kept, out = run.run_dir / "finetune" / "mine", tmp_path / "scored"
    rows = shutil.copy(dev, tmp_path / f"later{dev.suffix}")
    shutil.rmtree(folder)  # it is not needed any more
    capsys.readouterr()
    command = ["evaluate", "--task=mine", f"--rows={rows}", f"--json={tmp_path / 'score.json'}"]
    assert main([*command, "--from", str(tmp_path / "exported")]) == 0
    of_export = json.loads((tmp_path / "score.json").read_text())
    assert main([*command, "--from", str(run.run_dir), f"--to={out}"]) == 0
    said = capsys.readouterr().out
    found = json.loads((tmp_path / "score.json").read_text())
    expected = {name: value for name, value in entry["metrics"].items() if name != "null_threshold"}
    assert {name: found[name] for name in expected} == pytest.approx(
        expected, abs=1e-3
    )  # a barely trained regression answers much the same to all
    assert of_export.keys() == found.keys()
    assert {name: of_export[name] for name in expected} == pytest.approx({name: found[name] for name in expected}, abs=1e-3)
    assert found["task"] == "mine" and found["rows"] == len(json.loads((out / "predictions.json").read_text()))
    assert {file.name for file in out.iterdir()} >= {"predictions.json", "errors.json"}
    for file in out.iterdir():
        if file.suffix == ".conll" or (file.name == "predictions.json" and entry["metric"] != "spearman"):
            assert file.read_bytes() == (kept / file.name).read_bytes(), file
    assert f"mine, {found['rows']} rows of {rows}: " in said and f"written: {out}" in said
    assert ("commonest class of these rows: accuracy 40.0 %" in said) == ("macro_f1" in found and "micro_f1" not in found)


@pytest.fixture(scope="module")
def scored(pretrained: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("scored")
    shutil.copytree(pretrained.run_dir, folder / "run")
    rows = [f"integer division {i},number\nstring literal {i},text\n" for i in range(20)]
    (folder / "table.csv").write_text("text,label\n" + "".join(rows))
    tree = {**config.to_tree(pretrained), "finetune": {"mine": {**SPEC, "task": "csv", "path": str(folder / "table.csv")}}}
    run = dataclasses.replace(config.build_run(tree), out=str(folder / "run"))
    finetune(run, "mine", Line(io.StringIO()))
    return run


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("later.csv", "text,label\nan integer,number\na string,words\n", "row 1 has label 'words', which no training row has"),
        ("later.csv", "text,label\nan integer,\n", "later.csv:2: column 'label'"),
        ("later.csv", "text,score\nan integer,1.5\n", "its column 'score' is of numbers, and the model answers with one class a row"),
        ("later.csv", "text_a,text_b,label\nan integer,a float,number\n", "has pairs of texts, and the model was trained on single texts"),
        ("later.csv", "text\nan integer\n", "name the classes `label`"),
        ("later.csv", "text,label\n", "holds no rows"),
        ("later.txt", "an integer\n", "a table ends in .csv"),
        ("gone.csv", None, "gone.csv: does not exist"),
    ],
)
def test_a_file_that_cannot_be_scored_is_named_with_what_is_wrong(
    name: str, content: str | None, message: str, scored: Run, tmp_path: Path, capsys: Captured
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    assert main(["evaluate", "--from", str(scored.run_dir), "--task=mine", f"--rows={tmp_path / name}", f"--to={tmp_path / 'to'}"]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task=mine"], "name the rows to score on, --rows=FILE"),
        (["--rows=x.csv"], "is a pretrained model, and only a fine-tuned task can score rows: --task=NAME, of mine"),
        (["--rows=x.csv", "--task=other"], "has no fine-tuned task 'other' (it has: mine)"),
        (["--rows=x.csv", "--task=mine", "--blimp=y"], "measures a language model"),
        (["--rows=", "--task=mine"], "--rows = ''"),
        (["--to=x"], "name the rows to score on"),
    ],
)
def test_options_that_do_not_go_together_are_named(options: list[str], message: str, scored: Run, capsys: Captured) -> None:
    assert main(["evaluate", "--from", str(scored.run_dir), *options]) != 0
    assert message in capsys.readouterr().err


def test_an_exported_task_and_its_folder_score_as_the_run_does(scored: Run, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "later.csv").write_text("text,label\ninteger division,number\na string,text\nstring literal,text\n")
    assert main(["export", "--from", str(scored.run_dir), "--task=mine", f"--to={tmp_path / 'out'}"]) == 0
    found = []
    for source in (tmp_path / "out", scored.run_dir / "finetune" / "mine"):
        assert main(["evaluate", "--from", str(source), f"--rows={tmp_path / 'later.csv'}", f"--json={tmp_path / 'score.json'}"]) == 0
        found.append({**json.loads((tmp_path / "score.json").read_text()), "seconds": 0})
    assert found[0] == found[1] and found[0]["rows"] == 3 and found[0]["task"] == "mine"
    assert "commonest class of these rows: accuracy 66.7 %" in capsys.readouterr().out


def _glue_file(task: str, path: Path) -> Path:
    """Write a file of GLUE as it is published: CoLA has no line of names, QQP broken lines."""
    cola = [f"gj04\t{i % 2}\t\tA string number {i}.\n" for i in range(24)]
    qqp = [f"{i}\t1\t2\tIs {i} odd?\tIs {i} even?\t{i % 2}\n" for i in range(24)]
    text = "".join(cola) if task == "cola" else "".join(["id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n", *qqp, "24\t1\tIs it?\n"])
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(("task", "metrics"), [("cola", {"mcc", "accuracy"}), ("qqp", {"accuracy", "f1"})])
def test_a_file_of_glue_is_scored_by_the_export_as_by_the_run(
    task: str, metrics: set[str], with_task: Task, tmp_path: Path, capsys: Captured
) -> None:
    for split in ("train", "dev"):
        rows = _glue_file(task, tmp_path / "glue" / f"{split}.tsv")
    run = with_task(task, tmp_path / "glue")
    finetune(run, "mine")
    assert main(["export", "--from", str(run.run_dir), "--task=mine", f"--to={tmp_path / 'exported'}"]) == 0
    found = []
    for source in (run.run_dir, tmp_path / "exported"):
        capsys.readouterr()
        assert main(["evaluate", "--from", str(source), "--task=mine", f"--rows={rows}", f"--json={tmp_path / 'score.json'}"]) == 0
        assert (f"left out {rows}:26: 3 tab-separated fields where 6 belong" in capsys.readouterr().out) == (task == "qqp")
        found.append({**json.loads((tmp_path / "score.json").read_text()), "seconds": 0})
    assert found[0].keys() == {"task", "rows", "seconds", *metrics} and found[0] == pytest.approx(found[1])


@pytest.mark.parametrize("task", ["cola", "qqp"])
def test_a_file_of_glue_is_scored_by_a_model_of_others_where_the_task_is_named(
    task: str, with_task: Task, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    for split in ("train", "dev"):
        rows = _glue_file(task, tmp_path / "glue" / f"{split}.tsv")
    run = with_task(task, tmp_path / "glue", epochs=1)
    finetune(run, "mine")
    assert main(["export", "--from", str(run.run_dir), "--task=mine", f"--to={tmp_path / 'others'}"]) == 0
    monkeypatch.chdir(tmp_path)
    found = []
    for named in ("mine", task):
        assert main(["evaluate", "--from=others", f"--task={named}", f"--rows={rows}", "--json=score.json"]) == 0
        found.append({**json.loads((tmp_path / "score.json").read_text()), "seconds": 0, "task": ""})
        config_file = tmp_path / "others" / "config.json"
        said = {key: value for key, value in json.loads(config_file.read_text()).items() if key != "overnight_task"}
        config_file.write_text(json.dumps(said))
    assert found[0] == found[1]
    (tmp_path / "own.tsv").write_text("text\tlabel\na string\t1\n" if task == "cola" else "text_a\ttext_b\tlabel\na\tb\t1\n")
    assert main(["evaluate", "--from=others", f"--task={task}", "--rows=own.tsv"]) == 0, "a table of one's own"
    assert main(["evaluate", "--from=others", "--task=stsb", f"--rows={rows}"]) == 1, "its head answers with a class"


def test_columns_of_the_rows_can_be_named(scored: Run, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "later.csv").write_text("body,kind,label\ninteger division,number,x\nstring literal,text,y\n")
    command = ["evaluate", "--from", str(scored.run_dir), "--task=mine", f"--rows={tmp_path / 'later.csv'}"]
    assert main([*command, "--columns.text=body", "--columns.label=kind"]) == 0
    assert "mine, 2 rows of" in capsys.readouterr().out
    for columns, message in (
        (["--columns.txt=body"], "columns.txt = 'body': unknown key, did you mean 'text'?"),
        (["--columns.text=body", "--columns.label=kind", "--columns.score=kind"], "columns.score = 'kind': give one of columns.label"),
    ):
        assert main([*command, *columns]) != 0
        assert capsys.readouterr().err.startswith(f"overnight: {message}")
    assert main(["evaluate", "--from", str(scored.run_dir), "--columns.text=body"]) != 0
    assert "name them with --rows=FILE" in capsys.readouterr().err


def test_a_named_task_of_an_export_is_scored_by_its_own_head_and_nothing_is_imported(
    scored: Run, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "later.csv").write_text("text,label\ninteger division,number\na string,text\n")
    assert main(["export", "--from", str(scored.run_dir), "--task=mine", f"--to={tmp_path / 'out'}"]) == 0
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main(["evaluate", "--from=out", "--task=other", "--rows=later.csv"]) == 0
    said = capsys.readouterr()
    assert "out: other is answered by its own head (classification, number, text)" in said.err and "other, 2 rows of later.csv" in said.out
    assert not (tmp_path / "runs").exists()
