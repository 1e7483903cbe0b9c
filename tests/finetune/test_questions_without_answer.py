"""Questions that their paragraph does not answer: learned, scored and answered by nothing, by the run and by its export."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import overnight
from overnight import config
from overnight.config import BertRun, Run
from overnight.console import Line
from overnight.errors import DataError
from overnight.finetune.finetune import finetune
from overnight.finetune.predict import answer_file, load_trained, write_question_files
from overnight.finetune.scoring import score_file
from overnight.interop.export import export_run
from tests.finetune.official_squad import evaluate_v2


@pytest.fixture(scope="module")
def with_null(pretrained: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with a task in which every second question has no answer."""
    folder = tmp_path_factory.mktemp("null")
    shutil.copytree(pretrained.run_dir, folder / "run")
    path = folder / "questions.json"
    context = "The {} value is number seven."
    paragraphs = [
        {
            "context": context.format(i),
            "qas": [
                {
                    "id": f"{i}a",
                    "question": "What is it?",
                    "answers": [{"text": "seven", "answer_start": context.format(i).index("seven")}],
                },
                {"id": f"{i}b", "question": "Who was raised?", "is_impossible": True, "answers": []},
            ],
        }
        for i in range(40)
    ]
    path.write_text(json.dumps({"data": [{"title": "t", "paragraphs": paragraphs}]}))
    spec = {"task": "squad", "epochs": 10, "global_batch_size": 8, "micro_batch_size": 8, "lr": 3e-3, "seq_len": 32, "doc_stride": 8}
    result = dataclasses.replace(
        config.build_run({**config.to_tree(pretrained), "finetune": {"null": {**spec, "path": str(path)}}}), out=str(folder / "run")
    )
    finetune(result, "null", Line(io.StringIO()))
    return result


def test_questions_without_an_answer_are_learned_scored_and_answered_by_nothing(with_null: Run, tmp_path: Path) -> None:
    folder = with_null.run_dir / "finetune" / "null"
    kept, odds, nbest = (json.loads((folder / f"{name}.json").read_text()) for name in ("predictions", "null_odds", "nbest_predictions"))
    result = json.loads((folder / "task.json").read_text())["result"]["metrics"]
    scores = evaluate_v2({name: ["seven"] if name.endswith("a") else [] for name in kept}, kept)
    assert {name: result[name] for name in scores} == pytest.approx(scores) and result["f1"] > 90
    assert all((odds[name] > result["null_threshold"]) == (answer == "") for name, answer in kept.items())
    assert kept.keys() == odds.keys() == nbest.keys() and all("" in {entry["text"] for entry in found} for found in nbest.values())

    questions = with_null.finetune["null"].path
    model = load_trained(with_null, "null")
    write_question_files(model, questions, tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"predictions.json", "nbest_predictions.json", "null_odds.json"}
    answered = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert len(answered) == 80 and {name: answered[name] for name in kept} == kept
    assert {a["id"]: a["answer"] for a in answer_file(model, questions)} == answered
    assert json.loads((tmp_path / "out" / "null_odds.json").read_text())["3b"] == pytest.approx(
        next(a["null_odds"] for a in answer_file(model, questions) if a["id"] == "3b")
    )


def test_a_question_that_leaves_no_room_for_its_paragraph_is_scored_as_answered_by_nothing(with_null: Run, tmp_path: Path) -> None:
    model, path = load_trained(with_null, "null"), tmp_path / "later.json"
    model = dataclasses.replace(model, facts={**model.facts, "spec": {**model.facts["spec"], "path": ""}})  # not at hand any more
    tree = json.loads(Path(with_null.finetune["null"].path).read_text())
    path.write_text(json.dumps(tree))
    before = score_file(model, path, Line(io.StringIO()))
    asked = tree["data"][0]["paragraphs"][3]["qas"][0]
    tree["data"][0]["paragraphs"][3]["qas"][0] = {**asked, "question": "What is it " * 10}
    path.write_text(json.dumps(tree))
    after = score_file(model, path, Line(io.StringIO()))
    assert before.files["predictions.json"]["3a"] == "seven" and not before.notes
    assert after.files["predictions.json"] == {**before.files["predictions.json"], "3a": ""}
    assert after.rows == 80 and after.metrics["f1"] == pytest.approx(before.metrics["f1"] - 100 / 80)
    assert after.notes == (
        "1 of 80 questions have more than 28 tokens, which leave no room for the paragraph: answered with an empty text",
    )


def test_an_export_asks_and_answers_nothing_as_the_run_does(with_null: BertRun, tmp_path: Path) -> None:
    export_run(with_null, tmp_path / "out", "null")
    ours, theirs = load_trained(with_null, "null"), overnight.load(tmp_path / "out", device="cpu").trained
    assert {key: theirs.facts["spec"][key] for key in ("seq_len", "doc_stride", "max_answer_length")} == {
        "seq_len": 32, "doc_stride": 8, "max_answer_length": 30,
    }  # fmt: skip
    questions = with_null.finetune["null"].path
    found, expected = (list(answer_file(model, questions)) for model in (theirs, ours))
    assert [one["answer"] for one in found] == [one["answer"] for one in expected] and "" in {one["answer"] for one in found}
    assert [one["null_odds"] for one in found] == pytest.approx([one["null_odds"] for one in expected], abs=1e-3)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"doc_stride": 0}, r"config\.json: overnight_task\.doc_stride = 0: no export wrote this"),
        ({"null_threshold": "high"}, r"overnight_task\.null_threshold = 'high'"),
        ({"other": 1}, r"overnight_task\.other = 1"),
        ({"pairs": 1}, r"overnight_task\.pairs = 1"),
        ({"doc_stride": True}, r"overnight_task\.doc_stride = True"),
        ({"task": "colour"}, r"overnight_task\.task = 'colour'"),
        ({"columns": {"txt": "body"}}, r"overnight_task\.columns = \{'txt': 'body'\}"),
        ({"columns": {"text": 3}}, r"overnight_task\.columns = \{'text': 3\}"),
        (3, r"overnight_task = 3"),
    ],
)
def test_an_export_that_says_something_else_of_its_task_is_refused(said: Any, message: str, with_null: BertRun, tmp_path: Path) -> None:
    export_run(with_null, tmp_path / "out", "null")
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "overnight_task": said}))
    with pytest.raises(DataError, match=message):
        overnight.load(tmp_path / "out", device="cpu")
