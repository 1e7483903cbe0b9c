"""Fine-tuning does what was asked once, says it all in files, and goes on where it was cut off."""

from __future__ import annotations

import builtins
import dataclasses
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from overnight import console
from overnight.config import Run
from overnight.console import Line
from overnight.errors import ConfigError, DataError, UserError
from overnight.finetune import finetune as module
from overnight.finetune.encoded_examples import EncodedExamples
from overnight.finetune.encoded_task import encode_task
from overnight.finetune.finetune import finetune
from overnight.run_dir.lock import run_lock
from overnight.run_dir.task_results import read_results
from overnight.state_files import SEAL
from tests.finetune.conftest import Task, task_run, write_classes


def tune(run: Run) -> str:
    """Fine-tune; returns what was printed."""
    out = io.StringIO()
    finetune(run, "mine", Line(out))
    return out.getvalue()


def lines(run: Run) -> list[dict[str, Any]]:
    """Return what was trained: `tasks.jsonl` without what was answered by rules."""
    path = run.run_dir / "tasks.jsonl"
    found = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    return [line for line in found if line["kind"] != "baseline"]


def kept(run: Run) -> Path:
    return run.run_dir / "finetune" / "mine"


@pytest.fixture
def scores(tmp_path: Path) -> Path:
    path = tmp_path / "scores.csv"
    path.write_text("text_a,text_b,score\n" + "".join(f"class number {i % 9},object {i},{i % 9 / 3:.2f}\n" for i in range(80)))
    return path


def test_a_run_that_another_job_writes_is_waited_for_or_that_is_stopped(with_task: Task, classes: Path) -> None:
    run = with_task("csv", classes)
    with run_lock(run.run_dir), pytest.raises(UserError, match=r"wait until it ends, or stop it$"):  # there is no other folder to tune in
        tune(run)


def test_every_seed_is_tuned_with_and_without_pretraining(with_task: Task, classes: Path) -> None:
    run = with_task("csv", classes, seeds=[0, 3], random_init_seeds=2)
    out = tune(run)
    found = lines(run)
    assert [(e["init"], e["seed"]) for e in found] == [("pretrained", 0), ("pretrained", 3), ("random", 0), ("random", 3)]
    for entry in found:
        assert entry["kind"] == "finetune" and entry["name"] == "mine" and entry["task"] == "csv" and entry["rows"] == 40
        assert entry["metric"] == "accuracy" and entry["value"] == entry["metrics"]["accuracy"]
        assert 0 <= entry["value"] <= 1
        assert f"mine: seed {entry['seed']} {entry['init']}  accuracy {100 * entry['value']:.1f} %" in out


def test_the_folder_holds_the_best_pretrained_model_and_what_it_answers(with_task: Task, classes: Path) -> None:
    run = with_task("csv", classes, seeds=[0, 1], random_init_seeds=2)
    tune(run)
    facts = json.loads((kept(run) / "task.json").read_text())
    best = max(e["value"] for e in lines(run) if e["init"] == "pretrained")
    assert facts["result"]["value"] == best and facts["result"]["init"] == "pretrained"
    assert facts["kind"] == "classification" and facts["labels"] == ["number", "text"]
    assert facts["spec"]["task"] == "csv" and facts["spec"]["seq_len"] == 24
    answers = json.loads((kept(run) / "predictions.json").read_text())
    truth = dict(line.split(",")[::2] for line in (classes / "dev.csv").read_text().splitlines()[1:])
    assert answers.keys() == truth.keys()
    assert sum(answers[i] == truth[i] for i in truth) / len(truth) == pytest.approx(best)
    table = [line.split("\t") for line in (kept(run) / "test.tsv").read_text().splitlines()]
    assert table[0] == ["index", "prediction"] and [row[0] for row in table[1:]] == [str(i) for i in range(12)]
    assert {row[1] for row in table[1:]} <= {"number", "text"}
    assert not [p.name for p in (run.run_dir / "finetune").iterdir() if p.name not in ("mine", "mine.training")]


def test_a_repeated_call_does_nothing(with_task: Task, classes: Path) -> None:
    run = with_task("csv", classes, seeds=[0, 1])
    tune(run)
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in run.run_dir.rglob("*") if p.is_file() and p.name != "lock"}
    assert tune(run) == "mine: done already\n"
    # Where to cut the batch does not change the result, so it is no reason to begin again.
    tune(with_task("csv", classes, seeds=[0, 1], micro_batch_size=4))
    assert before == {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in run.run_dir.rglob("*") if p.is_file() and p.name != "lock"}


def test_other_rows_are_trained_on_anew_and_rows_that_are_gone_are_done(with_task: Task, classes: Path) -> None:
    run = with_task("csv", classes)
    tune(run)
    table = (classes / "train.csv").read_text()
    (classes / "train.csv").write_text(table.replace("number", "digit"))
    (classes / "dev.csv").write_text((classes / "dev.csv").read_text().replace("number", "digit"))
    assert tune(run).startswith("mine: the rows differ from those that its model was trained on; every seed is trained anew\n")
    assert json.loads((kept(run) / "task.json").read_text())["labels"] == ["digit", "text"]
    classes.rename(classes.with_name("moved"))
    assert tune(run) == "mine: done already\n"


def test_more_seeds_and_the_baseline_are_added_to_what_is_there(with_task: Task, classes: Path) -> None:
    tune(with_task("csv", classes, seeds=[0]))
    run = with_task("csv", classes, seeds=[0, 1], random_init_seeds=2)
    out = tune(run)
    assert "seed 0 pretrained  acc" not in out
    assert [(e["init"], e["seed"]) for e in lines(run)] == [("pretrained", 0), ("pretrained", 1), ("random", 0), ("random", 1)]


def test_random_init_is_trained_with_the_first_seeds_only_where_so_many_are_asked_for(with_task: Task, classes: Path) -> None:
    run = with_task("csv", classes, seeds=[4, 1], random_init_seeds=1)
    tune(run)
    assert [(e["init"], e["seed"]) for e in lines(run)] == [("pretrained", 4), ("pretrained", 1), ("random", 4)]


def test_muon_steps_the_matrices_where_it_is_asked_for(with_task: Task, classes: Path) -> None:
    adamw = tune(with_task("csv", classes))
    muon = tune(with_task("csv", classes, optimizer="muon"))
    assert "Muon" not in adamw
    assert re.search(r"matrices: .*, Muon\n.*embeddings: .*, AdamW\n", muon)


def test_lamb_and_a_decay_from_layer_to_layer_reach_the_optimizer(with_task: Task, classes: Path) -> None:
    said = tune(with_task("csv", classes, optimizer="lamb", layer_lr_decay=0.5, epochs=0.2))
    # One layer: its rate is half that of the head, and that of the embeddings a quarter.
    assert re.search(r"matrices: .*, trust ratio, rate times 0.5 to 1\n.*embeddings: .*, trust ratio, rate times 0.25\n", said)


def train_lines(run: Run) -> list[dict[str, Any]]:
    """The lines of metrics of the only seed."""
    (path,) = (run.run_dir / "finetune" / "mine.training").glob("*/metrics.jsonl")
    return [line for line in map(json.loads, path.read_text().splitlines()) if line["kind"] == "train"]


class Stop(BaseException):
    """What stands for a kill."""


@pytest.fixture(scope="module")
def whole(pretrained: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose four seeds nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    shutil.copytree(pretrained.run_dir, folder / "run")
    run = task_run(pretrained, folder / "run", "csv", write_classes(folder / "classes"), seeds=[0, 1], random_init_seeds=2)
    tune(run)
    return run


@pytest.mark.parametrize("half_a_line", [b"", pytest.param(b'{"kind": "finetune", "na', marks=pytest.mark.heavy)])
@pytest.mark.parametrize(("where", "call", "done"), [("_seed", 2, 1), ("_keep", 1, 0), ("append_result", 2, 0), ("append_result", 4, 1)])
def test_after_a_cut_only_what_is_missing_is_done_and_the_result_is_the_same(
    where: str, call: int, done: int, half_a_line: bytes, whole: Run, pretrained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = dataclasses.replace(whole, out=str(tmp_path / "run"))
    shutil.copytree(pretrained.run_dir, run.run_dir)
    owner = module if where == "append_result" else module._Tuning
    real, calls = getattr(owner, where), 0

    def cut(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise Stop
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, where, cut)
        with pytest.raises(Stop):
            tune(run)
    assert len(lines(run)) == done
    with (run.run_dir / "tasks.jsonl").open("ab") as file:
        file.write(half_a_line)
    tune(run)
    assert len(lines(run)) == 4
    ours, undisturbed = (read_results(each.run_dir / "tasks.jsonl") for each in (run, whole))
    ours, undisturbed = ([{k: v for k, v in e.items() if k not in ("seconds", SEAL)} for e in found] for found in (ours, undisturbed))
    assert ours == undisturbed
    assert [e["method"] for e in ours if e["kind"] == "baseline"] == ["largest class", "word counts"]
    for file in ("model.safetensors", "predictions.json", "test.tsv"):
        assert (kept(run) / file).read_bytes() == (kept(whole) / file).read_bytes()


def test_other_settings_are_done_again_and_the_folder_holds_what_was_asked_last(with_task: Task, classes: Path) -> None:
    first, second = with_task("csv", classes), with_task("csv", classes, lr=1e-3)
    for run in (first, second, first):
        tune(run)
        assert json.loads((kept(run) / "task.json").read_text())["spec"]["lr"] == run.finetune["mine"].lr
        assert lines(run)[-1]["value"] == json.loads((kept(run) / "task.json").read_text())["result"]["value"]
    assert len(lines(first)) == 3
    assert lines(first)[0]["value"] == lines(first)[2]["value"]


def quiet(run: Run) -> Run:
    """Without dropout, whose random numbers depend on how a batch is cut."""
    return dataclasses.replace(run, model=dataclasses.replace(run.model, dropout=0.0, attention_dropout=0.0))


@pytest.mark.parametrize("task", ["classes", "scores", "questions"])
def test_accumulation_does_not_change_the_result(task: str, with_task: Task, classes: Path, scores: Path, questions: Path) -> None:
    path, kind = {"classes": (classes, "csv"), "scores": (scores, "csv"), "questions": (questions, "squad")}[task]
    models = []
    for micro_batch in (8, 2):
        run = quiet(with_task(kind, path, micro_batch_size=micro_batch, epochs=1))
        tune(run)
        models.append(load_file(kept(run) / "model.safetensors"))
        shutil.rmtree(kept(run))
    if kind == "squad":
        # A softmax over the tokens does not feel what is added to all: the bias has no gradient but rounding.
        models[0].pop("head.bias")
    for name in models[0]:
        torch.testing.assert_close(models[0][name], models[1][name], rtol=1e-3, atol=2e-5, msg=name)


def test_a_long_evaluation_shows_how_far_it_is(with_task: Task, classes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_LINE_EVERY", 0.0)
    out = tune(with_task("csv", classes, epochs=0.2, micro_batch_size=8))
    scored = re.findall(r"^mine seed 0 pretrained, (\w+  scored \d+/\d+)  left", out, re.MULTILINE)
    assert scored == [*(f"dev  scored {n}/20" for n in (8, 16, 20)), *(f"test  scored {n}/12" for n in (8, 12))]


def test_a_regression_is_scored_by_its_correlation(with_task: Task, scores: Path) -> None:
    run = with_task("csv", scores)
    out = tune(run)
    (entry,) = lines(run)
    assert entry["metric"] == "spearman" and set(entry["metrics"]) == {"pearson", "spearman", "mean_absolute_error"}
    assert "split off scores.csv" in out
    answers = json.loads((kept(run) / "predictions.json").read_text())
    assert answers and all(isinstance(value, float) for value in answers.values())
    assert json.loads((kept(run) / "task.json").read_text())["labels"] == []


def test_questions_are_answered_with_text_of_the_paragraph(with_task: Task, questions: Path) -> None:
    run = with_task("squad", questions)
    tune(run)
    (entry,) = lines(run)
    assert entry["metric"] == "f1" and set(entry["metrics"]) == {"exact_match", "f1"}
    contexts = {
        qa["id"]: paragraph["context"]
        for article in json.loads((questions / "dev-v1.1.json").read_text())["data"]
        for paragraph in article["paragraphs"]
        for qa in paragraph["qas"]
    }
    answers = json.loads((kept(run) / "predictions.json").read_text())
    nbest = json.loads((kept(run) / "nbest_predictions.json").read_text())
    assert answers.keys() == nbest.keys() == contexts.keys()
    for question, text in answers.items():
        assert text in contexts[question] and nbest[question][0]["text"] == text
        assert sum(guess["probability"] for guess in nbest[question]) == pytest.approx(1, abs=1e-3)


def test_a_question_whose_answer_is_misplaced_is_not_trained_on(pretrained: Run, questions: Path) -> None:
    from overnight.config import Finetune
    from overnight.corpus.tokenizer import load_vocabulary

    path = questions / "train-v1.1.json"
    tree = json.loads(path.read_text())
    tree["data"][0]["paragraphs"][0]["qas"][0]["answers"][0]["answer_start"] += 1
    path.write_text(json.dumps(tree))
    spec = Finetune(task="squad", path=str(questions), seq_len=512, max_misplaced_answers=0.5)
    problem = encode_task(spec, pretrained.data_dir, load_vocabulary(pretrained.data_dir))
    assert len(problem.train) == 11 and (problem.train.targets["start"] > 0).all()
    assert not any("leaves no room" in note for note in problem.notes)
    short = encode_task(dataclasses.replace(spec, seq_len=67), pretrained.data_dir, load_vocabulary(pretrained.data_dir))
    assert (
        "seq_len = 67 leaves no room for a paragraph beside a question of more than 63 tokens, which is not answered; use 128 or more"
        in short.notes
    )


@hypothesis_settings(max_examples=40)
@given(rows=st.integers(1, 60), batch=st.integers(1, 20), seed=st.integers(0, 5))
def test_an_epoch_covers_every_row_once_in_an_order_of_its_own(rows: int, batch: int, seed: int) -> None:
    ids = [np.array([2, 10 + i, 3]) for i in range(rows)]
    examples = EncodedExamples(ids, [np.zeros(3, np.int8)] * rows, {"label": np.arange(rows)})
    epochs = 3
    seen: list[int] = []
    for step in range(-(-epochs * rows // batch)):
        work = examples.step(step, batch, batch, (seed, 2))
        # Inside a step the rows are sorted by length for packing; epochs are told apart by whole steps below.
        seen += [int(x) for micro in work.micro for x in micro.targets["label"]]
        for micro in work.micro:
            assert micro.ids_N[micro.starts[:-1].long() + 1].tolist() == [10 + int(x) for x in micro.targets["label"]]
    if rows % batch == 0:
        for epoch in range(epochs):
            assert sorted(seen[epoch * rows : (epoch + 1) * rows]) == list(range(rows))
    counts = np.bincount(seen, minlength=rows)
    assert counts.min() >= epochs and counts.max() <= epochs + -(-batch // rows) + 1
    if rows >= 30 and rows % batch == 0:
        assert seen[:rows] != seen[rows : 2 * rows]


def test_without_a_checkpoint_it_says_what_to_do(with_task: Task, classes: Path) -> None:
    run = with_task("csv", classes)
    shutil.rmtree(run.run_dir / "checkpoints")
    with pytest.raises(DataError, match="no checkpoint to fine-tune; run `overnight pretrain` first"):
        tune(run)


def test_a_damaged_checkpoint_is_named(with_task: Task, classes: Path) -> None:
    run = with_task("csv", classes)
    (run.run_dir / "checkpoints" / "step-0000010" / "model.safetensors").write_bytes(b"short")
    with pytest.raises(DataError, match=r"step-0000010/model.safetensors was cut short or changed"):
        tune(run)


@pytest.mark.parametrize("task", ["csv", "squad", "sst2", "mrpc", "sst", "imdb"])
def test_missing_data_is_named_and_nothing_is_written(task: str, with_task: Task, tmp_path: Path) -> None:
    run = with_task(task, tmp_path / "nowhere")
    with pytest.raises(DataError, match="nowhere"):
        tune(run)
    assert not kept(run).exists() and not lines(run)


def test_an_unset_variable_in_the_path_is_named(with_task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OVERNIGHT_NOWHERE", raising=False)
    with pytest.raises(ConfigError, match="OVERNIGHT_NOWHERE is not set"):
        tune(with_task("csv", Path("$OVERNIGHT_NOWHERE/x.csv")))


@pytest.mark.parametrize(("task", "package"), [("scores", "scipy"), ("cola", "sklearn"), ("mrpc", "sklearn")])
def test_a_package_that_the_metric_needs_is_asked_for_before_training(
    task: str, package: str, with_task: Task, scores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "glue"
    folder.mkdir()
    for split in ("train", "dev", "test"):
        if task == "cola":
            head = "index\tsentence\n" if split == "test" else ""
            row = "{0}\tcat {0}\n" if split == "test" else "gj04\t{1}\t\tcat {0}\n"
        else:
            head, row = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n", "{1}\t1\t2\tcat {0}\tmat {0}\n"
        (folder / f"{split}.tsv").write_text(head + "".join(row.format(i, i % 2) for i in range(20)))
    run = with_task("csv", scores) if task == "scores" else with_task(task, folder)
    real = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    monkeypatch.setattr(module._Tuning, "_seed", lambda *args, **kwargs: pytest.fail("training began"))
    with pytest.raises(UserError, match=r"pip install 'overnight\[tasks\]'"):
        tune(run)


def test_the_rule_of_word_overlap_is_written_beside_the_docnames_task(
    with_task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from overnight.corpus import pydocs
    from overnight.tasks import docnames
    from overnight.tasks.examples import Example, TaskData

    rows = [Example(str(i), "open file", "opens a file" if i % 2 else "adds numbers", str(i % 2)) for i in range(16)]
    task = TaskData("docnames", "classification", ("0", "1"), rows, rows, [], "accuracy", notes=("made here",))
    monkeypatch.setattr(docnames, "load_docnames", lambda seed: task)
    run = with_task("docnames", tmp_path)
    out = tune(run)
    kinds = [(e["kind"], e.get("method")) for e in read_results(run.run_dir / "tasks.jsonl")]
    assert kinds == [("baseline", "word overlap"), ("finetune", None)]
    assert "mine: made here" in out
    tune(run)
    assert len(lines(run)) == 1
    # The rows are made of other text once a package is another version.
    monkeypatch.setattr(pydocs, "environment", lambda: [("numpy", "99.0")])
    assert "seed 0 pretrained" in tune(run) and len(read_results(run.run_dir / "tasks.jsonl")) == 4


def test_fp16_scales_its_loss_and_ends_where_fp32_does(with_task: Task, classes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("fp32", "fp16"):
        run = dataclasses.replace(with_task("csv", classes), precision=kind)
        tune(run)
        assert ("loss_scale" in train_lines(run)[-1]) == (kind == "fp16")
    fp32, fp16 = lines(run)
    assert fp16["config_hash"] != fp32["config_hash"] and fp16["value"] == pytest.approx(fp32["value"], abs=0.1)
